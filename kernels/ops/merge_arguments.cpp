#include "ops/merge_arguments.h"

#include <algorithm>

namespace kstep {

TrackedTable checked_tracked(const GroupState& state, int64_t table, int64_t tracker) {
  const std::uint32_t t = checked_table(state, table);
  return {state.tables.get(), t, checked_tracker(state, t, tracker)};
}

MergeForm checked_form(int64_t form) {
  TORCH_CHECK_VALUE(form == 0 || form == 1, "form ", form, ", expected 0 (renew) or 1 (delta)");
  return static_cast<MergeForm>(form);
}

bool checked_row_type(const at::Tensor& rows) {
  TORCH_CHECK_TYPE(rows.scalar_type() == at::kLong || rows.scalar_type() == at::kInt, "rows are ", rows.scalar_type(),
                   ", expected int64 or int32");
  TORCH_CHECK_VALUE(rows.is_contiguous(), "rows must be contiguous");
  return rows.scalar_type() == at::kInt;
}

const std::uint64_t* checked_rows(const TableSpec& table, const at::Tensor& rows, std::vector<std::uint64_t>* wide) {
  const bool is_int32 = checked_row_type(rows);
  return checked_rows(table, rows.const_data_ptr(), static_cast<std::size_t>(rows.numel()), is_int32, wide);
}

const std::uint64_t* checked_rows(const TableSpec& table, const void* rows, std::size_t num_rows, bool is_int32,
                                  std::vector<std::uint64_t>* wide) {
  if (is_int32) wide->resize(num_rows);
  int64_t last = -1;
  for (std::size_t i = 0; i < num_rows; ++i) {
    const int64_t row = is_int32 ? static_cast<const int32_t*>(rows)[i] : static_cast<const int64_t*>(rows)[i];
    TORCH_CHECK_VALUE(row >= 0 && row < static_cast<int64_t>(table.num_rows), "row ", row, " is outside table '", table.name, "' of ",
                      table.num_rows, " rows");
    TORCH_CHECK_VALUE(last < row, "rows must be strictly ascending; rows[", i, "] is ", row);
    last = row;
    if (is_int32) (*wide)[i] = static_cast<std::uint64_t>(row);
  }
  return is_int32 ? wide->data() : static_cast<const std::uint64_t*>(rows);  // none is negative
}

void check_counts(const MergePart& part) {
  for (std::size_t i = 0; i < part.num_rows; ++i) {
    TORCH_CHECK_VALUE(part.count(i) >= 1, "counts[", i, "] is ", part.count(i), ": a row that was sent was touched at least once");
  }
}

std::uint64_t bias_step(const GroupState& state, int64_t step) {
  return step > 0 ? static_cast<std::uint64_t>(step) : std::max<std::uint64_t>(state.step.step, 1);
}

}  // namespace kstep
