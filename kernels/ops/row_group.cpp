#include "ops/row_group.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <cstdlib>
#include <cstring>
#include <sstream>
#include <unordered_map>

#include "compute/row_gradients.h"
#include "ops/buffer_pool.h"

namespace kstep {
namespace {

struct Registry {
  std::mutex mutex;
  std::unordered_map<int64_t, std::weak_ptr<GroupState>> groups;
  int64_t next_handle = 1;
};

Registry& registry() {
  static Registry* instance = new Registry;  // groups may outlive static destruction
  return *instance;
}

std::vector<Field> parse_fields(const std::string& table, const std::string& text) {
  std::vector<Field> fields;
  std::istringstream list(text);
  for (std::string item; std::getline(list, item, ',');) {
    std::istringstream parts(item);
    std::string name, dtype, width;
    std::getline(parts, name, ':');
    std::getline(parts, dtype, ':');
    std::getline(parts, width);
    Field field;
    field.name = name;
    char* end = nullptr;
    const long value = std::strtol(width.c_str(), &end, 10);
    TORCH_CHECK_VALUE(dtype_from_name(dtype, &field.dtype) && !width.empty() && *end == '\0' && value > 0, "table '", table,
                      "': field '", item, "' is not name:dtype:width");
    field.width = static_cast<std::uint32_t>(value);
    fields.push_back(std::move(field));
  }
  return fields;
}

InitKind parse_init(const std::string& table, const std::string& kind) {
  if (kind == "zero") return InitKind::Zero;
  if (kind == "uniform") return InitKind::Uniform;
  TORCH_CHECK_VALUE(kind == "normal", "table '", table, "': initial values '", kind, "', expected zero, uniform or normal");
  return InitKind::Normal;
}

const std::string kUnclipped = "unclipped:";  // with the position of a table behind it

OptimizerSpec parse_optimizer(const std::string& kind, const FloatDict& options) {
  OptimizerSpec spec;
  if (kind == "sgd") {
    spec.kind = OptimizerKind::Sgd;
  } else if (kind == "adam") {
    spec.kind = OptimizerKind::Adam;
  } else if (kind == "rowwise_adagrad") {
    spec.kind = OptimizerKind::RowwiseAdagrad;
  } else {
    TORCH_CHECK_VALUE(kind == "none", "optimizer '", kind, "', expected none, sgd, adam or rowwise_adagrad");
  }
  for (const auto& option : options) {
    const std::string& name = option.key();
    const double value = option.value();
    if (name == "beta1") spec.beta1 = value;
    else if (name == "beta2") spec.beta2 = value;
    else if (name == "eps") spec.eps = value;
    else if (name == "l2") spec.l2 = value;
    else if (name == "row_bias") spec.bias_correction = value != 0.0 ? BiasCorrection::Row : BiasCorrection::Global;
    else if (name == "step_per_moment") spec.step_per_moment = value != 0.0;
    else if (name == "frozen") spec.is_frozen = value != 0.0;
    else if (name == "amsgrad") spec.is_amsgrad = value != 0.0;
    else if (name == "replay_l2") spec.replays_l2 = value != 0.0;
    else if (name == "max_replay_steps") spec.max_replay_steps = static_cast<std::uint32_t>(value);
    else if (name == "clip_ratio") spec.clip_ratio = value;
    else if (name == "clip_zeta") spec.clip_zeta = value;
    else if (name.rfind(kUnclipped, 0) == 0) spec.unclipped.push_back(std::stoul(name.substr(kUnclipped.size())));
    else TORCH_CHECK_VALUE(false, "optimizer option '", name, "' is unknown");
  }
  spec.has_clip = options.contains("clip_ratio");
  TORCH_CHECK_VALUE(spec.has_clip == options.contains("clip_zeta"), "clip_ratio and clip_zeta come together");
  TORCH_CHECK_VALUE(spec.beta1 >= 0 && spec.beta1 < 1 && spec.beta2 >= 0 && spec.beta2 < 1, "betas (", spec.beta1, ", ",
                    spec.beta2, ") must be in [0, 1)");
  return spec;
}

at::Tensor row_tensor(const std::vector<std::uint64_t>& rows) {
  at::Tensor result = at::empty({static_cast<int64_t>(rows.size())}, at::kLong);
  std::memcpy(result.mutable_data_ptr(), rows.data(), rows.size() * sizeof(std::uint64_t));
  return result;
}

}  // namespace

void check(const Status& status) {
  TORCH_CHECK_VALUE(status.kind != StatusKind::InvalidArgument, status.message());
  TORCH_CHECK(status.ok(), status.message());
}

std::vector<TableSpec> table_specs(const StringList& names, const IntList& table_ids, const IntList& num_rows,
                                   const IntList& dims, const StringList& fields, const StringList& init_kinds,
                                   const std::vector<double>& init_a, const std::vector<double>& init_b,
                                   const IntList& seeds, const IntList& first_columns) {
  const std::size_t n = names.size();
  TORCH_CHECK_VALUE(table_ids.size() == n && num_rows.size() == n && dims.size() == n && fields.size() == n &&
                        init_kinds.size() == n && init_a.size() == n && init_b.size() == n && seeds.size() == n &&
                        first_columns.size() == n,
                    "every list must have one entry per table (", n, ")");
  std::vector<TableSpec> tables(n);
  for (std::size_t t = 0; t < n; ++t) {
    TORCH_CHECK_VALUE(num_rows[t] >= 1 && num_rows[t] <= int64_t{1} << 48, "table '", names[t], "': ", num_rows[t],
                      " rows, expected 1 to 2^48");
    TORCH_CHECK_VALUE(dims[t] >= 1 && dims[t] <= kMaxDim, "table '", names[t], "': dim ", dims[t], ", expected 1 to ", kMaxDim);
    TORCH_CHECK_VALUE(table_ids[t] >= 0 && table_ids[t] <= UINT32_MAX, "table '", names[t], "': table_id ", table_ids[t]);
    tables[t].name = names[t];
    tables[t].table_id = static_cast<std::uint32_t>(table_ids[t]);
    tables[t].num_rows = static_cast<std::uint64_t>(num_rows[t]);
    tables[t].dim = static_cast<std::uint32_t>(dims[t]);
    check(RecordSchema::make(parse_fields(names[t], fields[t]), &tables[t].schema));
    tables[t].init = {parse_init(names[t], init_kinds[t]), init_a[t], init_b[t]};
    tables[t].seed = static_cast<std::uint64_t>(seeds[t]);
    tables[t].first_column = static_cast<std::uint32_t>(first_columns[t]);
  }
  return tables;
}

std::uint32_t checked_table(const GroupState& state, int64_t table) {
  const auto num_tables = static_cast<int64_t>(state.tables->tables().size());
  TORCH_CHECK_VALUE(table >= 0 && table < num_tables, "table ", table, " of a group of ", num_tables);
  return static_cast<std::uint32_t>(table);
}

std::size_t checked_tracker(const GroupState& state, std::uint32_t table, int64_t tracker) {
  const std::size_t count = state.tables->num_trackers(table);
  TORCH_CHECK_VALUE(tracker >= 0 && tracker < static_cast<int64_t>(count), "table '", state.tables->tables()[table].name,
                    "': tracker ", tracker, ", its record has ", count, " counters of touches (set `touches` and `num_trackers`)");
  return static_cast<std::size_t>(tracker);
}

std::shared_ptr<GroupState> find_group(int64_t handle) {
  Registry& known = registry();
  std::lock_guard<std::mutex> lock(known.mutex);
  const auto found = known.groups.find(handle);
  std::shared_ptr<GroupState> state = found == known.groups.end() ? nullptr : found->second.lock();
  TORCH_CHECK_VALUE(state != nullptr, "row group ", handle, " is gone: keep it alive until the last backward of its lookups");
  return state;
}

const StepParams& GroupState::checked_step() const {
  TORCH_CHECK(has_step, "an update needs a learning rate and a step: call set_step before the first backward or apply");
  return step;
}

RowGroup::RowGroup(const c10::intrusive_ptr<RowSourceHolder>& holder, const std::string& kind, const FloatDict& options)
    : state_(std::make_shared<GroupState>()) {
  TORCH_CHECK_VALUE(holder->source != nullptr, "this row source already belongs to a row group");
  const OptimizerSpec spec = parse_optimizer(kind, options);
  check(TableGroup::make(std::move(holder->source), spec, &state_->tables));
  state_->kind = spec.kind;
  state_->bias_correction = spec.bias_correction;
  Registry& known = registry();
  std::lock_guard<std::mutex> lock(known.mutex);
  handle_ = known.next_handle++;
  known.groups[handle_] = state_;
}

RowGroup::~RowGroup() {
  Registry& known = registry();
  std::lock_guard<std::mutex> lock(known.mutex);
  known.groups.erase(handle_);
}

void RowGroup::set_step(double lr, int64_t step) {
  TORCH_CHECK_VALUE(step >= 1, "step ", step, ", steps count from 1");
  std::lock_guard<std::mutex> lock(state_->mutex);
  TORCH_CHECK_VALUE(!state_->tables->spec().replays_l2 || step <= INT32_MAX, "step ", step, ": rows that replay their L2 count steps up to ",
                    INT32_MAX);
  state_->step = {lr, static_cast<std::uint64_t>(step)};
  state_->has_step = true;
  state_->tables->set_step(state_->step);
}

std::tuple<IntList, std::vector<double>, IntList> RowGroup::rates() const {
  std::lock_guard<std::mutex> lock(state_->mutex);
  IntList first_clocks, shifts;
  std::vector<double> rates;
  for (const RateRun& run : state_->tables->rates().runs()) {
    first_clocks.push_back(run.first_clock);
    rates.push_back(run.lr);
    shifts.push_back(run.shift);
  }
  return {first_clocks, rates, shifts};
}

void RowGroup::restore_rates(const IntList& first_clocks, const std::vector<double>& rates, const IntList& shifts) {
  TORCH_CHECK_VALUE(first_clocks.size() == rates.size() && shifts.size() == rates.size() && !rates.empty(), first_clocks.size(),
                    " first clocks and ", shifts.size(), " shifts for ", rates.size(), " rates, expected as many, and at least one");
  std::vector<RateRun> runs;
  for (std::size_t i = 0; i < rates.size(); ++i) {
    TORCH_CHECK_VALUE(first_clocks[i] <= INT32_MAX && std::abs(shifts[i]) <= INT32_MAX && (i == 0 || first_clocks[i] > first_clocks[i - 1]),
                      "first clocks of rates must ascend up to ", INT32_MAX, "; [", i, "] is ", first_clocks[i]);
    runs.push_back({static_cast<std::int32_t>(first_clocks[i]), static_cast<float>(rates[i]), static_cast<std::int32_t>(shifts[i])});
  }
  std::lock_guard<std::mutex> lock(state_->mutex);
  state_->tables->restore_rates(std::move(runs));
}

void RowGroup::rebase(int64_t last_step) {
  TORCH_CHECK_VALUE(last_step >= 0 && last_step < INT32_MAX, "step ", last_step);
  std::lock_guard<std::mutex> lock(state_->mutex);
  state_->tables->rebase(static_cast<std::uint64_t>(last_step));
  if (state_->has_step) state_->step.step = static_cast<std::uint64_t>(last_step) + 1;
}

void RowGroup::catch_up(int64_t table, const at::Tensor& payloads) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  const std::uint32_t t = checked_table(*state_, table);
  const int64_t payload_bytes = state_->tables->layout(t).payload_bytes;
  check_tensor(payloads, "payloads", at::kByte, -1);
  TORCH_CHECK_VALUE(payloads.dim() == 2 && payloads.size(1) == payload_bytes, "payloads are ", payloads.sizes(), ", expected [n, ",
                    payload_bytes, "]");
  state_->tables->replay_payloads(t, static_cast<std::byte*>(payloads.mutable_data_ptr()), static_cast<std::size_t>(payloads.size(0)),
                                  at::get_num_threads());
}

