// TieredRows against a plain map: any cache size, depth, backend and schedule gives the same bytes.
#include <gtest/gtest.h>

#include <cstring>
#include <deque>
#include <map>
#include <random>

#include "cache/row_cache.h"
#include "compute/initial_values.h"
#include "storage/snapshot_reader.h"
#include "tests/faulty_env.h"
#include "tier/tiered_rows.h"

namespace kstep {
namespace {

TableSpec make_table(std::uint32_t id, const std::string& name, std::uint64_t num_rows, std::uint32_t dim) {
  TableSpec table;
  table.table_id = id;
  table.name = name;
  table.num_rows = num_rows;
  table.dim = dim;
  table.seed = 42;
  table.init = {InitKind::Uniform, -0.5, 0.5};
  EXPECT_TRUE(RecordSchema::make({{"weight", DType::F32, dim}, {"m", DType::F32, dim}}, &table.schema).ok());
  return table;
}

struct Config {
  std::uint64_t cache_bytes;
  std::uint32_t depth;
  IoBackend backend;
  std::uint64_t seed;
};

std::ostream& operator<<(std::ostream& out, const Config& c) {
  return out << "cache_bytes=" << c.cache_bytes << " depth=" << c.depth << " backend=" << static_cast<int>(c.backend) << " seed=" << c.seed;
}

TieredOptions make_options(Env* env, const Config& config) {
  TieredOptions options;
  options.store.env = env;
  options.store.paths = {"/a", "/b"};
  options.store.tables = {make_table(0, "one", 3000, 4), make_table(1, "two", 500, 9), make_table(2, "three", 2000, 4)};
  options.store.segment_bytes = 256u << 10;
  options.store.queue_depth = 8;
  options.store.backend = config.backend;
  options.cache_bytes = {config.cache_bytes, config.cache_bytes, config.cache_bytes};
  options.prefetch_depth = config.depth;
  return options;
}

// The specification: every row in a map, filled with its initial values on first sight.
class Model {
 public:
  explicit Model(std::vector<TableSpec> tables) : tables_(std::move(tables)) {}
  std::vector<std::byte> get(std::uint32_t table, std::uint64_t row) const {
    const auto it = rows_.find({table, row});
    if (it != rows_.end()) return it->second;
    std::vector<std::byte> payload(tables_[table].schema.payload_bytes());
    fill_initial_row(tables_[table], row, payload.data());
    return payload;
  }
  void update(std::uint32_t table, std::uint64_t row) {
    std::vector<std::byte> payload = get(table, row);
    change(payload.data(), payload.size(), row);
    rows_[{table, row}] = payload;
  }
  // Any deterministic function of the old bytes.
  static void change(std::byte* payload, std::size_t num_bytes, std::uint64_t row) {
    auto state = static_cast<unsigned>(row * 31 + 7);
    for (std::size_t i = 0; i < num_bytes; ++i) {
      state = state * 1103515245u + 12345u + static_cast<unsigned>(payload[i]);
      payload[i] = static_cast<std::byte>(state >> 16);
    }
  }
  std::size_t num_updated() const { return rows_.size(); }
  const std::map<std::pair<std::uint32_t, std::uint64_t>, std::vector<std::byte>>& rows() const { return rows_; }

