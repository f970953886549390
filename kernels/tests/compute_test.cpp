// Compute core: thread pool, dedup, initial values, rows in DRAM, and table groups on every instruction set. No torch.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <map>
#include <random>
#include <thread>

#include "compute/dedup.h"
#include "compute/initial_values.h"
#include "compute/row_gradients.h"
#include "compute/table_group.h"
#include "compute/thread_pool.h"
#include "tier/dram_rows.h"

namespace kstep {
namespace {

// ---- thread pool -------------------------------------------------------------------------------------------------------

TEST(ThreadPool, RunsEachTaskOnceForAnyNumberOfThreads) {
  for (int threads : {1, 2, 3, 8}) {
    for (std::size_t tasks : {0u, 1u, 2u, 7u, 1000u}) {
      std::vector<std::atomic<int>> runs(tasks);
      parallel_tasks(threads, tasks, [&](std::size_t task) { runs[task].fetch_add(1); });
      for (std::size_t task = 0; task < tasks; ++task) ASSERT_EQ(runs[task].load(), 1) << task << " of " << tasks;
    }
  }
}

TEST(ThreadPool, NestedAndConcurrentCallsFinish) {
  std::atomic<int> runs{0};
  auto work = [&] {
    for (int round = 0; round < 200; ++round) {
      parallel_tasks(3, 4, [&](std::size_t) { parallel_tasks(3, 5, [&](std::size_t) { runs.fetch_add(1); }); });
    }
  };
  std::thread other(work);
  work();
  other.join();
  EXPECT_EQ(runs.load(), 2 * 200 * 4 * 5);
}

TEST(ThreadPool, WorksInAForkedChild) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the thread sanitizer ends a forked child that starts threads";
#endif
  parallel_tasks(2, 10, [](std::size_t) {});
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(20);  // a child that hangs ends with a signal, which fails the test
    std::atomic<int> runs{0};
    parallel_tasks(2, 100, [&](std::size_t) { runs.fetch_add(1); });
    _exit(runs.load() == 100 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "status " << status;
}

// ---- initial values ----------------------------------------------------------------------------------------------------

TEST(InitialValues, ArePhiloxOfTheKnownAnswerTest) {
  // Salmon et al., Random123, kat_vectors: philox4x32, 10 rounds, counter and key all zero.
  const std::uint32_t expected[4] = {0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u};
  float values[4];
  fill_initial_values({InitKind::Uniform, 0.0, 1.0}, 0, 0, 0, 0, 4, values);
  for (int j = 0; j < 4; ++j) EXPECT_EQ(values[j], static_cast<float>(expected[j] >> 8) * 0x1p-24f);
}

TEST(InitialValues, OfAColumnShardAreThoseOfTheWholeRow) {
  for (InitKind kind : {InitKind::Zero, InitKind::Uniform, InitKind::Normal}) {
    std::vector<float> whole(300), part(300);
    fill_initial_values({kind, -0.1, 0.4}, 42, 7, 123456789012ull, 0, 300, whole.data());
    for (std::uint32_t first : {1u, 3u, 4u, 63u, 64u, 65u, 200u}) {
      for (std::uint32_t count : {1u, 5u, 64u, 99u}) {
        fill_initial_values({kind, -0.1, 0.4}, 42, 7, 123456789012ull, first, count, part.data());
        ASSERT_EQ(std::memcmp(part.data(), whole.data() + first, count * sizeof(float)), 0) << first << " " << count;
      }
    }
  }
}

TEST(InitialValues, NormalHasTheMomentsOfANormal) {
  double sum = 0, square = 0, fourth = 0;
  const int num_rows = 4000, dim = 64;
  for (int row = 0; row < num_rows; ++row) {
    float values[dim];
    fill_initial_values({InitKind::Normal, 0.0, 1.0}, 1, 2, static_cast<std::uint64_t>(row), 0, dim, values);
    for (float x : values) sum += x, square += x * x, fourth += static_cast<double>(x) * x * x * x;
  }
  const double n = num_rows * dim;  // 256,000: five standard errors are 0.01, 0.014 and 0.1
  EXPECT_NEAR(sum / n, 0.0, 0.01);
  EXPECT_NEAR(square / n, 1.0, 0.014);
  EXPECT_NEAR(fourth / n, 3.0, 0.1);
}

// ---- dedup -------------------------------------------------------------------------------------------------------------

struct DedupArrays {
  std::vector<std::int64_t> unique_rows, table_offsets, num_bad;
  std::vector<std::int32_t> row_offsets, positions, inverse;

