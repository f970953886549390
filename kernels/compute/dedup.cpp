#include "compute/dedup.h"

#include <algorithm>
#include <string>

#include "compute/thread_pool.h"

namespace kstep {
namespace {

constexpr int kMaxDigitBits = 11;          // 2048 counters of 4 bytes stay in the L1 cache
constexpr std::size_t kSmallSort = 256;    // below this a comparison sort beats clearing the counters
constexpr std::uint64_t kNarrowRows = 1ull << 32;

int bit_width(std::uint64_t value) {
  int bits = 0;
  for (; value != 0; value >>= 1) ++bits;
  return bits;
}

struct Digits {
  int num_passes, bits;
};

// Splits `key_bits` into equal digits of at most kMaxDigitBits.
Digits split_digits(int key_bits) {
  const int passes = std::max(1, (key_bits + kMaxDigitBits - 1) / kMaxDigitBits);
  return {passes, (key_bits + passes - 1) / passes};
}

// Stable radix sort of keys row << 32 | position by row; positions come in ascending. Returns where the result lies.
std::uint64_t* sort_narrow(std::uint64_t* keys, std::uint64_t* swap, std::size_t n, int row_bits) {
  if (n <= kSmallSort) {
    std::sort(keys, keys + n);
    return keys;
  }
  const Digits digits = split_digits(row_bits);
  const std::uint64_t mask = (1ull << digits.bits) - 1;
  for (int pass = 0; pass < digits.num_passes; ++pass) {
    std::uint32_t begin[1 << kMaxDigitBits] = {};
    const int shift = 32 + pass * digits.bits;
    for (std::size_t i = 0; i < n; ++i) ++begin[(keys[i] >> shift) & mask];
    std::uint32_t sum = 0;
    for (std::uint64_t digit = 0; digit <= mask; ++digit) {
      const std::uint32_t count = begin[digit];
      begin[digit] = sum;
      sum += count;
    }
    for (std::size_t i = 0; i < n; ++i) swap[begin[(keys[i] >> shift) & mask]++] = keys[i];
    std::swap(keys, swap);
  }
  return keys;
}

// Tables above 2^32 rows are rare and their cost is elsewhere: a comparison sort of (row, position) does.
// On return keys[i] is the position of the i-th and rows[i] its row.
void sort_wide(std::uint64_t* rows, std::uint64_t* rows_swap, std::uint64_t* keys, std::size_t n) {
  std::sort(keys, keys + n, [&](std::uint64_t a, std::uint64_t b) {
    return rows[a >> 32] != rows[b >> 32] ? rows[a >> 32] < rows[b >> 32] : a < b;
  });
  for (std::size_t i = 0; i < n; ++i) rows_swap[i] = rows[keys[i] >> 32];
  std::copy(rows_swap, rows_swap + n, rows);
  for (std::size_t i = 0; i < n; ++i) keys[i] &= 0xFFFFFFFFull;
}

Status check_offsets(const Bags& bags) {
  const std::size_t num_bags = bags.num_features * bags.batch_size;
  if (bags.offsets[0] != 0) {
    return Status::invalid("dedup", "offsets[0] is " + std::to_string(bags.offsets[0]) + ", expected 0");
  }
  for (std::size_t bag = 0; bag < num_bags; ++bag) {
    if (bags.offsets[bag + 1] < bags.offsets[bag]) {
      return Status::invalid("dedup", "offsets decrease from " + std::to_string(bags.offsets[bag]) + " to " +
                                          std::to_string(bags.offsets[bag + 1]) + " at bag " + std::to_string(bag) +
                                          " (feature " + std::to_string(bag / bags.batch_size) + ")");
    }
  }
  if (bags.offsets[num_bags] != static_cast<std::int64_t>(bags.num_ids)) {
    return Status::invalid("dedup", "offsets end at " + std::to_string(bags.offsets[num_bags]) + " but there are " +
                                        std::to_string(bags.num_ids) + " ids");
  }
  return Status();
}

class Dedup {
 public:
  Dedup(const Bags& bags, const std::int64_t* table_of_feature, const std::int64_t* num_rows, std::size_t num_tables,
        OutOfRange mode, DedupWorkspace* workspace, const DedupResult& result)
      : bags_(bags), table_of_feature_(table_of_feature), num_rows_(num_rows), num_tables_(num_tables), mode_(mode),
        scratch_(*workspace), result_(result) {}

