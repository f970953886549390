// Merge rounds, torch-free: trackers under several threads, the owner's sum, and packed rows. Bits are compared with the reference in
// tests/property/ops; here the sanitizers see the same code.
#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <string>

#include "compute/merge_message.h"
#include "compute/merge_reduce.h"
#include "compute/merge_rows.h"
#include "compute/wire.h"
#include "tier/dram_rows.h"

namespace kstep {
namespace {

constexpr std::size_t kNumRows = 5000;
constexpr std::uint32_t kDim = 5;

// Rows of which some lie in a lower tier, and whose counters cost as much as those of a cache with a long trace to replay.
class RowsBelow final : public RowSource {
 public:
  RowsBelow(std::unique_ptr<RowSource> rows, int* num_counters) : rows_(std::move(rows)), num_counters_(num_counters) {}
  const std::vector<TableSpec>& tables() const override { return rows_->tables(); }
  Status pin(std::uint32_t table, const std::uint64_t* rows, std::size_t num_rows, PinMode mode, std::byte** payload,
             PinTicket* ticket) override {
    num_read_ += num_rows / 2;
    return rows_->pin(table, rows, num_rows, mode, payload, ticket);
  }
  Status unpin(PinTicket ticket, bool dirty) override { return rows_->unpin(ticket, dirty); }
  Status prefetch(const std::vector<TableRows>& batch) override { return rows_->prefetch(batch); }
  std::uint64_t num_rows_read(std::uint32_t) const override { return num_read_; }
  std::vector<std::map<std::string, double>> counters() const override {
    ++*num_counters_;
    return rows_->counters();
  }

