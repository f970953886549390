// The two ends of a merge round at a replica: what its touched rows contribute, and merged rows written back.
//
// Formulas: docs/numerics.md, "Merge rounds"; `torchrec_kstep/ops/reference_merge.py` computes the same bits.
// Ownership: works on a TableGroup and the caller's arrays. Threads: as TableGroup, one call at a time per group.
#pragma once

#include <vector>

#include "compute/table_group.h"
#include "compute/wire.h"

namespace kstep {

// How moments travel. Renew: the new information in an average over touches; Delta: the change.
enum class MergeForm : int { Renew = 0, Delta = 1 };

// One tracker of one table.
struct TrackedTable {
  TableGroup* group = nullptr;
  std::uint32_t table = 0;
  std::size_t tracker = 0;
};

// `rows` strictly ascending and touched in the running round. counts: [num_rows]; values: [fields, num_rows, dim], fields in
// the order in which the tracker keeps them.
Status collect_rows(const TrackedTable& at, const std::uint64_t* rows, std::size_t num_rows, MergeForm form, int num_threads,
                    std::int32_t* counts, float* values);

struct MergedRows {
  const std::uint64_t* rows = nullptr;  // strictly ascending
  std::size_t num_rows = 0;
  const float* u_real = nullptr;        // [num_rows] touches that each merged row stands for; null: 1
  std::vector<WireRows> values;         // per field
};

// What applying told.
struct ApplyResult {
  std::int64_t num_rows_read = 0;  // had to be read from SSD
  // Of every few rows that this replica had touched: sums of absolute differences of its weights to the merged ones, and to those of
  // the round before.
  double distance = 0.0, way = 0.0;
};

// Applies to the detached round if there is one, else to the running one. `step`: the optimizer's step that corrects the bias of
// a frozen v_hat (BiasCorrection::Global).
Status apply_merged(const TrackedTable& at, const MergedRows& merged, MergeForm form, std::uint64_t step, int num_threads,
                    ApplyResult* result);

}  // namespace kstep