  void place_tables() {
    scratch_.id_begin.assign(num_tables_ + 1, 0);
    scratch_.num_valid.assign(num_tables_, 0);
    scratch_.num_unique.assign(num_tables_, 0);
    bool has_wide = false;
    for (std::size_t f = 0; f < bags_.num_features; ++f) {
      scratch_.id_begin[static_cast<std::size_t>(table_of_feature_[f]) + 1] += feature_end(f) - feature_begin(f);
    }
    for (std::size_t t = 0; t < num_tables_; ++t) {
      scratch_.id_begin[t + 1] += scratch_.id_begin[t];
      has_wide |= is_wide(t);
    }
    grow(&scratch_.keys);
    grow(&scratch_.swap);
    if (has_wide) {
      grow(&scratch_.wide_rows);
      grow(&scratch_.wide_swap);
    }
  }

  // Reads, checks and sorts the ids of one table; leaves the sorted keys in scratch_.keys.
  void sort_table(std::size_t table) {
    const std::size_t n = bags_.ids_are_int32 ? read_ids(table, static_cast<const std::int32_t*>(bags_.ids))
                                              : read_ids(table, static_cast<const std::int64_t*>(bags_.ids));
    std::uint64_t* keys = scratch_.keys.data() + scratch_.id_begin[table];
    std::size_t num_unique = 0;
    if (is_wide(table)) {
      std::uint64_t* rows = scratch_.wide_rows.data() + scratch_.id_begin[table];
      sort_wide(rows, scratch_.wide_swap.data() + scratch_.id_begin[table], keys, n);
      for (std::size_t i = 0; i < n; ++i) num_unique += i == 0 || rows[i] != rows[i - 1];
    } else {
      std::uint64_t* swap = scratch_.swap.data() + scratch_.id_begin[table];
      const std::uint64_t* sorted = sort_narrow(keys, swap, n, bit_width(last_row(table)));
      if (sorted != keys) std::copy(sorted, sorted + n, keys);
      for (std::size_t i = 0; i < n; ++i) num_unique += i == 0 || (keys[i] >> 32) != (keys[i - 1] >> 32);
    }
    scratch_.num_valid[table] = n;
    scratch_.num_unique[table] = num_unique;
  }

  // Turns num_valid into the first position of each table, and fills table_offsets and the final row offset.
  void place_results() {
    std::size_t position = 0;
    result_.table_offsets[0] = 0;
    for (std::size_t t = 0; t < num_tables_; ++t) {
      const std::size_t count = scratch_.num_valid[t];
      scratch_.num_valid[t] = position;
      position += count;
      result_.table_offsets[t + 1] = result_.table_offsets[t] + static_cast<std::int64_t>(scratch_.num_unique[t]);
    }
    result_.row_offsets[result_.table_offsets[num_tables_]] = static_cast<std::int32_t>(position);
    num_valid_total_ = position;
  }

  void write_table(std::size_t table) {
    const std::size_t begin = scratch_.num_valid[table];
    const std::size_t end = table + 1 < num_tables_ ? scratch_.num_valid[table + 1] : num_valid_total_;
    const std::uint64_t* keys = scratch_.keys.data() + scratch_.id_begin[table];
    const std::uint64_t* wide_rows = is_wide(table) ? scratch_.wide_rows.data() + scratch_.id_begin[table] : nullptr;
    std::int64_t unique = result_.table_offsets[table] - 1;
    std::uint64_t previous = 0;
    for (std::size_t k = begin; k < end; ++k) {
      const std::uint64_t key = keys[k - begin];
      const std::uint64_t row = wide_rows != nullptr ? wide_rows[k - begin] : key >> 32;
      const std::int32_t position = static_cast<std::int32_t>(key & 0xFFFFFFFFull);
      if (k == begin || row != previous) {
        ++unique;
        result_.unique_rows[unique] = static_cast<std::int64_t>(row);
        result_.row_offsets[unique] = static_cast<std::int32_t>(k);
        previous = row;
      }
      result_.positions[k] = position;
      result_.inverse[position] = static_cast<std::int32_t>(unique);
    }
  }

