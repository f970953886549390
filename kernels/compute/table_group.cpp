#include "compute/table_group.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "compute/thread_pool.h"

namespace kstep {
namespace {

constexpr std::size_t kBagsPerTask = 64;
constexpr std::size_t kTaskOutputBytes = 416 << 10;  // what one task of a pooled forward writes stays in the L2 cache
constexpr std::size_t kRowsPerTask = 1024;  // the first rows of a task are not prefetched
constexpr std::size_t kMapBagsPerTask = 4096;
constexpr std::size_t kRowsPerPin = std::size_t{1} << 14;  // of a walk over all touched rows: bounds what is pinned at once
// Beyond this an output is written around the cache: it would be evicted before anyone reads it.
constexpr std::size_t kStreamBytes = std::size_t{8} << 20;

template <typename T>
void grow(std::vector<T>* scratch, std::size_t size) {
  if (scratch->size() < size) scratch->resize(size);
}

// Bags of one task of a pooled forward, whose bags are `bag_floats` long; at least four tasks a thread where there are many.
std::size_t bags_per_task(std::size_t bag_floats, std::size_t batch_size, int num_threads) {
  const std::size_t wanted = std::min(kTaskOutputBytes / (bag_floats * sizeof(float)), batch_size / (4 * static_cast<std::size_t>(num_threads)));
  return std::min(std::max(wanted, kBagsPerTask), 8 * kBagsPerTask);
}

std::size_t num_blocks(std::size_t n, std::size_t block) { return (n + block - 1) / block; }

}  // namespace

// The rows of one call, pinned table by table; whatever is still pinned at the end of the scope is released unchanged.
class TableGroup::Pins {
 public:
  explicit Pins(TableGroup* group) : group_(*group) {}
  Pins(const Pins&) = delete;
  Pins& operator=(const Pins&) = delete;
  ~Pins() {
    // Only reached with open tickets when another failure is already on its way to the caller.
    for (PinTicket& ticket : group_.tickets_) {
      if (ticket != kNoTicket) (void)group_.source_->unpin(ticket, false);
      ticket = kNoTicket;
    }
  }

  Status pin(const std::int64_t* unique_rows, const std::int64_t* table_offsets, PinMode mode) {
    const std::size_t num_tables = group_.tables().size();
    grow(&group_.payload_, static_cast<std::size_t>(table_offsets[num_tables]));
    for (std::size_t t = 0; t < num_tables; ++t) {
      const std::int64_t begin = table_offsets[t], end = table_offsets[t + 1];
      if (begin == end) continue;
      // Row ids are never negative, so both integer types hold the same bits.
      const auto* rows = reinterpret_cast<const std::uint64_t*>(unique_rows + begin);
      KSTEP_RETURN_IF_ERROR(group_.source_->pin(static_cast<std::uint32_t>(t), rows, static_cast<std::size_t>(end - begin), mode,
                                                group_.payload_.data() + begin, &group_.tickets_[t]));
    }
    return Status();
  }

  Status unpin(bool dirty) {
    Status first;
    for (PinTicket& ticket : group_.tickets_) {
      if (ticket == kNoTicket) continue;
      Status status = group_.source_->unpin(ticket, dirty);
      ticket = kNoTicket;
      if (first.ok()) first = std::move(status);
    }
    return first;
  }