 private:
  std::vector<TableSpec> tables_;
  std::map<std::pair<std::uint32_t, std::uint64_t>, std::vector<std::byte>> rows_;
};

struct Batch {
  std::vector<std::vector<std::uint64_t>> rows;  // by table
};

Batch random_batch(std::mt19937_64* rng, const std::vector<TableSpec>& tables, std::size_t max_rows) {
  Batch batch;
  for (const TableSpec& table : tables) {
    std::map<std::uint64_t, bool> rows;
    const std::size_t n = (*rng)() % (max_rows + 1);
    for (std::size_t i = 0; i < n; ++i) rows[(*rng)() % ((*rng)() % 2 == 0 ? table.num_rows : table.num_rows / 10)] = true;
    batch.rows.emplace_back();
    for (const auto& row : rows) batch.rows.back().push_back(row.first);
  }
  return batch;
}

Status prefetch(TieredRows* source, const Batch& batch) {
  std::vector<TableRows> items;
  for (std::uint32_t t = 0; t < batch.rows.size(); ++t) items.push_back({t, batch.rows[t].data(), batch.rows[t].size()});
  return source->prefetch(items);
}

// One training step: pins every table, compares every payload with the model, updates, unpins.
Status step(TieredRows* source, Model* model, const Batch& batch, bool is_update) {
  std::vector<PinTicket> tickets;
  Status status;
  for (std::uint32_t t = 0; t < batch.rows.size() && status.ok(); ++t) {
    const std::vector<std::uint64_t>& rows = batch.rows[t];
    std::vector<std::byte*> payloads(rows.size());
    PinTicket ticket = kNoTicket;
    status = source->pin(t, rows.data(), rows.size(), is_update ? PinMode::Update : PinMode::Read, payloads.data(), &ticket);
    if (!status.ok()) break;
    tickets.push_back(ticket);
    const std::size_t num_bytes = source->tables()[t].schema.payload_bytes();
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const std::vector<std::byte> expected = model->get(t, rows[i]);
      if (std::memcmp(payloads[i], expected.data(), num_bytes) != 0) {
        status = Status::corruption("model", "table " + std::to_string(t) + " row " + std::to_string(rows[i]) + " has other bytes");
      }
    }
    for (std::size_t i = 0; is_update && i < rows.size(); ++i) {
      Model::change(payloads[i], num_bytes, rows[i]);
      model->update(t, rows[i]);
    }
  }
  for (const PinTicket ticket : tickets) {
    const Status unpinned = source->unpin(ticket, is_update);
    if (status.ok()) status = unpinned;
  }
  return status;
}

Status check_all(TieredRows* source, const Model& model) {
  Model copy = model;
  Batch all;
  for (const TableSpec& table : source->tables()) {
    all.rows.emplace_back();
    for (std::uint64_t row = 0; row < table.num_rows; ++row) all.rows.back().push_back(row);
  }
  return step(source, &copy, all, false);
}

class TieredSchedules : public ::testing::TestWithParam<Config> {};

TEST_P(TieredSchedules, EqualAPlainMap) {
  const Config config = GetParam();
  std::mt19937_64 rng(config.seed);
  FaultyEnv env;
  const TieredOptions options = make_options(&env, config);
  std::unique_ptr<TieredRows> source;
  Status status = TieredRows::make(options, &source);
  ASSERT_TRUE(status.ok()) << status.message();
  Model model(options.store.tables);
  std::deque<Batch> ahead;
  int num_snapshots = 0;
  for (int turn = 0; turn < kScheduleTurns; ++turn) {
    while (ahead.size() < config.depth + rng() % 4) {
      ahead.push_back(random_batch(&rng, options.store.tables, 300));
      ASSERT_TRUE(prefetch(source.get(), ahead.back()).ok());
    }
    const auto choice = rng() % 12;
    if (choice == 0) {  // evaluation between two steps, not announced
      status = step(source.get(), &model, random_batch(&rng, options.store.tables, 200), false);
    } else if (choice == 1) {
      status = source->snapshot("s" + std::to_string(num_snapshots++), "");
    } else if (choice == 2) {  // a change of mind
      if (rng() % 2 == 0) source->cancel_prefetch();
      ahead.clear();
    } else if (choice == 3 && !ahead.empty()) {  // a skipped batch
      ahead.pop_front();
    } else {
      Batch batch = ahead.empty() ? random_batch(&rng, options.store.tables, 300) : ahead.front();
      if (!ahead.empty()) ahead.pop_front();
      status = step(source.get(), &model, batch, true);
    }
    ASSERT_TRUE(status.ok()) << "turn " << turn << ": " << status.message();
  }
  status = check_all(source.get(), model);
  ASSERT_TRUE(status.ok()) << status.message();
  double num_materialised = 0;
  ASSERT_TRUE(source->flush().ok());
  for (const auto& counters : source->counters()) num_materialised += counters.at("materialised_rows");
  EXPECT_EQ(num_materialised, static_cast<double>(model.num_updated()));  // reading materialised nothing
}

INSTANTIATE_TEST_SUITE_P(Configs, TieredSchedules,
                         ::testing::Values(Config{0, 0, IoBackend::Inline, 1}, Config{0, 2, IoBackend::Inline, 2}, Config{100, 1, IoBackend::Inline, 3},
                                           Config{6000, 0, IoBackend::Inline, 4}, Config{6000, 2, IoBackend::Inline, 5},
                                           Config{6000, 3, IoBackend::Threads, 6}, Config{30000, 2, IoBackend::Threads, 7},
                                           Config{30000, 4, IoBackend::Inline, 8}, Config{1 << 20, 2, IoBackend::Inline, 9},
                                           Config{1 << 20, 1, IoBackend::Threads, 10}));

TEST(TieredRows, ABatchMuchLargerThanTheCacheKeepsEveryRow) {
  FaultyEnv env;
  TieredOptions options = make_options(&env, {0, 2, IoBackend::Inline, 0});
  options.store.tables = {make_table(0, "t", 50000, 16)};
  options.cache_bytes = {100 * (128 + RowCache::kOverheadBytes)};
  std::unique_ptr<TieredRows> source;
  ASSERT_TRUE(TieredRows::make(options, &source).ok());
  Model model(options.store.tables);
  Batch batch;
  batch.rows.emplace_back();
  for (std::uint64_t row = 0; row < 20000; ++row) batch.rows[0].push_back(row * 2);
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(prefetch(source.get(), batch).ok());
    const Status status = step(source.get(), &model, batch, true);
    ASSERT_TRUE(status.ok()) << status.message();
  }
  EXPECT_TRUE(check_all(source.get(), model).ok());
  EXPECT_GT(source->counters()[0].at("overflow_rows"), 0.0);
}

