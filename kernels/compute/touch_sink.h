// TouchSink: where an update notes that it is the first of its row since the last merge round, and keeps the row's base.
//
// What the row kernels see of a TouchTracker (touch_tracker.h). Filled before an update with room for all its rows; the
// kernels of several threads take slots by an atomic counter, so which row has which slot is not defined.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kstep {

constexpr std::size_t kMaxTrackers = 3;
constexpr std::size_t kMaxSpans = 3;

// Floats of a payload, one after the other.
struct Span {
  std::uint32_t offset = 0;  // bytes
  std::uint32_t floats = 0;
};

struct TouchSink {
  std::uint32_t counter = 0;  // byte offset of the tracker's int32 counter of updates in a payload
  std::uint32_t num_spans = 0;
  Span spans[kMaxSpans];           // what to keep, in the order in which a base has it
  std::uint32_t base_floats = 0;   // of one row: all spans
  std::uint32_t chunk_shift = 0;   // a chunk has 2^chunk_shift slots
  float* const* chunks = nullptr;
  std::uint64_t* rows = nullptr;       // the row of each slot
  std::uint64_t* num_rows = nullptr;   // slots taken
};

}  // namespace kstep