  DedupResult size_for(std::size_t num_ids, std::size_t num_tables) {
    unique_rows.resize(num_ids), table_offsets.resize(num_tables + 1), num_bad.resize(num_tables);
    row_offsets.resize(num_ids + 1), positions.resize(num_ids), inverse.resize(num_ids);
    return {unique_rows.data(), table_offsets.data(), row_offsets.data(), positions.data(), inverse.data(), num_bad.data()};
  }
};

Status run_dedup(const std::vector<std::int64_t>& ids, const std::vector<std::int64_t>& offsets,
                 const std::vector<std::int64_t>& table_of_feature, const std::vector<std::int64_t>& num_rows, OutOfRange mode,
                 int threads, DedupArrays* arrays) {
  static DedupWorkspace workspace;  // shared on purpose: scratch of one call must not leak into the next
  const DedupResult result = arrays->size_for(ids.size(), num_rows.size());
  const Bags bags{ids.data(), false, ids.size(), offsets.data(), table_of_feature.size(),
                  (offsets.size() - 1) / table_of_feature.size()};
  return dedup(bags, table_of_feature.data(), num_rows.data(), num_rows.size(), mode, threads, &workspace, result);
}

TEST(Dedup, AgreesWithAMapForSmallLargeAndWideTables) {
  std::mt19937_64 random(5);
  for (std::int64_t num_rows : {std::int64_t{1}, std::int64_t{100}, std::int64_t{5000}, std::int64_t{3000000000},
                                std::int64_t{1} << 32, (std::int64_t{1} << 32) + 1, std::int64_t{1} << 47}) {
    for (std::size_t n : {1u, 255u, 256u, 257u, 5000u}) {
      for (int threads : {1, 3}) {
        std::vector<std::int64_t> ids(2 * n);
        const std::int64_t used = std::min<std::int64_t>(num_rows, 700);
        for (std::int64_t& id : ids) {
          const auto row = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(used));
          id = random() % 2 == 0 ? row : num_rows - 1 - row;  // both ends of the range
        }
        const std::vector<std::int64_t> offsets = {0, static_cast<std::int64_t>(n), static_cast<std::int64_t>(2 * n)};
        DedupArrays out;
        ASSERT_TRUE(run_dedup(ids, offsets, {1, 0}, {num_rows, num_rows}, OutOfRange::Error, threads, &out).ok());
        std::map<std::pair<int, std::int64_t>, std::vector<std::int32_t>> expected;
        for (std::size_t i = 0; i < ids.size(); ++i) expected[{i < n ? 1 : 0, ids[i]}].push_back(static_cast<std::int32_t>(i));
        ASSERT_EQ(out.table_offsets.back(), static_cast<std::int64_t>(expected.size()));
        std::size_t u = 0;
        for (const auto& [key, positions] : expected) {
          ASSERT_EQ(out.unique_rows[u], key.second);
          ASSERT_GE(static_cast<std::int64_t>(u), out.table_offsets[static_cast<std::size_t>(key.first)]);
          const std::vector<std::int32_t> found(out.positions.begin() + out.row_offsets[u], out.positions.begin() + out.row_offsets[u + 1]);
          ASSERT_EQ(found, positions);
          for (std::int32_t i : positions) ASSERT_EQ(out.inverse[static_cast<std::size_t>(i)], static_cast<std::int32_t>(u));
          ++u;
        }
      }
    }
  }
}

TEST(Dedup, RefusesOffsetsThatAreNotThoseOfTheIds) {
  DedupArrays out;
  const std::vector<std::int64_t> ids = {1, 2, 3};
  for (const std::vector<std::int64_t>& offsets :
       {std::vector<std::int64_t>{1, 2, 3}, std::vector<std::int64_t>{0, 2, 1}, std::vector<std::int64_t>{0, 1, 2}, std::vector<std::int64_t>{0, 1, 4}}) {
    EXPECT_EQ(run_dedup(ids, offsets, {0, 0}, {10}, OutOfRange::Error, 1, &out).kind, StatusKind::InvalidArgument);
  }
}

// ---- rows in DRAM ------------------------------------------------------------------------------------------------------

TableSpec make_table(const char* name, std::uint64_t num_rows, std::uint32_t dim, std::vector<Field> states = {}) {
  TableSpec table;
  table.name = name;
  table.num_rows = num_rows;
  table.dim = dim;
  table.init = {InitKind::Uniform, -1.0, 1.0};
  table.seed = 11;
  std::vector<Field> fields = {{"weight", DType::F32, dim}};
  fields.insert(fields.end(), states.begin(), states.end());
  EXPECT_TRUE(RecordSchema::make(fields, &table.schema).ok());
  return table;
}

class DramRowsTest : public testing::TestWithParam<DramLayout> {
 protected:
  std::unique_ptr<RowSource> make(std::vector<TableSpec> tables) {
    std::unique_ptr<RowSource> source;
    const Status status = DramRows::make(std::move(tables), GetParam(), 2, &source);
    EXPECT_TRUE(status.ok()) << status.message();
    return source;
  }
};

TEST_P(DramRowsTest, ReadingNeverMaterialisesAndUpdatingDoes) {
  const auto source = make({make_table("a", 1000, 20, {{"m", DType::F32, 20}})});
  const std::vector<std::uint64_t> rows = {0, 5, 63, 64, 999};
  std::vector<std::byte*> payload(rows.size());
  std::vector<float> expected(20);
  PinTicket ticket = kNoTicket;
  ASSERT_TRUE(source->pin(0, rows.data(), rows.size(), PinMode::Read, payload.data(), &ticket).ok());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    fill_initial_values({InitKind::Uniform, -1.0, 1.0}, 11, 0, rows[i], 0, 20, expected.data());
    EXPECT_EQ(std::memcmp(payload[i], expected.data(), 80), 0);
    EXPECT_EQ(reinterpret_cast<float*>(payload[i])[20], 0.0f);
  }
  ASSERT_TRUE(source->unpin(ticket, false).ok());
  EXPECT_EQ(source->counters()[0].at("materialised_rows"), 0.0);