 private:
  TableGroup& group_;
};

TableGroup::TableGroup(std::unique_ptr<RowSource> source, const OptimizerSpec& spec)
    : source_(std::move(source)), spec_(spec), bias1_(spec.beta1), bias2_(spec.beta2) {}

Status TableGroup::make(std::unique_ptr<RowSource> source, const OptimizerSpec& spec, std::unique_ptr<TableGroup>* out) {
  std::unique_ptr<TableGroup> group(new TableGroup(std::move(source), spec));
  for (const TableSpec& table : group->tables()) {
    if (table.dim < 1 || table.dim > kMaxDim) {
      return Status::invalid("table '" + table.name + "'",
                             "dim " + std::to_string(table.dim) + ", expected 1 to " + std::to_string(kMaxDim));
    }
    group->layouts_.emplace_back();
    KSTEP_RETURN_IF_ERROR(RowLayout::make(table, spec, &group->layouts_.back()));
    group->trackers_.emplace_back();
    for (std::uint32_t counter : group->layouts_.back().touches) {
      if (counter == RecordSchema::kNoField) break;
      group->trackers_.back().emplace_back(counter, table.num_rows);
    }
  }
  group->num_updated_.assign(group->tables().size(), 0);
  group->num_clipped_.assign(group->tables().size(), 0);
  group->tickets_.assign(group->tables().size(), kNoTicket);
  *out = std::move(group);
  return Status();
}

std::size_t TableGroup::dim_of_feature(const Lookup& lookup, std::size_t feature) const {
  return layouts_[static_cast<std::size_t>(lookup.table_of_feature[feature])].dim;
}

std::size_t TableGroup::row_gradient_floats(const std::int64_t* table_offsets) const {
  std::size_t total = 0;
  for (std::size_t t = 0; t < layouts_.size(); ++t) {
    total += static_cast<std::size_t>(table_offsets[t + 1] - table_offsets[t]) * layouts_[t].dim;
  }
  return total;
}

void TableGroup::place_features(const Lookup& lookup, bool is_pooled) {
  grow(&feature_begin_, lookup.num_features + 1);
  feature_begin_[0] = 0;
  for (std::size_t f = 0; f < lookup.num_features; ++f) {
    const std::int64_t* offsets = lookup.offsets + f * lookup.batch_size;
    const std::size_t rows = is_pooled ? 1 : static_cast<std::size_t>(offsets[lookup.batch_size] - offsets[0]);
    feature_begin_[f + 1] = feature_begin_[f] + rows * dim_of_feature(lookup, f);
  }
}

// ---- forward ---------------------------------------------------------------------------------------------------------

Status TableGroup::pooled_forward(const Lookup& lookup, Pooling pooling, const float* weights, float* out,
                                  std::size_t out_stride, int num_threads) {
  Pins pins(this);
  KSTEP_RETURN_IF_ERROR(pins.pin(lookup.unique_rows, lookup.table_offsets, PinMode::Read));
  KSTEP_RETURN_IF_ERROR(show_present(lookup.unique_rows, lookup.table_offsets, num_threads));
  place_features(lookup, true);
  const bool stream = lookup.batch_size * out_stride * sizeof(float) >= kStreamBytes;
  const std::size_t num_bags = bags_per_task(out_stride, lookup.batch_size, num_threads);
  parallel_tasks(num_threads, num_blocks(lookup.batch_size, num_bags), [&](std::size_t task) {
    const std::size_t begin = task * num_bags, end = std::min(lookup.batch_size, begin + num_bags);
    for (std::size_t f = 0; f < lookup.num_features; ++f) {
      const PooledArgs args{payload_.data(), lookup.inverse, weights, lookup.offsets + f * lookup.batch_size,
                            out + feature_begin_[f], out_stride, static_cast<std::uint32_t>(dim_of_feature(lookup, f)),
                            pooling == Pooling::Mean, stream};
      row_kernels().gather_pooled(args, begin, end);
    }
  });
  return pins.unpin(false);
}

Status TableGroup::sequence_forward(const Lookup& lookup, float* out, int num_threads) {
  Pins pins(this);
  KSTEP_RETURN_IF_ERROR(pins.pin(lookup.unique_rows, lookup.table_offsets, PinMode::Read));
  KSTEP_RETURN_IF_ERROR(show_present(lookup.unique_rows, lookup.table_offsets, num_threads));
  place_features(lookup, false);
  const bool stream = feature_begin_[lookup.num_features] * sizeof(float) >= kStreamBytes;
  const std::size_t blocks = num_blocks(lookup.batch_size, kBagsPerTask);
  parallel_tasks(num_threads, blocks * lookup.num_features, [&](std::size_t task) {
    const std::size_t f = task / blocks, bag = task % blocks * kBagsPerTask;
    const std::int64_t* offsets = lookup.offsets + f * lookup.batch_size;
    const std::size_t dim = dim_of_feature(lookup, f);
    // Shifted so that args.out + position * dim is the place of a position of this feature.
    float* shifted = out + feature_begin_[f] - static_cast<std::size_t>(offsets[0]) * dim;
    const GatherArgs args{payload_.data(), lookup.inverse, shifted, static_cast<std::uint32_t>(dim), stream};
    row_kernels().gather_rows(args, static_cast<std::size_t>(offsets[bag]),
                              static_cast<std::size_t>(offsets[std::min(lookup.batch_size, bag + kBagsPerTask)]));
  });
  return pins.unpin(false);
}

// ---- backward --------------------------------------------------------------------------------------------------------

Status TableGroup::weight_grads(const Lookup& lookup, const Gradient& gradient, float* out, int num_threads) {
  Pins pins(this);
  KSTEP_RETURN_IF_ERROR(pins.pin(lookup.unique_rows, lookup.table_offsets, PinMode::Read));
  KSTEP_RETURN_IF_ERROR(show_present(lookup.unique_rows, lookup.table_offsets, num_threads));
  place_features(lookup, true);
  parallel_tasks(num_threads, num_blocks(lookup.batch_size, kBagsPerTask), [&](std::size_t task) {
    const std::size_t begin = task * kBagsPerTask, end = std::min(lookup.batch_size, begin + kBagsPerTask);
    for (std::size_t f = 0; f < lookup.num_features; ++f) {
      const WeightGradArgs args{payload_.data(), lookup.inverse, lookup.offsets + f * lookup.batch_size,
                                gradient.data + feature_begin_[f], gradient.stride, out,
                                static_cast<std::uint32_t>(dim_of_feature(lookup, f)), gradient.pooling == Pooling::Mean};
      row_kernels().weight_grads(args, begin, end);
    }
  });
  return pins.unpin(false);
}

void TableGroup::map_bag(const Lookup& lookup, const Gradient& gradient, std::size_t feature, std::size_t bag) {
  const std::int64_t* offsets = lookup.offsets + feature * lookup.batch_size;
  const std::int64_t begin = offsets[bag], end = offsets[bag + 1];
  if (!gradient.is_pooled) {
    const auto dim = static_cast<std::int64_t>(dim_of_feature(lookup, feature));
    for (std::int64_t i = begin; i < end; ++i) {
      grad_offsets_[static_cast<std::size_t>(i)] = static_cast<std::int64_t>(feature_begin_[feature]) + (i - offsets[0]) * dim;
    }
    return;
  }
  const auto at = static_cast<std::int64_t>(bag * gradient.stride + feature_begin_[feature]);
  for (std::int64_t i = begin; i < end; ++i) grad_offsets_[static_cast<std::size_t>(i)] = at;
  if (scales_.empty()) return;
  float scale = 1.0f;
  if (gradient.pooling == Pooling::Mean && end > begin) {
    scale = 1.0f / static_cast<float>(valid_in_bag(lookup.inverse, begin, end));
  }
  for (std::int64_t i = begin; i < end; ++i) {
    scales_[static_cast<std::size_t>(i)] = gradient.weights != nullptr ? gradient.weights[i] * scale : scale;
  }
}

// Finds where the gradient of each position lies and what scales it.
void TableGroup::map_gradient(const Lookup& lookup, const Gradient& gradient, int num_threads) {
  place_features(lookup, gradient.is_pooled);
  grow(&grad_offsets_, lookup.num_ids);
  if (gradient.is_pooled && (gradient.pooling == Pooling::Mean || gradient.weights != nullptr)) {
    grow(&scales_, lookup.num_ids);
  } else {
    scales_.clear();  // keeps its capacity
  }
  const std::size_t blocks = num_blocks(lookup.batch_size, kMapBagsPerTask);
  parallel_tasks(num_threads, blocks * lookup.num_features, [&](std::size_t task) {
    const std::size_t begin = task % blocks * kMapBagsPerTask, end = std::min(lookup.batch_size, begin + kMapBagsPerTask);
    for (std::size_t bag = begin; bag < end; ++bag) map_bag(lookup, gradient, task / blocks, bag);
  });
}

ReduceArgs TableGroup::reduce_args(const Lookup& lookup, const Gradient& gradient) {
  ReduceArgs args{};
  args.payload = payload_.data();
  args.row_offsets = lookup.row_offsets;
  args.positions = lookup.positions;
  args.grad_offsets = grad_offsets_.data();
  args.scales = scales_.empty() ? nullptr : scales_.data();
  args.grad = gradient.data;
  return args;
}

void TableGroup::cut_row_ranges(const std::int64_t* table_offsets) {
  ranges_.clear();
  for (std::size_t t = 0; t < layouts_.size(); ++t) {
    const auto end = static_cast<std::size_t>(table_offsets[t + 1]);
    for (auto begin = static_cast<std::size_t>(table_offsets[t]); begin < end; begin += kRowsPerTask) {
      ranges_.push_back({static_cast<std::uint32_t>(t), begin, std::min(end, begin + kRowsPerTask)});
    }
  }
  // Row u of table t lies at grad_begin_[t] + u * dim; u counts over all tables, so grad_begin_ may be negative.
  grow(&grad_begin_, layouts_.size());
  std::ptrdiff_t floats = 0;
  for (std::size_t t = 0; t < layouts_.size(); ++t) {
    const auto dim = static_cast<std::ptrdiff_t>(layouts_[t].dim);
    grad_begin_[t] = floats - table_offsets[t] * dim;
    floats += (table_offsets[t + 1] - table_offsets[t]) * dim;
  }
}

Status TableGroup::reduce(const Lookup& lookup, const Gradient& gradient, float* row_grads, std::int32_t* counts,
                          int num_threads) {
  map_gradient(lookup, gradient, num_threads);
  cut_row_ranges(lookup.table_offsets);
  const ReduceArgs args = reduce_args(lookup, gradient);
  parallel_tasks(num_threads, ranges_.size(), [&](std::size_t task) {
    const RowRange& range = ranges_[task];
    ReduceArgs mine = args;
    mine.row_grads = row_grads + grad_begin_[range.table];
    row_kernels().reduce_rows(mine, layouts_[range.table].dim, range.begin, range.end);
    for (std::size_t u = range.begin; u < range.end; ++u) counts[u] = lookup.row_offsets[u + 1] - lookup.row_offsets[u];
  });
  return Status();
}

Status TableGroup::check_can_update() const {
  if (spec_.kind != OptimizerKind::None) return Status();
  return Status::invalid("update", "this group was made without an optimizer: its rows can only be read");
}

bool TableGroup::has_clip(std::size_t table) const {
  return spec_.has_clip && std::find(spec_.unclipped.begin(), spec_.unclipped.end(), table) == spec_.unclipped.end();
}

void TableGroup::count_updates(const std::int64_t* table_offsets) {
  for (std::size_t t = 0; t < layouts_.size(); ++t) {
    num_updated_[t] += static_cast<std::uint64_t>(table_offsets[t + 1] - table_offsets[t]);
  }
}

UpdateParams TableGroup::update_params(std::size_t table, const StepParams& step) {
  UpdateParams params;
  params.kind = spec_.kind;
  params.layout = layouts_[table];
  params.lr = static_cast<float>(step.lr);
  params.beta1 = static_cast<float>(spec_.beta1);
  params.one_minus_beta1 = static_cast<float>(1.0 - spec_.beta1);
  params.beta2 = static_cast<float>(spec_.beta2);
  params.one_minus_beta2 = static_cast<float>(1.0 - spec_.beta2);
  params.eps = static_cast<float>(spec_.eps);
  params.l2 = static_cast<float>(spec_.l2);
  params.has_clip = has_clip(table);
  params.num_clipped = &num_clipped_[table];
  params.sinks = sinks_.empty() ? nullptr : sinks_.data() + table * kMaxTrackers;
  params.num_sinks = is_tracking_ ? static_cast<std::uint32_t>(trackers_[table].size()) : 0;
  params.clip_ratio = static_cast<float>(spec_.clip_ratio);
  params.clip_floor = static_cast<float>(spec_.clip_ratio * std::sqrt(static_cast<double>(params.layout.dim)) * spec_.clip_zeta);
  if (spec_.kind == OptimizerKind::Adam && spec_.bias_correction == BiasCorrection::Row) {
    params.row_bias1 = bias1_.inverse.data();
    params.row_bias1_size = static_cast<std::uint32_t>(bias1_.inverse.size());
    params.row_bias2 = bias2_.inverse.data();
    params.row_bias2_size = static_cast<std::uint32_t>(bias2_.inverse.size());
    params.row_beta1 = spec_.beta1;
    params.row_beta2 = spec_.beta2;
  } else if (spec_.kind == OptimizerKind::Adam) {
    params.inverse_bias1 = static_cast<float>(inverse_bias(spec_.beta1, step.step));
    params.inverse_bias2 = static_cast<float>(inverse_bias(spec_.beta2, step.step));
  }
  return params;
}

Status TableGroup::reduce_update(const Lookup& lookup, const Gradient& gradient, const StepParams& step, int num_threads) {
  KSTEP_RETURN_IF_ERROR(check_can_update());
  set_step(step);
  KSTEP_RETURN_IF_ERROR(prepare_sinks(lookup.table_offsets));
  Pins pins(this);
  KSTEP_RETURN_IF_ERROR(pins.pin(lookup.unique_rows, lookup.table_offsets, PinMode::Update));
  map_gradient(lookup, gradient, num_threads);
  cut_row_ranges(lookup.table_offsets);
  ReduceArgs args = reduce_args(lookup, gradient);
  args.unique_rows = lookup.unique_rows;
  const std::byte* const* shown = find_shown(lookup.unique_rows, lookup.table_offsets);
  shown_.is_valid = false;
  parallel_tasks(num_threads, ranges_.size(), [&](std::size_t task) {
    const RowRange& range = ranges_[task];
    const UpdateParams params = update_params(range.table, step);
    if (spec_.replays_l2) replay_before_update(range, params, step, shown);
    row_kernels().reduce_update(args, params, range.begin, range.end);
  });
  count_updates(lookup.table_offsets);
  return pins.unpin(true);
}

Status TableGroup::apply(const RowGradients& gradients, const StepParams& step, int num_threads, const float* scales) {
  KSTEP_RETURN_IF_ERROR(check_can_update());
  set_step(step);
  KSTEP_RETURN_IF_ERROR(prepare_sinks(gradients.table_offsets));
  Pins pins(this);
  KSTEP_RETURN_IF_ERROR(pins.pin(gradients.unique_rows, gradients.table_offsets, PinMode::Update));
  cut_row_ranges(gradients.table_offsets);
  const std::byte* const* shown = find_shown(gradients.unique_rows, gradients.table_offsets);
  shown_.is_valid = false;
  parallel_tasks(num_threads, ranges_.size(), [&](std::size_t task) {
    const RowRange& range = ranges_[task];
    const ApplyArgs args{payload_.data(), gradients.grads + grad_begin_[range.table], gradients.counts, gradients.unique_rows, scales};
    const UpdateParams params = update_params(range.table, step);
    if (spec_.replays_l2) replay_before_update(range, params, step, shown);
    row_kernels().apply_update(args, params, range.begin, range.end);
  });
  count_updates(gradients.table_offsets);
  return pins.unpin(true);
}

Status TableGroup::row_norms(const RowGradients& gradients, float* grad_squares, float* weight_squares, int num_threads) {
  Pins pins(this);
  KSTEP_RETURN_IF_ERROR(pins.pin(gradients.unique_rows, gradients.table_offsets, PinMode::Read));
  KSTEP_RETURN_IF_ERROR(show_present(gradients.unique_rows, gradients.table_offsets, num_threads));
  cut_row_ranges(gradients.table_offsets);
  parallel_tasks(num_threads, ranges_.size(), [&](std::size_t task) {
    const RowRange& range = ranges_[task];
    const NormArgs args{payload_.data(), gradients.grads + grad_begin_[range.table], static_cast<float>(spec_.l2), grad_squares,
                        weight_squares};
    row_kernels().row_norms(args, layouts_[range.table].dim, range.begin, range.end);
  });
  return pins.unpin(false);
}

// ---- single fields and touched rows ----------------------------------------------------------------------------------

namespace {

Status locate_field(const TableSpec& table, const std::string& name, std::size_t* offset, std::size_t* bytes) {
  for (const Field& field : table.schema.fields()) {
    if (field.name != name) continue;
    *offset = table.schema.offset_of(name);
    *bytes = static_cast<std::size_t>(field.width) * dtype_bytes(field.dtype);
    return Status();
  }
  return Status::invalid("table '" + table.name + "'", "no field '" + name + "', the record has " + table.schema.describe());
}

}  // namespace

Status TableGroup::read_field(std::uint32_t table, const std::uint64_t* rows, std::size_t num_rows, const std::string& field,
                              std::byte* values, int num_threads) {
  std::size_t offset = 0, bytes = 0;
  KSTEP_RETURN_IF_ERROR(locate_field(tables()[table], field, &offset, &bytes));
  const std::size_t rows_per_pin = spec_.replays_l2 ? kRowsPerPin : num_rows;  // copies of rows that missed steps are bounded
  for (std::size_t begin = 0; begin < num_rows; begin += rows_per_pin) {
    const std::size_t count = std::min(rows_per_pin, num_rows - begin);
    std::vector<std::int64_t> offsets(tables().size() + 1, 0);
    std::fill(offsets.begin() + table + 1, offsets.end(), static_cast<std::int64_t>(count));
    Pins pins(this);
    const auto* signed_rows = reinterpret_cast<const std::int64_t*>(rows + begin);
    KSTEP_RETURN_IF_ERROR(pins.pin(signed_rows, offsets.data(), PinMode::Read));
    KSTEP_RETURN_IF_ERROR(show_present(signed_rows, offsets.data(), num_threads));
    for (std::size_t i = 0; i < count; ++i) std::memcpy(values + (begin + i) * bytes, payload_[i] + offset, bytes);
    KSTEP_RETURN_IF_ERROR(pins.unpin(false));
  }
  return Status();
}

Status TableGroup::write_field(std::uint32_t table, const std::uint64_t* rows, std::size_t num_rows, const std::string& field,
                               const std::byte* values, int num_threads) {
  std::size_t offset = 0, bytes = 0;
  KSTEP_RETURN_IF_ERROR(locate_field(tables()[table], field, &offset, &bytes));
  grow(&payload_, num_rows);
  PinTicket ticket = kNoTicket;
  KSTEP_RETURN_IF_ERROR(source_->pin(table, rows, num_rows, PinMode::Update, payload_.data(), &ticket));
  shown_.is_valid = false;
  replay_pinned(table, num_rows, num_threads);
  for (std::size_t i = 0; i < num_rows; ++i) std::memcpy(payload_[i] + offset, values + i * bytes, bytes);
  return source_->unpin(ticket, true);
}

Status TableGroup::prepare_sinks(const std::int64_t* table_offsets) {
  sinks_.resize(layouts_.size() * kMaxTrackers);
  if (!is_tracking_) return Status();
  for (std::size_t t = 0; t < layouts_.size(); ++t) {
    const std::int64_t num_rows = table_offsets[t + 1] - table_offsets[t];
    if (num_rows == 0) continue;
    for (std::size_t i = 0; i < trackers_[t].size(); ++i) {
      TouchTracker& tracker = trackers_[t][i];
      if (tracker.current().is_merging) {
        return Status::busy("table '" + tables()[t].name + "'",
                            "a merge round has begun to apply; finish it with clear_touched before the next update");
      }
      KSTEP_RETURN_IF_ERROR(tracker.reserve(static_cast<std::size_t>(num_rows)));
      sinks_[t * kMaxTrackers + i] = tracker.sink();
    }
  }
  return Status();
}

Status TableGroup::set_tracking(bool is_tracking) {
  for (std::size_t t = 0; t < layouts_.size() && !is_tracking; ++t) {
    for (TouchTracker& tracker : trackers_[t]) {
      if (tracker.current().num_rows() == 0 && tracker.detached() == nullptr) continue;
      return Status::invalid("table '" + tables()[t].name + "'", "rows are touched; end the merge round before tracking stops");
    }
  }
  is_tracking_ = is_tracking;
  return Status();
}

Status TableGroup::track(std::uint32_t table, std::size_t tracker, const std::vector<std::string>& fields) {
  const std::string where = "table '" + tables()[table].name + "'";
  if (tracker >= trackers_[table].size()) {
    return Status::invalid(where, "no tracker " + std::to_string(tracker) + ": the record has " +
                                      std::to_string(trackers_[table].size()) + " counters of touches");
  }
  TouchTracker& tracked = trackers_[table][tracker];
  if (tracked.current().num_rows() > 0 || tracked.detached() != nullptr) {
    return Status::invalid(where, std::to_string(tracked.current().num_rows()) +
                                      " rows are touched already and have no base: clear them before tracking begins");
  }
  std::vector<Span> spans;
  for (const std::string& field : fields) {
    std::size_t offset = 0, bytes = 0;
    KSTEP_RETURN_IF_ERROR(locate_field(tables()[table], field, &offset, &bytes));
    if (bytes != layouts_[table].dim * sizeof(float)) return Status::invalid(where, "field '" + field + "' has no value per column to merge");
    spans.push_back({static_cast<std::uint32_t>(offset), layouts_[table].dim});
  }
  if (spans.empty() || spans.size() > kMaxSpans) {
    return Status::invalid(where, std::to_string(spans.size()) + " fields, expected 1 to " + std::to_string(kMaxSpans));
  }
  tracked.keep(std::move(spans));
  return Status();
}

const std::vector<std::uint64_t>& TableGroup::touched_rows(std::uint32_t table, std::size_t tracker) {
  return trackers_[table][tracker].current().rows();
}

Status TableGroup::zero_counters(std::uint32_t table, TouchTracker* tracker) {
  TouchRound& round = tracker->current();
  const std::vector<std::uint64_t>& touched = round.rows();
  std::vector<std::uint64_t> rows;
  std::vector<std::size_t> positions;
  for (std::size_t i = 0; i < touched.size(); ++i) {
    if (round.is_cleared[i] != 0) continue;
    rows.push_back(touched[i]);
    positions.push_back(i);
  }
  for (std::size_t begin = 0; begin < rows.size(); begin += kRowsPerPin) {
    const std::size_t count = std::min(kRowsPerPin, rows.size() - begin);
    grow(&payload_, count);
    PinTicket ticket = kNoTicket;
    KSTEP_RETURN_IF_ERROR(source_->pin(table, rows.data() + begin, count, PinMode::Update, payload_.data(), &ticket));
    for (std::size_t i = 0; i < count; ++i) {
      std::byte* at = payload_[i] + tracker->counter();
      std::memcpy(&round.counts[positions[begin + i]], at, sizeof(std::int32_t));
      std::memset(at, 0, sizeof(std::int32_t));
      round.is_cleared[positions[begin + i]] = 1;
    }
    KSTEP_RETURN_IF_ERROR(source_->unpin(ticket, true));
  }
  return Status();
}

Status TableGroup::clear_touched(std::uint32_t table, std::size_t tracker) {
  TouchTracker& tracked = trackers_[table][tracker];
  if (tracked.detached() == nullptr) KSTEP_RETURN_IF_ERROR(zero_counters(table, &tracked));
  tracked.clear();
  return Status();
}

Status TableGroup::detach_touched(std::uint32_t table, std::size_t tracker) {
  TouchTracker& tracked = trackers_[table][tracker];
  if (tracked.detached() != nullptr) {
    return Status::busy("table '" + tables()[table].name + "'", "the round detached before is still under way");
  }
  KSTEP_RETURN_IF_ERROR(zero_counters(table, &tracked));
  tracked.detach();
  return Status();
}

}  // namespace kstep
