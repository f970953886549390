#include "compute/merge_reduce.h"

#include <algorithm>
#include <limits>
#include <string>

#include "compute/row_kernels.h"
#include "compute/thread_pool.h"

namespace kstep {
namespace {

constexpr std::size_t kRowsPerTask = 256;

template <typename Row>
Status check_ascending(const std::vector<MergePart>& parts) {
  for (std::size_t p = 0; p < parts.size(); ++p) {
    const auto* rows = static_cast<const Row*>(parts[p].rows);
    for (std::size_t i = 0; i < parts[p].num_rows; ++i) {
      if (rows[i] < 0 || (i > 0 && rows[i - 1] >= rows[i])) {
        return Status::invalid("rows of replica " + std::to_string(p),
                               "must be 0 or more and strictly ascending; rows[" + std::to_string(i) + "] is " + std::to_string(rows[i]));
      }
    }
  }
  return Status();
}

// Walks all parts in ascending order of (row, part). Parts are few, so the smallest head is found by a look at each.
template <typename Row>
void fill_plan(const std::vector<MergePart>& parts, MergePlan* plan) {
  constexpr Row kEnd = std::numeric_limits<Row>::max();  // no row id: ids are below the number of rows
  std::size_t total = 0;
  for (const MergePart& part : parts) total += part.num_rows;
  plan->entries.reserve(total);
  plan->entry_begin.reserve(total + 1);
  std::vector<std::uint32_t> next(parts.size(), 0);
  std::vector<Row> heads(parts.size(), kEnd);
  const auto head_of = [&](std::size_t part) {
    return next[part] < parts[part].num_rows ? static_cast<const Row*>(parts[part].rows)[next[part]] : kEnd;
  };
  for (std::size_t part = 0; part < parts.size(); ++part) heads[part] = head_of(part);
  for (;;) {
    const Row row = *std::min_element(heads.begin(), heads.end());
    if (row == kEnd) break;
    plan->entry_begin.push_back(plan->entries.size());
    for (std::size_t part = 0; part < parts.size(); ++part) {
      if (heads[part] != row) continue;
      plan->entries.push_back({static_cast<std::uint32_t>(part), next[part]++});
      heads[part] = head_of(part);
    }
  }
  plan->entry_begin.push_back(plan->entries.size());
}

// How one row is merged: touches u, and the factor a of the summed changes.
struct RowWeight {
  double u_real, factor, total;
};

RowWeight weigh(const std::vector<MergePart>& parts, const MergePlan::Entry* entries, std::size_t count, const MergeRule& rule) {
  const auto num_steps = static_cast<double>(rule.num_steps);
  double total = 0.0, absent = 1.0;
  for (std::size_t e = 0; e < count; ++e) {
    const double touches = parts[entries[e].part].count(entries[e].index);
    total += touches;
    absent *= 1.0 - std::min(touches / num_steps, 1.0);
  }
  if (rule.policy == MergePolicy::Union) {
    const double u_real = count == 1 ? total : num_steps * (1.0 - absent);
    return {u_real, u_real / total, total};
  }
  const double divisor = rule.policy == MergePolicy::Touched ? static_cast<double>(count) : static_cast<double>(rule.num_replicas);
  return {total / divisor, 1.0 / divisor, total};
}

void add(const float* __restrict values, float share, std::size_t dim, bool is_first, float* __restrict sum) {
  if (is_first) {
    for (std::size_t j = 0; j < dim; ++j) sum[j] = share * values[j];
  } else {
    for (std::size_t j = 0; j < dim; ++j) sum[j] += share * values[j];
  }
}

void scale(float factor, std::size_t dim, float* __restrict sum) {
  for (std::size_t j = 0; j < dim; ++j) sum[j] = factor * sum[j];
}

std::uint64_t row_of(const MergePart& part, std::size_t index, bool rows_are_int32) {
  return rows_are_int32 ? static_cast<std::uint64_t>(static_cast<const std::int32_t*>(part.rows)[index])
                        : static_cast<std::uint64_t>(static_cast<const std::int64_t*>(part.rows)[index]);
}

}  // namespace

std::int32_t MergePart::count(std::size_t index) const {
  switch (count_bytes) {
    case 1: return static_cast<const std::uint8_t*>(counts)[index];
    case 2: return static_cast<const std::uint16_t*>(counts)[index];
    case 4: return static_cast<const std::int32_t*>(counts)[index];
    default: return 1;
  }
}

Status plan_merge(const std::vector<MergePart>& parts, bool rows_are_int32, MergePlan* plan) {
  KSTEP_RETURN_IF_ERROR(rows_are_int32 ? check_ascending<std::int32_t>(parts) : check_ascending<std::int64_t>(parts));
  if (rows_are_int32) {
    fill_plan<std::int32_t>(parts, plan);
  } else {
    fill_plan<std::int64_t>(parts, plan);
  }
  return Status();
}

void write_merged_rows(const std::vector<MergePart>& parts, const MergePlan& plan, bool rows_are_int32, void* rows) {
  for (std::size_t row = 0; row < plan.num_rows(); ++row) {
    const MergePlan::Entry& entry = plan.entries[plan.entry_begin[row]];
    if (rows_are_int32) {
      static_cast<std::int32_t*>(rows)[row] = static_cast<const std::int32_t*>(parts[entry.part].rows)[entry.index];
    } else {
      static_cast<std::int64_t*>(rows)[row] = static_cast<const std::int64_t*>(parts[entry.part].rows)[entry.index];
    }
  }
}

void reduce_parts(const std::vector<MergePart>& parts, const MergePlan& plan, bool rows_are_int32, const MergeRule& rule,
                  std::size_t dim, int num_threads, float* u_real, const std::vector<WireTarget>& values) {
  const std::size_t num_rows = plan.num_rows();
  std::vector<RowNoise> noise;
  for (const WireTarget& target : values) noise.emplace_back(target.salt);
  parallel_tasks(num_threads, (num_rows + kRowsPerTask - 1) / kRowsPerTask, [&](std::size_t task) {
    float decoded[kMaxDim], summed[kMaxDim];
    const std::size_t end = std::min(num_rows, (task + 1) * kRowsPerTask);
    for (std::size_t row = task * kRowsPerTask; row < end; ++row) {
      const MergePlan::Entry* entries = plan.entries.data() + plan.entry_begin[row];
      const std::size_t count = plan.entry_begin[row + 1] - plan.entry_begin[row];
      const RowWeight weight = weigh(parts, entries, count, rule);
      if (u_real != nullptr) u_real[row] = static_cast<float>(weight.u_real);
      for (std::size_t f = 0; f < values.size(); ++f) {
        const WireTarget& target = values[f];
        std::uint8_t* packed = target.data + row * wire_row_bytes(target.wire, dim);
        float* sum = target.wire == Wire::Fp32 ? reinterpret_cast<float*>(packed) : summed;
        for (std::size_t e = 0; e < count; ++e) {
          const MergePart& part = parts[entries[e].part];
          const auto share = rule.is_averaged[f] ? static_cast<float>(part.count(entries[e].index) / weight.total) : 1.0f;
          add(wire_decode_row(part.values[f], entries[e].index, dim, decoded), share, dim, e == 0, sum);
        }
        if (!rule.is_averaged[f]) scale(static_cast<float>(weight.factor), dim, sum);
        if (target.wire == Wire::Fp32) continue;
        const std::uint64_t id = row_of(parts[entries[0].part], entries[0].index, rows_are_int32);
        wire_encode_row(target.wire, sum, dim, noise[f].key(id), packed);
      }
    }
  });
}

}  // namespace kstep