// One huge batch must not take memory for the rest of the run.
TEST(TieredRows, OverflowMemoryIsGivenBackWhenItIsNoLongerUsed) {
  for (const bool by_flush : {true, false}) {
    FaultyEnv env;
    TieredOptions options = make_options(&env, {0, 2, IoBackend::Inline, 0});
    options.store.tables = {make_table(0, "t", 50000, 16)};
    options.cache_bytes = {100 * (128 + RowCache::kOverheadBytes)};
    std::unique_ptr<TieredRows> source;
    ASSERT_TRUE(TieredRows::make(options, &source).ok());
    Model model(options.store.tables);
    const std::uint64_t bytes_before = source->cache_memory_bytes();
    Batch large, small;
    large.rows.resize(1);
    small.rows = {{1, 2, 3}};
    for (std::uint64_t row = 0; row < 20000; ++row) large.rows[0].push_back(row * 2);
    for (int turn = 0; turn < 2; ++turn) {
      ASSERT_TRUE(step(source.get(), &model, large, true).ok());
      EXPECT_GT(source->cache_memory_bytes(), bytes_before + (10000u << 7));
      if (by_flush) {
        ASSERT_TRUE(source->flush().ok());
      } else {
        for (int i = 0; i < 300; ++i) ASSERT_TRUE(step(source.get(), &model, small, true).ok());
      }
      EXPECT_EQ(source->cache_memory_bytes(), bytes_before);
    }
    EXPECT_TRUE(check_all(source.get(), model).ok());
  }
}

// Rows found at the start of a round may be moved by the cleaner before the round reads them.
TEST(TieredRows, CleaningInTheMiddleOfARoundMovesNoRowUnderItsReader) {
  FaultyEnv env;
  TieredOptions options = make_options(&env, {0, 2, IoBackend::Inline, 0});
  options.store.tables = {make_table(0, "t", 60000, 16)};
  options.cache_bytes = {6000 * (128 + RowCache::kOverheadBytes)};
  std::unique_ptr<TieredRows> source;
  ASSERT_TRUE(TieredRows::make(options, &source).ok());
  Model model(options.store.tables);
  std::mt19937_64 rng(6);
  for (int i = 0; i < 40; ++i) {
    Batch batch;
    batch.rows.emplace_back();
    for (std::uint64_t row = 0; row < 60000; ++row) {
      if (rng() % 7 == 0) batch.rows[0].push_back(row);
    }
    const Status status = step(source.get(), &model, batch, true);
    ASSERT_TRUE(status.ok()) << "step " << i << ": " << status.message();
  }
  EXPECT_GT(source->counters()[0].at("cleaner_written_bytes"), 0.0);
  const SpaceUsage usage = source->usage();
  EXPECT_LE(usage.unheld_bytes, 1.5 * usage.live_unit_bytes + 1.5 * (1u << 20));
}

