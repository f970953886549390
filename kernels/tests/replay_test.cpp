// Rows that replay missed steps against rows that are updated in every step, with a gradient of zero where they are absent.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>

#include "compute/table_group.h"
#include "tier/dram_rows.h"

namespace kstep {
namespace {

constexpr std::uint64_t kNumRows = 150;
const std::uint32_t kDims[] = {1, 10, 16, 31, 64, 100, 2048};

std::vector<Field> fields_of(OptimizerKind kind, std::uint32_t dim, bool is_row) {
  std::vector<Field> fields = {{"weight", DType::F32, dim}};
  if (kind == OptimizerKind::Adam) fields.insert(fields.end(), {{"m", DType::F32, dim}, {"v", DType::F32, dim}});
  if (kind == OptimizerKind::RowwiseAdagrad) fields.push_back({"sum", DType::F32, 1});
  if (is_row) fields.push_back({"step", DType::I32, 1});
  return fields;
}

struct Case {
  OptimizerKind kind;
  BiasCorrection bias;
  bool has_clip;
};

std::unique_ptr<TableGroup> make_group(const Case& which, bool replays, std::uint32_t max_steps = 0) {
  OptimizerSpec spec;
  spec.kind = which.kind;
  spec.bias_correction = which.bias;
  spec.has_clip = which.has_clip;
  spec.l2 = 1e-2;
  spec.replays_l2 = replays;
  spec.max_replay_steps = max_steps;
  std::vector<TableSpec> tables;
  for (std::uint32_t dim : kDims) {
    TableSpec table;
    table.name = "t" + std::to_string(dim);
    table.table_id = dim;
    table.num_rows = kNumRows;
    table.dim = dim;
    table.init = {InitKind::Uniform, -0.2, 0.2};
    std::vector<Field> fields = fields_of(which.kind, dim, which.bias == BiasCorrection::Row);
    if (replays) fields.push_back({"last_step", DType::I32, 1});
    EXPECT_TRUE(RecordSchema::make(std::move(fields), &table.schema).ok());
    tables.push_back(std::move(table));
  }
  std::unique_ptr<RowSource> source;
  EXPECT_TRUE(DramRows::make(std::move(tables), DramLayout::Auto, 1, &source).ok());
  std::unique_ptr<TableGroup> group;
  EXPECT_TRUE(TableGroup::make(std::move(source), spec, &group).ok());
  return group;
}

// Gradients of the rows of a batch, or of all rows with zero for those that are not in it.
struct Batch {
  std::vector<std::int64_t> rows, offsets;
  std::vector<std::int32_t> counts;
  std::vector<float> grads;

