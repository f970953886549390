#include "compute/merge_rows.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <map>
#include <string>

#include "compute/cpu.h"
#include "compute/thread_pool.h"

namespace kstep {
namespace {

constexpr std::size_t kRowsPerTask = 256;
constexpr std::size_t kRowsPerPin = std::size_t{1} << 14;  // bounds what is pinned at once
constexpr std::size_t kRowsAhead = 6;
constexpr std::size_t kPrefetchBytes = 1024;

void prefetch(const void* address, std::size_t bytes) {
  const char* line = static_cast<const char*>(address);
  for (std::size_t at = 0; at < std::min(bytes, kPrefetchBytes); at += kCacheLineBytes) __builtin_prefetch(line + at);
}

// b^e, computed once for the small whole exponents that most rows have.
class Powers {
 public:
  explicit Powers(double beta) : beta_(beta) {
    for (std::size_t e = 0; e < kCached; ++e) cached_[e] = std::pow(beta, static_cast<double>(e));
  }
  double operator()(double exponent) const {
    const auto whole = static_cast<std::size_t>(exponent);
    return whole < kCached && static_cast<double>(whole) == exponent ? cached_[whole] : std::pow(beta_, exponent);
  }

 private:
  static constexpr std::size_t kCached = 64;
  const double beta_;
  double cached_[kCached];
};

struct MergedField {
  std::uint32_t offset;
  bool is_weight, is_v;
  Powers powers;  // of the moment's decay; of 1 for the weights
};

std::vector<MergedField> merged_fields(const TrackedTable& at) {
  const RowLayout& layout = at.group->layout(at.table);
  const OptimizerSpec& spec = at.group->spec();
  std::vector<MergedField> fields;
  for (const Span& span : at.group->tracker(at.table, at.tracker).spans()) {
    const bool is_weight = span.offset == 0, is_v = !is_weight && span.offset == layout.v;
    fields.push_back({span.offset, is_weight, is_v, Powers(is_weight ? 1.0 : is_v ? spec.beta2 : spec.beta1)});
  }
  return fields;
}

Status check_tracked(const TrackedTable& at) {
  if (!at.group->tracker(at.table, at.tracker).spans().empty()) return Status();
  return Status::invalid("table '" + at.group->tables()[at.table].name + "'",
                         "tracker " + std::to_string(at.tracker) + " keeps no bases: call track before the first update");
}

std::int64_t rows_read(const TrackedTable& at) {
  const std::map<std::string, double> counters = at.group->source().counters()[at.table];
  const auto found = counters.find("misses_rows");  // a source in DRAM has none
  return found == counters.end() ? 0 : static_cast<std::int64_t>(found->second);
}

std::int32_t& counter_at(std::byte* payload, std::uint32_t offset) { return *reinterpret_cast<std::int32_t*>(payload + offset); }

float* floats_at(std::byte* payload, std::uint32_t offset) { return reinterpret_cast<float*>(payload + offset); }

// Positions of ascending rows in a round; neighbours are found without a search.
class PositionWalk {
 public:
  PositionWalk(const TouchRound& round, std::uint64_t first_row) : sorted_(round.sorted()), at_(round.lower_bound(first_row)) {}
  std::size_t find(std::uint64_t row) {
    if (at_ < sorted_.size() && sorted_[at_] < row) ++at_;
    if (at_ < sorted_.size() && sorted_[at_] < row) {
      at_ = static_cast<std::size_t>(std::lower_bound(sorted_.begin() + static_cast<std::ptrdiff_t>(at_), sorted_.end(), row) - sorted_.begin());
    }
    return at_ < sorted_.size() && sorted_[at_] == row ? at_ : TouchRound::kNotFound;
  }

