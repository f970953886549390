// Merge messages: the rows of one table for one receiver, as sections of equal items, each filled up to 8 bytes.
//
//   row ids | touches, where they travel | each field, packed
//
// The same layout as torchrec_kstep/merge/message.py. A replica packs what it contributes for all receivers at once: each
// row goes to its owner, a hash of table and row.
// Ownership: the caller's arrays. Threads: a Packer may be used by several threads on disjoint ranges.
#pragma once

#include <cstdint>
#include <vector>

#include "common/status.h"
#include "compute/merge_rows.h"
#include "compute/wire.h"

namespace kstep {

// What a message says of each row.
struct MessageFormat {
  std::uint32_t row_id_bytes = 4;  // 4 or 8
  std::uint32_t count_bytes = 0;   // of touches: 1, 2 or 4 as integers, or a float32 of merged rows; 0: they do not travel
  std::uint32_t dim = 0;
  std::vector<Wire> wires;         // per field, at most kMaxSpans
};

// Where the sections of a message begin; row ids are at 0.
struct MessageSections {
  std::size_t counts = 0, fields[kMaxSpans] = {}, num_bytes = 0;
};

MessageSections sections_of(const MessageFormat& format, std::size_t num_rows);

// Sets what fills the sections up to zero, so that equal messages have equal bytes.
void clear_filling(const MessageFormat& format, std::size_t num_rows, std::uint8_t* message);

// Which replica sums up a row; `key` is the row's place among all rows of all tables.
std::size_t owner_of(std::uint64_t key, std::size_t num_replicas);

// One table of a packing.
struct PackRequest {
  MessageFormat format;
  std::uint64_t first_key = 0;           // key of row 0
  std::int32_t max_count = 1;            // touches beyond it travel as it
  std::vector<std::uint64_t> salts;      // per field
  std::vector<std::uint8_t*> messages;   // per receiver, the message about this table
  std::vector<std::size_t> num_rows;     // per receiver, the rows that it owns
};

class Packer {
 public:
  // Finds the owners of `rows`. Ranges that are packed must be those of `rows_per_task`.
  Packer(const PackRequest& request, const std::uint64_t* rows, std::size_t num_rows, std::size_t rows_per_task);

  // Fails if the request expects other numbers of rows.
  Status check() const;
  // Packs rows [begin, end): counts [end - begin] and fields [end - begin, dim]. Returns whether all values are finite.
  bool pack(std::size_t begin, std::size_t end, const std::int32_t* counts, const float* const* fields) const;

 private:
  struct Target {
    std::uint8_t *rows, *counts, *fields[kMaxSpans];
  };

  const PackRequest& request_;
  const std::uint64_t* rows_;
  const std::size_t num_rows_, rows_per_task_;
  std::vector<std::uint32_t> owners_;       // [num_rows]
  std::vector<std::size_t> task_begin_;     // [tasks + 1, receivers] rows of a receiver before each task
  std::vector<Target> targets_;             // per receiver
  std::vector<RowNoise> noise_;             // per field
};

// Packs what touched rows contribute, as collect_rows computes it.
Status pack_touched(const TrackedTable& at, const std::uint64_t* rows, std::size_t num_rows, MergeForm form, const PackRequest& request,
                    int num_threads, bool* is_finite);

// Packs contributions that were collected before: counts [num_rows], fields [num_rows, dim] each.
Status pack_contributions(const std::uint64_t* rows, std::size_t num_rows, const std::int32_t* counts,
                          const std::vector<const float*>& fields, const PackRequest& request, int num_threads, bool* is_finite);

}  // namespace kstep
