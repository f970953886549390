// Checks of arguments that the ops of merge rounds share (merge_ops.cpp, merge_message_ops.cpp).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "compute/merge_reduce.h"
#include "compute/merge_rows.h"
#include "ops/row_group.h"

namespace kstep {

TrackedTable checked_tracked(const GroupState& state, int64_t table, int64_t tracker);
MergeForm checked_form(int64_t form);
// Whether rows are int32; else they are int64.
bool checked_row_type(const at::Tensor& rows);
// Ascending rows of a table as the sources take them; `wide` holds them where they come as int32.
const std::uint64_t* checked_rows(const TableSpec& table, const at::Tensor& rows, std::vector<std::uint64_t>* wide);
const std::uint64_t* checked_rows(const TableSpec& table, const void* rows, std::size_t num_rows, bool is_int32,
                                  std::vector<std::uint64_t>* wide);
// Throws unless every row of a part was touched at least once.
void check_counts(const MergePart& part);
// The step that corrects the bias of a frozen v_hat: `step`, or with 0 the one that was set last.
std::uint64_t bias_step(const GroupState& state, int64_t step);

}  // namespace kstep
