// TouchTracker: which rows of one table were updated since the last merge round, and what they held just before ("bases").
//
// A record counts its updates in a field of its own ("touches"); a tracker lists the rows whose counter left zero and,
// once `keep` was called, copies of chosen fields from before that update. Bases live in DRAM only, in chunks that are
// never moved: their memory follows the rows touched in one round. Chunks of large tables lie on huge pages, because a merge
// round reads bases in the order of row ids, which is none in memory. A table has one tracker per merge period.
//
// A round can be set apart (`detach`) while its exchange is under way: updates then fill the next one.
// Ownership: owns its lists and bases. Threads: the caller's lock; the kernels write through `sink` between `reserve` and
// the next call.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "compute/touch_sink.h"
#include "tier/huge_buffer.h"

namespace kstep {

// The rows touched in one round.
class TouchRound {
 public:
  static constexpr std::size_t kNotFound = SIZE_MAX;

  std::size_t num_rows() const { return static_cast<std::size_t>(num_rows_); }
  // Ascending. Indices below are positions in it; valid until the next update.
  const std::vector<std::uint64_t>& rows();
  // Position of the first row >= `row`. REQUIRES: rows() was called since the last update.
  std::size_t lower_bound(std::uint64_t row) const;
  const std::vector<std::uint64_t>& sorted() const { return sorted_rows_; }
  // Base of the row at a position.
  const float* base(std::size_t position) const { return slot(order_[position]); }
  float* base(std::size_t position) { return slot(order_[position]); }

  // By position. is_cleared: the row's counter in its record is zero again. counts: what it was then.
  std::vector<std::uint8_t> is_cleared;
  std::vector<std::int32_t> counts;
  // Counters were cleared: an update before this round is forgotten or detached would list rows twice.
  bool is_merging = false;

 private:
  friend class TouchTracker;
  struct Chunk {
    HugeBuffer huge;
    std::unique_ptr<float[]> small;  // where `huge` is empty
  };
  float* slot(std::uint32_t index) const {
    return chunk_pointers_[index >> chunk_shift_] + std::size_t{index & ((1u << chunk_shift_) - 1)} * base_floats_;
  }

  std::uint32_t base_floats_ = 0, chunk_shift_ = 0;
  std::uint64_t num_rows_ = 0;
  std::vector<std::uint64_t> slot_rows_;                // [>= num_rows] in the order of slots
  std::vector<Chunk> chunks_;
  std::vector<float*> chunk_pointers_;
  std::vector<std::uint64_t> sorted_rows_;
  std::vector<std::uint32_t> order_;                    // slot of each sorted row
};

class TouchTracker {
 public:
  // `num_rows` of the table bounds the size of a chunk.
  TouchTracker(std::uint32_t counter, std::uint64_t num_rows) : counter_(counter), num_table_rows_(num_rows) {}

  std::uint32_t counter() const { return counter_; }
  const std::vector<Span>& spans() const { return spans_; }
  // From now on keep bases of these spans. REQUIRES: no row is touched, at most kMaxSpans.
  void keep(std::vector<Span> spans);

  // Makes room for the first touches of an update of `num_rows` rows. Fails if memory is exhausted.
  Status reserve(std::size_t num_rows);
  TouchSink sink();

  TouchRound& current() { return current_; }
  // The round that is being exchanged, or null.
  TouchRound* detached() { return has_detached_ ? &detached_ : nullptr; }
  // REQUIRES: nothing is detached.
  void detach();
  // Forgets the detached round if there is one, else the current one. Memory beyond what that round used goes back; the rest waits
  // for the next round, or for the one after the next `detach`.
  void clear();
  std::size_t base_bytes() const;

 private:
  void reset(TouchRound* round) const;
  // A round without rows, with the memory that `round` used.
  TouchRound emptied(TouchRound* round) const;

  const std::uint32_t counter_;
  const std::uint64_t num_table_rows_;
  std::vector<Span> spans_;
  TouchRound current_, detached_;
  TouchRound spare_;  // memory for the current round once this one is detached
  bool has_detached_ = false;
};

}  // namespace kstep
