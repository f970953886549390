// The torch classes of the library: RowSourceHolder (a source not yet in use) and RowGroup (a TableGroup with its mutex,
// its place in the training step and its pending gradients).
//
// Ops name a RowGroup by its handle, an integer, because tensors and integers are all that tracing can carry. A handle is
// valid as long as its RowGroup lives.
// Threads: every op and method locks its group.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "compute/table_group.h"

namespace kstep {

// Throws ValueError for a wrong argument, RuntimeError for everything else.
void check(const Status& status);

struct RowSourceHolder : torch::CustomClassHolder {
  std::unique_ptr<RowSource> source;  // empty once a RowGroup has taken it
};

using StringList = std::vector<std::string>;
using IntList = std::vector<int64_t>;
using FloatDict = c10::Dict<std::string, double>;
// (unique_rows, table_offsets, counts, grads) as in RowGradients.
using GradientTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// Tables as parallel lists, because a torch class takes nothing richer. `fields` holds one text per table, fields in
// payload order as "name:dtype:width" joined by ',', e.g. "weight:f32:64,m:f32:64,v:f32:64".
std::vector<TableSpec> table_specs(const StringList& names, const IntList& table_ids, const IntList& num_rows,
                                   const IntList& dims, const StringList& fields, const StringList& init_kinds,
                                   const std::vector<double>& init_a, const std::vector<double>& init_b,
                                   const IntList& seeds, const IntList& first_columns);

// What a RowGroup and the ops in flight share. All members but `mutex` are guarded by it.
struct GroupState {
  std::mutex mutex;
  std::unique_ptr<TableGroup> tables;
  OptimizerKind kind = OptimizerKind::None;
  BiasCorrection bias_correction = BiasCorrection::Global;
  StepParams step;
  bool has_step = false;
  bool is_deferred = false;
  std::vector<GradientTensors> pending;  // in the order of the backward calls

  // The step of an update; throws if none was set.
  const StepParams& checked_step() const;
};

// `table` and `tracker` as unsigned numbers; throw ValueError if the group has no such table, the table no such tracker.
std::uint32_t checked_table(const GroupState& state, int64_t table);
std::size_t checked_tracker(const GroupState& state, std::uint32_t table, int64_t tracker);

// The group behind a handle; throws ValueError if its RowGroup is gone.
std::shared_ptr<GroupState> find_group(int64_t handle);

class RowGroup : public torch::CustomClassHolder {
 public:
  // `kind`: none, sgd, adam or rowwise_adagrad. `options`: beta1, beta2, eps, l2, row_bias, step_per_moment, frozen, amsgrad (0 or 1), clip_ratio and
  // clip_zeta (both or none), "unclipped:<position>" (any value) for a table that is not clipped, replay_l2 (0 or 1), max_replay_steps;
  // an unknown name is refused.
  RowGroup(const c10::intrusive_ptr<RowSourceHolder>& holder, const std::string& kind, const FloatDict& options);
  ~RowGroup() override;

  int64_t handle() const { return handle_; }
  // Learning rate and step (from 1) of the updates that follow.
  void set_step(double lr, int64_t step);
  // Where absent rows replay their L2: the learning rates so far, as first clocks, the rates from there on, and shifts (RateRun).
  std::tuple<IntList, std::vector<double>, IntList> rates() const;
  void restore_rates(const IntList& first_clocks, const std::vector<double>& rates, const IntList& shifts);
  // All rows are as at the end of this step now, because they were loaded.
  void rebase(int64_t last_step);
  // Brings payloads of a table ([n, payload_bytes] uint8) to the end of the last step, in place.
  void catch_up(int64_t table, const at::Tensor& payloads);
  // Deferred: backward keeps summed gradients here until take_pending.
  void set_deferred(bool is_deferred);
  int64_t num_pending() const;
  // All pending gradients merged in the order of their backward calls; none are pending afterwards.
  GradientTensors take_pending();
  // The merge bookkeeping of a table, as in TableGroup; `tracker` counts from 0.
  void track(int64_t table, int64_t tracker, const StringList& fields);
  void set_tracking(bool is_tracking);
  at::Tensor touched_rows(int64_t table, int64_t tracker);
  void clear_touched(int64_t table, int64_t tracker);
  void detach_touched(int64_t table, int64_t tracker);
  int64_t base_bytes() const;
  void flush();
  std::vector<FloatDict> counters() const;

 private:
  std::shared_ptr<GroupState> state_;
  int64_t handle_ = 0;
};

// Throws TypeError or ValueError unless the tensor is contiguous, of this type and, where size >= 0, of this many elements.
void check_tensor(const at::Tensor& tensor, const char* name, at::ScalarType dtype, int64_t size);

RowGradients row_gradients(const GradientTensors& tensors);
GradientTensors merge_gradient_tensors(const std::vector<GradientTensors>& parts, const IntList& table_dims);

}  // namespace kstep
