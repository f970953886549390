// What a caller of TieredRows waits for beside its own rows, and what is counted of it.
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <functional>
#include <future>
#include <numeric>
#include <random>
#include <thread>

#include "cache/row_cache.h"
#include "tests/faulty_env.h"
#include "tier/tiered_rows.h"

namespace kstep {
namespace {

// One table of dim 16 with a moment, in a cache for so many of its rows.
std::unique_ptr<TieredRows> make_source(Env* env, std::uint64_t num_rows, std::uint64_t num_slots, IoBackend backend = IoBackend::Inline) {
  TieredOptions options;
  options.store.env = env;
  options.store.paths = {"/a", "/b"};
  TableSpec table;
  table.name = "t";
  table.num_rows = num_rows;
  table.dim = 16;
  EXPECT_TRUE(RecordSchema::make({{"weight", DType::F32, 16}, {"m", DType::F32, 16}}, &table.schema).ok());
  options.store.tables = {table};
  options.store.segment_bytes = 256u << 10;
  options.store.queue_depth = 8;
  options.store.backend = backend;
  options.cache_bytes = {num_slots * (128 + RowCache::kOverheadBytes)};
  std::unique_ptr<TieredRows> source;
  const Status status = TieredRows::make(options, &source);
  EXPECT_TRUE(status.ok()) << status.message();
  return source;
}

TEST(TieredRows, WaitingForAPieceOfIdleCleaningIsCountedAndIsAPartOfWaiting) {
  FaultyEnv env;
  const std::unique_ptr<TieredRows> source = make_source(&env, 20000, 30000);
  std::vector<std::uint64_t> rows(20000);
  std::iota(rows.begin(), rows.end(), 0);
  std::vector<std::byte*> payloads(rows.size());
  std::mt19937_64 rng(8);
  env.set_read_delay_us(5000);  // every row is in the cache: only the cleaner reads
  for (int i = 0; i < 25; ++i) {
    std::vector<std::uint64_t> some;
    for (const std::uint64_t row : rows) {
      if (i == 0 || rng() % 3 == 0) some.push_back(row);
    }
    PinTicket ticket = kNoTicket;
    ASSERT_TRUE(source->pin(0, some.data(), some.size(), PinMode::Update, payloads.data(), &ticket).ok());
    ASSERT_TRUE(source->unpin(ticket, true).ok());
    ASSERT_TRUE(source->flush().ok());
    ASSERT_TRUE(source->pin(0, rows.data(), 10, PinMode::Read, payloads.data(), &ticket).ok());
    ASSERT_TRUE(source->unpin(ticket, false).ok());
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // cleaning begins
  }
  const auto counters = source->counters()[0];
  EXPECT_GT(counters.at("cleaner_read_bytes"), 0.0);
  EXPECT_GT(counters.at("cleaner_stall_s"), 0.003);
  EXPECT_LE(counters.at("cleaner_stall_s"), counters.at("stall_s"));
}

// How many held reads must be let through until `work` is done, on a thread of its own; at 60 all are.
int reads_until_done(FaultyEnv* env, const std::function<void()>& work) {
  std::promise<void> begun;
  const std::future<void> done = std::async(std::launch::async, [&] { begun.set_value(), work(); });
  begun.get_future().wait();
  int num_reads = 0;
  while (done.wait_for(std::chrono::milliseconds(200)) != std::future_status::ready) {
    if (env->num_held_reads() == 0) continue;  // it needs time, not a read
    if (++num_reads == 60) env->clear_faults();
    env->let_read();
  }
  return num_reads;
}

// Only the cleaner reads here: every row is in the cache, or was never written. So it can be held at any piece of its work.
TEST(TieredRows, ACallerWaitsForThePieceOfCleaningInWorkAndForNoOther) {
  constexpr std::uint64_t kNumOld = 240000, kNumNew = 20000;  // new ones evict nine batches of old ones
  FaultyEnv env;
  const std::unique_ptr<TieredRows> source = make_source(&env, kNumOld + kNumNew, kNumOld + 100);
  std::vector<std::uint64_t> old_rows(kNumOld), new_rows(kNumNew), some;
  std::iota(old_rows.begin(), old_rows.end(), 0);
  std::iota(new_rows.begin(), new_rows.end(), kNumOld);
  std::vector<std::byte*> payloads(kNumOld);
  auto touch = [&](const std::vector<std::uint64_t>& rows, PinMode mode) {
    PinTicket ticket = kNoTicket;
    EXPECT_TRUE(source->pin(0, rows.data(), rows.size(), mode, payloads.data(), &ticket).ok());
    EXPECT_TRUE(source->unpin(ticket, mode == PinMode::Update).ok());
  };
  // Cached in the order of rows and written in another, so that those evicted together do not empty whole segments.
  touch(old_rows, PinMode::Read);
  for (std::uint64_t first = 0; first < 8; ++first) {
    some.clear();
    for (std::uint64_t row = first; row < kNumOld; row += 8) some.push_back(row);
    touch(some, PinMode::Update);
    ASSERT_TRUE(source->flush().ok());
  }
  ASSERT_TRUE(source->snapshot("held", "").ok());
  // Stale bytes for a pressure of 0.8 once the snapshot is gone; segments that become empty take 0.2 away, and idle cleaning ends at 0.25.
  const double live = static_cast<double>(source->usage().live_unit_bytes), file = static_cast<double>(source->usage().snapshot_bytes);
  const double stale = 1.444 * (live + (1u << 20)) - file;
  some.clear();
  for (const std::uint64_t row : old_rows) {  // here and there, so that every segment keeps live rows
    if (std::floor((row + 1) * (stale / file)) > std::floor(row * (stale / file))) some.push_back(row);
  }
  touch(some, PinMode::Update);
  ASSERT_TRUE(source->flush().ok());
  touch(old_rows, PinMode::Update);
  env.hold_reads();
  EXPECT_TRUE(source->remove_snapshot("held").ok());
  EXPECT_LE(reads_until_done(&env, [&] { touch(new_rows, PinMode::Read); }), 2) << "reads for a caller whose rows evict others";
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (env.num_held_reads() == 0 && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
  EXPECT_EQ(env.num_held_reads(), 1u) << "the cleaner works while nobody waits";
  EXPECT_LE(reads_until_done(&env, [&] { touch(new_rows, PinMode::Read); }), 4) << "reads for a caller while there is a debt";
  env.clear_faults();
  const auto counters = source->counters()[0];
  EXPECT_GT(counters.at("evicted_rows"), 18000.0);
  EXPECT_EQ(counters.at("misses_rows"), 0.0);
}

// A round cleans while it makes room, before it reads. Who comes while it reads waits for the reads.
TEST(TieredRows, CleaningThatWasOverBeforeTheCallerCameIsNoWaitForIt) {
  constexpr std::uint64_t kNumRows = 40000, kNumSlots = 12000, kNumPinned = 5000;
  FaultyEnv env;
  const std::unique_ptr<TieredRows> source = make_source(&env, kNumRows, kNumSlots, IoBackend::Threads);
  std::vector<std::byte*> payloads(kNumRows);
  std::mt19937_64 rng(9);
  auto some_rows = [&] {
    std::vector<std::uint64_t> rows(kNumRows);
    std::iota(rows.begin(), rows.end(), 0);
    std::shuffle(rows.begin(), rows.end(), rng);
    rows.resize(kNumPinned);
    return rows;
  };
  auto pin = [&](const std::vector<std::uint64_t>& rows) {
    PinTicket ticket = kNoTicket;
    const Status status = source->pin(0, rows.data(), rows.size(), PinMode::Update, payloads.data(), &ticket);
    return status.ok() ? source->unpin(ticket, true) : status;
  };
  for (int i = 0; i < 60; ++i) ASSERT_TRUE(pin(some_rows()).ok());  // every row is on the drive, many of them more than once
  double cleaned_s = 0, waited_s = 0;
  for (int i = 0; i < 20; ++i) {
    const auto before = source->counters()[0];
    env.hold_reads(64u << 10);  // of rows, not of pieces
    const std::vector<std::uint64_t> rows = some_rows();
    ASSERT_TRUE(source->prefetch({{0, rows.data(), rows.size()}}).ok());
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (env.num_held_reads() == 0 && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
    ASSERT_GT(env.num_held_reads(), 0u);
    const double cleaned_before = before.at("cleaner_s");
    std::future<Status> pinned = std::async(std::launch::async, [&] { return pin(rows); });
    EXPECT_EQ(pinned.wait_for(std::chrono::milliseconds(30)), std::future_status::timeout);
    env.clear_faults();
    ASSERT_TRUE(pinned.get().ok());
    const auto after = source->counters()[0];
    cleaned_s += after.at("cleaner_s") - cleaned_before;
    waited_s += after.at("cleaner_stall_s") - before.at("cleaner_stall_s");
  }
  EXPECT_GT(cleaned_s, 0.001);
  EXPECT_LT(waited_s, 0.3 * cleaned_s);  // counted over the round it is above half
}

}  // namespace
}  // namespace kstep
