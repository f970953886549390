// Dedup: from the ids of a batch to unique rows per table, and back.
//
// Each table's ids are radix-sorted by (row, position), so the result is one and the same for every thread count:
//   unique_rows[table_offsets[t] : table_offsets[t + 1]]      rows of table t, strictly ascending
//   positions[row_offsets[u] : row_offsets[u + 1]]            where row u occurs in `ids`, ascending
//   inverse[i]                                                the u of ids[i]; kIgnoredPosition for an ignored id
// Ownership: all arrays are the caller's. Threads: one call per workspace at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/status.h"

namespace kstep {

// What happens to an id below 0 or not below its table's number of rows. Bad ids are counted in every mode.
enum class OutOfRange : int {
  Error = 0,   // the call fails, naming the first bad id; nothing else happens
  Clamp = 1,   // the nearest valid row is read instead: row 0 or the last one
  Ignore = 2,  // the id is as if absent: it adds nothing to its bag, also not to the bag's size
};

constexpr std::int32_t kIgnoredPosition = -1;
constexpr std::size_t kMaxIds = INT32_MAX;  // positions are int32

// The ids of a batch, feature-major as in a KeyedJaggedTensor: bag (f, b) is ids[offsets[f * B + b] : offsets[f * B + b + 1]].
struct Bags {
  const void* ids = nullptr;  // int64 or int32
  bool ids_are_int32 = false;
  std::size_t num_ids = 0;
  const std::int64_t* offsets = nullptr;  // num_features * batch_size + 1
  std::size_t num_features = 0;
  std::size_t batch_size = 0;
};

struct DedupResult {
  std::int64_t* unique_rows = nullptr;    // [num_ids], the first table_offsets[num_tables] are set
  std::int64_t* table_offsets = nullptr;  // [num_tables + 1]
  std::int32_t* row_offsets = nullptr;    // [num_ids + 1], the first U + 1 are set
  std::int32_t* positions = nullptr;      // [num_ids], the first row_offsets[U] are set
  std::int32_t* inverse = nullptr;        // [num_ids]
  std::int64_t* num_bad = nullptr;        // [num_tables] ids out of range
};

// Scratch that only grows; reuse it to avoid allocation in the steady state.
struct DedupWorkspace {
  std::vector<std::uint64_t> keys, swap;           // row << 32 | position, rows below 2^32
  std::vector<std::uint64_t> wide_rows, wide_swap;  // rows, where a table has more than 2^32
  std::vector<std::size_t> id_begin;               // [num_tables + 1] first slot of each table in the scratch
  std::vector<std::size_t> num_valid, num_unique;  // [num_tables]
};

// `table_of_feature` has bags.num_features entries below num_tables; `num_rows` has num_tables entries.
// Fails with InvalidArgument on offsets that do not start at 0, decrease or do not end at num_ids, and on bad ids in
// OutOfRange::Error.
Status dedup(const Bags& bags, const std::int64_t* table_of_feature, const std::int64_t* num_rows, std::size_t num_tables,
             OutOfRange mode, int num_threads, DedupWorkspace* workspace, const DedupResult& result);

}  // namespace kstep