void RowGroup::set_deferred(bool is_deferred) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  TORCH_CHECK(is_deferred || state_->pending.empty(), state_->pending.size(),
              " pending gradients would be lost: apply them before switching to fused updates");
  state_->is_deferred = is_deferred;
}

int64_t RowGroup::num_pending() const {
  std::lock_guard<std::mutex> lock(state_->mutex);
  return static_cast<int64_t>(state_->pending.size());
}

GradientTensors RowGroup::take_pending() {
  std::vector<GradientTensors> pending;
  IntList dims;
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    pending.swap(state_->pending);
    for (const TableSpec& table : state_->tables->tables()) dims.push_back(table.dim);
  }
  if (pending.size() == 1) return std::move(pending.front());
  return merge_gradient_tensors(pending, dims);
}

void RowGroup::track(int64_t table, int64_t tracker, const StringList& fields) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  const std::uint32_t t = checked_table(*state_, table);
  check(state_->tables->track(t, checked_tracker(*state_, t, tracker), fields));
}

void RowGroup::set_tracking(bool is_tracking) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  check(state_->tables->set_tracking(is_tracking));
}

at::Tensor RowGroup::touched_rows(int64_t table, int64_t tracker) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  const std::uint32_t t = checked_table(*state_, table);
  return row_tensor(state_->tables->touched_rows(t, checked_tracker(*state_, t, tracker)));
}

