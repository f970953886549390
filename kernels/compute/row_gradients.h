// Adding up summed row gradients of several micro-batches or replicas.
//
// For each row the gradients are added in the order in which the parts are given, float32; counts are added as integers.
// Ownership: the caller's arrays. Threads: pure function on its outputs.
#pragma once

#include <vector>

#include "compute/table_group.h"

namespace kstep {

// Where the merged gradients go: room for the sum of all parts' rows.
struct MergedGradients {
  std::int64_t* unique_rows = nullptr;
  std::int64_t* table_offsets = nullptr;  // [num_tables + 1]
  std::int32_t* counts = nullptr;
  float* grads = nullptr;
};

// Number of distinct rows per table over all parts, as table offsets into the result: [num_tables + 1].
void merged_table_offsets(const std::vector<RowGradients>& parts, std::size_t num_tables, int num_threads,
                          std::int64_t* table_offsets);

// Fills `out`; out.table_offsets must come from merged_table_offsets.
void merge_row_gradients(const std::vector<RowGradients>& parts, const std::int64_t* table_dims, std::size_t num_tables,
                         int num_threads, const MergedGradients& out);

}  // namespace kstep
