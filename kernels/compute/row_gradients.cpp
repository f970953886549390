#include "compute/row_gradients.h"

#include <algorithm>

#include "compute/thread_pool.h"

namespace kstep {
namespace {

// Walks the rows of one table over all parts in ascending order. Parts are few (micro-batches, replicas), so the smallest
// head is found by a scan, which also visits equal rows in the order of the parts.
template <typename Visit>
void walk_table(const std::vector<RowGradients>& parts, std::size_t table, Visit&& visit) {
  std::vector<std::int64_t> at;
  for (const RowGradients& part : parts) at.push_back(part.table_offsets[table]);
  for (;;) {
    std::int64_t row = INT64_MAX;
    for (std::size_t p = 0; p < parts.size(); ++p) {
      if (at[p] < parts[p].table_offsets[table + 1]) row = std::min(row, parts[p].unique_rows[at[p]]);
    }
    if (row == INT64_MAX) return;
    bool is_first = true;
    for (std::size_t p = 0; p < parts.size(); ++p) {
      if (at[p] >= parts[p].table_offsets[table + 1] || parts[p].unique_rows[at[p]] != row) continue;
      visit(row, p, static_cast<std::size_t>(at[p]++), is_first);
      is_first = false;
    }
  }
}

// First float of each table of a part.
std::size_t grads_before(const std::int64_t* table_offsets, const std::int64_t* table_dims, std::size_t table) {
  std::int64_t floats = 0;
  for (std::size_t t = 0; t < table; ++t) floats += (table_offsets[t + 1] - table_offsets[t]) * table_dims[t];
  return static_cast<std::size_t>(floats);
}

void merge_table(const std::vector<RowGradients>& parts, const std::int64_t* table_dims, std::size_t table,
                 const MergedGradients& out) {
  const auto dim = static_cast<std::size_t>(table_dims[table]);
  std::vector<const float*> part_grads;
  for (const RowGradients& part : parts) part_grads.push_back(part.grads + grads_before(part.table_offsets, table_dims, table));
  const auto first = static_cast<std::size_t>(out.table_offsets[table]);
  float* table_grads = out.grads + grads_before(out.table_offsets, table_dims, table);
  std::size_t u = first;
  walk_table(parts, table, [&](std::int64_t row, std::size_t part, std::size_t at, bool is_first) {
    if (!is_first) --u;
    float* sum = table_grads + (u - first) * dim;
    const auto part_first = static_cast<std::size_t>(parts[part].table_offsets[table]);
    const float* grad = part_grads[part] + (at - part_first) * dim;
    if (is_first) {
      out.unique_rows[u] = row;
      out.counts[u] = parts[part].counts[at];
      std::copy(grad, grad + dim, sum);
    } else {
      out.counts[u] += parts[part].counts[at];
      for (std::size_t j = 0; j < dim; ++j) sum[j] += grad[j];
    }
    ++u;
  });
}

}  // namespace

void merged_table_offsets(const std::vector<RowGradients>& parts, std::size_t num_tables, int num_threads,
                          std::int64_t* table_offsets) {
  table_offsets[0] = 0;
  parallel_tasks(num_threads, num_tables, [&](std::size_t table) {
    std::int64_t count = 0;
    walk_table(parts, table, [&](std::int64_t, std::size_t, std::size_t, bool is_first) { count += is_first ? 1 : 0; });
    table_offsets[table + 1] = count;
  });
  for (std::size_t t = 0; t < num_tables; ++t) table_offsets[t + 1] += table_offsets[t];
}

void merge_row_gradients(const std::vector<RowGradients>& parts, const std::int64_t* table_dims, std::size_t num_tables,
                         int num_threads, const MergedGradients& out) {
  parallel_tasks(num_threads, num_tables, [&](std::size_t table) { merge_table(parts, table_dims, table, out); });
}

}  // namespace kstep