TEST(TieredRows, SnapshotsRestoreToTheSameBitsAndReadOnlyWhileTrainingGoesOn) {
  FaultyEnv env;
  TieredOptions options = make_options(&env, {20000, 2, IoBackend::Inline, 0});
  std::unique_ptr<TieredRows> source;
  ASSERT_TRUE(TieredRows::make(options, &source).ok());
  Model model(options.store.tables);
  std::mt19937_64 rng(4);
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(step(source.get(), &model, random_batch(&rng, options.store.tables, 400), true).ok());
  ASSERT_TRUE(source->snapshot("mid", "step=20").ok());
  const Model at_snapshot = model;
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(step(source.get(), &model, random_batch(&rng, options.store.tables, 400), true).ok());

  std::unique_ptr<SnapshotReader> reader;
  const Status opened = SnapshotReader::open(&env, options.store.paths, "mid", &reader);
  ASSERT_TRUE(opened.ok()) << opened.message();
  EXPECT_EQ(reader->manifest().metadata, "step=20");
  std::size_t num_rows = 0;
  for (std::uint32_t t = 0; t < 3; ++t) {
    TableState* table = reader->find_table(options.store.tables[t].name);
    const Status visited = reader->for_each_row(table, [&](std::uint64_t row, const std::byte* payload) {
      ++num_rows;
      const std::vector<std::byte> expected = at_snapshot.get(t, row);
      EXPECT_EQ(std::memcmp(payload, expected.data(), expected.size()), 0) << "row " << row;
      return Status();
    });
    ASSERT_TRUE(visited.ok()) << visited.message();
  }
  EXPECT_EQ(num_rows, at_snapshot.num_updated());
  VerifyReport report;
  ASSERT_TRUE(reader->verify(&report).ok());
  EXPECT_TRUE(report.failures.empty()) << report.failures[0];
  EXPECT_EQ(report.num_live_records, num_rows);

  source.reset();
  options.store.restore_snapshot = "mid";
  ASSERT_TRUE(TieredRows::make(options, &source).ok());
  EXPECT_TRUE(check_all(source.get(), at_snapshot).ok());
  const std::string file = env.files_under("/a/snapshots/mid").at(1);
  env.damage(file, kSegmentHeaderBytes + 5);
  ASSERT_TRUE(reader->verify(&report).ok());
  ASSERT_EQ(report.failures.size(), 1u);
  EXPECT_NE(report.failures[0].find(file), std::string::npos);
}

TEST(TieredRows, EvaluationWritesNothing) {
  FaultyEnv env;
  TieredOptions options = make_options(&env, {6000, 2, IoBackend::Inline, 0});
  std::unique_ptr<TieredRows> source;
  ASSERT_TRUE(TieredRows::make(options, &source).ok());
  Model model(options.store.tables);
  std::mt19937_64 rng(4);
  ASSERT_TRUE(step(source.get(), &model, random_batch(&rng, options.store.tables, 400), true).ok());
  ASSERT_TRUE(source->flush().ok());
  const std::uint64_t num_writes = env.num_ops(FaultyEnv::Op::Write);
  for (int i = 0; i < 10; ++i) ASSERT_TRUE(step(source.get(), &model, random_batch(&rng, options.store.tables, 400), false).ok());
  EXPECT_TRUE(check_all(source.get(), model).ok());
  EXPECT_EQ(env.num_ops(FaultyEnv::Op::Write), num_writes);
}

