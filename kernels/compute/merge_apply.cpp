#include <algorithm>
#include <cmath>

#include "compute/merge_fields.h"
#include "compute/merge_rows.h"
#include "compute/row_kernels.h"
#include "compute/thread_pool.h"

namespace kstep {
namespace {

constexpr std::size_t kRowsPerTask = 256;
constexpr std::size_t kDriftEvery = 16;  // of the rows that arrive, one is compared

struct ApplyMergedArgs {
  const std::vector<MergedField>& fields;
  const MergedRows& merged;
  TouchRound* start;    // the round that is applied
  TouchRound* running;  // the round after it, or null if it is the running one itself
  std::byte* const* payload;
  std::size_t dim;
  std::uint32_t counter;
  std::uint32_t steps[2];  // offsets of the counters of updates that move with this tracker, else kNoField
  std::uint32_t v_hat;     // offset if this tracker sets it, else kNoField
  const OptimizerSpec& spec;
  std::uint64_t global_step;
  MergeForm form;
};

struct MergedRow {
  std::byte* payload;
  std::size_t index;           // in MergedRows
  std::size_t start, running;  // positions in the rounds, or kNotFound
};

float union_touches(const ApplyMergedArgs& a, const MergedRow& row) {
  return a.merged.u_real == nullptr ? 1.0f : a.merged.u_real[row.index];
}

// How far apart replicas had gone, on some rows.
struct Drift {
  double distance = 0.0, way = 0.0;