void RowGroup::clear_touched(int64_t table, int64_t tracker) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  const std::uint32_t t = checked_table(*state_, table);
  check(state_->tables->clear_touched(t, checked_tracker(*state_, t, tracker)));
}

void RowGroup::detach_touched(int64_t table, int64_t tracker) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  const std::uint32_t t = checked_table(*state_, table);
  check(state_->tables->detach_touched(t, checked_tracker(*state_, t, tracker)));
}

int64_t RowGroup::base_bytes() const {
  std::lock_guard<std::mutex> lock(state_->mutex);
  std::size_t bytes = 0;
  for (std::size_t t = 0; t < state_->tables->tables().size(); ++t) {
    for (std::size_t i = 0; i < state_->tables->num_trackers(t); ++i) bytes += state_->tables->tracker(t, i).base_bytes();
  }
  return static_cast<int64_t>(bytes);
}

void RowGroup::flush() {
  std::lock_guard<std::mutex> lock(state_->mutex);
  check(state_->tables->source().flush());
}

std::vector<FloatDict> RowGroup::counters() const {
  std::lock_guard<std::mutex> lock(state_->mutex);
  std::vector<FloatDict> result;
  for (const std::map<std::string, double>& table : state_->tables->source().counters()) {
    FloatDict dict;
    for (const auto& [name, value] : table) dict.insert(name, value);
    const std::size_t position = result.size();
    if (state_->tables->has_clip(position)) {
      dict.insert("updated_rows", static_cast<double>(state_->tables->num_updated(position)));
      dict.insert("clipped_rows", static_cast<double>(state_->tables->num_clipped(position)));
    }
    result.push_back(dict);
  }
  return result;
}

