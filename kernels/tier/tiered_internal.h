// Private parts of TieredRows, shared by its two source files.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "cache/clairvoyant.h"
#include "cache/row_cache.h"
#include "tier/tiered_rows.h"

namespace kstep {

// The rows of one pin or one prefetched table of a batch, on their way.
struct TieredRows::Job {
  enum class State : std::uint8_t {
    Idle,    // not in use
    Queued,  // waiting for the I/O thread, or partly scanned
    Ready,   // every row is in a pinned slot
    Active,  // handed to the caller under a ticket
    Failed,  // nothing is pinned; `status` says why
  };
  State state = State::Idle;
  PinMode mode = PinMode::Read;
  bool is_demanded = false;   // a caller waits for it, so it may use overflow slots
  bool is_cancelled = false;
  bool is_dirty = false;      // all rows were updated
  bool may_overflow = false;  // I/O thread: is_demanded when the round began
  std::uint32_t index = 0;    // in jobs_
  std::uint32_t generation = 0;
  std::uint32_t table = 0;
  std::uint32_t batch = 0;    // 0: not announced by prefetch()
  std::size_t num_scanned = 0;
  std::vector<std::uint64_t> rows;
  std::vector<std::uint32_t> slots;
  std::vector<std::byte*> payloads;
  Status status;

  // With room to spare: batches differ a little in size, and each new largest one must not cost new memory.
  void reserve(std::size_t num_rows) {
    if (num_rows <= rows.capacity()) return;
    const std::size_t num_reserved = num_rows + num_rows / 8;
    rows.reserve(num_reserved);
    slots.reserve(num_reserved);
    payloads.reserve(num_reserved);
  }
};

struct TieredRows::TableCounters {
  // Written by the I/O thread.
  std::uint64_t hits_rows = 0;
  std::atomic<std::uint64_t> misses_rows{0};  // read by the caller's thread as well
  std::uint64_t first_touches_rows = 0;
  std::uint64_t evicted_rows = 0;
  std::uint64_t overflow_rows = 0;
  // Written by the caller's thread, under the mutex.
  double stall_s = 0;
  std::uint64_t prefetched_pins = 0;
  std::uint64_t unprefetched_pins = 0;
};

// The tables of one payload size: one cache, one log.
struct TieredRows::CacheClass {
  CacheClass(std::unique_ptr<RowCache> c) : cache(std::move(c)), clairvoyant(cache->capacity()) {}
  std::unique_ptr<RowCache> cache;
  ClairvoyantEstimator clairvoyant;
  std::uint32_t payload_bytes = 0;
  std::uint32_t record_bytes = 0;
  std::vector<ReadRow> misses;              // of this round, to be read
  std::vector<std::uint32_t> miss_slots;
  std::vector<std::uint32_t> idle_overflow;  // unpinned overflow slots, to be emptied
  std::vector<std::uint32_t> waiting_overflow;
  std::uint32_t num_calm_rounds = 0;         // since overflow slots were last in use
};

}  // namespace kstep
