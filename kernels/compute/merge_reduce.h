// The owner's part of a merge round: one change per row out of the contributions of all replicas.
//
// Rows are merged from ascending lists; each row's sum belongs to one task and runs in the order of the replicas.
// Formulas: docs/numerics.md, "Merge rounds". Ownership: the caller's arrays. Threads: pure functions.
#pragma once

#include <cstdint>
#include <vector>

#include "common/status.h"
#include "compute/wire.h"

namespace kstep {

// How the steps of several replicas add up.
enum class MergePolicy : int { Union = 0, Touched = 1, Mean = 2 };

// What one replica sent.
struct MergePart {
  const void* rows = nullptr;    // [num_rows] int64 or int32, strictly ascending
  const void* counts = nullptr;  // [num_rows] of count_bytes each
  std::uint32_t count_bytes = 0;  // 1, 2 or 4; 0: every row counts once
  std::vector<WireRows> values;  // per field
  std::size_t num_rows = 0;

  std::int32_t count(std::size_t index) const;
};

// Which contributions belong to which merged row.
struct MergePlan {
  struct Entry {
    std::uint32_t part, index;
  };
  std::vector<Entry> entries;              // row after row, the replicas of a row in their order
  std::vector<std::size_t> entry_begin;    // [U + 1]
  std::size_t num_rows() const { return entry_begin.size() - 1; }
};

// Fails with InvalidArgument on rows that do not ascend.
Status plan_merge(const std::vector<MergePart>& parts, bool rows_are_int32, MergePlan* plan);

// The merged rows, in the type of the parts' rows: [U].
void write_merged_rows(const std::vector<MergePart>& parts, const MergePlan& plan, bool rows_are_int32, void* rows);

struct MergeRule {
  MergePolicy policy = MergePolicy::Union;
  std::int64_t num_steps = 1, num_replicas = 1;
  std::vector<bool> is_averaged;  // per field: averaged by counts (moments in renewed form) instead of scaled by the policy
};

// u_real: [U] or null; values: per field, packed.
void reduce_parts(const std::vector<MergePart>& parts, const MergePlan& plan, bool rows_are_int32, const MergeRule& rule,
                  std::size_t dim, int num_threads, float* u_real, const std::vector<WireTarget>& values);

}  // namespace kstep