  // `held`: this replica's weights when the round began.
  void add(const float* __restrict held, const float* __restrict base, const float* __restrict change, std::size_t dim) {
    for (std::size_t j = 0; j < dim; ++j) {
      const float own = held[j] - base[j];
      distance += std::fabs(change[j] - own);
      way += std::fabs(own);
    }
  }
};

// The merged value of a field. `base` and `target` may be the same row.
void merge_values(const ApplyMergedArgs& a, const MergedField& field, const MergedRow& row, const float* base, const float* change,
                  float* target) {
  if (field.is_weight || a.form == MergeForm::Delta) {
    for (std::size_t j = 0; j < a.dim; ++j) target[j] = base[j] + change[j];
  } else {
    const double power = field.powers(static_cast<double>(union_touches(a, row)));
    const auto decay = static_cast<float>(power), rest = static_cast<float>(1.0 - power);
    for (std::size_t j = 0; j < a.dim; ++j) target[j] = decay * base[j] + rest * change[j];
  }
  if (!field.is_v) return;
  for (std::size_t j = 0; j < a.dim; ++j) target[j] = target[j] < 0.0f ? 0.0f : target[j];
}

// A row that moved since its round was detached: shifted by what the merge changes, and its new base is the merged value.
// `collected`, the running base, is what the row held then; it becomes the merged value.
void correct_moved(const MergedField& field, const float* __restrict target, float decay, std::size_t dim, float* __restrict present,
                   float* __restrict collected) {
  for (std::size_t j = 0; j < dim; ++j) {
    const float corrected = present[j] + decay * (target[j] - collected[j]);
    present[j] = field.is_v && corrected < 0.0f ? 0.0f : corrected;
    collected[j] = target[j];
  }
}

// v_hat from the merged v; `step` counts the updates behind it.
void freeze(const ApplyMergedArgs& a, const float* __restrict v, std::uint64_t step, float* __restrict v_hat) {
  const auto bias = static_cast<float>(inverse_bias(a.spec.beta2, step));
  for (std::size_t j = 0; j < a.dim; ++j) {
    const float corrected = v[j] * bias;
    v_hat[j] = a.spec.is_amsgrad && v_hat[j] > corrected ? v_hat[j] : corrected;
  }
}

// `scratch`: [2, kMaxDim].
void apply_row(const ApplyMergedArgs& a, const MergedRow& row, float* scratch, Drift* drift) {
  const bool is_touched = row.start != TouchRound::kNotFound;
  const bool has_moved = row.running != TouchRound::kNotFound;
  const std::int32_t count_now = counter_at(row.payload, a.counter);
  const float* merged_v = nullptr;
  for (std::size_t f = 0; f < a.fields.size(); ++f) {
    const MergedField& field = a.fields[f];
    float* present = floats_at(row.payload, field.offset);
    float* collected = has_moved ? a.running->base(row.running) + f * a.dim : present;
    const float* base = is_touched ? a.start->base(row.start) + f * a.dim : collected;
    const float* change = wire_decode_row(a.merged.values[f], row.index, a.dim, scratch + kMaxDim);
    if (field.is_weight && is_touched && row.index % kDriftEvery == 0) drift->add(collected, base, change, a.dim);
    merge_values(a, field, row, base, change, has_moved ? scratch : present);
    if (has_moved) correct_moved(field, scratch, static_cast<float>(field.powers(count_now)), a.dim, present, collected);
    if (field.is_v) merged_v = has_moved ? collected : present;
  }
  const std::int32_t mine = !is_touched ? 0 : a.running == nullptr ? count_now : a.start->counts[row.start];
  const auto steps = std::max(static_cast<std::int32_t>(std::nearbyint(union_touches(a, row))), 1);
  std::uint64_t step_of_v = a.global_step;
  for (std::uint32_t offset : a.steps) {
    if (offset == RecordSchema::kNoField) continue;
    counter_at(row.payload, offset) += steps - mine;
    step_of_v = static_cast<std::uint64_t>(counter_at(row.payload, offset) - (has_moved ? count_now : 0));
  }
  if (a.v_hat != RecordSchema::kNoField) freeze(a, merged_v, step_of_v, floats_at(row.payload, a.v_hat));
  if (a.running == nullptr && is_touched) {
    counter_at(row.payload, a.counter) = 0;
    a.start->is_cleared[row.start] = 1;
  }
}

// Rows [begin, end) of those that are pinned, [first, last).
void apply_range(const ApplyMergedArgs& a, std::size_t first, std::size_t last, std::size_t begin, std::size_t end, Drift* drift) {
  float scratch[2 * kMaxDim];
  const std::uint64_t* rows = a.merged.rows;
  PositionWalk start(*a.start, rows[begin]);
  PositionWalk running(a.running != nullptr ? *a.running : *a.start, rows[begin]);
  const std::size_t row_bytes = a.fields.size() * a.dim * sizeof(float);
  for (std::size_t i = begin; i < end; ++i) {
    if (i + kRowsAhead < last) prefetch_row(a.payload[i - first + kRowsAhead], row_bytes, a.counter);
    MergedRow row{a.payload[i - first], i, start.find(rows[i]), TouchRound::kNotFound};
    if (row.start != TouchRound::kNotFound && row.start + kRowsAhead < a.start->sorted().size()) {
      prefetch(a.start->base(row.start + kRowsAhead), row_bytes);
    }
    if (a.running != nullptr) row.running = running.find(rows[i]);
    apply_row(a, row, scratch, drift);
  }
}

}  // namespace

Status apply_merged(const TrackedTable& at, const MergedRows& merged, MergeForm form, std::uint64_t step, int num_threads,
                    ApplyResult* result) {
  KSTEP_RETURN_IF_ERROR(check_tracked(at));
  const std::uint64_t read_before = at.group->source().num_rows_read(at.table);
  TouchTracker& tracker = at.group->tracker(at.table, at.tracker);
  const std::vector<MergedField> fields = merged_fields(at);
  TouchRound* running = tracker.detached() != nullptr ? &tracker.current() : nullptr;
  TouchRound* start = running != nullptr ? tracker.detached() : &tracker.current();
  (void)tracker.current().rows();
  if (running == nullptr && merged.num_rows > 0 && start->num_rows() > 0) start->is_merging = true;
  const RowLayout& layout = at.group->layout(at.table);
  const OptimizerSpec& spec = at.group->spec();
  const bool has_v = std::any_of(fields.begin(), fields.end(), [](const MergedField& field) { return field.is_v; });
  const bool has_m = std::any_of(fields.begin(), fields.end(), [&](const MergedField& field) { return !field.is_weight && !field.is_v; });
  const bool counts_rows = spec.kind == OptimizerKind::Adam && spec.bias_correction == BiasCorrection::Row;
  // One counter for both moments moves with v, whose correction lasts longer; else each moves with its moment.
  const bool moves_step = counts_rows && (spec.step_per_moment ? has_m : has_v);
  std::vector<std::byte*> payload(std::min(merged.num_rows, kRowsPerPin));
  const ApplyMergedArgs args{fields,
                             merged,
                             start,
                             running,
                             payload.data(),
                             layout.dim,
                             tracker.counter(),
                             {moves_step ? layout.step : RecordSchema::kNoField, has_v ? layout.step_v : RecordSchema::kNoField},
                             has_v ? layout.v_hat : RecordSchema::kNoField,
                             spec,
                             step,
                             form};
  RowSource& source = at.group->source();
  std::vector<Drift> drifts(std::min(merged.num_rows, kRowsPerPin) / kRowsPerTask + 1);  // by task, so that sums repeat
  for (std::size_t first = 0; first < merged.num_rows; first += kRowsPerPin) {
    const std::size_t count = std::min(kRowsPerPin, merged.num_rows - first);
    const std::size_t num_tasks = (count + kRowsPerTask - 1) / kRowsPerTask;
    PinTicket ticket = kNoTicket;
    KSTEP_RETURN_IF_ERROR(source.pin(at.table, merged.rows + first, count, PinMode::Update, payload.data(), &ticket));
    parallel_tasks(num_threads, num_tasks, [&](std::size_t task) {
      const std::size_t begin = first + task * kRowsPerTask;
      drifts[task] = Drift();
      apply_range(args, first, first + count, begin, std::min(first + count, begin + kRowsPerTask), &drifts[task]);
    });
    KSTEP_RETURN_IF_ERROR(source.unpin(ticket, true));
    for (std::size_t task = 0; task < num_tasks; ++task) {
      result->distance += drifts[task].distance;
      result->way += drifts[task].way;
    }
  }
  result->num_rows_read += static_cast<std::int64_t>(source.num_rows_read(at.table) - read_before);
  return Status();
}

}  // namespace kstep
