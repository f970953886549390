// Cleaner: gives back the space of overwritten rows, a little at a time.
//
// Purpose: keeps the bytes that no snapshot holds within `space_factor` x the units of live rows by
// copying the live records of mostly-stale segments to the cold stream and dropping the segment.
// The work is paced by how much was appended, so no single step pays for a whole segment.
// docs/row_store.md explains the pacing and the choice of victims.
// The next piece of a victim is read while others use the thread, so that cleaning costs it little more than copying.
// Ownership: a read buffer and the engine that fills it; borrows the log. Thread rule: that of the StoreContext.
#pragma once

#include <cstdint>
#include <memory>

#include "storage/io_engine.h"
#include "storage/row_log.h"

namespace kstep {

class Cleaner {
 public:
  // REQUIRES: space_factor > 1. `reads` is for this cleaner alone.
  Cleaner(StoreContext* context, RowLog* log, double space_factor, std::unique_ptr<IoEngine> reads);
  ~Cleaner();  // waits for a read in flight

  // 0 below the start of cleaning, 1 at the bound, above 1 past it.
  double pressure() const;
  // Cleans in proportion to `appended_bytes` and the pressure. Bounded by 8x the appended bytes plus one piece, beside
  // what is owed: while the store is awaited nothing more is begun and the rest stays as credit, unless the pressure is 1 or more.
  Status after_append(std::uint64_t appended_bytes);
  // Cleans one piece of the best victim, whatever the pressure. *did_work is false when nothing can be gained.
  Status step(bool* did_work);

 private:
  std::uint64_t piece_bytes() const;
  bool choose_victim();
  Status clean_piece();
  Status remove_empty(bool* did_work);
  std::uint32_t units_of_piece(const Segment& segment) const;
  Status begin_reading();
  Status finish_reading();
  void end_reading();
  Status read_piece(std::uint64_t offset, std::size_t num_bytes, std::size_t* got);

  StoreContext* context_;
  RowLog* log_;
  double space_factor_;
  double credit_bytes_ = 0;
  std::uint32_t victim_ = kNoSlot;  // ordinal
  std::uint64_t victim_id_ = 0;     // tells whether the ordinal was reused
  std::uint32_t next_unit_ = 0;
  AlignedBuffer piece_;
  std::unique_ptr<IoEngine> reads_;
  IoRequest ahead_;                        // the piece being read, or the last one that was
  bool is_reading_ = false;
  std::uint32_t ahead_ordinal_ = kNoSlot;  // whose piece that is
  std::uint64_t ahead_id_ = 0;
};

}  // namespace kstep
