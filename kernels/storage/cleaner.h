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
  // Earns work in proportion to `appended_bytes` and the pressure, and does what was earned. Bounded by 8x the appended bytes plus
  // one piece, beside what is owed: while the store is awaited nothing more is begun and the rest stays as credit, unless the pressure is 1 or more.
  Status after_append(std::uint64_t appended_bytes);
  // Cleans one piece of the best victim, whatever the pressure. *did_work is false when nothing can be gained.
  Status step(bool* did_work);
  // Copies one slice of what was earned, while the drive is busy with reads of rows. Waits for no read and removes no segment, as
  // the rows being read may lie in one that is empty by now. What fails is told by the next call of the others. False: nothing to do now.
  bool work_beside_reads();

 private:
  // Some units of a sealed segment, in memory.
  struct Piece {
    AlignedBuffer memory;
    std::uint32_t ordinal = kNoSlot;  // kNoSlot: nothing
    std::uint64_t id = 0;             // of the segment: tells whether the ordinal was reused
    std::uint32_t first_unit = 0;
    std::uint32_t num_units = 0;
    std::uint64_t offset = 0;         // in the file
    std::uint32_t num_bytes = 0;
  };

  std::uint64_t piece_bytes() const;
  bool choose_victim();
  bool find_victim();
  Status remove_empty(bool* did_work);
  Piece next_piece(AlignedBuffer memory) const;
  Status begin_reading();
  Status finish_reading(bool waits);
  void end_reading();
  Status load_piece(bool waits, bool* is_loaded);
  Status copy_slice(std::uint32_t max_records, std::uint64_t* num_bytes);
  Status finish_victim();

  StoreContext* context_;
  RowLog* log_;
  double space_factor_;
  double credit_bytes_ = 0;
  std::uint32_t victim_ = kNoSlot;  // ordinal
  std::uint64_t victim_id_ = 0;
  std::uint32_t next_unit_ = 0;     // of the victim: the first that was not loaded yet
  Piece piece_;                     // being copied
  std::uint32_t next_record_ = 0;   // of piece_'s segment
  std::uint32_t end_record_ = 0;    // equal to next_record_: nothing is left of piece_
  std::unique_ptr<IoEngine> reads_;
  Piece ahead_;                     // being read, or read
  IoRequest request_;               // of ahead_
  bool is_reading_ = false;
  Status told_later_;               // what work_beside_reads() met
};

}  // namespace kstep