// Reads and writes that fail at any moment fail a pin, never a value; the same step works afterwards.
TEST(TieredRows, AFailureFailsThePinAndLosesNothing) {
  for (const auto op : {FaultyEnv::Op::Read, FaultyEnv::Op::Write}) {
    int num_failures = 0;
    for (const std::uint64_t cache_bytes : {0u, 4000u, 40000u}) {
      FaultyEnv env;
      TieredOptions options = make_options(&env, {cache_bytes, 2, IoBackend::Inline, 0});
      std::unique_ptr<TieredRows> source;
      ASSERT_TRUE(TieredRows::make(options, &source).ok());
      Model model(options.store.tables);
      std::mt19937_64 rng(4);
      for (std::uint64_t turn = 0; turn < 150; ++turn) {
        const Batch batch = random_batch(&rng, options.store.tables, 300);
        if (turn % 2 == 0) {
          ASSERT_TRUE(prefetch(source.get(), batch).ok());
        }
        if (turn % 15 == 14) env.fail(op, rng() % 4, op == FaultyEnv::Op::Read ? StatusKind::Io : StatusKind::NoSpace, 400);
        // Pins of later tables fail after earlier ones were updated, so compare from one table at a time.
        for (std::uint32_t t = 0; t < 3; ++t) {
          Batch one;
          one.rows.resize(3);
          one.rows[t] = batch.rows[t];
          Status status = step(source.get(), &model, one, true);
          if (status.ok()) continue;
          ASSERT_NE(status.kind, StatusKind::Corruption) << status.message();
          ++num_failures;
          env.clear_faults();
          status = step(source.get(), &model, one, true);
          ASSERT_TRUE(status.ok()) << "turn " << turn << ": " << status.message();
        }
      }
      env.clear_faults();
      Status status = check_all(source.get(), model);
      if (!status.ok()) status = check_all(source.get(), model);  // the first may still report an earlier failure
      EXPECT_TRUE(status.ok()) << status.message();
    }
    EXPECT_GT(num_failures, 5);
  }
}

TEST(TieredRows, RefusesBadCallsByName) {
  FaultyEnv env;
  TieredOptions options = make_options(&env, {6000, 2, IoBackend::Inline, 0});
  std::unique_ptr<TieredRows> source;
  ASSERT_TRUE(TieredRows::make(options, &source).ok());
  PinTicket ticket = kNoTicket;
  std::byte* payload = nullptr;
  const std::uint64_t bad_row = 3000;
  Status status = source->pin(0, &bad_row, 1, PinMode::Read, &payload, &ticket);
  EXPECT_EQ(status.kind, StatusKind::InvalidArgument);
  EXPECT_NE(status.message().find("table 'one': row 3000 of 3000"), std::string::npos) << status.message();
  EXPECT_EQ(source->pin(9, &bad_row, 1, PinMode::Read, &payload, &ticket).kind, StatusKind::InvalidArgument);
  EXPECT_EQ(source->unpin(77, false).kind, StatusKind::InvalidArgument);
  const std::uint64_t row = 5;
  ASSERT_TRUE(source->pin(0, &row, 1, PinMode::Update, &payload, &ticket).ok());
  EXPECT_EQ(source->flush().kind, StatusKind::Busy);
  EXPECT_EQ(source->snapshot("s", "").kind, StatusKind::Busy);
  ASSERT_TRUE(source->unpin(ticket, true).ok());
  EXPECT_EQ(source->unpin(ticket, true).kind, StatusKind::InvalidArgument);
  EXPECT_TRUE(source->snapshot("s", "").ok());
  ASSERT_TRUE(source->pin(0, &row, 1, PinMode::Read, &payload, &ticket).ok());
  EXPECT_EQ(source->unpin(ticket, true).kind, StatusKind::InvalidArgument);
  EXPECT_TRUE(source->unpin(ticket, false).ok());
}

// Two batches in flight over the same rows are one slot: the second sees the first one's update.
TEST(TieredRows, RowsOfTwoOpenTicketsAreOneSlot) {
  FaultyEnv env;
  std::unique_ptr<TieredRows> source;
  ASSERT_TRUE(TieredRows::make(make_options(&env, {0, 2, IoBackend::Inline, 0}), &source).ok());
  const std::uint64_t row = 17;
  std::byte* first = nullptr;
  std::byte* second = nullptr;
  PinTicket a = kNoTicket;
  PinTicket b = kNoTicket;
  ASSERT_TRUE(source->pin(0, &row, 1, PinMode::Update, &first, &a).ok());
  ASSERT_TRUE(source->pin(0, &row, 1, PinMode::Update, &second, &b).ok());
  EXPECT_EQ(first, second);
  first[0] = std::byte{9};
  ASSERT_TRUE(source->unpin(a, true).ok());
  EXPECT_EQ(second[0], std::byte{9});
  ASSERT_TRUE(source->unpin(b, false).ok());
  ASSERT_TRUE(source->pin(0, &row, 1, PinMode::Read, &first, &a).ok());
  EXPECT_EQ(first[0], std::byte{9});
  ASSERT_TRUE(source->unpin(a, false).ok());
}