  ASSERT_TRUE(source->pin(0, rows.data(), 2, PinMode::Update, payload.data(), &ticket).ok());
  reinterpret_cast<float*>(payload[1])[3] = 77.0f;
  ASSERT_TRUE(source->unpin(ticket, true).ok());
  EXPECT_EQ(source->counters()[0].at("materialised_rows"), 2.0);
  ASSERT_TRUE(source->pin(0, rows.data(), rows.size(), PinMode::Read, payload.data(), &ticket).ok());
  EXPECT_EQ(reinterpret_cast<float*>(payload[1])[3], 77.0f);
  ASSERT_TRUE(source->unpin(ticket, false).ok());
}

TEST_P(DramRowsTest, ManyRowsKeepTheirValues) {
  const auto source = make({make_table("a", 200000, 3)});
  std::mt19937_64 random(3);
  std::map<std::uint64_t, float> expected;
  for (int round = 0; round < 30; ++round) {
    std::map<std::uint64_t, float> batch;
    for (int i = 0; i < 500; ++i) batch[random() % 200000] = static_cast<float>(round * 1000 + i);
    std::vector<std::uint64_t> rows;
    for (const auto& [row, value] : batch) rows.push_back(row);
    std::vector<std::byte*> payload(rows.size());
    PinTicket ticket = kNoTicket;
    ASSERT_TRUE(source->pin(0, rows.data(), rows.size(), PinMode::Update, payload.data(), &ticket).ok());
    for (std::size_t i = 0; i < rows.size(); ++i) {
      float* weight = reinterpret_cast<float*>(payload[i]);
      if (expected.count(rows[i]) != 0) {
        ASSERT_EQ(weight[2], expected[rows[i]]);
      }
      weight[2] = expected[rows[i]] = batch[rows[i]];
    }
    ASSERT_TRUE(source->unpin(ticket, true).ok());
  }
  EXPECT_EQ(source->counters()[0].at("materialised_rows"), static_cast<double>(expected.size()));
}

TEST_P(DramRowsTest, RefusesWrongTicketsAndTables) {
  const auto source = make({make_table("a", 10, 4)});
  const std::uint64_t row = 1;
  std::byte* payload = nullptr;
  PinTicket ticket = kNoTicket;
  EXPECT_EQ(source->pin(1, &row, 1, PinMode::Read, &payload, &ticket).kind, StatusKind::InvalidArgument);
  EXPECT_EQ(ticket, kNoTicket);
  EXPECT_EQ(source->unpin(kNoTicket, false).kind, StatusKind::InvalidArgument);
  ASSERT_TRUE(source->pin(0, &row, 1, PinMode::Read, &payload, &ticket).ok());
  EXPECT_EQ(source->unpin(ticket, true).kind, StatusKind::InvalidArgument) << "rows read cannot be dirty";
  EXPECT_TRUE(source->unpin(ticket, false).ok());
  EXPECT_EQ(source->unpin(ticket, false).kind, StatusKind::InvalidArgument) << "a ticket closes once";
}

