// The inner loops, compiled once per instruction set and chosen at run time.
//
// Every function works on a range and is called for disjoint ranges from several threads. All instruction sets give the
// same bits: each output element is computed by the same sequence of rounded operations, and sums over columns run in 16
// fixed lanes. Only the compute drivers (table_group.cpp) call these; arguments are checked before.
// Ownership: nothing is owned. Threads: pure functions on disjoint output ranges.
#pragma once

#include <cstddef>
#include <cstdint>

#include "compute/optimizer.h"

namespace kstep {

// Pooled forward of one feature. out[b] = (sum over the bag of weight_i * row_i) * (1 / size of the bag, if mean).
struct PooledArgs {
  std::byte* const* payload;     // [U]
  const std::int32_t* inverse;   // [N] row of each position, negative: ignored
  const float* weights;          // [N] or null
  const std::int64_t* offsets;   // [B + 1] of this feature
  float* out;                    // column 0 of this feature in bag 0
  std::size_t out_stride;        // floats between two bags
  std::uint32_t dim;
  bool is_mean;
  bool stream;                   // the output is too large to stay in the cache: write around it
};

// Sequence forward: out[i - first] = row_i, zeros for an ignored position.
struct GatherArgs {
  std::byte* const* payload;
  const std::int32_t* inverse;
  float* out;  // row of position 0
  std::uint32_t dim;
  bool stream;
};

// Gradient of each row of a table: g[u] = sum over its positions, ascending, of scale_i * grad_i.
struct ReduceArgs {
  std::byte* const* payload;          // [U]
  const std::int32_t* row_offsets;    // [U + 1]
  const std::int32_t* positions;      // [N]
  const std::int64_t* grad_offsets;   // [N] floats from `grad` to the gradient of each position
  const float* scales;                // [N] or null (all ones)
  const float* grad;
  float* row_grads;                   // row 0 of this table, as if its first row were row 0; deferred mode only
  const std::int64_t* unique_rows;    // [U]
};

// Update from row gradients that are already summed.
struct ApplyArgs {
  std::byte* const* payload;
  const float* row_grads;      // as in ReduceArgs
  const std::int32_t* counts;  // [U] occurrences of the row in the batch
  const std::int64_t* unique_rows;  // [U]
  const float* scales;              // [U] factor of each row's gradient, in place of the clip; or null
};

// The steps that rows missed (optimizer.h, "Replay").
struct ReplayArgs {
  std::byte* const* payload;
  const RateRun* runs;  // at least one, as in RateHistory
  std::size_t num_runs;
  std::int32_t until;      // clock of the step to whose end rows are brought
  std::int32_t mark;       // what `last_step` becomes where it is less: `until`, or the clock of the update that follows
  std::int32_t max_steps;  // 0: no bound
  // Adam: inverse_bias by step (BiasTable), and its betas for steps beyond the tables.
  const float* bias1;
  const float* bias2;
  std::uint32_t bias1_size, bias2_size;
  double beta1, beta2;
};

// What a clip needs to know of rows whose columns lie in several places: squares of this part, to be added up over the parts.
struct NormArgs {
  std::byte* const* payload;
  const float* row_grads;  // as in ReduceArgs
  float l2;
  float* grad_squares;     // [U] of the gradient, L2 included
  float* weight_squares;   // [U]
};

// Gradient of the per-sample weights of one feature: out_i = (1 / bag size, if mean) * <grad of the bag, row_i>.
struct WeightGradArgs {
  std::byte* const* payload;
  const std::int32_t* inverse;
  const std::int64_t* offsets;
  const float* grad;  // column 0 of this feature in bag 0
  std::size_t grad_stride;
  float* out;         // [N]
  std::uint32_t dim;
  bool is_mean;
};

struct RowKernels {
  const char* isa;
  void (*gather_pooled)(const PooledArgs&, std::size_t bag_begin, std::size_t bag_end);
  void (*gather_rows)(const GatherArgs&, std::size_t position_begin, std::size_t position_end);
  void (*reduce_rows)(const ReduceArgs&, std::uint32_t dim, std::size_t row_begin, std::size_t row_end);
  void (*reduce_update)(const ReduceArgs&, const UpdateParams&, std::size_t row_begin, std::size_t row_end);
  void (*apply_update)(const ApplyArgs&, const UpdateParams&, std::size_t row_begin, std::size_t row_end);
  void (*replay_rows)(const ReplayArgs&, const UpdateParams&, std::size_t row_begin, std::size_t row_end);
  void (*row_norms)(const NormArgs&, std::uint32_t dim, std::size_t row_begin, std::size_t row_end);
  void (*weight_grads)(const WeightGradArgs&, std::size_t bag_begin, std::size_t bag_end);
};

constexpr std::uint32_t kMaxDim = 2048;

// The kernels in use: the widest that the processor has, unless select_isa chose.
const RowKernels& row_kernels();

// Chooses "avx2", "avx512" or "auto" for the whole process; false if this processor or build lacks it. For tests and
// benchmarks; no other thread may be inside a kernel.
bool select_isa(const char* isa);

// Size of bag [begin, end) without ignored positions. Static, as everything the kernels call: an inline function would
// be shared between units built for different instruction sets.
static inline std::int64_t valid_in_bag(const std::int32_t* inverse, std::int64_t begin, std::int64_t end) {
  std::int64_t count = 0;
  for (std::int64_t i = begin; i < end; ++i) count += inverse[i] >= 0;
  return count;
}

}  // namespace kstep
