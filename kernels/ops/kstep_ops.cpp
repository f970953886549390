// TORCH_LIBRARY(kstep): schemas, argument checks and dispatch; no algorithms. The schemas below are the only place where
// signatures are written; `torchrec_kstep/ops` wraps each op under the same name and argument order.
#include <Python.h>
//
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "compute/dedup.h"
#include "compute/initial_values.h"
#include "ops/buffer_pool.h"
#include "ops/row_group.h"
#include "ops/tiered_source.h"
#include "tier/dram_rows.h"

namespace kstep {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// ---- dedup -----------------------------------------------------------------------------------------------------------

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> dedup_op(const Tensor& ids, const Tensor& offsets,
                                                                    at::IntArrayRef table_of_feature,
                                                                    at::IntArrayRef num_rows, int64_t out_of_range) {
  const auto num_features = static_cast<int64_t>(table_of_feature.size()), num_tables = static_cast<int64_t>(num_rows.size());
  TORCH_CHECK_TYPE(ids.scalar_type() == at::kLong || ids.scalar_type() == at::kInt, "ids are ", ids.scalar_type(),
                   ", expected int64 or int32");
  check_tensor(ids, "ids", ids.scalar_type(), -1);
  check_tensor(offsets, "offsets", at::kLong, -1);
  TORCH_CHECK_VALUE(num_features >= 1 && num_tables >= 1, "at least one feature and one table");
  TORCH_CHECK_VALUE(offsets.numel() >= 1 && (offsets.numel() - 1) % num_features == 0, "offsets have ", offsets.numel(),
                    " elements, expected ", num_features, " features x batch size + 1");
  TORCH_CHECK_VALUE(out_of_range >= 0 && out_of_range <= 2, "out_of_range ", out_of_range, ", expected 0, 1 or 2");
  for (int64_t table : table_of_feature) TORCH_CHECK_VALUE(table >= 0 && table < num_tables, "table ", table, " of ", num_tables);
  for (int64_t rows : num_rows) TORCH_CHECK_VALUE(rows >= 1, "a table with ", rows, " rows");

  const int64_t n = ids.numel();
  Tensor unique_rows = at::empty({n}, at::kLong), table_offsets = at::empty({num_tables + 1}, at::kLong);
  Tensor row_offsets = at::empty({n + 1}, at::kInt), positions = at::empty({n}, at::kInt), inverse = at::empty({n}, at::kInt);
  Tensor num_bad = at::empty({num_tables}, at::kLong);
  const Bags bags{ids.const_data_ptr(), ids.scalar_type() == at::kInt, static_cast<std::size_t>(n),
                  offsets.const_data_ptr<int64_t>(), static_cast<std::size_t>(num_features),
                  static_cast<std::size_t>((offsets.numel() - 1) / num_features)};
  const DedupResult result{unique_rows.mutable_data_ptr<int64_t>(), table_offsets.mutable_data_ptr<int64_t>(),
                           row_offsets.mutable_data_ptr<int32_t>(), positions.mutable_data_ptr<int32_t>(),
                           inverse.mutable_data_ptr<int32_t>(),     num_bad.mutable_data_ptr<int64_t>()};
  static thread_local DedupWorkspace workspace;
  check(dedup(bags, table_of_feature.data(), num_rows.data(), num_rows.size(), static_cast<OutOfRange>(out_of_range),
              at::get_num_threads(), &workspace, result));
  const int64_t num_unique = result.table_offsets[num_tables];
  return {unique_rows.narrow(0, 0, num_unique),    table_offsets, row_offsets.narrow(0, 0, num_unique + 1),
          positions.narrow(0, 0, result.row_offsets[num_unique]), inverse,       num_bad};
}

// ---- lookups ---------------------------------------------------------------------------------------------------------

void check_rows(const TableGroup& group, const Tensor& unique_rows, const Tensor& table_offsets) {
  const auto num_tables = static_cast<int64_t>(group.tables().size());
  check_tensor(unique_rows, "unique_rows", at::kLong, -1);
  check_tensor(table_offsets, "table_offsets", at::kLong, num_tables + 1);
  const auto* offsets = table_offsets.const_data_ptr<int64_t>();
  const auto* rows = unique_rows.const_data_ptr<int64_t>();
  TORCH_CHECK_VALUE(offsets[0] == 0 && offsets[num_tables] == unique_rows.numel(), "table_offsets must run from 0 to ",
                    unique_rows.numel());
  for (int64_t t = 0; t < num_tables; ++t) {
    const TableSpec& table = group.tables()[static_cast<std::size_t>(t)];
    TORCH_CHECK_VALUE(offsets[t] <= offsets[t + 1], "table_offsets decrease at table ", t);
    if (offsets[t] == offsets[t + 1]) continue;
    const int64_t first = rows[offsets[t]], last = rows[offsets[t + 1] - 1];
    TORCH_CHECK_VALUE(first >= 0 && last < static_cast<int64_t>(table.num_rows), "rows ", first, " to ", last,
                      " are outside table '", table.name, "' of ", table.num_rows, " rows");
  }
}

Lookup checked_lookup(const TableGroup& group, const Tensor& offsets, const Tensor& unique_rows, const Tensor& table_offsets,
                      const Tensor& row_offsets, const Tensor& positions, const Tensor& inverse,
                      at::IntArrayRef table_of_feature, at::IntArrayRef table_dims) {
  const auto num_features = static_cast<int64_t>(table_of_feature.size());
  check_rows(group, unique_rows, table_offsets);
  check_tensor(offsets, "offsets", at::kLong, -1);
  check_tensor(row_offsets, "row_offsets", at::kInt, unique_rows.numel() + 1);
  check_tensor(positions, "positions", at::kInt, -1);
  check_tensor(inverse, "inverse", at::kInt, -1);
  TORCH_CHECK_VALUE(num_features >= 1 && (offsets.numel() - 1) % num_features == 0, "offsets have ", offsets.numel(),
                    " elements, expected ", num_features, " features x batch size + 1");
  TORCH_CHECK_VALUE(positions.numel() <= inverse.numel() && offsets.const_data_ptr<int64_t>()[offsets.numel() - 1] == inverse.numel(),
                    "offsets, positions and inverse are of different batches");
  TORCH_CHECK_VALUE(table_dims.size() == group.tables().size(), table_dims.size(), " table_dims for ", group.tables().size(), " tables");
  for (std::size_t t = 0; t < table_dims.size(); ++t) {
    TORCH_CHECK_VALUE(table_dims[t] == group.tables()[t].dim, "table_dims[", t, "] is ", table_dims[t], ", the group has ",
                      group.tables()[t].dim);
  }
  for (int64_t table : table_of_feature) {
    TORCH_CHECK_VALUE(table >= 0 && table < static_cast<int64_t>(table_dims.size()), "table ", table, " of ", table_dims.size());
  }
  Lookup lookup;
  lookup.num_ids = static_cast<std::size_t>(inverse.numel());
  lookup.num_features = table_of_feature.size();
  lookup.batch_size = static_cast<std::size_t>((offsets.numel() - 1) / num_features);
  lookup.offsets = offsets.const_data_ptr<int64_t>();
  lookup.table_of_feature = table_of_feature.data();
  lookup.unique_rows = unique_rows.const_data_ptr<int64_t>();
  lookup.table_offsets = table_offsets.const_data_ptr<int64_t>();
  lookup.row_offsets = row_offsets.const_data_ptr<int32_t>();
  lookup.positions = positions.const_data_ptr<int32_t>();
  lookup.inverse = inverse.const_data_ptr<int32_t>();
  return lookup;
}

const float* checked_weights(const OptionalTensor& weights, std::size_t num_ids) {
  if (!weights.has_value()) return nullptr;
  check_tensor(*weights, "weights", at::kFloat, static_cast<int64_t>(num_ids));
  return weights->const_data_ptr<float>();
}

Pooling checked_pooling(int64_t pooling) {
  TORCH_CHECK_VALUE(pooling == 0 || pooling == 1, "pooling ", pooling, ", expected 0 (sum) or 1 (mean)");
  return static_cast<Pooling>(pooling);
}

int64_t total_columns(at::IntArrayRef table_of_feature, at::IntArrayRef table_dims) {
  int64_t columns = 0;
  for (int64_t table : table_of_feature) columns += table_dims[static_cast<std::size_t>(table)];
  return columns;
}

Tensor pooled_lookup(int64_t group, const Tensor& /*anchor*/, const OptionalTensor& weights, const Tensor& offsets,
                     const Tensor& unique_rows, const Tensor& table_offsets, const Tensor& row_offsets, const Tensor& positions,
                     const Tensor& inverse, at::IntArrayRef table_of_feature, at::IntArrayRef table_dims, int64_t pooling) {
  const std::shared_ptr<GroupState> state = find_group(group);
  std::lock_guard<std::mutex> lock(state->mutex);
  const Lookup lookup = checked_lookup(*state->tables, offsets, unique_rows, table_offsets, row_offsets, positions, inverse,
                                       table_of_feature, table_dims);
  const int64_t columns = total_columns(table_of_feature, table_dims);
  Tensor out = empty_output({static_cast<int64_t>(lookup.batch_size), columns});
  check(state->tables->pooled_forward(lookup, checked_pooling(pooling), checked_weights(weights, lookup.num_ids),
                                      out.mutable_data_ptr<float>(), static_cast<std::size_t>(columns), at::get_num_threads()));
  return out;
}

Tensor sequence_lookup(int64_t group, const Tensor& /*anchor*/, const Tensor& offsets, const Tensor& unique_rows,
                       const Tensor& table_offsets, const Tensor& row_offsets, const Tensor& positions, const Tensor& inverse,
                       at::IntArrayRef table_of_feature, at::IntArrayRef table_dims) {
  const std::shared_ptr<GroupState> state = find_group(group);
  std::lock_guard<std::mutex> lock(state->mutex);
  const Lookup lookup = checked_lookup(*state->tables, offsets, unique_rows, table_offsets, row_offsets, positions, inverse,
                                       table_of_feature, table_dims);
  int64_t num_floats = 0;
  for (std::size_t f = 0; f < lookup.num_features; ++f) {
    num_floats += (lookup.offsets[(f + 1) * lookup.batch_size] - lookup.offsets[f * lookup.batch_size]) *
                  table_dims[static_cast<std::size_t>(table_of_feature[f])];
  }
  Tensor out = empty_output({num_floats});
  check(state->tables->sequence_forward(lookup, out.mutable_data_ptr<float>(), at::get_num_threads()));
  return out;
}

// Fused: updates the rows. Deferred: keeps the summed gradients in the group.
void use_gradient(GroupState* state, const Lookup& lookup, const Gradient& gradient, const Tensor& unique_rows,
                  const Tensor& table_offsets) {
  if (!state->is_deferred) {
    check(state->tables->reduce_update(lookup, gradient, state->checked_step(), at::get_num_threads()));
    return;
  }
  Tensor counts = at::empty({unique_rows.numel()}, at::kInt);
  Tensor grads = empty_output({static_cast<int64_t>(state->tables->row_gradient_floats(lookup.table_offsets))});
  check(state->tables->reduce(lookup, gradient, grads.mutable_data_ptr<float>(), counts.mutable_data_ptr<int32_t>(),
                              at::get_num_threads()));
  state->pending.emplace_back(unique_rows, table_offsets, counts, grads);
}

Tensor pooled_backward(int64_t group, const Tensor& grad, const OptionalTensor& weights, const Tensor& offsets,
                       const Tensor& unique_rows, const Tensor& table_offsets, const Tensor& row_offsets,
                       const Tensor& positions, const Tensor& inverse, at::IntArrayRef table_of_feature,
                       at::IntArrayRef table_dims, int64_t pooling, bool needs_weight_grad) {
  const std::shared_ptr<GroupState> state = find_group(group);
  std::lock_guard<std::mutex> lock(state->mutex);
  const Lookup lookup = checked_lookup(*state->tables, offsets, unique_rows, table_offsets, row_offsets, positions, inverse,
                                       table_of_feature, table_dims);
  const int64_t columns = total_columns(table_of_feature, table_dims);
  TORCH_CHECK_TYPE(grad.scalar_type() == at::kFloat, "grad is ", grad.scalar_type(), ", expected Float");
  TORCH_CHECK_VALUE(grad.dim() == 2 && grad.size(0) == static_cast<int64_t>(lookup.batch_size) && grad.size(1) == columns,
                    "grad is ", grad.sizes(), ", expected [", lookup.batch_size, ", ", columns, "]");
  const Tensor dense = grad.stride(1) == 1 ? grad : grad.contiguous();  // bags may lie anywhere, columns side by side
  Gradient gradient;
  gradient.data = dense.const_data_ptr<float>();
  gradient.stride = static_cast<std::size_t>(dense.stride(0));
  gradient.pooling = checked_pooling(pooling);
  gradient.weights = checked_weights(weights, lookup.num_ids);
  Tensor weight_grad = at::empty({needs_weight_grad ? inverse.numel() : 0}, at::kFloat);
  if (needs_weight_grad) {
    check(state->tables->weight_grads(lookup, gradient, weight_grad.mutable_data_ptr<float>(), at::get_num_threads()));
  }
  use_gradient(state.get(), lookup, gradient, unique_rows, table_offsets);
  return weight_grad;
}

void sequence_backward(int64_t group, const Tensor& grad, const Tensor& offsets, const Tensor& unique_rows,
                       const Tensor& table_offsets, const Tensor& row_offsets, const Tensor& positions, const Tensor& inverse,
                       at::IntArrayRef table_of_feature, at::IntArrayRef table_dims) {
  const std::shared_ptr<GroupState> state = find_group(group);
  std::lock_guard<std::mutex> lock(state->mutex);
  const Lookup lookup = checked_lookup(*state->tables, offsets, unique_rows, table_offsets, row_offsets, positions, inverse,
                                       table_of_feature, table_dims);
  TORCH_CHECK_TYPE(grad.scalar_type() == at::kFloat, "grad is ", grad.scalar_type(), ", expected Float");
  const Tensor dense = grad.contiguous();
  Gradient gradient;
  gradient.data = dense.const_data_ptr<float>();
  gradient.is_pooled = false;
  use_gradient(state.get(), lookup, gradient, unique_rows, table_offsets);
}

// ---- summed gradients and single fields ------------------------------------------------------------------------------

void check_gradients(const GradientTensors& part, at::IntArrayRef table_dims) {
  const auto& [rows, table_offsets, counts, grads] = part;
  const auto num_tables = static_cast<int64_t>(table_dims.size());
  check_tensor(rows, "unique_rows", at::kLong, -1);
  check_tensor(table_offsets, "table_offsets", at::kLong, num_tables + 1);
  check_tensor(counts, "counts", at::kInt, rows.numel());
  const auto* offsets = table_offsets.const_data_ptr<int64_t>();
  TORCH_CHECK_VALUE(offsets[0] == 0 && offsets[num_tables] == rows.numel(), "table_offsets must run from 0 to ", rows.numel());
  int64_t num_floats = 0;
  for (int64_t t = 0; t < num_tables; ++t) {
    TORCH_CHECK_VALUE(offsets[t] <= offsets[t + 1], "table_offsets decrease at table ", t);
    num_floats += (offsets[t + 1] - offsets[t]) * table_dims[static_cast<std::size_t>(t)];
  }
  check_tensor(grads, "grads", at::kFloat, num_floats);
}

GradientTensors merge_row_gradients_op(at::TensorList unique_rows, at::TensorList table_offsets, at::TensorList counts,
                                       at::TensorList grads, at::IntArrayRef table_dims) {
  TORCH_CHECK_VALUE(unique_rows.size() == table_offsets.size() && counts.size() == grads.size() && counts.size() == unique_rows.size(),
                    "every list must have one entry per part");
  std::vector<GradientTensors> parts;
  for (std::size_t p = 0; p < grads.size(); ++p) {
    parts.emplace_back(unique_rows[p], table_offsets[p], counts[p], grads[p]);
    check_gradients(parts.back(), table_dims);
  }
  return merge_gradient_tensors(parts, table_dims.vec());
}

GradientTensors checked_gradients(const TableGroup& group, const Tensor& unique_rows, const Tensor& table_offsets, const Tensor& counts,
                                  const Tensor& grads) {
  IntList dims;
  for (const TableSpec& table : group.tables()) dims.push_back(table.dim);
  GradientTensors gradients{unique_rows, table_offsets, counts, grads};
  check_gradients(gradients, dims);
  check_rows(group, unique_rows, table_offsets);
  return gradients;
}

void apply_row_gradients(int64_t group, const Tensor& unique_rows, const Tensor& table_offsets, const Tensor& counts,
                         const Tensor& grads, const OptionalTensor& scales) {
  const std::shared_ptr<GroupState> state = find_group(group);
  std::lock_guard<std::mutex> lock(state->mutex);
  const GradientTensors gradients = checked_gradients(*state->tables, unique_rows, table_offsets, counts, grads);
  if (scales.has_value()) check_tensor(*scales, "scales", at::kFloat, unique_rows.numel());
  check(state->tables->apply(row_gradients(gradients), state->checked_step(), at::get_num_threads(),
                             scales.has_value() ? scales->const_data_ptr<float>() : nullptr));
}

std::tuple<Tensor, Tensor> row_norms(int64_t group, const Tensor& unique_rows, const Tensor& table_offsets, const Tensor& counts,
                                     const Tensor& grads) {
  const std::shared_ptr<GroupState> state = find_group(group);
  std::lock_guard<std::mutex> lock(state->mutex);
  const GradientTensors gradients = checked_gradients(*state->tables, unique_rows, table_offsets, counts, grads);
  Tensor grad_squares = at::empty({unique_rows.numel()}, at::kFloat), weight_squares = at::empty({unique_rows.numel()}, at::kFloat);
  check(state->tables->row_norms(row_gradients(gradients), grad_squares.mutable_data_ptr<float>(),
                                 weight_squares.mutable_data_ptr<float>(), at::get_num_threads()));
  return {grad_squares, weight_squares};
}

const std::uint64_t* checked_field_rows(const TableGroup& group, int64_t table, const Tensor& rows) {
  const auto num_tables = static_cast<int64_t>(group.tables().size());
  TORCH_CHECK_VALUE(table >= 0 && table < num_tables, "table ", table, " of a group of ", num_tables);
  check_tensor(rows, "rows", at::kLong, -1);
  const auto* data = rows.const_data_ptr<int64_t>();
  const TableSpec& spec = group.tables()[static_cast<std::size_t>(table)];
  for (int64_t i = 0; i < rows.numel(); ++i) {
    TORCH_CHECK_VALUE(data[i] >= 0 && data[i] < static_cast<int64_t>(spec.num_rows), "row ", data[i], " is outside table '",
                      spec.name, "' of ", spec.num_rows, " rows");
    TORCH_CHECK_VALUE(i == 0 || data[i - 1] < data[i], "rows must be strictly ascending; rows[", i, "] is ", data[i]);
  }
  return reinterpret_cast<const std::uint64_t*>(data);  // none is negative
}

void check_field(const TableSpec& table, const std::string& name, int64_t width, at::ScalarType dtype) {
  for (const Field& field : table.schema.fields()) {
    if (field.name != name) continue;
    const bool same_type = (field.dtype == DType::F32 && dtype == at::kFloat) || (field.dtype == DType::I32 && dtype == at::kInt);
    TORCH_CHECK_VALUE(same_type && field.width == width, "field '", name, "' of table '", table.name, "' is ",
                      dtype_name(field.dtype), "[", field.width, "], not ", dtype, "[", width, "]");
    return;
  }
  TORCH_CHECK_VALUE(false, "table '", table.name, "' has no field '", name, "'; its record is ", table.schema.describe());
}

Tensor read_rows(int64_t group, int64_t table, const Tensor& rows, c10::string_view field, int64_t width, at::ScalarType dtype) {
  const std::shared_ptr<GroupState> state = find_group(group);
  std::lock_guard<std::mutex> lock(state->mutex);
  const std::uint64_t* row_ids = checked_field_rows(*state->tables, table, rows);
  const std::string name(field);
  check_field(state->tables->tables()[static_cast<std::size_t>(table)], name, width, dtype);
  Tensor values = at::empty({rows.numel(), width}, dtype);
  check(state->tables->read_field(static_cast<std::uint32_t>(table), row_ids, static_cast<std::size_t>(rows.numel()), name,
                                  static_cast<std::byte*>(values.mutable_data_ptr()), at::get_num_threads()));
  return values;
}

void write_rows(int64_t group, int64_t table, const Tensor& rows, c10::string_view field, const Tensor& values) {
  const std::shared_ptr<GroupState> state = find_group(group);
  std::lock_guard<std::mutex> lock(state->mutex);
  const std::uint64_t* row_ids = checked_field_rows(*state->tables, table, rows);
  const std::string name(field);
  TORCH_CHECK_VALUE(values.dim() == 2 && values.size(0) == rows.numel(), "values are ", values.sizes(), ", expected [",
                    rows.numel(), ", width]");
  check_field(state->tables->tables()[static_cast<std::size_t>(table)], name, values.size(1), values.scalar_type());
  const Tensor dense = values.contiguous();
  check(state->tables->write_field(static_cast<std::uint32_t>(table), row_ids, static_cast<std::size_t>(rows.numel()), name,
                                   static_cast<const std::byte*>(dense.const_data_ptr()), at::get_num_threads()));
}

void prefetch_rows(int64_t group, const Tensor& unique_rows, const Tensor& table_offsets) {
  const std::shared_ptr<GroupState> state = find_group(group);
  std::lock_guard<std::mutex> lock(state->mutex);
  check_rows(*state->tables, unique_rows, table_offsets);
  const auto* rows = reinterpret_cast<const std::uint64_t*>(unique_rows.const_data_ptr<int64_t>());
  const auto* offsets = table_offsets.const_data_ptr<int64_t>();
  std::vector<TableRows> batch;
  for (int64_t t = 0; t + 1 < table_offsets.numel(); ++t) {
    batch.push_back({static_cast<std::uint32_t>(t), rows + offsets[t], static_cast<std::size_t>(offsets[t + 1] - offsets[t])});
  }
  check(state->tables->source().prefetch(batch));
}

Tensor initial_values(const Tensor& rows, int64_t seed, int64_t table_id, int64_t first_column, int64_t dim, int64_t kind,
                      double a, double b) {
  check_tensor(rows, "rows", at::kLong, -1);
  TORCH_CHECK_VALUE(kind >= 0 && kind <= 2, "kind ", kind, ", expected 0 (zero), 1 (uniform) or 2 (normal)");
  TORCH_CHECK_VALUE(dim >= 1 && first_column >= 0, "dim ", dim, ", first_column ", first_column);
  Tensor values = at::empty({rows.numel(), dim}, at::kFloat);
  auto* out = values.mutable_data_ptr<float>();
  const auto* ids = rows.const_data_ptr<int64_t>();
  const InitSpec init{static_cast<InitKind>(kind), a, b};
  for (int64_t i = 0; i < rows.numel(); ++i) {
    fill_initial_values(init, static_cast<std::uint64_t>(seed), static_cast<std::uint32_t>(table_id),
                        static_cast<std::uint64_t>(ids[i]), static_cast<std::uint32_t>(first_column),
                        static_cast<std::uint32_t>(dim), out + i * dim);
  }
  return values;
}

c10::intrusive_ptr<RowSourceHolder> make_dram_rows(const StringList& names, const IntList& table_ids, const IntList& num_rows,
                                                   const IntList& dims, const StringList& fields, const StringList& init_kinds,
                                                   const std::vector<double>& init_a, const std::vector<double>& init_b,
                                                   const IntList& seeds, const IntList& first_columns, int64_t layout) {
  auto holder = c10::make_intrusive<RowSourceHolder>();
  check(DramRows::make(
      table_specs(names, table_ids, num_rows, dims, fields, init_kinds, init_a, init_b, seeds, first_columns),
      static_cast<DramLayout>(layout), at::get_num_threads(), &holder->source));
  return holder;
}

std::string choose_isa(const std::string& isa) {
  TORCH_CHECK_VALUE(select_isa(isa.c_str()), "instruction set '", isa, "' is not available, this processor runs ",
                    row_kernels().isa);
  return row_kernels().isa;
}

}  // namespace

