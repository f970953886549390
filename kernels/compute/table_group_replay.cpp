// TableGroup: rows that were absent from some steps are brought up to date.
#include <algorithm>
#include <cstring>

#include "compute/table_group.h"
#include "compute/thread_pool.h"

namespace kstep {
namespace {

constexpr std::size_t kRowsPerTask = 64;  // rows differ much in how many steps they missed
constexpr std::size_t kRowsAhead = 8;

std::int32_t last_step_of(const std::byte* payload, const RowLayout& layout) {
  std::int32_t step = 0;
  std::memcpy(&step, payload + layout.last_step, sizeof step);
  return step;
}

std::size_t num_tasks(std::size_t num_rows) { return (num_rows + kRowsPerTask - 1) / kRowsPerTask; }

}  // namespace

void TableGroup::set_step(const StepParams& step) {
  if (step.step != present_.step) shown_.is_valid = false;
  present_ = step;
  if (spec_.replays_l2) rates_.set(clock_of(step.step), static_cast<float>(step.lr), shift_);
}

void TableGroup::restore_rates(std::vector<RateRun> runs) {
  shown_.is_valid = false;
  shift_ = runs.back().shift;
  rates_.restore(std::move(runs));
}

void TableGroup::rebase(std::uint64_t last_step) {
  if (!spec_.replays_l2) return;
  shown_.is_valid = false;
  shift_ = static_cast<std::int32_t>(static_cast<std::int64_t>(last_step) - last_clock());
  set_step({present_.lr, last_step + 1});
}

ReplayArgs TableGroup::replay_args(std::byte* const* payload, std::int32_t until, std::int32_t mark) const {
  ReplayArgs args{};
  args.payload = payload;
  args.runs = rates_.runs().data();
  args.num_runs = rates_.runs().size();
  args.until = until;
  args.mark = mark;
  args.max_steps = static_cast<std::int32_t>(spec_.max_replay_steps);
  args.bias1 = bias1_.inverse.data();
  args.bias1_size = static_cast<std::uint32_t>(bias1_.inverse.size());
  args.beta1 = spec_.beta1;
  args.bias2 = bias2_.inverse.data();
  args.bias2_size = static_cast<std::uint32_t>(bias2_.inverse.size());
  args.beta2 = spec_.beta2;
  return args;
}

void TableGroup::replay_before_update(const RowRange& range, const UpdateParams& params, const StepParams& step,
                                      const std::byte* const* shown) {
  for (std::size_t row = range.begin; shown != nullptr && row < range.end; ++row) {
    if (shown[row] != nullptr) std::memcpy(payload_[row], shown[row], params.layout.payload_bytes);
  }
  const std::int32_t present = clock_of(step.step);
  row_kernels().replay_rows(replay_args(payload_.data(), present - 1, present), params, range.begin, range.end);
}

// The rows at the front of payload_, which are pinned for an update.
void TableGroup::replay_pinned(std::uint32_t table, std::size_t num_rows, int num_threads) {
  if (!spec_.replays_l2 || last_clock() == 0) return;
  const UpdateParams params = update_params(table, present_);
  const ReplayArgs args = replay_args(payload_.data(), last_clock(), last_clock());
  parallel_tasks(num_threads, num_tasks(num_rows), [&](std::size_t task) {
    row_kernels().replay_rows(args, params, task * kRowsPerTask, std::min(num_rows, (task + 1) * kRowsPerTask));
  });
}

void TableGroup::replay_payloads(std::uint32_t table, std::byte* payloads, std::size_t num_rows, int num_threads) {
  payload_.resize(std::max(payload_.size(), num_rows));
  for (std::size_t i = 0; i < num_rows; ++i) payload_[i] = payloads + i * layouts_[table].payload_bytes;
  replay_pinned(table, num_rows, num_threads);
}

// Replaces the payload of each row of a range that missed steps by a copy that did not.
void TableGroup::copy_missed(std::uint32_t table, std::size_t row_begin, std::size_t row_end, std::byte* copies) {
  const RowLayout& layout = layouts_[table];
  const std::size_t stride_bytes = tables()[table].schema.stride_bytes();
  const UpdateParams params = update_params(table, present_);
  const ReplayArgs args = replay_args(payload_.data(), last_clock(), last_clock());
  for (std::size_t row = row_begin; row < row_end; ++row) {
    if (row + kRowsAhead < row_end) __builtin_prefetch(payload_[row + kRowsAhead] + layout.last_step);
    shown_.copies[row] = nullptr;
    if (last_step_of(payload_[row], layout) >= args.until) continue;
    std::byte* copy = copies + (row - row_begin) * stride_bytes;
    std::memcpy(copy, payload_[row], layout.payload_bytes);
    shown_.copies[row] = payload_[row] = copy;
    row_kernels().replay_rows(args, params, row, row + 1);
  }
}

// The copies of exactly these rows in the present step, or null.
const std::byte* const* TableGroup::find_shown(const std::int64_t* unique_rows, const std::int64_t* table_offsets) const {
  if (!shown_.is_valid || !std::equal(shown_.table_offsets.begin(), shown_.table_offsets.end(), table_offsets) ||
      !std::equal(shown_.unique_rows.begin(), shown_.unique_rows.end(), unique_rows)) {
    return nullptr;
  }
  return shown_.copies.data();
}

// After a pin for reading.
Status TableGroup::show_present(const std::int64_t* unique_rows, const std::int64_t* table_offsets, int num_threads) {
  if (!spec_.replays_l2 || last_clock() == 0) return Status();
  const auto num_rows = static_cast<std::size_t>(table_offsets[layouts_.size()]);
  if (find_shown(unique_rows, table_offsets) != nullptr) {
    for (std::size_t row = 0; row < num_rows; ++row) {
      if (shown_.copies[row] != nullptr) payload_[row] = shown_.copies[row];
    }
    return Status();
  }
  shown_.is_valid = false;
  ranges_.clear();
  copy_begin_.clear();
  std::size_t num_bytes = 0;
  for (std::size_t t = 0; t < layouts_.size(); ++t) {
    const auto end = static_cast<std::size_t>(table_offsets[t + 1]);
    for (auto begin = static_cast<std::size_t>(table_offsets[t]); begin < end; begin += kRowsPerTask) {
      ranges_.push_back({static_cast<std::uint32_t>(t), begin, std::min(end, begin + kRowsPerTask)});
      copy_begin_.push_back(num_bytes);
      num_bytes += (ranges_.back().end - begin) * tables()[t].schema.stride_bytes();
    }
  }
  if (shown_.memory.size() < num_bytes) {
    KSTEP_RETURN_IF_ERROR(HugeBuffer::make(num_bytes * 5 / 4, "rows that missed steps", &shown_.memory));
  }
  shown_.copies.resize(num_rows);
  parallel_tasks(num_threads, ranges_.size(), [&](std::size_t task) {
    const RowRange& range = ranges_[task];
    copy_missed(range.table, range.begin, range.end, shown_.memory.data() + copy_begin_[task]);
  });
  shown_.unique_rows.assign(unique_rows, unique_rows + num_rows);
  shown_.table_offsets.assign(table_offsets, table_offsets + layouts_.size() + 1);
  shown_.is_valid = true;
  return Status();
}

}  // namespace kstep