  // Names the first bad id, if there is one.
  Status bad_id_error() const {
    std::int64_t total = 0;
    for (std::size_t t = 0; t < num_tables_; ++t) total += result_.num_bad[t];
    if (total == 0) return Status();
    for (std::size_t f = 0; f < bags_.num_features; ++f) {
      for (std::size_t i = feature_begin(f); i < feature_end(f); ++i) {
        const std::int64_t id = bags_.ids_are_int32 ? static_cast<const std::int32_t*>(bags_.ids)[i]
                                                    : static_cast<const std::int64_t*>(bags_.ids)[i];
        const std::int64_t table = table_of_feature_[f];
        if (id >= 0 && id < num_rows_[table]) continue;
        return Status::invalid("dedup", "id " + std::to_string(id) + " at position " + std::to_string(i) + " of feature " +
                                            std::to_string(f) + " is outside [0, " + std::to_string(num_rows_[table]) +
                                            ") of table " + std::to_string(table) + "; " + std::to_string(total) +
                                            " ids of this batch are out of range. Fix the ids, or choose clamp or ignore");
      }
    }
    return Status();
  }

 private:
  std::size_t feature_begin(std::size_t f) const { return static_cast<std::size_t>(bags_.offsets[f * bags_.batch_size]); }
  std::size_t feature_end(std::size_t f) const { return feature_begin(f + 1); }
  std::uint64_t last_row(std::size_t t) const { return static_cast<std::uint64_t>(num_rows_[t]) - 1; }
  bool is_wide(std::size_t t) const { return static_cast<std::uint64_t>(num_rows_[t]) > kNarrowRows; }
  void grow(std::vector<std::uint64_t>* v) const {
    if (v->size() < bags_.num_ids) v->resize(bags_.num_ids);
  }

  template <typename Id>
  std::size_t read_ids(std::size_t table, const Id* ids) {
    const bool wide = is_wide(table);
    std::uint64_t* keys = scratch_.keys.data() + scratch_.id_begin[table];
    std::uint64_t* rows = wide ? scratch_.wide_rows.data() + scratch_.id_begin[table] : nullptr;
    const std::int64_t num_rows = num_rows_[table];
    std::size_t n = 0;
    std::int64_t num_bad = 0;
    for (std::size_t f = 0; f < bags_.num_features; ++f) {
      if (static_cast<std::size_t>(table_of_feature_[f]) != table) continue;
      for (std::size_t i = feature_begin(f), end = feature_end(f); i < end; ++i) {
        std::int64_t id = ids[i];
        if (static_cast<std::uint64_t>(id) >= static_cast<std::uint64_t>(num_rows)) {
          ++num_bad;
          if (mode_ != OutOfRange::Clamp) {
            result_.inverse[i] = kIgnoredPosition;
            continue;
          }
          id = id < 0 ? 0 : num_rows - 1;
        }
        // A wide key holds its place among the table's ids instead of the row.
        keys[n] = (wide ? static_cast<std::uint64_t>(n) : static_cast<std::uint64_t>(id)) << 32 | i;
        if (wide) rows[n] = static_cast<std::uint64_t>(id);
        ++n;
      }
    }
    result_.num_bad[table] = num_bad;
    return n;
  }

  const Bags& bags_;
  const std::int64_t* table_of_feature_;
  const std::int64_t* num_rows_;
  const std::size_t num_tables_;
  const OutOfRange mode_;
  DedupWorkspace& scratch_;
  const DedupResult& result_;
  std::size_t num_valid_total_ = 0;
};

}  // namespace

Status dedup(const Bags& bags, const std::int64_t* table_of_feature, const std::int64_t* num_rows, std::size_t num_tables,
             OutOfRange mode, int num_threads, DedupWorkspace* workspace, const DedupResult& result) {
  if (bags.num_ids > kMaxIds) {
    return Status::invalid("dedup", std::to_string(bags.num_ids) + " ids in one batch, at most 2147483647 are supported");
  }
  KSTEP_RETURN_IF_ERROR(check_offsets(bags));
  Dedup work(bags, table_of_feature, num_rows, num_tables, mode, workspace, result);
  work.place_tables();
  parallel_tasks(num_threads, num_tables, [&](std::size_t table) { work.sort_table(table); });
  if (mode == OutOfRange::Error) KSTEP_RETURN_IF_ERROR(work.bad_id_error());
  work.place_results();
  parallel_tasks(num_threads, num_tables, [&](std::size_t table) { work.write_table(table); });
  return Status();
}

}  // namespace kstep
