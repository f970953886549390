// The ops of merge rounds: schemas, argument checks and dispatch, beside kstep_ops.cpp; `torchrec_kstep/ops/merge.py` wraps them.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "compute/merge_reduce.h"
#include "compute/merge_rows.h"
#include "compute/wire.h"
#include "ops/buffer_pool.h"
#include "ops/merge_arguments.h"
#include "ops/row_group.h"

namespace kstep {
namespace {

using at::Tensor;

std::tuple<Tensor, Tensor> merge_collect(int64_t group, int64_t table, int64_t tracker, const Tensor& rows, int64_t form,
                                         int64_t num_fields, int64_t dim) {
  const std::shared_ptr<GroupState> state = find_group(group);
  std::lock_guard<std::mutex> lock(state->mutex);
  const TrackedTable at = checked_tracked(*state, table, tracker);
  const TableSpec& spec = state->tables->tables()[at.table];
  const auto tracked = static_cast<int64_t>(state->tables->tracker(at.table, at.tracker).spans().size());
  TORCH_CHECK_VALUE(tracked > 0, "table '", spec.name, "': tracker ", tracker, " keeps no bases: call track before the first update");
  TORCH_CHECK_VALUE(num_fields == tracked && dim == spec.dim, "table '", spec.name, "' has ", tracked, " tracked fields of dim ", spec.dim,
                    ", not ", num_fields, " of dim ", dim);
  std::vector<std::uint64_t> wide;
  const std::uint64_t* row_ids = checked_rows(spec, rows, &wide);
  Tensor counts = at::empty({rows.numel()}, at::kInt);
  Tensor values = empty_contributions({num_fields, rows.numel(), dim});
  check(collect_rows(at, row_ids, static_cast<std::size_t>(rows.numel()), checked_form(form), at::get_num_threads(),
                     counts.mutable_data_ptr<int32_t>(), values.mutable_data_ptr<float>()));
  return {counts, values};
}

MergePart checked_part(const Tensor& rows, const Tensor& counts, at::TensorList values, at::ScalarType row_type, int64_t dim) {
  TORCH_CHECK_TYPE(rows.scalar_type() == row_type, "rows are ", rows.scalar_type(), " and ", row_type, ", expected one type");
  (void)checked_row_type(rows);
  check_tensor(counts, "counts", at::kInt, rows.numel());
  TORCH_CHECK_VALUE(rows.numel() <= INT32_MAX, rows.numel(), " rows in one part, expected fewer than 2^31");
  MergePart part;
  part.rows = rows.const_data_ptr();
  part.counts = counts.const_data_ptr<int32_t>();
  part.count_bytes = sizeof(int32_t);
  part.num_rows = static_cast<std::size_t>(rows.numel());
  check_counts(part);
  for (const Tensor& value : values) {
    check_tensor(value, "values", at::kFloat, rows.numel() * dim);
    part.values.push_back({reinterpret_cast<const std::uint8_t*>(value.const_data_ptr<float>()), Wire::Fp32});
  }
  return part;
}

std::tuple<Tensor, Tensor, Tensor> merge_reduce(at::TensorList rows, at::TensorList counts, at::TensorList values,
                                                const c10::List<bool>& is_averaged, int64_t policy, int64_t num_steps,
                                                int64_t num_replicas) {
  const std::size_t num_parts = rows.size(), num_fields = is_averaged.size();
  TORCH_CHECK_VALUE(num_parts >= 1 && counts.size() == num_parts && num_fields >= 1 && values.size() == num_parts * num_fields,
                    "every list must have one entry per replica, values one per replica and field");
  TORCH_CHECK_VALUE(policy >= 0 && policy <= 2, "policy ", policy, ", expected 0 (union), 1 (touched) or 2 (mean)");
  TORCH_CHECK_VALUE(num_steps >= 1 && num_replicas >= static_cast<int64_t>(num_parts), "num_steps ", num_steps, ", num_replicas ",
                    num_replicas, ", expected at least 1 and the ", num_parts, " parts");
  TORCH_CHECK_VALUE(values[0].dim() == 2, "values are ", values[0].sizes(), ", expected [n, dim]");
  const int64_t dim = values[0].size(1);
  TORCH_CHECK_VALUE(dim >= 1 && dim <= kMaxDim, "dim ", dim, ", expected 1 to ", kMaxDim);
  std::vector<MergePart> parts;
  for (std::size_t p = 0; p < num_parts; ++p) {
    parts.push_back(checked_part(rows[p], counts[p], values.slice(p * num_fields, num_fields), rows[0].scalar_type(), dim));
  }
  MergePlan plan;
  check(plan_merge(parts, rows[0].scalar_type() == at::kInt, &plan));
  const auto num_rows = static_cast<int64_t>(plan.num_rows());
  Tensor merged_rows = at::empty({num_rows}, rows[0].scalar_type());
  Tensor u_real = at::empty({num_rows}, at::kFloat);
  Tensor merged = empty_output({static_cast<int64_t>(num_fields), num_rows, dim});
  const MergeRule rule{static_cast<MergePolicy>(policy), num_steps, num_replicas, std::vector<bool>(is_averaged.begin(), is_averaged.end())};
  std::vector<WireTarget> targets;
  for (int64_t f = 0; f < static_cast<int64_t>(num_fields); ++f) {
    targets.push_back({reinterpret_cast<std::uint8_t*>(merged.mutable_data_ptr<float>() + f * num_rows * dim), Wire::Fp32, 0});
  }
  reduce_parts(parts, plan, rows[0].scalar_type() == at::kInt, rule, static_cast<std::size_t>(dim), at::get_num_threads(),
               u_real.mutable_data_ptr<float>(), targets);
  write_merged_rows(parts, plan, rows[0].scalar_type() == at::kInt, merged_rows.mutable_data_ptr());
  return {merged_rows, u_real, merged};
}

int64_t merge_apply(int64_t group, int64_t table, int64_t tracker, const Tensor& rows, const Tensor& u_real, at::TensorList values,
                    int64_t form, int64_t step) {
  const std::shared_ptr<GroupState> state = find_group(group);
  std::lock_guard<std::mutex> lock(state->mutex);
  const TrackedTable at = checked_tracked(*state, table, tracker);
  const TableSpec& spec = state->tables->tables()[at.table];
  const std::size_t tracked = state->tables->tracker(at.table, at.tracker).spans().size();
  TORCH_CHECK_VALUE(tracked > 0, "table '", spec.name, "': tracker ", tracker, " keeps no bases: call track before the first update");
  TORCH_CHECK_VALUE(values.size() == tracked, "table '", spec.name, "' has ", tracked, " tracked fields, values of ", values.size());
  std::vector<std::uint64_t> wide;
  MergedRows merged;
  merged.rows = checked_rows(spec, rows, &wide);
  merged.num_rows = static_cast<std::size_t>(rows.numel());
  check_tensor(u_real, "u_real", at::kFloat, rows.numel());
  merged.u_real = u_real.const_data_ptr<float>();
  for (const Tensor& value : values) {
    check_tensor(value, "values", at::kFloat, rows.numel() * spec.dim);
    merged.values.push_back({reinterpret_cast<const std::uint8_t*>(value.const_data_ptr<float>()), Wire::Fp32});
  }
  ApplyResult result;
  check(apply_merged(at, merged, checked_form(form), bias_step(*state, step), at::get_num_threads(), &result));
  return result.num_rows_read;
}

Wire checked_wire(int64_t wire) {
  TORCH_CHECK_VALUE(wire == 1 || wire == 2, "wire ", wire, ", expected 1 (bf16) or 2 (int8); fp32 needs no packing");
  return static_cast<Wire>(wire);
}

Tensor wire_encode_op(const Tensor& values, int64_t wire, const Tensor& rows, int64_t salt) {
  check_tensor(values, "values", at::kFloat, -1);
  const bool rows_are_int32 = checked_row_type(rows);
  TORCH_CHECK_VALUE(values.dim() == 2 && values.size(0) == rows.numel(), "values are ", values.sizes(), ", expected [", rows.numel(),
                    ", dim]");
  const auto dim = static_cast<std::size_t>(values.size(1));
  Tensor encoded = at::empty({values.size(0), static_cast<int64_t>(wire_row_bytes(checked_wire(wire), dim))}, at::kByte);
  wire_encode(values.const_data_ptr<float>(), static_cast<std::size_t>(values.size(0)), dim, checked_wire(wire), rows.const_data_ptr(),
              rows_are_int32, static_cast<std::uint64_t>(salt), at::get_num_threads(), encoded.mutable_data_ptr<uint8_t>());
  return encoded;
}

Tensor wire_decode_op(const Tensor& encoded, int64_t wire, int64_t dim) {
  check_tensor(encoded, "encoded", at::kByte, -1);
  TORCH_CHECK_VALUE(dim >= 1 && encoded.dim() == 2 &&
                        encoded.size(1) == static_cast<int64_t>(wire_row_bytes(checked_wire(wire), static_cast<std::size_t>(dim))),
                    "encoded is ", encoded.sizes(), ", which are not rows of ", dim, " values in this format");
  Tensor values = empty_output({encoded.size(0), dim});
  wire_decode(encoded.const_data_ptr<uint8_t>(), static_cast<std::size_t>(encoded.size(0)), static_cast<std::size_t>(dim), checked_wire(wire),
              at::get_num_threads(), values.mutable_data_ptr<float>());
  return values;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(kstep, m) {
  m.def(
      "merge_collect(int group, int table, int tracker, Tensor rows, int form, int num_fields, int dim) -> (Tensor counts, Tensor values)");
  m.def(
      "merge_reduce(Tensor[] rows, Tensor[] counts, Tensor[] values, bool[] is_averaged, int policy, int num_steps, int num_replicas) -> "
      "(Tensor rows, Tensor u_real, Tensor values)");
  m.def("merge_apply(int group, int table, int tracker, Tensor rows, Tensor u_real, Tensor[] values, int form, int step) -> int");
  m.def("wire_encode(Tensor values, int wire, Tensor rows, int salt) -> Tensor");
  m.def("wire_decode(Tensor encoded, int wire, int dim) -> Tensor");
}

TORCH_LIBRARY_IMPL(kstep, CPU, m) {
  m.impl("merge_collect", &merge_collect);
  m.impl("merge_reduce", &merge_reduce);
  m.impl("merge_apply", &merge_apply);
  m.impl("wire_encode", &wire_encode_op);
  m.impl("wire_decode", &wire_decode_op);
}

}  // namespace kstep
