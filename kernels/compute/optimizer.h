// OptimizerSpec: how a row is updated, and the constants that the row kernels need for it.
//
// Formulas (docs/numerics.md; float32 throughout, each operation rounded on its own, no FMA). g is the row's summed
// gradient, taken in this order:
//   L2        g += l2 * w               (rows of the batch; those absent from it stand still, or replay it: below)
//   clip      t = r * count * max(||w||, r * sqrt(dim) * zeta);  g *= t / ||g|| if ||g|| > t       (CowClip)
//   SGD       w -= lr * g
//   Adam      m = b1 * m + (1 - b1) * g;  v = b2 * v + ((1 - b2) * g) * g
//             w -= (lr / (1 - b1^t)) * m / (sqrt(v / (1 - b2^t)) + eps)       (lazy: touched rows only)
//             t is the group's step (global) or the number of times this row was updated (row), counted from 1
//             frozen: max(v_hat, v / (1 - b2^t)) in place of v / (1 - b2^t); v_hat is set by merge rounds, 0 before the first
//   Adagrad   sum += mean(g^2);  w -= (lr / (sqrt(sum) + eps)) * g           (row-wise: one sum per row)
//   Replay    a row that was absent in steps a..b makes, before it is read or updated again, the updates of these steps with
//             g = l2 * w, the learning rate of each step and no clip; after each, weights below 2^-63 and moments below 2^-126
//             become 0, so that a row that has decayed ends at zero instead of among denormal numbers. t counts these updates too.
// Sums over columns (norms, mean) run in 16 lanes, column j in lane j % 16, then a tree: the same bits at every vector
// width.
// Ownership: plain values. Threads: immutable after make().
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "common/schema.h"
#include "common/status.h"
#include "compute/touch_sink.h"

namespace kstep {

enum class OptimizerKind : int { None = 0, Sgd = 1, Adam = 2, RowwiseAdagrad = 3 };
enum class BiasCorrection : int { Global = 0, Row = 1 };

struct OptimizerSpec {
  OptimizerKind kind = OptimizerKind::None;  // None: rows are only read
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8;
  double l2 = 0.0;
  bool replays_l2 = false;             // absent rows decay too: field "last_step" says which steps a row has seen
  std::uint32_t max_replay_steps = 0;  // a row stands still after so many steps of absence; 0: never
  BiasCorrection bias_correction = BiasCorrection::Global;
  bool step_per_moment = false;  // Row: v counts its updates apart from m
  bool is_frozen = false;        // the denominator is at least v_hat, which only merge rounds change
  bool is_amsgrad = false;       // frozen: v_hat never falls
  bool has_clip = false;
  double clip_ratio = 1.0;   // r
  double clip_zeta = 1e-5;   // zeta
  std::vector<std::size_t> unclipped;  // positions of the tables that the clip leaves alone
};

// 1 / (1 - beta^step), step >= 1.
double inverse_bias(double beta, std::uint64_t step);

// inverse_bias as float32 for step 0, 1, 2, ... up to where it becomes 1.0f, at most kMaxSteps entries (entry 0 unused).
struct BiasTable {
  static constexpr std::size_t kMaxSteps = 1u << 20;
  double beta = 0.0;
  std::vector<float> inverse;

  explicit BiasTable(double b);
};

// Byte offsets of the fields inside a payload; RecordSchema::kNoField where the table has no such field.
struct RowLayout {
  std::uint32_t dim = 0;
  std::uint32_t payload_bytes = 0;
  std::uint32_t m = 0, v = 0, step = 0, sum = 0;
  std::uint32_t step_v = 0, v_hat = 0;
  std::uint32_t last_step = 0;               // the clock (RateHistory) of the last update, replayed ones included
  std::uint32_t touches[kMaxTrackers] = {};  // per tracker: updates since the row's touches were last cleared
  std::uint32_t base = 0;                    // the weights just before the first of those of tracker 0

  // Fails with InvalidArgument, naming table and field, if the schema lacks a field that `spec` needs or has it in
  // another type or width.
  static Status make(const TableSpec& table, const OptimizerSpec& spec, RowLayout* out);
};

// From `first_clock` on a group had this learning rate, and its step was clock + shift.
struct RateRun {
  std::int32_t first_clock = 0;
  float lr = 0.0f;
  std::int32_t shift = 0;
};

// The learning rate of every step so far, as runs of equal ones: a constant rate takes one entry. Steps are told by a clock that
// goes on where a group's step does not: rows that are loaded from an earlier or later step stay comparable with those that
// were equal already and were not written.
class RateHistory {
 public:
  // Rate and shift from `clock` on. What was known of later steps is forgotten.
  void set(std::int32_t clock, float lr, std::int32_t shift);
  // REQUIRES: first clocks strictly ascending.
  void restore(std::vector<RateRun> runs) { runs_ = std::move(runs); }
  // Ascending. The first also stands for the steps before it.
  const std::vector<RateRun>& runs() const { return runs_; }

 private:
  std::vector<RateRun> runs_;
};

// What one update of one table needs.
struct UpdateParams {
  OptimizerKind kind = OptimizerKind::None;
  RowLayout layout;
  float lr = 0.0f, beta1 = 0.0f, one_minus_beta1 = 0.0f, beta2 = 0.0f, one_minus_beta2 = 0.0f, eps = 0.0f, l2 = 0.0f;
  float inverse_bias1 = 1.0f, inverse_bias2 = 1.0f;  // at the group's step
  // BiasCorrection::Row: inverse_bias by step (BiasTable), and its betas for steps beyond the tables.
  const float* row_bias1 = nullptr;
  const float* row_bias2 = nullptr;
  std::uint32_t row_bias1_size = 0, row_bias2_size = 0;
  double row_beta1 = 0.0, row_beta2 = 0.0;
  bool has_clip = false;
  float clip_ratio = 1.0f, clip_floor = 0.0f;  // r, and r * sqrt(dim) * zeta
  std::uint64_t* num_clipped = nullptr;        // counts rows whose gradient was scaled down; several threads add to it
  const TouchSink* sinks = nullptr;  // one per tracker of the table
  std::uint32_t num_sinks = 0;
};

// Name of the counter field of a tracker: "touches", "touches_1", "touches_2".
std::string touches_field(std::size_t tracker);

}  // namespace kstep
