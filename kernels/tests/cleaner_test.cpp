// The cleaner through the store: bytes stay within their bound, and who waits does not wait for a backlog.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <map>
#include <random>
#include <thread>

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

// A store with some pressure on its cleaner and credit earned, while somebody waits, so that writing cleans nothing.
struct Indebted {
  FaultyEnv env;
  std::unique_ptr<RowStore> store;
  std::atomic<bool> is_awaited{true};
  Model model;

  explicit Indebted(std::uint32_t max_open_files = 0, std::uint64_t quota_bytes = 0) {
    StoreOptions options = make_options(&env, {"/a"});
    options.tables = {make_table(0, "t", 40000, 16)};
    options.max_open_files = max_open_files;
    options.quota_bytes = quota_bytes;
    EXPECT_TRUE(RowStore::open(options, &store).ok());
    store->set_awaited(&is_awaited);
    std::mt19937_64 rng(7);
    std::uint64_t version = 0;
    auto write = [&](std::size_t count) {
      std::map<std::uint64_t, bool> rows;
      while (rows.size() < count) rows[rng() % 40000] = true;
      std::vector<std::pair<std::size_t, std::uint64_t>> keys;
      for (const auto& row : rows) keys.emplace_back(0, row.first);
      EXPECT_TRUE(write_rows(store.get(), &model, keys, ++version).ok());
    };
    write(39000);
    while (share_used() < 0.85) write(1000);
    EXPECT_EQ(cleaned(), 0.0) << "somebody waits";
  }
  double share_used() const {
    const double live = static_cast<double>(store->usage().live_unit_bytes + (1u << 20));
    return (static_cast<double>(store->usage().unheld_bytes) - live) / (0.5 * live);
  }
  double cleaned() const { return store->counters().at("cleaner_written_bytes"); }
  // Cleans while nobody waits, until so many segments were removed; that they were: a step removes one and does nothing else.
  bool remove_segments(std::size_t count) {
    is_awaited = false;
    bool did_work = true;
    while (count > 0 && did_work) {
      const std::uint64_t before = store->usage().unheld_bytes;
      EXPECT_TRUE(store->clean_when_idle(&did_work).ok());
      if (store->usage().unheld_bytes < before) --count;
    }
    is_awaited = true;
    return count == 0;
  }
};

TEST(RowStore, CleansBesideReadsWhoeverWaitsAndRemovesNothingUnderThem) {
  Indebted state;
  const std::uint64_t unheld_before = state.store->usage().unheld_bytes;
  ASSERT_TRUE(check_all(state.store.get(), state.model).ok());  // reads every row, in one call
  EXPECT_GT(state.cleaned(), 0.0);
  EXPECT_GE(state.store->usage().unheld_bytes, unheld_before) << "a segment was removed while rows were read from it";
  EXPECT_LE(state.store->seconds_cleaning_alone(), state.store->seconds_cleaning());
  EXPECT_TRUE(check_all(state.store.get(), state.model).ok());
  ASSERT_TRUE(write_rows(state.store.get(), &state.model, {{0, 1}}, 1000).ok());
  EXPECT_TRUE(check_all(state.store.get(), state.model).ok());
}

TEST(RowStore, CleansBesideReadsWithFewFileHandles) {
  Indebted state(8);
  for (int turn = 0; turn < 20; ++turn) ASSERT_TRUE(check_all(state.store.get(), state.model).ok()) << turn;
  EXPECT_GT(state.cleaned(), 0.0);
}

// Rows that are read and rows that are cleaned are not the same: who reads sound rows is not told of damage elsewhere, but the next cleaning is.
TEST(RowStore, DamageMetBesideReadsIsToldByTheNextCleaning) {
  Indebted state;
  for (const std::string& file : state.env.files_under("/a/log-148")) {
    std::uint64_t num_bytes = 0;
    ASSERT_TRUE(state.env.file_size(file, &num_bytes).ok());
    for (std::uint64_t offset = 4096 + 60; offset < num_bytes; offset += 4096) state.env.damage(file, offset);  // a record of each unit
  }
  std::vector<std::pair<std::uint64_t, std::vector<std::byte>>> sound;  // rows that can be read
  TableState* table = state.store->table(0);
  for (const auto& item : state.model) {
    std::vector<std::byte> payload(table->spec.schema.payload_bytes());
    ReadRow row{kNoSlot, table, item.first.second, payload.data()};
    if (state.store->read(&row, 1).ok()) sound.emplace_back(item.first.second, payload);
  }
  ASSERT_GT(sound.size(), 1000u);
  ASSERT_LT(sound.size(), state.model.size());
  std::vector<ReadRow> rows;
  std::vector<std::vector<std::byte>> outputs(sound.size(), std::vector<std::byte>(table->spec.schema.payload_bytes()));
  for (std::size_t i = 0; i < sound.size(); ++i) rows.push_back({kNoSlot, table, sound[i].first, outputs[i].data()});
  const Status read = state.store->read(rows.data(), rows.size());
  EXPECT_TRUE(read.ok()) << read.message();
  for (std::size_t i = 0; i < sound.size(); ++i) ASSERT_EQ(outputs[i], sound[i].second);
  const double cleaned = state.cleaned();
  EXPECT_GT(cleaned, 0.0);
  bool did_work = false;
  EXPECT_EQ(state.store->clean_when_idle(&did_work).kind, StatusKind::Corruption);
  // Nothing more was cleaned until then, so some credit is left.
  EXPECT_EQ(state.cleaned(), cleaned);
  EXPECT_TRUE(state.store->read(rows.data(), rows.size()).ok());
  EXPECT_GT(state.cleaned(), cleaned);
}

