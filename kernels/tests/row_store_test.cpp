// RowStore against a plain map, on a medium that forgets, tears and refuses.
#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <random>

#include "storage/row_store.h"
#include "tests/faulty_env.h"
#include "tests/row_store_model.h"

namespace kstep {
namespace {

TEST(RowStorePaths, RowsLieByWeight) {
  for (const std::vector<double>& weights : {std::vector<double>{1, 1}, {3, 1}, {1, 0}, {0, 2}, {}}) {
    FaultyEnv env;
    StoreOptions options = make_options(&env, {"/a", "/b"});
    options.path_weights = weights;
    std::unique_ptr<RowStore> store;
    ASSERT_TRUE(RowStore::open(options, &store).ok());
    Model model;
    std::mt19937_64 rng(5);
    for (std::uint64_t version = 0; version < 30; ++version) {
      ASSERT_TRUE(write_rows(store.get(), &model, random_keys(&rng, *store, 600), version).ok());
    }
    ASSERT_TRUE(store->flush().ok());  // counters tell what has arrived
    ASSERT_TRUE(check_all(store.get(), model).ok());
    double bytes[2] = {0, 0};
    for (const SegmentInfo& segment : store->segment_map()) bytes[segment.path] += static_cast<double>(segment.file_bytes);
    const double expected = weights.empty() ? 0.5 : weights[0] / (weights[0] + weights[1]);
    EXPECT_NEAR(bytes[0] / (bytes[0] + bytes[1]), expected, expected == 0 || expected == 1 ? 0 : 0.15);
    auto counters = store->counters();
    EXPECT_EQ(counters.at("path_read_bytes_0") > 0, expected > 0);
    EXPECT_EQ(counters.at("path_written_bytes_1") > 0, expected < 1);
    EXPECT_EQ(counters.at("path_written_bytes_0") + counters.at("path_written_bytes_1"), counters.at("device_written_bytes"));
  }
}

TEST(RowStorePaths, OtherWeightsNeedNoOtherStore) {
  FaultyEnv env;
  StoreOptions options = make_options(&env, {"/a", "/b"});
  options.path_weights = {1, 0};
  Model model;
  std::mt19937_64 rng(6);
  {
    std::unique_ptr<RowStore> store;
    ASSERT_TRUE(RowStore::open(options, &store).ok());
    ASSERT_TRUE(write_rows(store.get(), &model, random_keys(&rng, *store, 300), 1).ok());
    ASSERT_TRUE(store->snapshot("one", "").ok());
  }
  options.path_weights = {0, 1};
  options.restore_snapshot = "one";
  std::unique_ptr<RowStore> store;
  ASSERT_TRUE(RowStore::open(options, &store).ok());
  ASSERT_TRUE(check_all(store.get(), model).ok());
  ASSERT_TRUE(write_rows(store.get(), &model, random_keys(&rng, *store, 300), 2).ok());
  ASSERT_TRUE(check_all(store.get(), model).ok());
}

TEST(RowStorePaths, RefusesWeightsAndBoundsThatSayNothing) {
  FaultyEnv env;
  for (const std::vector<double>& weights : {std::vector<double>{1}, {0, 0}, {1, -1}, {1, 1, 1}}) {
    StoreOptions options = make_options(&env, {"/a", "/b"});
    options.path_weights = weights;
    std::unique_ptr<RowStore> store;
    EXPECT_EQ(RowStore::open(options, &store).kind, StatusKind::InvalidArgument);
  }
  StoreOptions options = make_options(&env, {"/a", "/b"});
  options.path_bytes_per_s = {1};
  std::unique_ptr<RowStore> store;
  EXPECT_EQ(RowStore::open(options, &store).kind, StatusKind::InvalidArgument);
}

TEST(RowStorePaths, ABoundedDriveHoldsTheSameRows) {
  FaultyEnv env;
  StoreOptions options = make_options(&env, {"/a", "/b"});
  options.path_bytes_per_s = {0, 20 << 20};
  std::unique_ptr<RowStore> store;
  ASSERT_TRUE(RowStore::open(options, &store).ok());
  Model model;
  std::mt19937_64 rng(7);
  for (std::uint64_t version = 0; version < 5; ++version) {
    ASSERT_TRUE(write_rows(store.get(), &model, random_keys(&rng, *store, 200), version).ok());
    ASSERT_TRUE(check_all(store.get(), model).ok());
  }
}

class RowStoreSchedules : public ::testing::TestWithParam<int> {};

// Random batches, snapshots, deletions, crashes and restores, compared with a map after each.
TEST_P(RowStoreSchedules, EqualAPlainMap) {
  std::mt19937_64 rng(static_cast<std::uint64_t>(GetParam()));
  FaultyEnv env;
  std::vector<std::string> paths = {"/a"};
  if (GetParam() % 2 == 1) paths = {"/a", "/b", "/c"};
  StoreOptions options = make_options(&env, paths);
  options.backend = GetParam() % 3 == 0 ? IoBackend::Threads : IoBackend::Inline;
  std::unique_ptr<RowStore> store;
  ASSERT_TRUE(RowStore::open(options, &store).ok());
  Model model;
  std::map<std::string, Model> snapshots;
  std::uint64_t version = 0;
  for (int turn = 0; turn < kScheduleTurns; ++turn) {
    const auto choice = rng() % 20;
    if (choice < 14) {
      const Status status = write_rows(store.get(), &model, random_keys(&rng, *store, 1 + rng() % 300), ++version);
      ASSERT_TRUE(status.ok()) << status.message();
    } else if (choice < 16) {
      const std::string name = "s" + std::to_string(turn);
      const Status status = store->snapshot(name, "turn " + std::to_string(turn));
      ASSERT_TRUE(status.ok()) << status.message();
      snapshots[name] = model;
    } else if (choice == 16 && !snapshots.empty()) {
      const std::string name = std::next(snapshots.begin(), static_cast<std::ptrdiff_t>(rng() % snapshots.size()))->first;
      ASSERT_TRUE(store->remove_snapshot(name).ok());
      snapshots.erase(name);
    } else if (choice == 17 && !snapshots.empty()) {
      const std::string name = std::next(snapshots.begin(), static_cast<std::ptrdiff_t>(rng() % snapshots.size()))->first;
      store.reset();
      env.crash(0.5, rng());
      options.restore_snapshot = name;
      const Status status = RowStore::open(options, &store);
      ASSERT_TRUE(status.ok()) << status.message();
      model = snapshots[name];
    } else {
      bool did_work = false;
      ASSERT_TRUE(store->clean_when_idle(&did_work).ok());
    }
    const Status status = check_all(store.get(), model);
    ASSERT_TRUE(status.ok()) << "turn " << turn << ": " << status.message();
    ASSERT_EQ(store->snapshots().size(), snapshots.size());
  }
  EXPECT_TRUE(store->damaged_snapshots().empty());
}

INSTANTIATE_TEST_SUITE_P(Seeds, RowStoreSchedules, ::testing::Range(0, 12));

// Power fails at each sync of a run in turn; every snapshot that was reported committed is whole.
TEST(RowStoreCrash, AtEverySyncACommittedSnapshotIsWhole) {
  auto run = [](FaultyEnv* env, std::map<std::string, Model>* reported, bool is_frozen_run, std::uint64_t freeze_at) {
    StoreOptions options = make_options(env, {"/a", "/b"});
    std::unique_ptr<RowStore> store;
    if (is_frozen_run) env->freeze_after_syncs(freeze_at);
    ASSERT_TRUE(RowStore::open(options, &store).ok());
    Model model;
    std::mt19937_64 rng(3);
    for (int step = 0; step < 5; ++step) {
      ASSERT_TRUE(write_rows(store.get(), &model, random_keys(&rng, *store, 200), static_cast<std::uint64_t>(step)).ok());
      const std::string name = "s" + std::to_string(step);
      ASSERT_TRUE(store->snapshot(name, "").ok());
      if (!is_frozen_run || env->num_syncs() <= freeze_at) (*reported)[name] = model;
      if (step == 3) {
        ASSERT_TRUE(store->remove_snapshot("s1").ok());
        reported->erase("s1");
      }
    }
  };
  FaultyEnv whole;
  std::map<std::string, Model> all;
  run(&whole, &all, false, 0);
  std::map<std::string, Model> models;  // of every snapshot, s1 included
  {
    FaultyEnv env;
    std::unique_ptr<RowStore> store;
    ASSERT_TRUE(RowStore::open(make_options(&env), &store).ok());
    Model model;
    std::mt19937_64 rng(3);
    for (int step = 0; step < 5; ++step) {
      ASSERT_TRUE(write_rows(store.get(), &model, random_keys(&rng, *store, 200), static_cast<std::uint64_t>(step)).ok());
      models["s" + std::to_string(step)] = model;
    }
  }
  const std::uint64_t num_syncs = whole.num_syncs();
  ASSERT_GT(num_syncs, 30u);
  for (std::uint64_t freeze_at = 0; freeze_at <= num_syncs; ++freeze_at) {
    for (const double keep_share : {0.0, 0.5, 1.0}) {
      FaultyEnv env;
      std::map<std::string, Model> reported;
      run(&env, &reported, true, freeze_at);
      env.crash(keep_share, freeze_at);
      std::unique_ptr<RowStore> store;
      const Status opened = RowStore::open(make_options(&env, {"/a", "/b"}), &store);
      ASSERT_TRUE(opened.ok()) << "frozen at " << freeze_at << ": " << opened.message();
      const std::vector<std::string> found = store->snapshots();
      for (const auto& item : reported) {
        ASSERT_EQ(std::count(found.begin(), found.end(), item.first), 1) << item.first << " lost, frozen at " << freeze_at;
      }
      store.reset();
      for (const auto& item : reported) {
        StoreOptions options = make_options(&env, {"/a", "/b"});
        options.restore_snapshot = item.first;
        Status status = RowStore::open(options, &store);
        ASSERT_TRUE(status.ok()) << item.first << " frozen at " << freeze_at << ": " << status.message();
        status = check_all(store.get(), models[item.first]);
        ASSERT_TRUE(status.ok()) << item.first << " frozen at " << freeze_at << ": " << status.message();
        store.reset();
      }
    }
  }
}

struct FaultCase {
  FaultyEnv::Op op;
  StatusKind kind;
};

class RowStoreFaults : public ::testing::TestWithParam<FaultCase> {};

// One operation fails at each position in turn: the failure is reported, nothing is lost, and after
// the cause is gone the same call works (a failed sync of a segment asks for a reopen instead).
TEST_P(RowStoreFaults, AreReportedAndLoseNothing) {
  const FaultCase fault = GetParam();
  for (std::uint64_t nth = 0; nth < 60; ++nth) {
    FaultyEnv env;
    StoreOptions options = make_options(&env, {"/a", "/b"});
    std::unique_ptr<RowStore> store;
    ASSERT_TRUE(RowStore::open(options, &store).ok());
    Model model;
    std::mt19937_64 rng(11);
    ASSERT_TRUE(write_rows(store.get(), &model, random_keys(&rng, *store, 400), 1).ok());
    ASSERT_TRUE(store->snapshot("good", "").ok());
    const Model good = model;
    env.fail(fault.op, nth, fault.kind, 1);
    bool was_reported = false;
    bool must_reopen = false;
    for (std::uint64_t step = 2; step < 12; ++step) {
      Status status = write_rows(store.get(), &model, random_keys(&rng, *store, 300), step);
      if (status.ok() && step % 4 == 0) status = store->snapshot("s" + std::to_string(step), "");
      if (status.ok()) continue;
      was_reported = true;
      ASSERT_TRUE(status.kind == fault.kind || status.kind == StatusKind::Io) << status.message();
      ASSERT_FALSE(status.detail.empty());
      env.clear_faults();
      must_reopen = store->begin_batch(0).kind != StatusKind::Ok;
      if (must_reopen) break;
      status = check_all(store.get(), model);
      ASSERT_TRUE(status.ok()) << "fault " << nth << ": " << status.message();
    }
    env.clear_faults();
    ASSERT_TRUE(!must_reopen || fault.op == FaultyEnv::Op::Sync || fault.op == FaultyEnv::Op::SyncDir);
    if (!must_reopen) {
      ASSERT_TRUE(check_all(store.get(), model).ok());
      const Status status = store->snapshot("after", "");
      ASSERT_TRUE(status.ok()) << "fault " << nth << ": " << status.message();
    }
    store.reset();
    env.crash(0.0, nth);
    options.restore_snapshot = "good";
    ASSERT_TRUE(RowStore::open(options, &store).ok());
    ASSERT_TRUE(check_all(store.get(), good).ok());
    if (!must_reopen) {
      store.reset();
      options.restore_snapshot = "after";
      ASSERT_TRUE(RowStore::open(options, &store).ok());
      ASSERT_TRUE(check_all(store.get(), model).ok());
    }
    if (!was_reported && nth > 30) return;  // past the last operation of this kind
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, RowStoreFaults,
                         ::testing::Values(FaultCase{FaultyEnv::Op::Write, StatusKind::Io}, FaultCase{FaultyEnv::Op::Write, StatusKind::NoSpace},
                                           FaultCase{FaultyEnv::Op::Sync, StatusKind::Io}, FaultCase{FaultyEnv::Op::SyncDir, StatusKind::Io},
                                           FaultCase{FaultyEnv::Op::Rename, StatusKind::Io}, FaultCase{FaultyEnv::Op::Link, StatusKind::NoSpace},
                                           FaultCase{FaultyEnv::Op::Open, StatusKind::Io}));

TEST(RowStoreReads, ReportShortReadsBitFlipsAndErrors) {
  FaultyEnv env;
  std::unique_ptr<RowStore> store;
  ASSERT_TRUE(RowStore::open(make_options(&env), &store).ok());
  Model model;
  std::mt19937_64 rng(2);
  ASSERT_TRUE(write_rows(store.get(), &model, random_keys(&rng, *store, 600), 1).ok());
  ASSERT_TRUE(store->snapshot("s", "").ok());
  env.shorten_read(3);
  EXPECT_EQ(check_all(store.get(), model).kind, StatusKind::Corruption);
  env.flip_bit_in_read(3);
  const Status flipped = check_all(store.get(), model);
  EXPECT_TRUE(flipped.ok() || flipped.kind == StatusKind::Corruption);  // the bit may lie outside a wanted record
  env.fail(FaultyEnv::Op::Read, 3, StatusKind::Io);
  const Status failed = check_all(store.get(), model);
  EXPECT_EQ(failed.kind, StatusKind::Io);
  EXPECT_NE(failed.context.find(".seg at offset"), std::string::npos);
  env.clear_faults();
  EXPECT_TRUE(check_all(store.get(), model).ok());
}

// A flipped bit anywhere in a segment is noticed by opening or by reading every live row, or lies in padding.
TEST(RowStoreReads, NoticeDamageAnywhereInASegment) {
  FaultyEnv env;
  StoreOptions options = make_options(&env);
  options.tables = {make_table(0, "t", 100, 16)};
  std::unique_ptr<RowStore> store;
  ASSERT_TRUE(RowStore::open(options, &store).ok());
  Model model;
  std::vector<std::pair<std::size_t, std::uint64_t>> keys;
  for (std::uint64_t row = 0; row < 54; ++row) keys.emplace_back(0, row);  // two full units
  ASSERT_TRUE(write_rows(store.get(), &model, keys, 1).ok());
  ASSERT_TRUE(store->snapshot("s", "").ok());
  options.restore_snapshot = "s";
  const std::string file = env.files_under("/a/snapshots/s/log-148").at(0);
  std::uint64_t file_bytes = 0;
  ASSERT_TRUE(env.file_size(file, &file_bytes).ok());
  const RecordLayout layout = store->table(0)->log->layout();
  ASSERT_EQ(layout.records_per_unit, 27u);
  for (std::uint64_t offset = 0; offset < file_bytes; offset += offset % 7 + 1) {
    const std::uint64_t in_unit = (offset - kSegmentHeaderBytes) % layout.unit_bytes;
    const bool is_header_padding = offset >= 64 && offset < kSegmentHeaderBytes;
    const bool is_unit_padding = offset >= kSegmentHeaderBytes && offset < layout.offset_of(54) && in_unit >= 27u * 148;
    const bool is_footer_padding = offset >= layout.offset_of(54) + 54 * 3 && offset < file_bytes - 64;
    if (is_header_padding || is_unit_padding || is_footer_padding) continue;
    store.reset();
    env.damage(file, offset);
    Status status = RowStore::open(options, &store);
    if (status.ok()) status = check_all(store.get(), model);
    EXPECT_EQ(status.kind, StatusKind::Corruption) << "offset " << offset << " " << status.message();
    env.damage(file, offset);  // flips it back
  }
}

TEST(RowStore, RefusesASecondOwnerAnotherSchemaAndOtherPathsByName) {
  FaultyEnv env;
  StoreOptions options = make_options(&env, {"/a", "/b"});
  std::unique_ptr<RowStore> store;
  ASSERT_TRUE(RowStore::open(options, &store).ok());
  Model model;
  std::mt19937_64 rng(2);
  ASSERT_TRUE(write_rows(store.get(), &model, random_keys(&rng, *store, 100), 1).ok());
  ASSERT_TRUE(store->snapshot("s", "step=7").ok());
  EXPECT_EQ(store->snapshot("s", "").kind, StatusKind::InvalidArgument);
  for (const std::string name : {"", "../x", ".", "a b", "x.partial", ".hidden"}) {
    EXPECT_EQ(store->snapshot(name, "").kind, StatusKind::InvalidArgument) << name;
  }
  std::unique_ptr<RowStore> second;
  EXPECT_EQ(RowStore::open(options, &second).kind, StatusKind::Busy);
  store.reset();

  options.restore_snapshot = "absent";
  EXPECT_EQ(RowStore::open(options, &second).kind, StatusKind::NotFound);
  options.restore_snapshot = "s";
  StoreOptions other = options;
  other.tables[0] = make_table(3, "small", 500, 5);
  Status status = RowStore::open(other, &second);
  EXPECT_EQ(status.kind, StatusKind::InvalidArgument);
  EXPECT_NE(status.message().find("table 'small': field 'weight'"), std::string::npos) << status.message();
  other = options;
  other.tables[1].num_rows = 301;
  EXPECT_NE(RowStore::open(other, &second).message().find("table 'twin': num_rows"), std::string::npos);
  other = options;
  other.tables.pop_back();
  EXPECT_NE(RowStore::open(other, &second).message().find("table 'wide'"), std::string::npos);
  other = options;
  std::swap(other.paths[0], other.paths[1]);
  status = RowStore::open(other, &second);
  EXPECT_EQ(status.kind, StatusKind::InvalidArgument);
  EXPECT_NE(status.message().find("same order"), std::string::npos) << status.message();
  other = options;
  other.tables.push_back(make_table(20, "new", 10, 8));  // a new table is welcome
  ASSERT_TRUE(RowStore::open(other, &second).ok());
  EXPECT_TRUE(check_all(second.get(), model).ok());
}

// A snapshot folder copied in from another store is not restored by accident, nor does it stop this one.
TEST(RowStore, RefusesASnapshotOfAnotherStore) {
  FaultyEnv env;
  std::unique_ptr<RowStore> store;
  ASSERT_TRUE(RowStore::open(make_options(&env, {"/a"}), &store).ok());
  ASSERT_TRUE(store->snapshot("s", "").ok());
  store.reset();
  StoreOptions options = make_options(&env, {"/b"});
  ASSERT_TRUE(RowStore::open(options, &store).ok());
  store.reset();
  ASSERT_TRUE(env.rename("/a/snapshots/s", "/b/snapshots/s").ok());
  options.restore_snapshot = "s";
  const Status status = RowStore::open(options, &store);
  EXPECT_EQ(status.kind, StatusKind::InvalidArgument) << status.message();
  options.restore_snapshot.clear();
  ASSERT_TRUE(RowStore::open(options, &store).ok());
  EXPECT_EQ(store->damaged_snapshots(), std::vector<std::string>{"s"});
}

TEST(RowStore, RefusesANewerFormatVersion) {
  FaultyEnv env;
  ASSERT_TRUE(env.make_dir("/a").ok());
  Json json = Json::object();
  json.set("format_version", Json::number(std::uint64_t{2}));
  ASSERT_TRUE(env.write_text("/a/STORE", json.dump_checked()).ok());
  std::unique_ptr<RowStore> store;
  const Status status = RowStore::open(make_options(&env), &store);
  EXPECT_EQ(status.kind, StatusKind::InvalidArgument);
  EXPECT_NE(status.message().find("format version 2"), std::string::npos) << status.message();
}

// The quota holds over snapshots too; deleting a snapshot gives room again, and the failed batch works.
TEST(RowStore, KeepsTheQuotaAndRecovers) {
  FaultyEnv env;
  StoreOptions options = make_options(&env);
  options.tables = {make_table(0, "t", 20000, 16)};
  options.quota_bytes = 12u << 20;
  std::unique_ptr<RowStore> store;
  ASSERT_TRUE(RowStore::open(options, &store).ok());
  Model model;
  std::mt19937_64 rng(5);
  Status status;
  int num_snapshots = 0;
  std::uint64_t version = 0;
  std::vector<std::pair<std::size_t, std::uint64_t>> keys;
  while (status.ok() && version < 500) {
    keys.clear();
    const std::uint64_t start = rng() % 16000;
    for (std::uint64_t row = start; row < start + 4000; ++row) keys.emplace_back(0, row);
    status = write_rows(store.get(), &model, keys, ++version);
    ASSERT_LE(env.stored_bytes(), options.quota_bytes);
    if (status.ok() && version % 5 == 0) {
      ASSERT_TRUE(store->snapshot("s" + std::to_string(num_snapshots++), "").ok());
    }
  }
  ASSERT_EQ(status.kind, StatusKind::NoSpace) << status.message();
  EXPECT_NE(status.message().find("ssd_bytes"), std::string::npos);
  EXPECT_TRUE(check_all(store.get(), model).ok());
  for (int i = 0; i + 1 < num_snapshots; ++i) ASSERT_TRUE(store->remove_snapshot("s" + std::to_string(i)).ok());
  status = write_rows(store.get(), &model, keys, ++version);
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_TRUE(check_all(store.get(), model).ok());
}

// A drive that is really full, without a quota: reported, and gone when there is space again.
TEST(RowStore, SurvivesAFullDrive) {
  FaultyEnv env;
  StoreOptions options = make_options(&env);
  options.tables = {make_table(0, "t", 200000, 16)};
  std::unique_ptr<RowStore> store;
  ASSERT_TRUE(RowStore::open(options, &store).ok());
  Model model;
  std::vector<std::pair<std::size_t, std::uint64_t>> keys;
  for (std::uint64_t row = 0; row < 1000; ++row) keys.emplace_back(0, row);
  ASSERT_TRUE(write_rows(store.get(), &model, keys, 1).ok());
  ASSERT_TRUE(store->snapshot("good", "").ok());
  env.set_capacity_bytes(4u << 20);
  Status status;
  for (std::uint64_t start = 0; status.ok() && start < 199000; start += 1000) {
    keys.clear();
    for (std::uint64_t row = start; row < start + 1000; ++row) keys.emplace_back(0, row);
    status = write_rows(store.get(), &model, keys, 2);
  }
  ASSERT_EQ(status.kind, StatusKind::NoSpace) << status.message();
  EXPECT_NE(status.message().find("are free"), std::string::npos) << status.message();
  ASSERT_FALSE(store->snapshot("bad", "").ok());
  EXPECT_TRUE(check_all(store.get(), model).ok());
  env.clear_faults();
  status = write_rows(store.get(), &model, keys, 3);
  ASSERT_TRUE(status.ok()) << status.message();
  ASSERT_TRUE(store->snapshot("bad", "").ok());
  EXPECT_TRUE(check_all(store.get(), model).ok());
}

// Cost of a snapshot follows what changed, not what there is.
TEST(RowStore, SnapshotsAreIncremental) {
  FaultyEnv env;
  StoreOptions options = make_options(&env);
  options.tables = {make_table(0, "t", 40000, 16)};
  std::unique_ptr<RowStore> store;
  ASSERT_TRUE(RowStore::open(options, &store).ok());
  Model model;
  std::vector<std::pair<std::size_t, std::uint64_t>> keys;
  for (std::uint64_t row = 0; row < 40000; ++row) keys.emplace_back(0, row);
  ASSERT_TRUE(write_rows(store.get(), &model, keys, 1).ok());
  ASSERT_TRUE(store->snapshot("a", "").ok());
  const std::uint64_t before = env.stored_bytes();
  keys.resize(50);
  ASSERT_TRUE(write_rows(store.get(), &model, keys, 2).ok());
  ASSERT_TRUE(store->snapshot("b", "").ok());
  EXPECT_LT(env.stored_bytes() - before, 64u << 10);
}

}  // namespace
}  // namespace kstep
