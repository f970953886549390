// The cleaner through the store: bytes stay within their bound, and who waits does not wait for a backlog.
#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <random>

#include "storage/row_store.h"
#include "tests/faulty_env.h"
#include "tests/row_store_model.h"

namespace kstep {
namespace {

// What the accounting says equals what the file system holds, and the space bound is kept.
TEST(RowStore, CountsItsBytesAndKeepsTheSpaceBound) {
  FaultyEnv env;
  StoreOptions options = make_options(&env, {"/a", "/b"});
  options.tables = {make_table(0, "t", 40000, 16)};
  std::unique_ptr<RowStore> store;
  ASSERT_TRUE(RowStore::open(options, &store).ok());
  Model model;
  std::mt19937_64 rng(7);
  for (int batch = 0; batch < 400; ++batch) {
    std::vector<std::pair<std::size_t, std::uint64_t>> keys;
    std::map<std::uint64_t, bool> rows;
    for (int i = 0; i < 1000; ++i) rows[rng() % 40000] = true;
    for (const auto& row : rows) keys.emplace_back(0, row.first);
    ASSERT_TRUE(write_rows(store.get(), &model, keys, static_cast<std::uint64_t>(batch)).ok());
    const SpaceUsage usage = store->usage();
    ASSERT_LE(usage.unheld_bytes, 1.5 * usage.live_unit_bytes + 1.5 * (1u << 20)) << "batch " << batch;
  }
  ASSERT_TRUE(store->snapshot("s", "").ok());
  std::uint64_t file_bytes = 0;
  for (const std::string path : {"/a", "/b"}) {
    for (const std::string& file : env.files_under(path + "/log-148")) {
      std::uint64_t bytes = 0;
      ASSERT_TRUE(env.file_size(file, &bytes).ok());
      file_bytes += bytes;
    }
  }
  EXPECT_EQ(store->usage().unheld_bytes + store->usage().snapshot_bytes - store->usage().snapshot_only_bytes, file_bytes);
  const auto counters = store->counters();
  EXPECT_LT(counters.at("write_amplification_ratio"), 4.0);
  EXPECT_GT(counters.at("cleaner_written_bytes"), 0.0);
  EXPECT_TRUE(check_all(store.get(), model).ok());
}

// What is begun below the bound can wait for a better moment; at the bound it is done whoever waits.
TEST(RowStore, BeginsNoCleaningWhileSomebodyWaitsUntilSpaceIsShort) {
  constexpr double kOpenBytes = 1u << 20;  // of the bound's own measure, as in Cleaner::pressure
  constexpr double kNearBound = 0.9;       // of the spare space; a batch takes 0.05, the bound is at 0.96
  std::uint64_t num_cleaning[2] = {0, 0};  // batches that cleaned far from the bound, by whether somebody waited
  for (const bool waits : {false, true}) {
    FaultyEnv env;
    StoreOptions options = make_options(&env, {"/a"});
    options.tables = {make_table(0, "t", 40000, 16)};
    std::unique_ptr<RowStore> store;
    ASSERT_TRUE(RowStore::open(options, &store).ok());
    std::atomic<bool> is_awaited{waits};
    store->set_awaited(&is_awaited);
    Model model;
    std::mt19937_64 rng(7);
    double read_before = 0, used_before = 0;
    for (int batch = 0; batch < 400; ++batch) {
      std::map<std::uint64_t, bool> rows;
      for (int i = 0; i < 1000; ++i) rows[rng() % 40000] = true;
      std::vector<std::pair<std::size_t, std::uint64_t>> keys;
      for (const auto& row : rows) keys.emplace_back(0, row.first);
      ASSERT_TRUE(write_rows(store.get(), &model, keys, static_cast<std::uint64_t>(batch)).ok());
      const SpaceUsage usage = store->usage();
      ASSERT_LE(usage.unheld_bytes, 1.5 * usage.live_unit_bytes + 1.5 * (1u << 20)) << "batch " << batch;
      const double read = store->counters().at("cleaner_read_bytes");
      if (read > read_before && used_before < kNearBound) ++num_cleaning[waits];
      read_before = read;
      const double live = static_cast<double>(usage.live_unit_bytes) + kOpenBytes;
      used_before = (static_cast<double>(usage.unheld_bytes) - live) / (0.5 * live);
    }
    EXPECT_GT(read_before, 0.0);
    EXPECT_TRUE(check_all(store.get(), model).ok());
  }
  EXPECT_GT(num_cleaning[0], 50u);
  EXPECT_EQ(num_cleaning[1], 0u);
}

}  // namespace
}  // namespace kstep