void check_tensor(const Tensor& tensor, const char* name, at::ScalarType dtype, int64_t size) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == dtype, name, " is ", tensor.scalar_type(), ", expected ", dtype);
  TORCH_CHECK_VALUE(tensor.is_contiguous(), name, " must be contiguous");
  TORCH_CHECK_VALUE(size < 0 || tensor.numel() == size, name, " has ", tensor.numel(), " elements, expected ", size);
}

TORCH_LIBRARY(kstep, m) {
  m.class_<RowSourceHolder>("RowSource").def_static("dram", &make_dram_rows);
  m.class_<RowGroup>("RowGroup")
      .def(torch::init<const c10::intrusive_ptr<RowSourceHolder>&, const std::string&, const FloatDict&>())
      .def("handle", &RowGroup::handle)
      .def("set_step", &RowGroup::set_step)
      .def("rates", &RowGroup::rates)
      .def("restore_rates", &RowGroup::restore_rates)
      .def("rebase", &RowGroup::rebase)
      .def("catch_up", &RowGroup::catch_up)
      .def("set_deferred", &RowGroup::set_deferred)
      .def("num_pending", &RowGroup::num_pending)
      .def("take_pending", &RowGroup::take_pending)
      .def("track", &RowGroup::track)
      .def("set_tracking", &RowGroup::set_tracking)
      .def("touched_rows", &RowGroup::touched_rows)
      .def("clear_touched", &RowGroup::clear_touched)
      .def("detach_touched", &RowGroup::detach_touched)
      .def("base_bytes", &RowGroup::base_bytes)
      .def("flush", &RowGroup::flush)
      .def("counters", &RowGroup::counters);
  register_tiered(m);
  register_snapshot_tools(m);
  m.def("select_isa(str isa) -> str", &choose_isa);
  m.def(
      "dedup(Tensor ids, Tensor offsets, int[] table_of_feature, int[] num_rows, int out_of_range) -> (Tensor unique_rows, "
      "Tensor table_offsets, Tensor row_offsets, Tensor positions, Tensor inverse, Tensor num_bad)");
  m.def(
      "pooled_lookup(int group, Tensor anchor, Tensor? weights, Tensor offsets, Tensor unique_rows, Tensor table_offsets, "
      "Tensor row_offsets, Tensor positions, Tensor inverse, int[] table_of_feature, int[] table_dims, int pooling) -> Tensor");
  m.def(
      "pooled_backward(int group, Tensor grad, Tensor? weights, Tensor offsets, Tensor unique_rows, Tensor table_offsets, "
      "Tensor row_offsets, Tensor positions, Tensor inverse, int[] table_of_feature, int[] table_dims, int pooling, "
      "bool needs_weight_grad) -> Tensor");
  m.def(
      "sequence_lookup(int group, Tensor anchor, Tensor offsets, Tensor unique_rows, Tensor table_offsets, Tensor row_offsets, "
      "Tensor positions, Tensor inverse, int[] table_of_feature, int[] table_dims) -> Tensor");
  m.def(
      "sequence_backward(int group, Tensor grad, Tensor offsets, Tensor unique_rows, Tensor table_offsets, Tensor row_offsets, "
      "Tensor positions, Tensor inverse, int[] table_of_feature, int[] table_dims) -> ()");
  m.def(
      "merge_row_gradients(Tensor[] unique_rows, Tensor[] table_offsets, Tensor[] counts, Tensor[] grads, int[] table_dims) -> "
      "(Tensor unique_rows, Tensor table_offsets, Tensor counts, Tensor grads)");
  m.def("apply_row_gradients(int group, Tensor unique_rows, Tensor table_offsets, Tensor counts, Tensor grads, Tensor? scales) -> ()");
  m.def(
      "row_norms(int group, Tensor unique_rows, Tensor table_offsets, Tensor counts, Tensor grads) -> (Tensor grad_squares, "
      "Tensor weight_squares)");
  m.def("read_rows(int group, int table, Tensor rows, str field, int width, ScalarType dtype) -> Tensor");
  m.def("write_rows(int group, int table, Tensor rows, str field, Tensor values) -> ()");
  m.def("prefetch_rows(int group, Tensor unique_rows, Tensor table_offsets) -> ()");
  m.def(
      "initial_values(Tensor rows, int seed, int table_id, int first_column, int dim, int kind, float a, float b) -> Tensor");
}

TORCH_LIBRARY_IMPL(kstep, CPU, m) {
  m.impl("dedup", &dedup_op);
  m.impl("pooled_lookup", &pooled_lookup);
  m.impl("pooled_backward", &pooled_backward);
  m.impl("sequence_lookup", &sequence_lookup);
  m.impl("sequence_backward", &sequence_backward);
  m.impl("merge_row_gradients", &merge_row_gradients_op);
  m.impl("apply_row_gradients", &apply_row_gradients);
  m.impl("row_norms", &row_norms);
  m.impl("read_rows", &read_rows);
  m.impl("write_rows", &write_rows);
  m.impl("prefetch_rows", &prefetch_rows);
  m.impl("initial_values", &initial_values);
}

}  // namespace kstep

// An importable name for the build: the ops register themselves when the library is loaded.
extern "C" PyObject* PyInit__kernels() {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_kernels", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
