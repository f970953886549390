#include <atomic>
#include <string>

#include "compute/merge_fields.h"
#include "compute/merge_message.h"
#include "compute/merge_rows.h"
#include "compute/thread_pool.h"

namespace kstep {

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

namespace {

constexpr std::size_t kRowsPerTask = 256;
constexpr std::size_t kScratchFloats = std::size_t{1} << 14;  // of a task that packs: stays in the second level cache

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
  std::size_t dim;
  std::uint32_t counter;
  MergeForm form;
};

// Where the contributions of some rows go: counts [rows], values [fields, stride, dim].
struct CollectTarget {
  std::int32_t* counts;
  float* values;
  std::size_t stride;
};

// Rows [begin, end) of those that are pinned, [first, last). Returns false at a row that is not touched.
bool collect_range(const CollectArgs& a, std::size_t first, std::size_t last, std::size_t begin, std::size_t end,
                   const CollectTarget& target) {
  PositionWalk walk(a.round, a.rows[begin]);
  const std::size_t row_bytes = a.fields.size() * a.dim * sizeof(float);
  for (std::size_t i = begin; i < end; ++i) {
    std::byte* payload = a.payload[i - first];
    if (i + kRowsAhead < last) prefetch_row(a.payload[i - first + kRowsAhead], row_bytes, a.counter);
    const std::size_t position = walk.find(a.rows[i]);
    if (position == TouchRound::kNotFound) return false;
    if (position + kRowsAhead < a.round.sorted().size()) prefetch(a.round.base(position + kRowsAhead), row_bytes);
    const std::int32_t count = counter_at(payload, a.counter);
    target.counts[i - begin] = count;
    const float* base = a.round.base(position);
    for (std::size_t f = 0; f < a.fields.size(); ++f, base += a.dim) {
      const MergedField& field = a.fields[f];
      float* out = target.values + (f * target.stride + i - begin) * a.dim;
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

// Pins the rows of a collection in parts and calls `work(args, first, last, begin, end)` for ranges of `rows_per_task`, which
// returns false at a row that is not touched.
template <typename Work>
Status for_collected(const TrackedTable& at, const std::uint64_t* rows, std::size_t num_rows, MergeForm form, int num_threads,
                     std::size_t rows_per_task, const Work& work) {
  KSTEP_RETURN_IF_ERROR(check_tracked(at));
  TouchTracker& tracker = at.group->tracker(at.table, at.tracker);
  (void)tracker.current().rows();  // sorts
  const std::vector<MergedField> fields = merged_fields(at);
  const std::size_t rows_per_pin = std::max(kRowsPerPin / rows_per_task, std::size_t{1}) * rows_per_task;
  std::vector<std::byte*> payload(std::min(num_rows, rows_per_pin));
  const CollectArgs args{fields, tracker.current(), rows, payload.data(), at.group->layout(at.table).dim, tracker.counter(), form};
  RowSource& source = at.group->source();
  for (std::size_t first = 0; first < num_rows; first += rows_per_pin) {
    const std::size_t last = std::min(num_rows, first + rows_per_pin);
    PinTicket ticket = kNoTicket;
    KSTEP_RETURN_IF_ERROR(source.pin(at.table, rows + first, last - first, PinMode::Read, payload.data(), &ticket));
    std::atomic<bool> is_touched{true};
    parallel_tasks(num_threads, (last - first + rows_per_task - 1) / rows_per_task, [&](std::size_t task) {
      const std::size_t begin = first + task * rows_per_task;
      if (!work(args, first, last, begin, std::min(last, begin + rows_per_task))) is_touched.store(false);
    });
    KSTEP_RETURN_IF_ERROR(source.unpin(ticket, false));
    if (!is_touched.load()) {
      return Status::invalid("table '" + at.group->tables()[at.table].name + "'",
                             "not all rows to collect were touched in the running round");
    }
  }
  return Status();
}

}  // namespace

Status collect_rows(const TrackedTable& at, const std::uint64_t* rows, std::size_t num_rows, MergeForm form, int num_threads,
                    std::int32_t* counts, float* values) {
  const std::size_t dim = at.group->layout(at.table).dim;
  return for_collected(at, rows, num_rows, form, num_threads, kRowsPerTask,
                       [&](const CollectArgs& args, std::size_t first, std::size_t last, std::size_t begin, std::size_t end) {
                         return collect_range(args, first, last, begin, end, {counts + begin, values + begin * dim, num_rows});
                       });
}

Status pack_touched(const TrackedTable& at, const std::uint64_t* rows, std::size_t num_rows, MergeForm form, const PackRequest& request,
                    int num_threads, bool* is_finite) {
  KSTEP_RETURN_IF_ERROR(check_tracked(at));
  const std::size_t dim = at.group->layout(at.table).dim, num_fields = request.format.wires.size();
  const std::size_t rows_per_task = std::clamp<std::size_t>(kScratchFloats / (num_fields * dim), 8, kRowsPerTask);
  Packer packer(request, rows, num_rows, rows_per_task);
  KSTEP_RETURN_IF_ERROR(packer.check());
  std::atomic<bool> finite{true};
  KSTEP_RETURN_IF_ERROR(
      for_collected(at, rows, num_rows, form, num_threads, rows_per_task,
                    [&](const CollectArgs& args, std::size_t first, std::size_t last, std::size_t begin, std::size_t end) {
                      thread_local std::vector<float> values;
                      std::int32_t counts[kRowsPerTask];
                      values.resize(num_fields * rows_per_task * dim);
                      if (!collect_range(args, first, last, begin, end, {counts, values.data(), rows_per_task})) return false;
                      const float* fields[kMaxSpans];
                      for (std::size_t f = 0; f < num_fields; ++f) fields[f] = values.data() + f * rows_per_task * dim;
                      if (!packer.pack(begin, end, counts, fields)) finite.store(false);
                      return true;
                    }));
  *is_finite = finite.load();
  return Status();
}

}  // namespace kstep