RowGradients row_gradients(const GradientTensors& tensors) {
  const auto& [rows, table_offsets, counts, grads] = tensors;
  return {rows.const_data_ptr<int64_t>(), table_offsets.const_data_ptr<int64_t>(), counts.const_data_ptr<int32_t>(),
          grads.const_data_ptr<float>()};
}

GradientTensors merge_gradient_tensors(const std::vector<GradientTensors>& parts, const IntList& table_dims) {
  std::vector<RowGradients> views;
  for (const GradientTensors& part : parts) views.push_back(row_gradients(part));
  const std::size_t num_tables = table_dims.size();
  at::Tensor table_offsets = at::empty({static_cast<int64_t>(num_tables) + 1}, at::kLong);
  auto* offsets = table_offsets.mutable_data_ptr<int64_t>();
  merged_table_offsets(views, num_tables, at::get_num_threads(), offsets);
  int64_t num_floats = 0;
  for (std::size_t t = 0; t < num_tables; ++t) num_floats += (offsets[t + 1] - offsets[t]) * table_dims[t];
  at::Tensor rows = at::empty({offsets[num_tables]}, at::kLong);
  at::Tensor counts = at::empty({offsets[num_tables]}, at::kInt);
  at::Tensor grads = empty_output({num_floats});
  merge_row_gradients(views, table_dims.data(), num_tables, at::get_num_threads(),
                      {rows.mutable_data_ptr<int64_t>(), offsets, counts.mutable_data_ptr<int32_t>(),
                       grads.mutable_data_ptr<float>()});
  return {rows, table_offsets, counts, grads};
}

}  // namespace kstep