INSTANTIATE_TEST_SUITE_P(Layouts, DramRowsTest, testing::Values(DramLayout::Direct, DramLayout::Packed),
                         [](const auto& info) { return info.param == DramLayout::Direct ? "Direct" : "Packed"; });

TEST(DramRows, AHugeTableTakesMemoryForTouchedRowsOnly) {
  std::unique_ptr<RowSource> source;
  ASSERT_TRUE(DramRows::make({make_table("huge", std::uint64_t{1} << 47, 16)}, DramLayout::Auto, 1, &source).ok());
  const std::vector<std::uint64_t> rows = {0, std::uint64_t{1} << 40, (std::uint64_t{1} << 47) - 1};
  std::vector<std::byte*> payload(rows.size());
  PinTicket ticket = kNoTicket;
  ASSERT_TRUE(source->pin(0, rows.data(), rows.size(), PinMode::Update, payload.data(), &ticket).ok());
  ASSERT_TRUE(source->unpin(ticket, true).ok());
  EXPECT_EQ(source->counters()[0].at("materialised_bytes"), 3 * 64.0);
}

// ---- table groups ------------------------------------------------------------------------------------------------------

const std::uint32_t kTestDims[] = {1, 3, 8, 16, 17, 31, 32, 33, 64, 65, 100, 128, 129, 1000, 2048};

std::vector<Field> adam_fields(std::uint32_t dim) {
  return {{"m", DType::F32, dim}, {"v", DType::F32, dim}, {"step", DType::I32, 1}, {"touches", DType::I32, 1}, {"base", DType::F32, dim}};
}

OptimizerSpec adam_spec() {
  OptimizerSpec spec;
  spec.kind = OptimizerKind::Adam;
  spec.bias_correction = BiasCorrection::Row;
  spec.l2 = 1e-3;
  spec.has_clip = true;
  return spec;
}

// Runs three weighted, mean-pooled training steps on tables of all test dims and returns every byte they computed.
std::vector<char> train(const char* isa, int threads, bool deferred) {
  EXPECT_TRUE(select_isa(isa)) << isa;
  const std::size_t num_tables = std::size(kTestDims), batch_size = 70, num_rows = 50;
  std::vector<TableSpec> tables;
  std::size_t columns = 0;
  std::vector<std::int64_t> table_of_feature, rows_of_table(num_tables, num_rows);
  for (std::size_t t = 0; t < num_tables; ++t) {
    tables.push_back(make_table("t", num_rows, kTestDims[t], adam_fields(kTestDims[t])));
    tables.back().table_id = static_cast<std::uint32_t>(t);
    table_of_feature.push_back(static_cast<std::int64_t>(t));
    columns += kTestDims[t];
  }
  std::unique_ptr<RowSource> source;
  EXPECT_TRUE(DramRows::make(tables, DramLayout::Auto, threads, &source).ok());
  std::unique_ptr<TableGroup> group;
  EXPECT_TRUE(TableGroup::make(std::move(source), adam_spec(), &group).ok());
  std::mt19937_64 random(9);
  std::vector<char> bytes;
  auto keep = [&](const void* data, std::size_t size) {
    bytes.insert(bytes.end(), static_cast<const char*>(data), static_cast<const char*>(data) + size);
  };
  for (std::uint64_t step = 1; step <= 3; ++step) {
    std::vector<std::int64_t> ids, offsets = {0};
    for (std::size_t bag = 0; bag < num_tables * batch_size; ++bag) {
      for (std::uint64_t i = random() % 4; i > 0; --i) ids.push_back(static_cast<std::int64_t>(random() % num_rows));
      offsets.push_back(static_cast<std::int64_t>(ids.size()));
    }
    DedupArrays found;
    EXPECT_TRUE(run_dedup(ids, offsets, table_of_feature, rows_of_table, OutOfRange::Error, threads, &found).ok());
    std::vector<float> weights(ids.size()), out(batch_size * columns), grad(out.size()), weight_grads(ids.size());
    std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
    for (float& x : weights) x = uniform(random);
    for (float& x : grad) x = uniform(random);
    const Lookup lookup{ids.size(),          num_tables, batch_size, offsets.data(), table_of_feature.data(), found.unique_rows.data(),
                        found.table_offsets.data(), found.row_offsets.data(), found.positions.data(), found.inverse.data()};
    const Gradient gradient{grad.data(), true, columns, Pooling::Mean, weights.data()};
    EXPECT_TRUE(group->pooled_forward(lookup, Pooling::Mean, weights.data(), out.data(), columns, threads).ok());
    EXPECT_TRUE(group->weight_grads(lookup, gradient, weight_grads.data(), threads).ok());
    if (deferred) {
      std::vector<float> row_grads(group->row_gradient_floats(found.table_offsets.data()));
      std::vector<std::int32_t> counts(static_cast<std::size_t>(found.table_offsets.back()));
      EXPECT_TRUE(group->reduce(lookup, gradient, row_grads.data(), counts.data(), threads).ok());
      const RowGradients sums{found.unique_rows.data(), found.table_offsets.data(), counts.data(), row_grads.data()};
      EXPECT_TRUE(group->apply(sums, {1e-2, step}, threads).ok());
    } else {
      EXPECT_TRUE(group->reduce_update(lookup, gradient, {1e-2, step}, threads).ok());
    }
    keep(out.data(), out.size() * sizeof(float));
    keep(weight_grads.data(), weight_grads.size() * sizeof(float));
  }
  for (std::uint32_t t = 0; t < num_tables; ++t) {
    const std::vector<std::uint64_t> touched = group->touched_rows(t, 0);
    keep(touched.data(), touched.size() * sizeof(std::uint64_t));
    for (const Field& field : tables[t].schema.fields()) {
      std::vector<std::byte> values(touched.size() * field.width * 4);
      EXPECT_TRUE(group->read_field(t, touched.data(), touched.size(), field.name, values.data()).ok());
      keep(values.data(), values.size());
    }
  }
  EXPECT_TRUE(select_isa("auto"));
  return bytes;
}