 private:
  const std::vector<std::uint64_t>& sorted_;
  std::size_t at_;
};

// ---- collect ---------------------------------------------------------------------------------------------------------

void subtract(const float* __restrict now, const float* __restrict base, std::size_t dim, float* __restrict out) {
  for (std::size_t j = 0; j < dim; ++j) out[j] = now[j] - base[j];
}

void renew(const float* __restrict now, const float* __restrict base, std::size_t dim, float decay, float inverse_rest, bool is_v,
           float* __restrict out) {
  for (std::size_t j = 0; j < dim; ++j) out[j] = (now[j] - decay * base[j]) * inverse_rest;
  if (!is_v) return;
  for (std::size_t j = 0; j < dim; ++j) out[j] = out[j] < 0.0f ? 0.0f : out[j];
}

struct CollectArgs {
  const std::vector<MergedField>& fields;
  const TouchRound& round;
  const std::uint64_t* rows;
  std::byte* const* payload;
  std::size_t num_rows, dim;  // of the whole call
  std::uint32_t counter;
  MergeForm form;
  std::int32_t* counts;
  float* values;
};

// Payloads of rows [begin, end) are a.payload[0 .. end - begin). Returns false at a row that is not touched.
bool collect_range(const CollectArgs& a, std::size_t first, std::size_t begin, std::size_t end) {
  PositionWalk walk(a.round, a.rows[begin]);
  const std::size_t row_bytes = a.fields.size() * a.dim * sizeof(float);
  for (std::size_t i = begin; i < end; ++i) {
    std::byte* payload = a.payload[i - first];
    if (i + kRowsAhead < end) prefetch(a.payload[i - first + kRowsAhead], row_bytes);
    const std::size_t position = walk.find(a.rows[i]);
    if (position == TouchRound::kNotFound) return false;
    if (position + kRowsAhead < a.round.sorted().size()) prefetch(a.round.base(position + kRowsAhead), row_bytes);
    const std::int32_t count = counter_at(payload, a.counter);
    a.counts[i] = count;
    const float* base = a.round.base(position);
    for (std::size_t f = 0; f < a.fields.size(); ++f, base += a.dim) {
      const MergedField& field = a.fields[f];
      float* out = a.values + (f * a.num_rows + i) * a.dim;
      const float* now = floats_at(payload, field.offset);
      if (field.is_weight || a.form == MergeForm::Delta) {
        subtract(now, base, a.dim, out);
      } else {
        const double power = field.powers(count);
        renew(now, base, a.dim, static_cast<float>(power), static_cast<float>(1.0 / (1.0 - power)), field.is_v, out);
      }
    }
  }
  return true;
}

// ---- apply -----------------------------------------------------------------------------------------------------------

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

// The merged value of a field. `base` and `target` may be the same row.
void merge_values(const ApplyMergedArgs& a, const MergedField& field, const MergedRow& row, const float* base, const float* change,
                  float* target) {
  if (field.is_weight || a.form == MergeForm::Delta) {
    for (std::size_t j = 0; j < a.dim; ++j) target[j] = base[j] + change[j];
  } else {
    const double power = field.powers(static_cast<double>(a.merged.u_real[row.index]));
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

void apply_row(const ApplyMergedArgs& a, const MergedRow& row, float* scratch) {
  const bool is_touched = row.start != TouchRound::kNotFound;
  const bool has_moved = row.running != TouchRound::kNotFound;
  const std::int32_t count_now = counter_at(row.payload, a.counter);
  const float* merged_v = nullptr;
  for (std::size_t f = 0; f < a.fields.size(); ++f) {
    const MergedField& field = a.fields[f];
    float* present = floats_at(row.payload, field.offset);
    float* collected = has_moved ? a.running->base(row.running) + f * a.dim : present;
    const float* base = is_touched ? a.start->base(row.start) + f * a.dim : collected;
    const float* change = a.merged.values[f] + row.index * a.dim;
    merge_values(a, field, row, base, change, has_moved ? scratch : present);
    if (has_moved) correct_moved(field, scratch, static_cast<float>(field.powers(count_now)), a.dim, present, collected);
    if (field.is_v) merged_v = has_moved ? collected : present;
  }
  const std::int32_t mine = !is_touched ? 0 : a.running == nullptr ? count_now : a.start->counts[row.start];
  const auto steps = std::max(static_cast<std::int32_t>(std::nearbyint(a.merged.u_real[row.index])), 1);
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

void apply_range(const ApplyMergedArgs& a, std::size_t first, std::size_t begin, std::size_t end) {
  float scratch[kMaxDim];
  const std::uint64_t* rows = a.merged.rows;
  PositionWalk start(*a.start, rows[begin]);
  PositionWalk running(a.running != nullptr ? *a.running : *a.start, rows[begin]);
  const std::size_t row_bytes = a.fields.size() * a.dim * sizeof(float);
  for (std::size_t i = begin; i < end; ++i) {
    if (i + kRowsAhead < end) prefetch(a.payload[i - first + kRowsAhead], row_bytes);
    MergedRow row{a.payload[i - first], i, start.find(rows[i]), TouchRound::kNotFound};
    if (row.start != TouchRound::kNotFound && row.start + kRowsAhead < a.start->sorted().size()) {
      prefetch(a.start->base(row.start + kRowsAhead), row_bytes);
    }
    if (a.running != nullptr) row.running = running.find(rows[i]);
    apply_row(a, row, scratch);
  }
}

}  // namespace

Status collect_rows(const TrackedTable& at, const std::uint64_t* rows, std::size_t num_rows, MergeForm form, int num_threads,
                    std::int32_t* counts, float* values) {
  KSTEP_RETURN_IF_ERROR(check_tracked(at));
  TouchTracker& tracker = at.group->tracker(at.table, at.tracker);
  (void)tracker.current().rows();  // sorts
  const std::vector<MergedField> fields = merged_fields(at);
  std::vector<std::byte*> payload(std::min(num_rows, kRowsPerPin));
  const CollectArgs args{fields,   tracker.current(),  rows, payload.data(), num_rows, at.group->layout(at.table).dim, tracker.counter(), form,
                         counts, values};
  RowSource& source = at.group->source();
  for (std::size_t first = 0; first < num_rows; first += kRowsPerPin) {
    const std::size_t count = std::min(kRowsPerPin, num_rows - first);
    PinTicket ticket = kNoTicket;
    KSTEP_RETURN_IF_ERROR(source.pin(at.table, rows + first, count, PinMode::Read, payload.data(), &ticket));
    std::atomic<bool> is_touched{true};
    parallel_tasks(num_threads, (count + kRowsPerTask - 1) / kRowsPerTask, [&](std::size_t task) {
      const std::size_t begin = first + task * kRowsPerTask;
      if (!collect_range(args, first, begin, std::min(first + count, begin + kRowsPerTask))) is_touched.store(false);
    });
    KSTEP_RETURN_IF_ERROR(source.unpin(ticket, false));
    if (!is_touched.load()) {
      return Status::invalid("table '" + at.group->tables()[at.table].name + "'",
                             "not all rows to collect were touched in the running round");
    }
  }
  return Status();
}

Status apply_merged(const TrackedTable& at, const MergedRows& merged, MergeForm form, std::uint64_t step, int num_threads,
                    std::int64_t* num_rows_read) {
  KSTEP_RETURN_IF_ERROR(check_tracked(at));
  const std::int64_t read_before = rows_read(at);
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
  for (std::size_t first = 0; first < merged.num_rows; first += kRowsPerPin) {
    const std::size_t count = std::min(kRowsPerPin, merged.num_rows - first);
    PinTicket ticket = kNoTicket;
    KSTEP_RETURN_IF_ERROR(source.pin(at.table, merged.rows + first, count, PinMode::Update, payload.data(), &ticket));
    parallel_tasks(num_threads, (count + kRowsPerTask - 1) / kRowsPerTask, [&](std::size_t task) {
      const std::size_t begin = first + task * kRowsPerTask;
      apply_range(args, first, begin, std::min(first + count, begin + kRowsPerTask));
    });
    KSTEP_RETURN_IF_ERROR(source.unpin(ticket, true));
  }
  *num_rows_read = rows_read(at) - read_before;
  return Status();
}

}  // namespace kstep
