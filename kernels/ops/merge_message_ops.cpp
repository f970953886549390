// The ops of merge rounds that work on whole messages, many tables at a time; `torchrec_kstep/ops/merge_messages.py` wraps them.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>

#include "compute/merge_message.h"
#include "compute/row_kernels.h"
#include "ops/buffer_pool.h"
#include "ops/merge_arguments.h"

namespace kstep {
namespace {

using at::IntArrayRef;
using at::Tensor;

constexpr std::size_t kAlignment = 8;

// The formats of several tables, as the ops take them: three numbers per table (bytes of a row id, bytes of touches, dim), the
// number of fields of each, and the wires of all fields.
std::vector<MessageFormat> checked_formats(IntArrayRef numbers, IntArrayRef num_fields, IntArrayRef wires) {
  TORCH_CHECK_VALUE(numbers.size() == 3 * num_fields.size(), "formats of ", num_fields.size(), " tables take ", 3 * num_fields.size(),
                    " numbers, got ", numbers.size());
  std::vector<MessageFormat> formats(num_fields.size());
  std::size_t field = 0;
  for (std::size_t t = 0; t < formats.size(); ++t) {
    const int64_t row_id_bytes = numbers[3 * t], count_bytes = numbers[3 * t + 1], dim = numbers[3 * t + 2];
    TORCH_CHECK_VALUE((row_id_bytes == 4 || row_id_bytes == 8) && (count_bytes == 0 || count_bytes == 1 || count_bytes == 2 || count_bytes == 4),
                      "row ids of ", row_id_bytes, " and touches of ", count_bytes, " bytes, expected 4 or 8 and 0, 1, 2 or 4");
    TORCH_CHECK_VALUE(dim >= 1 && dim <= kMaxDim, "dim ", dim, ", expected 1 to ", kMaxDim);
    TORCH_CHECK_VALUE(num_fields[t] >= 1 && num_fields[t] <= static_cast<int64_t>(kMaxSpans) && field + num_fields[t] <= wires.size(),
                      "table ", t, " has ", num_fields[t], " fields, expected 1 to ", kMaxSpans, " with a wire each");
    formats[t] = {static_cast<std::uint32_t>(row_id_bytes), static_cast<std::uint32_t>(count_bytes), static_cast<std::uint32_t>(dim), {}};
    for (int64_t f = 0; f < num_fields[t]; ++f) {
      const int64_t wire = wires[field++];
      TORCH_CHECK_VALUE(wire >= 0 && wire <= 2, "wire ", wire, ", expected 0 (fp32), 1 (bf16) or 2 (int8)");
      formats[t].wires.push_back(static_cast<Wire>(wire));
    }
  }
  TORCH_CHECK_VALUE(field == wires.size(), wires.size(), " wires for ", field, " fields");
  return formats;
}

// Numbers [num_messages, num_tables] that are not negative.
const int64_t* checked_numbers(const Tensor& numbers, const char* name, std::size_t num_messages, std::size_t num_tables) {
  check_tensor(numbers, name, at::kLong, static_cast<int64_t>(num_messages * num_tables));
  const auto* data = numbers.const_data_ptr<int64_t>();
  for (std::size_t i = 0; i < num_messages * num_tables; ++i) TORCH_CHECK_VALUE(data[i] >= 0, name, "[", i, "] is ", data[i]);
  return data;
}

// Where a table's part of a message of `num_bytes` bytes begins.
std::size_t checked_begin(int64_t begin, const MessageFormat& format, int64_t num_rows, int64_t num_bytes) {
  const std::size_t size = sections_of(format, static_cast<std::size_t>(num_rows)).num_bytes;
  TORCH_CHECK_VALUE(begin >= 0 && begin % static_cast<int64_t>(kAlignment) == 0 && begin + static_cast<int64_t>(size) <= num_bytes,
                    "a part of ", size, " bytes at ", begin, " of a message of ", num_bytes, " bytes, expected it inside and at a multiple of ",
                    kAlignment);
  return static_cast<std::size_t>(begin);
}

const std::uint8_t* checked_message(const Tensor& message) {
  check_tensor(message, "message", at::kByte, -1);
  const auto* data = message.const_data_ptr<std::uint8_t>();
  TORCH_CHECK_VALUE(reinterpret_cast<std::uintptr_t>(data) % kAlignment == 0, "a message must lie at a multiple of ", kAlignment, " bytes");
  return data;
}

Tensor merge_owner_counts(at::TensorList rows, IntArrayRef first_keys, int64_t num_replicas) {
  TORCH_CHECK_VALUE(rows.size() == first_keys.size() && num_replicas >= 1 && num_replicas <= INT32_MAX, "every list must have one entry per piece");
  const auto num_pieces = static_cast<int64_t>(rows.size());
  Tensor counts = at::zeros({num_replicas, num_pieces}, at::kLong);
  auto* found = counts.mutable_data_ptr<int64_t>();
  for (int64_t p = 0; p < num_pieces; ++p) {
    check_tensor(rows[p], "rows", at::kLong, -1);
    const auto* ids = rows[p].const_data_ptr<int64_t>();
    for (int64_t i = 0; i < rows[p].numel(); ++i) {
      const std::size_t owner = owner_of(static_cast<std::uint64_t>(ids[i] + first_keys[p]), static_cast<std::size_t>(num_replicas));
      ++found[static_cast<int64_t>(owner) * num_pieces + p];
    }
  }
  return counts;
}

// What the two packing ops share. They return the first table that is not finite, or -1, as a tensor: an op that writes into an
// argument may return nothing else.
struct PackArguments {
  std::vector<MessageFormat> formats;
  IntArrayRef salts, first_keys;
  int64_t max_count;
  const int64_t *counts, *begins;  // [receivers, tables]
  std::size_t num_receivers;
  std::uint8_t* message;
  int64_t num_bytes;
  std::size_t next_field = 0;