 private:
  std::unique_ptr<RowSource> rows_;
  int* num_counters_;
  std::uint64_t num_read_ = 0;
};

// `num_counters`: if given, rows are read from a tier below, and how often counters are asked for is told there.
std::unique_ptr<TableGroup> make_group(int* num_counters = nullptr) {
  TableSpec table;
  table.name = "t";
  table.num_rows = kNumRows;
  table.dim = kDim;
  table.init = {InitKind::Uniform, -1.0, 1.0};
  const Status schema = RecordSchema::make(
      {{"weight", DType::F32, kDim}, {"m", DType::F32, kDim}, {"v", DType::F32, kDim}, {"touches", DType::I32, 1}, {"touches_1", DType::I32, 1}},
      &table.schema);
  EXPECT_TRUE(schema.ok()) << schema.message();
  std::unique_ptr<RowSource> source;
  EXPECT_TRUE(DramRows::make({table}, DramLayout::Packed, 2, &source).ok());
  if (num_counters != nullptr) source = std::make_unique<RowsBelow>(std::move(source), num_counters);
  OptimizerSpec adam;
  adam.kind = OptimizerKind::Adam;
  std::unique_ptr<TableGroup> group;
  EXPECT_TRUE(TableGroup::make(std::move(source), adam, &group).ok());
  return group;
}

// Updates every `stride`-th row with a gradient of ones.
void update(TableGroup* group, std::size_t stride, int num_threads) {
  std::vector<std::int64_t> rows;
  for (std::size_t row = 0; row < kNumRows; row += stride) rows.push_back(static_cast<std::int64_t>(row));
  const std::vector<std::int64_t> offsets = {0, static_cast<std::int64_t>(rows.size())};
  const std::vector<std::int32_t> counts(rows.size(), 1);
  const std::vector<float> grads(rows.size() * kDim, 1.0f);
  ASSERT_TRUE(group->apply({rows.data(), offsets.data(), counts.data(), grads.data()}, {0.1, 1}, num_threads).ok());
}

std::vector<float> weights_of(TableGroup* group, const std::vector<std::uint64_t>& rows) {
  std::vector<float> values(rows.size() * kDim);
  EXPECT_TRUE(group->read_field(0, rows.data(), rows.size(), "weight", reinterpret_cast<std::byte*>(values.data())).ok());
  return values;
}

TEST(TouchTracker, ListsEachRowOnceWithItsBaseForAnyNumberOfThreads) {
  for (int threads : {1, 4}) {
    auto group = make_group();
    ASSERT_TRUE(group->track(0, 0, {"v", "weight"}).ok());
    std::vector<std::uint64_t> all(kNumRows);
    std::iota(all.begin(), all.end(), 0);
    const std::vector<float> before = weights_of(group.get(), all);
    for (std::size_t stride : {3u, 2u, 3u, 7u}) update(group.get(), stride, threads);
    const std::vector<std::uint64_t> touched = group->touched_rows(0, 0);
    std::vector<std::uint64_t> expected;
    for (std::uint64_t row : all) {
      if (row % 2 == 0 || row % 3 == 0 || row % 7 == 0) expected.push_back(row);
    }
    ASSERT_EQ(touched, expected);
    ASSERT_EQ(group->touched_rows(0, 1), expected) << "a tracker without bases counts too";
    for (std::size_t i = 0; i < touched.size(); ++i) {
      const float* base = group->tracker(0, 0).current().base(i);
      EXPECT_EQ(std::memcmp(base + kDim, before.data() + touched[i] * kDim, kDim * sizeof(float)), 0) << "row " << touched[i];
      EXPECT_EQ(base[0], 0.0f);
    }
    ASSERT_TRUE(group->clear_touched(0, 0).ok());
    EXPECT_TRUE(group->touched_rows(0, 0).empty());
    EXPECT_EQ(group->touched_rows(0, 1), expected);
  }
}

TEST(TouchTracker, RoundsThatAreDetachedTakeTurnsInMemoryThatIsThere) {
  auto group = make_group();
  ASSERT_TRUE(group->track(0, 0, {"weight"}).ok());
  std::vector<const float*> bases;
  for (int round = 0; round < 4; ++round) {
    const std::vector<float> before = weights_of(group.get(), {0});
    update(group.get(), 2, 1);
    ASSERT_EQ(group->touched_rows(0, 0).size(), kNumRows / 2);
    bases.push_back(group->tracker(0, 0).current().base(0));
    EXPECT_EQ(std::memcmp(bases.back(), before.data(), kDim * sizeof(float)), 0) << "round " << round;
    ASSERT_TRUE(group->detach_touched(0, 0).ok());
    ASSERT_TRUE(group->clear_touched(0, 0).ok());
  }
  EXPECT_NE(bases[1], bases[0]);
  EXPECT_EQ(bases[2], bases[0]);
  EXPECT_EQ(bases[3], bases[1]);
}

TEST(MergeRounds, OneReplicaEndsWhereItWas) {
  auto group = make_group();
  ASSERT_TRUE(group->track(0, 0, {"weight"}).ok());
  for (std::size_t stride : {3u, 2u}) update(group.get(), stride, 4);
  const std::vector<std::uint64_t> rows = group->touched_rows(0, 0);
  const std::vector<float> before = weights_of(group.get(), rows);
  const TrackedTable at{group.get(), 0, 0};
  MergePart part;
  std::vector<std::int32_t> counts(rows.size());
  std::vector<float> changes(rows.size() * kDim);
  ASSERT_TRUE(collect_rows(at, rows.data(), rows.size(), MergeForm::Delta, 4, counts.data(), changes.data()).ok());
  part.rows = rows.data();
  part.counts = counts.data();
  part.count_bytes = sizeof(std::int32_t);
  part.values = {{reinterpret_cast<const std::uint8_t*>(changes.data()), Wire::Fp32}};
  part.num_rows = rows.size();
  MergePlan plan;
  ASSERT_TRUE(plan_merge({part}, false, &plan).ok());
  ASSERT_EQ(plan.num_rows(), rows.size());
  std::vector<float> u_real(rows.size()), merged(changes.size());
  const WireTarget target{reinterpret_cast<std::uint8_t*>(merged.data()), Wire::Fp32, 0};
  reduce_parts({part}, plan, false, {MergePolicy::Union, 2, 1, {false}}, kDim, 4, u_real.data(), {target});
  EXPECT_EQ(merged, changes);
  for (std::size_t i = 0; i < rows.size(); ++i) ASSERT_EQ(u_real[i], static_cast<float>(counts[i]));
  ApplyResult result;
  const WireRows values{reinterpret_cast<const std::uint8_t*>(merged.data()), Wire::Fp32};
  ASSERT_TRUE(apply_merged(at, {rows.data(), rows.size(), u_real.data(), {values}}, MergeForm::Delta, 2, 4, &result).ok());
  EXPECT_EQ(result.num_rows_read, 0);
  EXPECT_LT(result.distance, 1e-5 * result.way) << "alone, a replica is where the merge goes";
  EXPECT_GT(result.way, 0.0);
  const std::vector<float> after = weights_of(group.get(), rows);
  for (std::size_t j = 0; j < after.size(); ++j) ASSERT_NEAR(after[j], before[j], 2e-7f);
  EXPECT_EQ(group->clear_touched(0, 0).kind, StatusKind::Ok);
}

TEST(MergeRounds, RowsReadAreCountedWithoutAskingForAllCounters) {
  int num_counters = 0;
  auto group = make_group(&num_counters);
  ASSERT_TRUE(group->track(0, 0, {"weight"}).ok());
  std::vector<std::uint64_t> rows(1000);
  std::iota(rows.begin(), rows.end(), 0);
  const std::vector<float> changes(rows.size() * kDim, 0.5f);
  const WireRows values{reinterpret_cast<const std::uint8_t*>(changes.data()), Wire::Fp32};
  ApplyResult result;
  for (int piece = 0; piece < 2; ++piece) {
    ASSERT_TRUE(apply_merged({group.get(), 0, 0}, {rows.data(), rows.size(), nullptr, {values}}, MergeForm::Delta, 2, 2, &result).ok());
  }
  EXPECT_EQ(result.num_rows_read, 1000);
  EXPECT_EQ(num_counters, 0) << "a round has many pieces, and counters replay a trace each time";
}

// Packs all touched rows for three receivers, one message after the other.
std::vector<std::uint8_t> packed(TableGroup* group, const MessageFormat& format, int num_threads) {
  const std::vector<std::uint64_t> rows = group->touched_rows(0, 0);
  PackRequest request;
  request.format = format;
  request.first_key = 77;
  request.salts = {5};
  request.num_rows.assign(3, 0);
  for (std::uint64_t row : rows) ++request.num_rows[owner_of(row + request.first_key, 3)];
  std::size_t num_bytes = 0;
  std::vector<std::size_t> begins;
  for (std::size_t count : request.num_rows) {
    begins.push_back(num_bytes);
    num_bytes += sections_of(format, count).num_bytes;
  }
  std::vector<std::uint8_t> message(num_bytes, 0xEE);
  for (std::size_t begin : begins) request.messages.push_back(message.data() + begin);
  bool is_finite = false;
  EXPECT_TRUE(pack_touched({group, 0, 0}, rows.data(), rows.size(), MergeForm::Renew, request, num_threads, &is_finite).ok());
  EXPECT_TRUE(is_finite);
  request.num_rows[0] += 1;
  EXPECT_EQ(pack_touched({group, 0, 0}, rows.data(), rows.size(), MergeForm::Renew, request, 1, &is_finite).kind, StatusKind::InvalidArgument);
  return message;
}

TEST(MergeMessage, BytesDoNotDependOnTheNumberOfThreads) {
  auto group = make_group();
  ASSERT_TRUE(group->track(0, 0, {"weight"}).ok());
  for (std::size_t stride : {3u, 2u}) update(group.get(), stride, 4);
  for (Wire wire : {Wire::Fp32, Wire::Bf16, Wire::Int8}) {
    const MessageFormat format{4, 1, kDim, {wire}};
    EXPECT_EQ(packed(group.get(), format, 1), packed(group.get(), format, 4));
  }
}

TEST(Wire, PackedRowsDoNotDependOnTheNumberOfThreads) {
  std::vector<float> values(kNumRows * kDim);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 97) * 0.01f - 0.3f;
  std::vector<std::int32_t> rows(kNumRows);
  std::iota(rows.begin(), rows.end(), 0);
  for (Wire wire : {Wire::Bf16, Wire::Int8}) {
    const std::size_t row_bytes = wire_row_bytes(wire, kDim);
    std::vector<std::uint8_t> one(kNumRows * row_bytes), four(kNumRows * row_bytes);
    wire_encode(values.data(), kNumRows, kDim, wire, rows.data(), true, 9, 1, one.data());
    wire_encode(values.data(), kNumRows, kDim, wire, rows.data(), true, 9, 4, four.data());
    EXPECT_EQ(one, four);
    std::vector<float> decoded(values.size());
    wire_decode(one.data(), kNumRows, kDim, wire, 4, decoded.data());
    for (std::size_t i = 0; i < values.size(); ++i) ASSERT_NEAR(decoded[i], values[i], 0.01f);
  }
}

}  // namespace
}  // namespace kstep
