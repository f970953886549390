// TableGroup: tables that share one RowSource and one optimizer, and all that a training step does with them.
//
// A step: dedup (dedup.h) -> forward -> backward. Backward either updates the rows at once (`reduce_update`, fused mode) or
// leaves one summed gradient per row (`reduce`), which `apply` turns into the same update later (deferred mode). Both run
// the same two inner functions on the same numbers, so their bits are equal.
// Each unique row belongs to one task, which sums the row's gradients in ascending position: no atomics, and results that
// do not depend on the number of threads.
// Where absent rows replay their L2 (optimizer.h), lookups and reads show every row as it is at the end of the last step, in a
// copy where it missed some, and leave no trace; updates and `write_field` bring the row itself there first.
//
// Ownership: owns its RowSource and its scratch. Threads: one call at a time (the op unit locks).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "compute/optimizer.h"
#include "compute/row_kernels.h"
#include "compute/touch_tracker.h"
#include "tier/huge_buffer.h"
#include "tier/row_source.h"

namespace kstep {

enum class Pooling : int { Sum = 0, Mean = 1 };

// One batch after dedup: the arrays of DedupResult plus how bags and features are laid out.
struct Lookup {
  std::size_t num_ids = 0, num_features = 0, batch_size = 0;
  const std::int64_t* offsets = nullptr;           // [num_features * batch_size + 1]
  const std::int64_t* table_of_feature = nullptr;  // [num_features]
  const std::int64_t* unique_rows = nullptr;       // [U]
  const std::int64_t* table_offsets = nullptr;     // [num_tables + 1]
  const std::int32_t* row_offsets = nullptr;       // [U + 1]
  const std::int32_t* positions = nullptr;
  const std::int32_t* inverse = nullptr;           // [num_ids]
};

// The gradient that reaches a lookup. Pooled: one row per bag, features side by side. Sequence: one row per position,
// features one after the other.
struct Gradient {
  const float* data = nullptr;
  bool is_pooled = true;
  std::size_t stride = 0;          // floats between two bags (pooled)
  Pooling pooling = Pooling::Sum;  // pooled
  const float* weights = nullptr;  // [num_ids] or null (pooled)
};

// Summed gradients of unique rows, tables one after the other.
struct RowGradients {
  const std::int64_t* unique_rows = nullptr;    // [U], strictly ascending inside a table
  const std::int64_t* table_offsets = nullptr;  // [num_tables + 1]
  const std::int32_t* counts = nullptr;         // [U] occurrences in the batch
  const float* grads = nullptr;                 // row u of table t has dim(t) floats
};

// The moving part of the optimizer: set before each update.
struct StepParams {
  double lr = 0.0;
  std::uint64_t step = 0;  // 1 in the first update; used by BiasCorrection::Global
};

class TableGroup {
 public:
  static Status make(std::unique_ptr<RowSource> source, const OptimizerSpec& spec, std::unique_ptr<TableGroup>* out);

  RowSource& source() { return *source_; }
  const std::vector<TableSpec>& tables() const { return source_->tables(); }
  const OptimizerSpec& spec() const { return spec_; }
  const RowLayout& layout(std::size_t table) const { return layouts_[table]; }
  // Trackers of a table: as many as its record has fields "touches", "touches_1", "touches_2".
  std::size_t num_trackers(std::size_t table) const { return trackers_[table].size(); }
  TouchTracker& tracker(std::size_t table, std::size_t tracker) { return trackers_[table][tracker]; }
  std::size_t row_gradient_floats(const std::int64_t* table_offsets) const;

  // The step of the updates that follow, which lookups and reads come before: rows are shown at the end of the one before it.
  // Its rate is kept for rows that are absent from it.
  void set_step(const StepParams& step);
  const RateHistory& rates() const { return rates_; }
  // Goes on with the clock and rates of a snapshot whose rows these are. REQUIRES: at least one run.
  void restore_rates(std::vector<RateRun> runs);
  // Says that all rows are now as at the end of another step: they were loaded. The clock goes on.
  void rebase(std::uint64_t last_step);
  // Brings `num_rows` payloads of a table, one after the other, to the end of the last step.
  void replay_payloads(std::uint32_t table, std::byte* payloads, std::size_t num_rows, int num_threads);

  // out: bag b has the columns of all features side by side, `out_stride` floats apart.
  Status pooled_forward(const Lookup& lookup, Pooling pooling, const float* weights, float* out, std::size_t out_stride,
                        int num_threads);
  // out: [floats of all positions], feature after feature.
  Status sequence_forward(const Lookup& lookup, float* out, int num_threads);
  // Gradient of the per-sample weights, [num_ids]; reads the rows as they are now, so it comes before an update.
  Status weight_grads(const Lookup& lookup, const Gradient& gradient, float* out, int num_threads);

  Status reduce(const Lookup& lookup, const Gradient& gradient, float* row_grads, std::int32_t* counts, int num_threads);
  Status reduce_update(const Lookup& lookup, const Gradient& gradient, const StepParams& step, int num_threads);
  // scales: [U] factor of each row's gradient in place of the clip, or null.
  Status apply(const RowGradients& gradients, const StepParams& step, int num_threads, const float* scales = nullptr);
  // Sums of squares over the columns of each row: [U] of its gradient (L2 included) and of its weights.
  Status row_norms(const RowGradients& gradients, float* grad_squares, float* weight_squares, int num_threads);