  // REQUIRES: called for the tables in turn.
  PackRequest request(std::size_t table) {
    PackRequest made;
    made.format = formats[table];
    made.first_key = static_cast<std::uint64_t>(first_keys[table]);
    made.max_count = static_cast<std::int32_t>(std::min<int64_t>(max_count, INT32_MAX));
    for (std::size_t f = 0; f < made.format.wires.size(); ++f) made.salts.push_back(static_cast<std::uint64_t>(salts[next_field++]));
    for (std::size_t receiver = 0; receiver < num_receivers; ++receiver) {
      const std::size_t at = receiver * formats.size() + table;
      made.messages.push_back(message + checked_begin(begins[at], made.format, counts[at], num_bytes));
      made.num_rows.push_back(static_cast<std::size_t>(counts[at]));
    }
    return made;
  }
};

PackArguments pack_arguments(IntArrayRef formats, IntArrayRef num_fields, IntArrayRef wires, IntArrayRef salts, IntArrayRef first_keys,
                             int64_t max_count, const Tensor& counts, const Tensor& begins, const Tensor& message) {
  PackArguments made{checked_formats(formats, num_fields, wires), salts, first_keys, max_count, nullptr, nullptr, 0, nullptr, message.numel()};
  TORCH_CHECK_VALUE(counts.dim() == 2 && counts.size(1) == static_cast<int64_t>(made.formats.size()) && counts.size(0) >= 1, "counts are ",
                    counts.sizes(), ", expected [receivers, ", made.formats.size(), "]");
  TORCH_CHECK_VALUE(salts.size() == wires.size() && first_keys.size() == made.formats.size() && max_count >= 1,
                    "every list must have one entry per table or field");
  made.num_receivers = static_cast<std::size_t>(counts.size(0));
  made.counts = checked_numbers(counts, "counts", made.num_receivers, made.formats.size());
  made.begins = checked_numbers(begins, "begins", made.num_receivers, made.formats.size());
  made.message = const_cast<std::uint8_t*>(checked_message(message));
  return made;
}

Tensor merge_pack(int64_t group, int64_t tracker, int64_t form, IntArrayRef tables, at::TensorList rows, IntArrayRef formats,
                   IntArrayRef num_fields, IntArrayRef wires, IntArrayRef salts, IntArrayRef first_keys, int64_t max_count,
                   const Tensor& counts, const Tensor& begins, Tensor message) {
  const std::shared_ptr<GroupState> state = find_group(group);
  std::lock_guard<std::mutex> lock(state->mutex);
  PackArguments arguments = pack_arguments(formats, num_fields, wires, salts, first_keys, max_count, counts, begins, message);
  TORCH_CHECK_VALUE(tables.size() == arguments.formats.size() && rows.size() == tables.size(), "every list must have one entry per table");
  int64_t first_bad = -1;
  for (std::size_t t = 0; t < tables.size(); ++t) {
    const TrackedTable at = checked_tracked(*state, tables[t], tracker);
    const TableSpec& spec = state->tables->tables()[at.table];
    const PackRequest request = arguments.request(t);
    const std::size_t num_tracked = state->tables->tracker(at.table, at.tracker).spans().size();
    TORCH_CHECK_VALUE(num_tracked == request.format.wires.size() && request.format.dim == spec.dim, "table '", spec.name, "' has ", num_tracked,
                      " tracked fields of dim ", spec.dim, ", not ", request.format.wires.size(), " of dim ", request.format.dim);
    std::vector<std::uint64_t> wide;
    const std::uint64_t* ids = checked_rows(spec, rows[t], &wide);
    bool is_finite = true;
    check(pack_touched(at, ids, static_cast<std::size_t>(rows[t].numel()), checked_form(form), request, at::get_num_threads(), &is_finite));
    if (!is_finite && first_bad < 0) first_bad = static_cast<int64_t>(t);
  }
  return at::scalar_tensor(first_bad, at::kLong);
}

Tensor merge_pack_contributions(at::TensorList rows, at::TensorList touches, at::TensorList values, IntArrayRef formats,
                                 IntArrayRef num_fields, IntArrayRef wires, IntArrayRef salts, IntArrayRef first_keys, int64_t max_count,
                                 const Tensor& counts, const Tensor& begins, Tensor message) {
  PackArguments arguments = pack_arguments(formats, num_fields, wires, salts, first_keys, max_count, counts, begins, message);
  TORCH_CHECK_VALUE(rows.size() == arguments.formats.size() && touches.size() == rows.size() && values.size() == wires.size(),
                    "every list must have one entry per table or field");
  int64_t first_bad = -1;
  for (std::size_t t = 0; t < rows.size(); ++t) {
    const std::size_t first_field = arguments.next_field;
    const PackRequest request = arguments.request(t);
    check_tensor(rows[t], "rows", at::kLong, -1);
    check_tensor(touches[t], "touches", at::kInt, rows[t].numel());
    std::vector<const float*> fields;
    for (std::size_t f = first_field; f < arguments.next_field; ++f) {
      check_tensor(values[f], "values", at::kFloat, rows[t].numel() * request.format.dim);
      fields.push_back(values[f].const_data_ptr<float>());
    }
    bool is_finite = true;
    check(pack_contributions(reinterpret_cast<const std::uint64_t*>(rows[t].const_data_ptr<int64_t>()),
                             static_cast<std::size_t>(rows[t].numel()), touches[t].const_data_ptr<int32_t>(), fields, request,
                             at::get_num_threads(), &is_finite));
    if (!is_finite && first_bad < 0) first_bad = static_cast<int64_t>(t);
  }
  return at::scalar_tensor(first_bad, at::kLong);
}

MergePart part_of(const std::uint8_t* message, const MessageFormat& format, std::size_t num_rows) {
  const MessageSections sections = sections_of(format, num_rows);
  MergePart part;
  part.rows = message;
  part.counts = message + sections.counts;
  part.count_bytes = format.count_bytes;
  part.num_rows = num_rows;
  for (std::size_t f = 0; f < format.wires.size(); ++f) part.values.push_back({message + sections.fields[f], format.wires[f]});
  return part;
}

struct TableSum {
  std::vector<MergePart> parts;
  MergePlan plan;
};

std::tuple<Tensor, Tensor> merge_reduce_messages(at::TensorList messages, const Tensor& counts, IntArrayRef formats, IntArrayRef num_fields,
                                                 IntArrayRef wires, IntArrayRef union_bytes, const c10::List<bool>& is_averaged,
                                                 IntArrayRef salts, int64_t policy, int64_t num_steps, int64_t num_replicas) {
  std::vector<MessageFormat> up = checked_formats(formats, num_fields, wires);
  const std::size_t num_tables = up.size(), num_senders = messages.size();
  const int64_t* num_rows = checked_numbers(counts, "counts", num_senders, num_tables);
  TORCH_CHECK_VALUE(union_bytes.size() == num_tables && is_averaged.size() == wires.size() && salts.size() == wires.size(),
                    "every list must have one entry per table or field");
  TORCH_CHECK_VALUE(policy >= 0 && policy <= 2, "policy ", policy, ", expected 0 (union), 1 (touched) or 2 (mean)");
  TORCH_CHECK_VALUE(num_steps >= 1 && num_senders >= 1 && num_replicas >= static_cast<int64_t>(num_senders), "num_steps ", num_steps,
                    ", num_replicas ", num_replicas, ", expected at least 1 and the ", num_senders, " messages");
  std::vector<TableSum> sums(num_tables);
  for (std::size_t sender = 0; sender < num_senders; ++sender) {
    const std::uint8_t* data = checked_message(messages[sender]);
    int64_t begin = 0;
    for (std::size_t t = 0; t < num_tables; ++t) {
      const int64_t rows = num_rows[sender * num_tables + t];
      TORCH_CHECK_VALUE(rows <= INT32_MAX, rows, " rows in one part, expected fewer than 2^31");
      const MergePart part = part_of(data + checked_begin(begin, up[t], rows, messages[sender].numel()), up[t], static_cast<std::size_t>(rows));
      check_counts(part);
      sums[t].parts.push_back(part);
      begin += static_cast<int64_t>(sections_of(up[t], part.num_rows).num_bytes);
    }
    TORCH_CHECK_VALUE(begin == messages[sender].numel(), "a message of ", messages[sender].numel(), " bytes, expected ", begin);
  }
  Tensor merged_counts = at::empty({static_cast<int64_t>(num_tables)}, at::kLong);
  std::vector<std::size_t> begins;
  std::size_t num_bytes = 0;
  std::vector<MessageFormat> down = up;
  for (std::size_t t = 0; t < num_tables; ++t) {
    TORCH_CHECK_VALUE(union_bytes[t] == 0 || union_bytes[t] == sizeof(float), "union touches of ", union_bytes[t], " bytes, expected 0 or 4");
    down[t].count_bytes = static_cast<std::uint32_t>(union_bytes[t]);
    check(plan_merge(sums[t].parts, up[t].row_id_bytes == sizeof(std::int32_t), &sums[t].plan));
    merged_counts.mutable_data_ptr<int64_t>()[t] = static_cast<int64_t>(sums[t].plan.num_rows());
    begins.push_back(num_bytes);
    num_bytes += sections_of(down[t], sums[t].plan.num_rows()).num_bytes;
  }
  Tensor merged = empty_message(static_cast<int64_t>(num_bytes));
  std::size_t field = 0;
  for (std::size_t t = 0; t < num_tables; ++t) {
    const bool rows_are_int32 = up[t].row_id_bytes == sizeof(std::int32_t);
    const MessageSections sections = sections_of(down[t], sums[t].plan.num_rows());
    std::uint8_t* data = merged.mutable_data_ptr<std::uint8_t>() + begins[t];
    MergeRule rule{static_cast<MergePolicy>(policy), num_steps, num_replicas, {}};
    std::vector<WireTarget> targets;
    for (std::size_t f = 0; f < down[t].wires.size(); ++f, ++field) {
      rule.is_averaged.push_back(is_averaged[field]);
      targets.push_back({data + sections.fields[f], down[t].wires[f], static_cast<std::uint64_t>(salts[field])});
    }
    clear_filling(down[t], sums[t].plan.num_rows(), data);
    reduce_parts(sums[t].parts, sums[t].plan, rows_are_int32, rule, down[t].dim, at::get_num_threads(),
                 down[t].count_bytes == 0 ? nullptr : reinterpret_cast<float*>(data + sections.counts), targets);
    write_merged_rows(sums[t].parts, sums[t].plan, rows_are_int32, data);
  }
  return {merged, merged_counts};
}

std::tuple<int64_t, double, double> merge_apply_messages(int64_t group, int64_t tracker, int64_t form, int64_t step, IntArrayRef tables,
                                                         at::TensorList messages, const Tensor& counts, const Tensor& begins,
                                                         IntArrayRef formats, IntArrayRef num_fields, IntArrayRef wires) {
  const std::shared_ptr<GroupState> state = find_group(group);
  std::lock_guard<std::mutex> lock(state->mutex);
  const std::vector<MessageFormat> down = checked_formats(formats, num_fields, wires);
  TORCH_CHECK_VALUE(tables.size() == down.size(), "every list must have one entry per table");
  const int64_t* num_rows = checked_numbers(counts, "counts", messages.size(), tables.size());
  const int64_t* first_bytes = checked_numbers(begins, "begins", messages.size(), tables.size());
  ApplyResult result;
  std::vector<std::uint64_t> wide;
  for (std::size_t t = 0; t < tables.size(); ++t) {
    const TrackedTable at = checked_tracked(*state, tables[t], tracker);
    const TableSpec& spec = state->tables->tables()[at.table];
    const std::size_t num_tracked = state->tables->tracker(at.table, at.tracker).spans().size();
    TORCH_CHECK_VALUE(num_tracked == down[t].wires.size() && down[t].dim == spec.dim, "table '", spec.name, "' has ", num_tracked,
                      " tracked fields of dim ", spec.dim, ", not ", down[t].wires.size(), " of dim ", down[t].dim);
    TORCH_CHECK_VALUE(down[t].count_bytes == 0 || down[t].count_bytes == sizeof(float), "union touches of ", down[t].count_bytes, " bytes");
    for (std::size_t m = 0; m < messages.size(); ++m) {
      const std::size_t place = m * tables.size() + t;
      if (num_rows[place] == 0) continue;
      const std::uint8_t* message = checked_message(messages[m]) + checked_begin(first_bytes[place], down[t], num_rows[place], messages[m].numel());
      const MergePart part = part_of(message, down[t], static_cast<std::size_t>(num_rows[place]));
      MergedRows merged;
      merged.rows = checked_rows(spec, part.rows, part.num_rows, down[t].row_id_bytes == sizeof(std::int32_t), &wide);
      merged.num_rows = part.num_rows;
      merged.u_real = part.count_bytes == 0 ? nullptr : static_cast<const float*>(part.counts);
      merged.values = part.values;
      check(apply_merged(at, merged, checked_form(form), bias_step(*state, step), at::get_num_threads(), &result));
    }
  }
  return {result.num_rows_read, result.distance, result.way};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(kstep, m) {
  m.def("empty_message(int num_bytes) -> Tensor");
  m.def("merge_owner_counts(Tensor[] rows, int[] first_keys, int num_replicas) -> Tensor");
  m.def(
      "merge_pack(int group, int tracker, int form, int[] tables, Tensor[] rows, int[] formats, int[] num_fields, int[] wires, int[] salts, "
      "int[] first_keys, int max_count, Tensor counts, Tensor begins, Tensor(a!) message) -> Tensor");
  m.def(
      "merge_pack_contributions(Tensor[] rows, Tensor[] touches, Tensor[] values, int[] formats, int[] num_fields, int[] wires, int[] salts, "
      "int[] first_keys, int max_count, Tensor counts, Tensor begins, Tensor(a!) message) -> Tensor");
  m.def(
      "merge_reduce_messages(Tensor[] messages, Tensor counts, int[] formats, int[] num_fields, int[] wires, int[] union_bytes, "
      "bool[] is_averaged, int[] salts, int policy, int num_steps, int num_replicas) -> (Tensor message, Tensor counts)");
  m.def(
      "merge_apply_messages(int group, int tracker, int form, int step, int[] tables, Tensor[] messages, Tensor counts, Tensor begins, "
      "int[] formats, int[] num_fields, int[] wires) -> (int num_rows_read, float distance, float way)");
}

TORCH_LIBRARY_IMPL(kstep, CompositeExplicitAutograd, m) {
  m.impl("empty_message", &empty_message);
}

TORCH_LIBRARY_IMPL(kstep, CPU, m) {
  m.impl("merge_owner_counts", &merge_owner_counts);
  m.impl("merge_pack", &merge_pack);
  m.impl("merge_pack_contributions", &merge_pack_contributions);
  m.impl("merge_reduce_messages", &merge_reduce_messages);
  m.impl("merge_apply_messages", &merge_apply_messages);
}

}  // namespace kstep