TEST(TieredRows, LookAheadEvictsFewerNeededRows) {
  std::map<bool, double> misses;
  for (const bool has_lookahead : {false, true}) {
    FaultyEnv env;
    TieredOptions options = make_options(&env, {0, 1, IoBackend::Inline, 0});
    options.store.tables = {make_table(0, "t", 20000, 16)};
    options.cache_bytes = {2000 * (128 + RowCache::kOverheadBytes)};
    std::unique_ptr<TieredRows> source;
    ASSERT_TRUE(TieredRows::make(options, &source).ok());
    Model model(options.store.tables);
    std::mt19937_64 rng(8);
    std::deque<Batch> ahead;
    for (int i = 0; i < 150; ++i) {
      while (ahead.size() < 12) {
        ahead.push_back(random_batch(&rng, options.store.tables, 400));
        if (has_lookahead) {
          ASSERT_TRUE(prefetch(source.get(), ahead.back()).ok());
        }
      }
      ASSERT_TRUE(step(source.get(), &model, ahead.front(), true).ok());
      ahead.pop_front();
    }
    misses[has_lookahead] = source->counters()[0].at("misses_rows");
  }
  EXPECT_LT(misses[true], 0.9 * misses[false]);
}

TEST(RowCache, FindsWhatWasInsertedThroughManyEvictions) {
  std::unique_ptr<RowCache> cache;
  ASSERT_TRUE(RowCache::make(300 * (64 + RowCache::kOverheadBytes), 64, &cache).ok());
  ASSERT_EQ(cache->capacity(), 300u);
  std::map<std::uint64_t, std::uint32_t> model;
  std::mt19937_64 rng(3);
  for (int i = 0; i < 20000; ++i) {
    const std::uint64_t key = cache_key(rng() % 3, rng() % 500);
    const std::uint32_t found = cache->find(key);
    ASSERT_EQ(found, model.count(key) > 0 ? model[key] : kNoCacheSlot);
    if (found != kNoCacheSlot) continue;
    std::uint32_t slot = cache->take_free();
    if (slot == kNoCacheSlot) {
      slot = cache->choose_victim(0);
      ASSERT_NE(slot, kNoCacheSlot);
      model.erase(cache->key(slot));
      cache->erase(slot);
    }
    cache->insert(slot, key);
    model[key] = slot;
  }
  EXPECT_EQ(model.size(), 300u);
}

TEST(RowCache, NeverEvictsPinnedRowsAndKeepsAnnouncedOnesLongest) {
  std::unique_ptr<RowCache> cache;
  ASSERT_TRUE(RowCache::make(10 * (64 + RowCache::kOverheadBytes), 64, &cache).ok());
  for (std::uint64_t row = 0; row < 10; ++row) cache->insert(cache->take_free(), cache_key(0, row));
  for (std::uint64_t row = 0; row < 4; ++row) cache->pin(cache->find(cache_key(0, row)));
  for (std::uint64_t row = 4; row < 8; ++row) cache->announce(cache->find(cache_key(0, row)), 5);
  for (int i = 0; i < 6; ++i) {
    const std::uint32_t victim = cache->choose_victim(3);
    ASSERT_NE(victim, kNoCacheSlot);
    const std::uint64_t row = row_of_key(cache->key(victim));
    if (i < 2) {
      EXPECT_GE(row, 8u);
    } else {
      EXPECT_GE(row, 4u);
    }
    cache->erase(victim);
  }
  EXPECT_EQ(cache->choose_victim(3), kNoCacheSlot);
}

}  // namespace
}  // namespace kstep