  // Copies one field of rows (strictly ascending) to or from `values`, [num_rows * width * dtype bytes].
  Status read_field(std::uint32_t table, const std::uint64_t* rows, std::size_t num_rows, const std::string& field,
                    std::byte* values, int num_threads = 1);
  Status write_field(std::uint32_t table, const std::uint64_t* rows, std::size_t num_rows, const std::string& field,
                     const std::byte* values, int num_threads = 1);

  // Updates of rows of a table, and how many of them the clip scaled down, since the group was made.
  std::uint64_t num_updated(std::size_t table) const { return num_updated_[table]; }
  std::uint64_t num_clipped(std::size_t table) const { return num_clipped_[table]; }
  bool has_clip(std::size_t table) const;

  // Whether updates count touches, as they do at first. Switching off needs a group without touched rows.
  Status set_tracking(bool is_tracking);
  // Keeps bases of float32 fields at the first touch of each row from now on; no row may be touched yet.
  Status track(std::uint32_t table, std::size_t tracker, const std::vector<std::string>& fields);
  // Rows updated since `clear_touched` or `detach_touched`, ascending.
  const std::vector<std::uint64_t>& touched_rows(std::uint32_t table, std::size_t tracker);
  // Sets the counters of those rows to 0 and forgets the rows; after `detach_touched`: forgets the detached ones.
  Status clear_touched(std::uint32_t table, std::size_t tracker);
  // Sets the counters of those rows to 0 and the rows apart, with their bases, until `clear_touched`.
  Status detach_touched(std::uint32_t table, std::size_t tracker);

 private:
  struct RowRange {
    std::uint32_t table;
    std::size_t begin, end;
  };
  class Pins;

  TableGroup(std::unique_ptr<RowSource> source, const OptimizerSpec& spec);
  Status check_can_update() const;
  std::size_t dim_of_feature(const Lookup& lookup, std::size_t feature) const;
  UpdateParams update_params(std::size_t table, const StepParams& step);
  void count_updates(const std::int64_t* table_offsets);
  void map_gradient(const Lookup& lookup, const Gradient& gradient, int num_threads);
  void map_bag(const Lookup& lookup, const Gradient& gradient, std::size_t feature, std::size_t bag);
  ReduceArgs reduce_args(const Lookup& lookup, const Gradient& gradient);
  void cut_row_ranges(const std::int64_t* table_offsets);
  void place_features(const Lookup& lookup, bool is_pooled);
  Status prepare_sinks(const std::int64_t* table_offsets);
  Status zero_counters(std::uint32_t table, TouchTracker* tracker);
  std::int32_t clock_of(std::uint64_t step) const { return static_cast<std::int32_t>(static_cast<std::int64_t>(step) - shift_); }
  std::int32_t last_clock() const { return present_.step == 0 ? 0 : clock_of(present_.step - 1); }
  ReplayArgs replay_args(std::byte* const* payload, std::int32_t until, std::int32_t mark) const;
  // For a range of pinned rows that is about to be updated in `step`; `shown` as `find_shown` returns it.
  void replay_before_update(const RowRange& range, const UpdateParams& params, const StepParams& step, const std::byte* const* shown);
  void replay_pinned(std::uint32_t table, std::size_t num_rows, int num_threads);
  Status show_present(const std::int64_t* unique_rows, const std::int64_t* table_offsets, int num_threads);
  void copy_missed(std::uint32_t table, std::size_t row_begin, std::size_t row_end, std::byte* copies);
  const std::byte* const* find_shown(const std::int64_t* unique_rows, const std::int64_t* table_offsets) const;

  const std::unique_ptr<RowSource> source_;
  const OptimizerSpec spec_;
  const BiasTable bias1_, bias2_;
  std::vector<RowLayout> layouts_;
  std::vector<std::uint64_t> num_updated_, num_clipped_;  // [num_tables]
  std::vector<std::vector<TouchTracker>> trackers_;  // per table
  bool is_tracking_ = true;
  StepParams present_;  // step 0: none was set
  RateHistory rates_;
  std::int32_t shift_ = 0;  // step - clock

  // Scratch; grows to the largest batch and stays.
  std::vector<std::byte*> payload_;          // [U]
  std::vector<PinTicket> tickets_;           // [num_tables]
  std::vector<RowRange> ranges_;
  std::vector<std::size_t> feature_begin_;   // pooled: first column; sequence: first float of a feature
  std::vector<std::ptrdiff_t> grad_begin_;   // deferred: float in row_grads at which row 0 of a table would lie
  std::vector<std::int64_t> grad_offsets_;   // [N]
  std::vector<float> scales_;                // [N]
  std::vector<TouchSink> sinks_;             // [num_tables * kMaxTrackers]
  // What `show_present` showed last. An update of the same rows that follows takes it over instead of replaying once more.
  struct Shown {
    bool is_valid = false;  // until a row or the step changes
    std::vector<std::int64_t> unique_rows, table_offsets;
    std::vector<std::byte*> copies;  // [U] payload of a row that had missed steps, else null
    HugeBuffer memory;
  };
  Shown shown_;
  std::vector<std::size_t> copy_begin_;  // bytes at which the copies of a range begin
};

}  // namespace kstep