TEST(TableGroup, SameBitsForEveryThreadCountInstructionSetAndUpdateMode) {
  const std::vector<char> expected = train("avx2", 1, false);
  EXPECT_TRUE(train("avx2", 3, false) == expected) << "threads";
  EXPECT_TRUE(train("avx2", 1, true) == expected) << "deferred";
  EXPECT_TRUE(train("auto", 1, false) == expected) << row_kernels().isa;
  EXPECT_TRUE(train("auto", 4, true) == expected) << row_kernels().isa << ", deferred, threads";
  EXPECT_FALSE(select_isa("sse9"));
}

TEST(TableGroup, RefusesRecordsThatLackWhatTheOptimizerNeeds) {
  auto attempt = [](std::vector<Field> states, const OptimizerSpec& spec) {
    std::unique_ptr<RowSource> source;
    EXPECT_TRUE(DramRows::make({make_table("clicks", 10, 4, std::move(states))}, DramLayout::Auto, 1, &source).ok());
    std::unique_ptr<TableGroup> group;
    return TableGroup::make(std::move(source), spec, &group);
  };
  OptimizerSpec adam = adam_spec(), adagrad;
  adagrad.kind = OptimizerKind::RowwiseAdagrad;
  EXPECT_TRUE(attempt(adam_fields(4), adam).ok());
  const Status missing = attempt({{"m", DType::F32, 4}}, adam);
  EXPECT_EQ(missing.kind, StatusKind::InvalidArgument);
  EXPECT_NE(missing.message().find("clicks"), std::string::npos);
  EXPECT_NE(missing.message().find("'v'"), std::string::npos);
  EXPECT_EQ(attempt({{"sum", DType::F32, 4}}, adagrad).kind, StatusKind::InvalidArgument) << "wrong width";
  EXPECT_EQ(attempt({{"sum", DType::I32, 1}}, adagrad).kind, StatusKind::InvalidArgument) << "wrong type";
  EXPECT_EQ(attempt({{"base", DType::F32, 4}}, {}).kind, StatusKind::InvalidArgument) << "base without touches";
}