  Batch(std::uint64_t seed, bool with_absent) : offsets{0} {
    std::mt19937_64 random(seed);
    std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
    for (std::uint32_t dim : kDims) {
      for (std::uint64_t row = 0; row < kNumRows; ++row) {
        const bool is_present = random() % 10 == 0;
        if (!is_present && !with_absent) continue;
        rows.push_back(static_cast<std::int64_t>(row));
        counts.push_back(1);
        for (std::uint32_t j = 0; j < dim; ++j) grads.push_back(is_present ? uniform(random) : 0.0f);
      }
      offsets.push_back(static_cast<std::int64_t>(rows.size()));
    }
  }
  RowGradients gradients() const { return {rows.data(), offsets.data(), counts.data(), grads.data()}; }
};

std::vector<float> read_all(TableGroup* group, int threads) {
  std::vector<std::uint64_t> rows(kNumRows);
  for (std::uint64_t row = 0; row < kNumRows; ++row) rows[row] = row;
  std::vector<float> all;
  for (std::uint32_t t = 0; t < std::size(kDims); ++t) {
    for (const Field& field : group->tables()[t].schema.fields()) {
      if (field.name == "last_step") continue;
      std::vector<float> values(kNumRows * field.width);
      EXPECT_TRUE(group->read_field(t, rows.data(), kNumRows, field.name, reinterpret_cast<std::byte*>(values.data()), threads).ok());
      all.insert(all.end(), values.begin(), values.end());
    }
  }
  return all;
}

std::vector<float> train(TableGroup* group, bool is_dense, int threads) {
  for (std::uint64_t step = 1; step <= 25; ++step) {
    const StepParams params{step % 7 < 3 ? 1e-2 : 1e-2 / static_cast<double>(step), step};
    group->set_step(params);
    if (step % 5 == 0 && !is_dense) continue;  // a step without a batch
    Batch batch(step, is_dense);
    if (step % 5 == 0) std::fill(batch.grads.begin(), batch.grads.end(), 0.0f);
    EXPECT_TRUE(group->apply(batch.gradients(), params, threads).ok());
  }
  group->set_step({1.0, 26});
  return read_all(group, threads);
}

class ReplayTest : public testing::TestWithParam<Case> {};

TEST_P(ReplayTest, GivesTheBitsOfUpdatesInEveryStepForAnyThreadsAndInstructionSet) {
  for (const char* isa : {"avx2", "auto"}) {
    ASSERT_TRUE(select_isa(isa));
    const std::vector<float> expected = train(make_group(GetParam(), false).get(), true, 1);
    for (int threads : {1, 3}) {
      const std::vector<float> actual = train(make_group(GetParam(), true).get(), false, threads);
      ASSERT_EQ(actual.size(), expected.size());
      for (std::size_t i = 0; i < expected.size(); ++i) ASSERT_EQ(actual[i], expected[i]) << "value " << i << ", " << threads << " threads, " << isa;
    }
  }
  ASSERT_TRUE(select_isa("auto"));
}

TEST_P(ReplayTest, ReadingTwiceAndInBetweenChangesNothing) {
  const auto quiet = make_group(GetParam(), true), watched = make_group(GetParam(), true);
  for (std::uint64_t step : {1u, 2u, 9u, 40u}) {
    const Batch batch(step, false);
    for (TableGroup* group : {quiet.get(), watched.get()}) {
      group->set_step({1e-2, step});
      if (group == watched.get()) {
        EXPECT_EQ(read_all(group, 2), read_all(group, 1));
      }
      EXPECT_TRUE(group->apply(batch.gradients(), {1e-2, step}, 2).ok());
    }
  }
  EXPECT_EQ(read_all(quiet.get(), 1), read_all(watched.get(), 1));
}

std::string name_of(const testing::TestParamInfo<Case>& info) {
  const char* names[] = {"None", "Sgd", "Adam", "Adagrad"};
  return std::string(names[static_cast<int>(info.param.kind)]) + (info.param.bias == BiasCorrection::Row ? "Row" : "") +
         (info.param.has_clip ? "Clipped" : "");
}

INSTANTIATE_TEST_SUITE_P(Rules, ReplayTest,
                         testing::Values(Case{OptimizerKind::Adam, BiasCorrection::Global, false}, Case{OptimizerKind::Adam, BiasCorrection::Row, false},
                                         Case{OptimizerKind::Adam, BiasCorrection::Global, true}, Case{OptimizerKind::Sgd, BiasCorrection::Global, false},
                                         Case{OptimizerKind::RowwiseAdagrad, BiasCorrection::Global, false}),
                         name_of);

TEST(RateHistory, KeepsOneEntryPerChangeAndForgetsWhatComesLater) {
  RateHistory rates;
  for (std::int32_t clock = 1; clock <= 1000; ++clock) rates.set(clock, clock <= 10 ? 0.5f : 0.25f, 0);
  ASSERT_EQ(rates.runs().size(), 2u);
  EXPECT_EQ(rates.runs()[1].first_clock, 11);
  rates.set(1000, 0.125f, 0);
  EXPECT_EQ(rates.runs().size(), 3u);
  rates.set(1001, 0.125f, 7);
  EXPECT_EQ(rates.runs().size(), 4u);
  rates.set(5, 0.75f, 0);
  ASSERT_EQ(rates.runs().size(), 2u);
  EXPECT_EQ(rates.runs()[0].lr, 0.5f);
  EXPECT_EQ(rates.runs()[1].first_clock, 5);
}

// Rows are written as they were after 30 steps: into a group that is further or has just begun, field by field in any order.
TEST_P(ReplayTest, LoadedRowsGoOnFromTheirOwnStep) {
  auto run = [](TableGroup* group, std::uint64_t first, std::uint64_t last) {
    for (std::uint64_t step = first; step <= last; ++step) {
      const StepParams params{1e-2 / static_cast<double>(1 + step % 3), step};
      group->set_step(params);
      if (step % 4 != 0) EXPECT_TRUE(group->apply(Batch(step, false).gradients(), params, 2).ok());
    }
  };
  const auto expected = make_group(GetParam(), true);
  run(expected.get(), 1, 30);
  expected->set_step({1e-2, 31});
  std::vector<std::uint64_t> rows(kNumRows);
  for (std::uint64_t row = 0; row < kNumRows; ++row) rows[row] = row;
  for (const std::uint64_t already : {0u, 12u, 50u}) {
    const auto loaded = make_group(GetParam(), true);
    loaded->set_step({1e-2, 1});
    run(loaded.get(), 1, already);
    loaded->set_step({1e-2, already + 1});
    for (std::uint32_t t = 0; t < std::size(kDims); ++t) {
      std::vector<Field> fields = loaded->tables()[t].schema.fields();
      if (t % 2 == 1) std::reverse(fields.begin(), fields.end());
      for (const Field& field : fields) {
        if (field.name == "last_step") continue;
        std::vector<std::byte> values(kNumRows * field.width * 4);
        ASSERT_TRUE(expected->read_field(t, rows.data(), kNumRows, field.name, values.data()).ok());
        ASSERT_TRUE(loaded->write_field(t, rows.data(), kNumRows, field.name, values.data()).ok());
      }
    }
    loaded->rebase(30);
    EXPECT_EQ(read_all(loaded.get(), 1), read_all(expected.get(), 1)) << already;
    const auto original = make_group(GetParam(), true);
    run(original.get(), 1, 45);
    run(loaded.get(), 31, 45);
    EXPECT_EQ(read_all(loaded.get(), 1), read_all(original.get(), 1)) << already;
  }
}

TEST(Replay, RefusesRecordsThatCannot) {
  auto attempt = [](std::vector<Field> fields) {
    OptimizerSpec spec;
    spec.kind = OptimizerKind::Sgd;
    spec.l2 = 0.1;
    spec.replays_l2 = true;
    TableSpec table;
    table.name = "clicks";
    table.num_rows = 10;
    table.dim = 4;
    fields.insert(fields.begin(), {"weight", DType::F32, 4});
    EXPECT_TRUE(RecordSchema::make(std::move(fields), &table.schema).ok());
    std::unique_ptr<RowSource> source;
    EXPECT_TRUE(DramRows::make({table}, DramLayout::Auto, 1, &source).ok());
    std::unique_ptr<TableGroup> group;
    return TableGroup::make(std::move(source), spec, &group);
  };
  EXPECT_TRUE(attempt({{"last_step", DType::I32, 1}}).ok());
  EXPECT_NE(attempt({}).message().find("'last_step'"), std::string::npos);
  EXPECT_EQ(attempt({{"last_step", DType::I32, 1}, {"touches", DType::I32, 1}}).kind, StatusKind::InvalidArgument);
}

}  // namespace
}  // namespace kstep