// Waits for `is_true`; false after half a minute.
template <typename Condition>
bool comes_true(Condition is_true) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (!is_true()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

constexpr std::chrono::milliseconds kLongEnough{100};  // for what is not held to be done; with less a test can pass wrongly, not fail

// The last close of a removed file gives its space back, and may take a while.
TEST(RowStore, GoesOnWhileRemovedFilesAreStillBeingClosed) {
  Indebted state;
  state.env.hold_closes();
  std::future<void> done = std::async(std::launch::async, [&] {
    EXPECT_TRUE(state.remove_segments(FileCloser::kMaxFiles));
    EXPECT_TRUE(check_all(state.store.get(), state.model).ok());
  });
  EXPECT_EQ(done.wait_for(std::chrono::seconds(30)), std::future_status::ready);
  EXPECT_TRUE(comes_true([&] { return state.env.num_held_closes() == 1; })) << "one after the other";
  state.env.let_closes();
  done.get();
}

// Removed files that were not closed yet are no reason to tell of a full drive.
TEST(RowStore, AFullDriveIsToldOnlyWhenRemovedFilesAreClosed) {
  Indebted state;
  state.env.hold_closes();
  ASSERT_TRUE(state.remove_segments(FileCloser::kMaxFiles));
  state.env.set_capacity_bytes(state.env.stored_bytes() + 1000);
  std::vector<std::pair<std::size_t, std::uint64_t>> keys;
  for (std::uint64_t row = 0; row < 700; ++row) keys.emplace_back(0, row);  // fewer bytes than a segment has
  std::future<Status> done = std::async(std::launch::async, [&] {
    KSTEP_RETURN_IF_ERROR(write_rows(state.store.get(), &state.model, keys, 1000));
    return state.store->flush();
  });
  EXPECT_EQ(done.wait_for(kLongEnough), std::future_status::timeout);
  state.env.let_closes();
  const Status status = done.get();
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_TRUE(check_all(state.store.get(), state.model).ok());
}

TEST(RowStore, NearTheQuotaABatchBeginsWhenRemovedFilesAreClosed) {
  const std::uint64_t used = Indebted().store->usage().total_bytes();
  for (const bool is_near : {false, true}) {
    Indebted state(0, is_near ? used + (600u << 10) : 1u << 30);  // room for a batch, but not for kMaxFiles segments too
    state.env.hold_closes();
    ASSERT_TRUE(state.remove_segments(1));
    std::future<Status> done = std::async(std::launch::async, [&] { return state.store->begin_batch(1000); });
    if (is_near) {
      EXPECT_EQ(done.wait_for(kLongEnough), std::future_status::timeout);
      state.env.let_closes();
    }
    EXPECT_EQ(done.wait_for(std::chrono::seconds(30)), std::future_status::ready) << is_near;
    state.env.let_closes();
    const Status status = done.get();
    EXPECT_TRUE(status.ok()) << status.message();
  }
}

TEST(FileCloser, ClosesInOrderWaitsWhenItHasManyAndLeavesNone) {
  FaultyEnv env;
  ASSERT_TRUE(env.make_dir("/a").ok());
  auto removed_file = [&](int i) {
    const std::string path = "/a/" + std::to_string(i);
    std::unique_ptr<File> file;
    EXPECT_TRUE(env.open(path, OpenMode::Create, false, &file).ok());
    EXPECT_TRUE(file->write_at(0, "12345678", 8).ok());
    EXPECT_TRUE(env.remove_file(path).ok());
    return file;
  };
  const int num_files = static_cast<int>(FileCloser::kMaxFiles);
  {
    FileCloser closer;
    EXPECT_FALSE(closer.drain());
    env.hold_closes();
    for (int i = 0; i < num_files; ++i) closer.close(removed_file(i));
    EXPECT_EQ(env.stored_bytes(), 8u * num_files);
    std::future<void> done = std::async(std::launch::async, [&] { closer.close(removed_file(num_files)); });
    EXPECT_EQ(done.wait_for(kLongEnough), std::future_status::timeout);
    env.let_closes();
    done.get();
    closer.drain();
    EXPECT_EQ(env.stored_bytes(), 0u);
    EXPECT_FALSE(closer.drain());
    for (int i = 0; i < num_files; ++i) closer.close(removed_file(i));
  }
  EXPECT_EQ(env.stored_bytes(), 0u);
}

}  // namespace
}  // namespace kstep
