// What reads and rewrites committed snapshots: compaction and the read-only row source; and stores of column shards.
#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <random>
#include <thread>

#include "compute/initial_values.h"
#include "storage/compact.h"
#include "tests/faulty_env.h"
#include "tier/snapshot_rows.h"

namespace kstep {
namespace {

TableSpec make_table(std::uint32_t id, const std::string& name, std::uint64_t num_rows, std::uint32_t dim, std::uint32_t first_column = 0) {
  TableSpec table;
  table.table_id = id;
  table.name = name;
  table.num_rows = num_rows;
  table.dim = dim;
  table.seed = 5;
  table.init = {InitKind::Normal, 0.0, 0.1};
  table.first_column = first_column;
  EXPECT_TRUE(RecordSchema::make({{"weight", DType::F32, dim}, {"m", DType::F32, dim}}, &table.schema).ok());
  return table;
}

StoreOptions make_options(Env* env, std::vector<TableSpec> tables) {
  StoreOptions options;
  options.env = env;
  options.paths = {"/a", "/b"};
  options.tables = std::move(tables);
  options.segment_bytes = 256u << 10;
  options.queue_depth = 8;
  options.backend = IoBackend::Inline;
  return options;
}

// Payload of each written (table, row).
using Model = std::map<std::pair<std::size_t, std::uint64_t>, std::vector<std::byte>>;

std::vector<std::byte> expected(const Model& model, const std::vector<TableSpec>& tables, std::size_t t, std::uint64_t row) {
  const auto found = model.find({t, row});
  if (found != model.end()) return found->second;
  std::vector<std::byte> payload(tables[t].schema.payload_bytes());
  fill_initial_row(tables[t], row, payload.data());
  return payload;
}

// Gives `count` rows of every table new random bytes.
void write_some(RowStore* store, Model* model, std::mt19937_64* rng, std::size_t count) {
  for (std::size_t t = 0; t < store->num_tables(); ++t) {
    TableState* table = store->table(t);
    std::map<std::uint64_t, bool> rows;
    for (std::size_t i = 0; i < count; ++i) rows[(*rng)() % table->spec.num_rows] = true;
    ASSERT_TRUE(store->begin_batch(rows.size() * table->log->layout().record_bytes).ok());
    for (const auto& row : rows) {
      std::vector<std::byte> payload(table->spec.schema.payload_bytes());
      for (std::byte& byte : payload) byte = static_cast<std::byte>((*rng)());
      ASSERT_TRUE(store->append(table, row.first, payload.data()).ok());
      (*model)[{t, row.first}] = payload;
    }
    ASSERT_TRUE(store->end_batch().ok());
  }
}

std::shared_ptr<SnapshotReader> open_snapshot(Env* env, const std::string& name) {
  std::unique_ptr<SnapshotReader> reader;
  const Status status = SnapshotReader::open(env, {"/a", "/b"}, name, &reader);
  EXPECT_TRUE(status.ok()) << status.message();
  return reader;
}

// Every row of every table, touched or not, through the read-only source.
void expect_rows(Env* env, const std::string& name, const std::vector<TableSpec>& tables, const Model& model) {
  SnapshotRows source(open_snapshot(env, name), std::make_shared<std::mutex>());
  double num_misses = 0;
  for (std::uint32_t t = 0; t < tables.size(); ++t) {
    std::vector<std::uint64_t> rows(tables[t].num_rows);
    for (std::uint64_t row = 0; row < rows.size(); ++row) rows[row] = row;
    std::vector<std::byte*> payloads(rows.size());
    PinTicket ticket = kNoTicket;
    const Status status = source.pin(t, rows.data(), rows.size(), PinMode::Read, payloads.data(), &ticket);
    ASSERT_TRUE(status.ok()) << status.message();
    for (std::uint64_t row = 0; row < rows.size(); ++row) {
      const std::vector<std::byte> bytes = expected(model, tables, t, row);
      ASSERT_EQ(std::memcmp(payloads[row], bytes.data(), bytes.size()), 0) << "table " << t << " row " << row;
    }
    ASSERT_TRUE(source.unpin(ticket, false).ok());
    num_misses += source.counters()[t].at("misses_rows");
  }
  EXPECT_EQ(num_misses, static_cast<double>(model.size()));
}

class Snapshots : public ::testing::TestWithParam<std::uint64_t> {};

TEST_P(Snapshots, CompactionKeepsEveryRowAndDropsStaleRecords) {
  FaultyEnv env;
  std::mt19937_64 rng(GetParam());
  const std::vector<TableSpec> tables = {make_table(3, "small", 700, 4), make_table(9, "twin", 500, 4), make_table(1, "wide", 300, 33),
                                         make_table(2, "untouched", 50, 8)};
  Model model;
  {
    std::unique_ptr<RowStore> store;
    ASSERT_TRUE(RowStore::open(make_options(&env, {tables[0], tables[1], tables[2], tables[3]}), &store).ok());
    // Snapshots in between hold segments, so the cleaner leaves stale records behind.
    for (int i = 0; i < 12; ++i) {
      write_some(store.get(), &model, &rng, 200);
      ASSERT_TRUE(store->snapshot("s" + std::to_string(i), "step=" + std::to_string(i)).ok());
    }
  }
  CompactReport report;
  const Status status = compact_snapshot(make_options(&env, {}), "s11", "compact", &report);
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(report.num_rows, model.size());
  EXPECT_LT(report.bytes_after, report.bytes_before);
  expect_rows(&env, "compact", tables, model);
  expect_rows(&env, "s11", tables, model);  // the old one stays
  const auto compacted = open_snapshot(&env, "compact");
  EXPECT_EQ(compacted->manifest().metadata, "step=11");
  VerifyReport verified;
  ASSERT_TRUE(compacted->verify(&verified).ok());
  EXPECT_TRUE(verified.failures.empty());
  EXPECT_EQ(verified.num_records, model.size());  // one version of each row
  std::unique_ptr<RowStore> store;
  StoreOptions options = make_options(&env, tables);
  options.restore_snapshot = "compact";
  ASSERT_TRUE(RowStore::open(options, &store).ok());  // training goes on from it
  write_some(store.get(), &model, &rng, 100);
  ASSERT_TRUE(store->snapshot("next", "").ok());
  expect_rows(&env, "next", tables, model);
}

INSTANTIATE_TEST_SUITE_P(Seeds, Snapshots, ::testing::Values(1, 2, 3));

TEST(Compact, RefusesWhatItCannotDoByName) {
  FaultyEnv env;
  std::mt19937_64 rng(1);
  Model model;
  const std::vector<TableSpec> tables = {make_table(0, "t", 300, 8)};
  std::unique_ptr<RowStore> store;
  ASSERT_TRUE(RowStore::open(make_options(&env, tables), &store).ok());
  write_some(store.get(), &model, &rng, 100);
  ASSERT_TRUE(store->snapshot("s", "").ok());
  CompactReport report;
  EXPECT_EQ(compact_snapshot(make_options(&env, {}), "s", "c", &report).kind, StatusKind::Busy);  // training holds the store
  store.reset();
  EXPECT_EQ(compact_snapshot(make_options(&env, {}), "missing", "c", &report).kind, StatusKind::NotFound);
  EXPECT_EQ(compact_snapshot(make_options(&env, {}), "s", "no/name", &report).kind, StatusKind::InvalidArgument);
  const Status taken = compact_snapshot(make_options(&env, {}), "s", "s", &report);
  EXPECT_EQ(taken.kind, StatusKind::InvalidArgument);
  EXPECT_NE(taken.message().find("'s'"), std::string::npos);
  expect_rows(&env, "s", tables, model);
}

TEST(Compact, FailsOnADamagedRecordAndCommitsNothing) {
  FaultyEnv env;
  std::mt19937_64 rng(1);
  Model model;
  const std::vector<TableSpec> tables = {make_table(0, "t", 300, 8)};
  {
    std::unique_ptr<RowStore> store;
    ASSERT_TRUE(RowStore::open(make_options(&env, tables), &store).ok());
    write_some(store.get(), &model, &rng, 200);
    ASSERT_TRUE(store->snapshot("s", "").ok());
  }
  for (const std::string& file : env.files_under("/a/snapshots/s")) {
    if (file.find("seg-") != std::string::npos) env.damage(file, kSegmentHeaderBytes + 5);
  }
  for (const std::string& file : env.files_under("/b/snapshots/s")) env.damage(file, kSegmentHeaderBytes + 5);
  CompactReport report;
  EXPECT_EQ(compact_snapshot(make_options(&env, {}), "s", "c", &report).kind, StatusKind::Corruption);
  std::unique_ptr<SnapshotReader> reader;
  EXPECT_EQ(SnapshotReader::open(&env, {"/a", "/b"}, "c", &reader).kind, StatusKind::NotFound);
}

TEST(SnapshotRows, RefusesUpdatesWrongRowsAndWrongTickets) {
  FaultyEnv env;
  std::mt19937_64 rng(1);
  Model model;
  const std::vector<TableSpec> tables = {make_table(0, "t", 300, 8)};
  std::unique_ptr<RowStore> store;
  ASSERT_TRUE(RowStore::open(make_options(&env, tables), &store).ok());
  write_some(store.get(), &model, &rng, 100);
  ASSERT_TRUE(store->snapshot("s", "").ok());
  SnapshotRows source(open_snapshot(&env, "s"), std::make_shared<std::mutex>());
  const std::uint64_t rows[2] = {7, 299}, outside[1] = {300};
  std::byte* payloads[2] = {};
  PinTicket ticket = kNoTicket, second = kNoTicket;
  const Status update = source.pin(0, rows, 2, PinMode::Update, payloads, &ticket);
  EXPECT_EQ(update.kind, StatusKind::InvalidArgument);
  EXPECT_NE(update.message().find("'s'"), std::string::npos);
  EXPECT_EQ(source.pin(1, rows, 2, PinMode::Read, payloads, &ticket).kind, StatusKind::InvalidArgument);
  EXPECT_EQ(source.pin(0, outside, 1, PinMode::Read, payloads, &ticket).kind, StatusKind::InvalidArgument);
  EXPECT_EQ(ticket, kNoTicket);
  ASSERT_TRUE(source.pin(0, rows, 0, PinMode::Read, payloads, &ticket).ok());
  ASSERT_TRUE(source.unpin(ticket, false).ok());
  // Two open tickets do not share memory.
  std::byte* others[2] = {};
  ASSERT_TRUE(source.pin(0, rows, 2, PinMode::Read, payloads, &ticket).ok());
  ASSERT_TRUE(source.pin(0, rows + 1, 1, PinMode::Read, others, &second).ok());
  EXPECT_NE(payloads[1], others[0]);
  EXPECT_EQ(std::memcmp(payloads[1], others[0], tables[0].schema.payload_bytes()), 0);
  EXPECT_FALSE(source.unpin(ticket, true).ok());
  ASSERT_TRUE(source.unpin(ticket, false).ok());
  EXPECT_FALSE(source.unpin(ticket, false).ok());
  ASSERT_TRUE(source.unpin(second, false).ok());
  EXPECT_FALSE(source.unpin(kNoTicket, false).ok());
  EXPECT_FALSE(source.unpin(99, false).ok());
}

TEST(SnapshotRows, TwoSourcesShareOneReaderFromTwoThreads) {
  FaultyEnv env;
  std::mt19937_64 rng(2);
  Model model;
  const std::vector<TableSpec> tables = {make_table(0, "t", 2000, 8)};
  std::unique_ptr<RowStore> store;
  ASSERT_TRUE(RowStore::open(make_options(&env, tables), &store).ok());
  write_some(store.get(), &model, &rng, 1500);
  ASSERT_TRUE(store->snapshot("s", "").ok());
  const std::shared_ptr<SnapshotReader> reader = open_snapshot(&env, "s");
  const auto mutex = std::make_shared<std::mutex>();
  auto check = [&](std::uint64_t first) {
    SnapshotRows source(reader, mutex);
    for (std::uint64_t begin = first; begin + 50 <= 2000; begin += 100) {
      std::vector<std::uint64_t> rows;
      for (std::uint64_t row = begin; row < begin + 50; ++row) rows.push_back(row);
      std::vector<std::byte*> payloads(rows.size());
      PinTicket ticket = kNoTicket;
      ASSERT_TRUE(source.pin(0, rows.data(), rows.size(), PinMode::Read, payloads.data(), &ticket).ok());
      for (std::size_t i = 0; i < rows.size(); ++i) {
        const std::vector<std::byte> bytes = expected(model, tables, 0, rows[i]);
        ASSERT_EQ(std::memcmp(payloads[i], bytes.data(), bytes.size()), 0) << rows[i];
      }
      ASSERT_TRUE(source.unpin(ticket, false).ok());
    }
  };
  std::thread other([&] { check(0); });
  check(50);
  other.join();
}

// Column shards of one table share table_id, seed and row ids, and must not be taken for each other.
TEST(ColumnShards, OfOneTableLiveInOneStore) {
  FaultyEnv env;
  std::mt19937_64 rng(3);
  Model model;
  const std::vector<TableSpec> tables = {make_table(4, "t", 600, 8), make_table(4, "t:8", 600, 8, 8), make_table(4, "t:16", 600, 5, 16),
                                         make_table(7, "last", 100, 4, 4095)};
  std::unique_ptr<RowStore> store;
  const Status opened = RowStore::open(make_options(&env, tables), &store);
  ASSERT_TRUE(opened.ok()) << opened.message();
  for (int i = 0; i < 40; ++i) write_some(store.get(), &model, &rng, 200);  // enough for the cleaner to copy
  ASSERT_TRUE(store->snapshot("s", "").ok());
  expect_rows(&env, "s", tables, model);
  store.reset();
  StoreOptions options = make_options(&env, tables);
  options.restore_snapshot = "s";
  ASSERT_TRUE(RowStore::open(options, &store).ok());
  write_some(store.get(), &model, &rng, 100);
  ASSERT_TRUE(store->snapshot("s2", "").ok());
  expect_rows(&env, "s2", tables, model);
  store.reset();
  CompactReport report;
  ASSERT_TRUE(compact_snapshot(make_options(&env, {}), "s2", "c", &report).ok());
  expect_rows(&env, "c", tables, model);

  options = make_options(&env, {tables[1], make_table(4, "again", 600, 8, 8)});
  const Status twice = RowStore::open(options, &store);
  EXPECT_EQ(twice.kind, StatusKind::InvalidArgument);
  EXPECT_NE(twice.message().find("'again'"), std::string::npos);
  options = make_options(&env, {make_table(4, "far", 600, 8, 4096)});
  EXPECT_EQ(RowStore::open(options, &store).kind, StatusKind::InvalidArgument);
}

}  // namespace
}  // namespace kstep