// Fails the pin of one table, to see what the group does with the pins before it.
class FailingRows final : public RowSource {
 public:
  FailingRows(std::unique_ptr<RowSource> inner, std::uint32_t bad_table) : inner_(std::move(inner)), bad_table_(bad_table) {}
  const std::vector<TableSpec>& tables() const override { return inner_->tables(); }
  Status pin(std::uint32_t table, const std::uint64_t* rows, std::size_t n, PinMode mode, std::byte** out, PinTicket* ticket) override {
    if (table == bad_table_ && is_broken) return Status::io("pin", "simulated");
    ++num_open;
    return inner_->pin(table, rows, n, mode, out, ticket);
  }
  Status unpin(PinTicket ticket, bool dirty) override {
    --num_open;
    num_dirty += dirty ? 1 : 0;
    return inner_->unpin(ticket, dirty);
  }
  Status prefetch(const std::vector<TableRows>& batch) override { return inner_->prefetch(batch); }
  std::vector<std::map<std::string, double>> counters() const override { return inner_->counters(); }

  bool is_broken = false;
  int num_open = 0, num_dirty = 0;

 private:
  std::unique_ptr<RowSource> inner_;
  const std::uint32_t bad_table_;
};

TEST(TableGroup, AFailedPinLeavesNoRowPinnedOrChanged) {
  std::unique_ptr<RowSource> inner;
  ASSERT_TRUE(DramRows::make({make_table("a", 10, 4), make_table("b", 10, 4)}, DramLayout::Auto, 1, &inner).ok());
  auto owned = std::make_unique<FailingRows>(std::move(inner), 1);
  FailingRows* rows = owned.get();
  OptimizerSpec sgd;
  sgd.kind = OptimizerKind::Sgd;
  std::unique_ptr<TableGroup> group;
  ASSERT_TRUE(TableGroup::make(std::move(owned), sgd, &group).ok());
  const std::vector<std::int64_t> unique = {3, 4}, table_offsets = {0, 1, 2};
  const std::vector<std::int32_t> counts = {1, 1};
  const std::vector<float> grads(8, 1.0f);
  const RowGradients gradients{unique.data(), table_offsets.data(), counts.data(), grads.data()};
  const std::uint64_t row = 3;
  float before[4], after[4];
  ASSERT_TRUE(group->read_field(0, &row, 1, "weight", reinterpret_cast<std::byte*>(before)).ok());
  rows->is_broken = true;
  EXPECT_EQ(group->apply(gradients, {1.0, 1}, 1).kind, StatusKind::Io);
  EXPECT_EQ(rows->num_open, 0);
  EXPECT_EQ(rows->num_dirty, 0);
  ASSERT_TRUE(group->read_field(0, &row, 1, "weight", reinterpret_cast<std::byte*>(after)).ok());
  EXPECT_EQ(std::memcmp(before, after, sizeof before), 0);
  rows->is_broken = false;
  EXPECT_TRUE(group->apply(gradients, {1.0, 1}, 1).ok());
  ASSERT_TRUE(group->read_field(0, &row, 1, "weight", reinterpret_cast<std::byte*>(after)).ok());
  EXPECT_EQ(after[0], before[0] - 1.0f);
}

TEST(TableGroup, WithoutAnOptimizerRowsAreOnlyRead) {
  std::unique_ptr<RowSource> source;
  ASSERT_TRUE(DramRows::make({make_table("a", 10, 4)}, DramLayout::Auto, 1, &source).ok());
  std::unique_ptr<TableGroup> group;
  ASSERT_TRUE(TableGroup::make(std::move(source), {}, &group).ok());
  const std::int64_t unique = 3, table_offsets[] = {0, 1};
  const std::int32_t count = 1;
  const float grads[4] = {1, 1, 1, 1};
  EXPECT_EQ(group->apply({&unique, table_offsets, &count, grads}, {1.0, 1}, 1).kind, StatusKind::InvalidArgument);
  EXPECT_EQ(group->source().counters()[0].at("materialised_rows"), 0.0);
}

TEST(BiasTable, EndsWhereTheCorrectionIsOneAndContinuesExactly) {
  for (double beta : {0.0, 0.5, 0.9, 0.999}) {
    const BiasTable table(beta);
    ASSERT_EQ(table.inverse.back(), 1.0f) << beta;
    EXPECT_EQ(static_cast<float>(inverse_bias(beta, table.inverse.size())), 1.0f);
    EXPECT_EQ(table.inverse[1], static_cast<float>(1.0 / (1.0 - beta)));
  }
  EXPECT_EQ(BiasTable(0.9999999).inverse.size(), BiasTable::kMaxSteps);
}

}  // namespace
}  // namespace kstep
