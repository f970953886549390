// RowCache: rows of one payload size in DRAM, found by key, evicted by frequency CLOCK with look-ahead.
//
// Purpose: slots of fixed size on huge pages. A slot is pinned while a batch uses it and cannot be
// evicted then. Beside the `capacity` slots there are overflow slots, taken when every slot is pinned,
// so a batch larger than the cache still works; the owner empties them as soon as they are unpinned.
// Ownership: owns the memory; pointers into slots stay valid until the slot is released.
// Thread rule: one thread owns all calls; pinned payloads may be used by others.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "common/status.h"
#include "tier/huge_buffer.h"

namespace kstep {

constexpr std::uint32_t kNoCacheSlot = UINT32_MAX;

// Table position and row in one number. REQUIRES: table < 2^16, row < 2^48.
inline std::uint64_t cache_key(std::uint32_t table, std::uint64_t row) { return (std::uint64_t{table} << 48) | row; }
inline std::uint32_t table_of_key(std::uint64_t key) { return static_cast<std::uint32_t>(key >> 48); }
inline std::uint64_t row_of_key(std::uint64_t key) { return key & ((1ull << 48) - 1); }

class RowCache {
 public:
  // Bookkeeping per slot, counted in cache_bytes: its state, its share of the hash and of the announcements.
  static constexpr std::uint64_t kOverheadBytes = 48;

  static Status make(std::uint64_t cache_bytes, std::uint32_t stride_bytes, std::unique_ptr<RowCache>* out);

  std::uint32_t capacity() const { return capacity_; }
  std::uint32_t num_used() const { return num_used_; }          // of capacity
  std::uint32_t num_overflow() const { return num_overflow_; }  // overflow slots in use
  bool holds_overflow_memory() const { return !overflow_.empty(); }
  std::uint64_t memory_bytes() const;

  // --- finding ---
  std::uint32_t find(std::uint64_t key) const;
  // Two stages of cache-line prefetch for a later find(): the hash entry first, the slot's state second.
  void prefetch_entry(std::uint64_t key) const { __builtin_prefetch(&entries_[start_of(key)]); }
  void prefetch_state(std::uint64_t key) const {
    const std::uint32_t slot = entries_[start_of(key)];
    if (slot != kNoCacheSlot) __builtin_prefetch(&states_[slot]);
  }
  std::byte* payload(std::uint32_t slot) const {
    if (slot < capacity_) return slots_.data() + std::size_t{slot} * stride_;
    const std::uint32_t i = slot - capacity_;
    return overflow_[i / kOverflowChunk].data() + std::size_t{i % kOverflowChunk} * stride_;
  }
  std::uint64_t key(std::uint32_t slot) const { return states_[slot].key; }
  bool is_used(std::uint32_t slot) const { return states_[slot].is_used; }  // has a key
  bool is_overflow(std::uint32_t slot) const { return slot >= capacity_; }

  // --- pins, dirt, use ---
  void pin(std::uint32_t slot) {
    if (states_[slot].num_pins++ == 0 && slot < capacity_) ++num_pinned_;
  }
  void unpin(std::uint32_t slot) {
    if (--states_[slot].num_pins == 0 && slot < capacity_) --num_pinned_;
  }
  std::uint32_t num_pins(std::uint32_t slot) const { return states_[slot].num_pins; }
  void set_dirty(std::uint32_t slot, bool dirty) { states_[slot].is_dirty = dirty; }
  bool is_dirty(std::uint32_t slot) const { return states_[slot].is_dirty; }
  void count_use(std::uint32_t slot) {
    if (states_[slot].frequency < kMaxFrequency) ++states_[slot].frequency;
  }
  // The row will be used in batch `batch`; it is kept until that batch came, while others can be evicted.
  void announce(std::uint32_t slot, std::uint32_t batch) {
    if (batch > states_[slot].next_batch) states_[slot].next_batch = batch;
  }
  // The same for rows that are not here yet. Lossy: a later note may displace an earlier one.
  void note_announced(std::uint64_t key, std::uint32_t batch) { announced_[start_of(key) & announced_mask_] = {tag_of(key), batch}; }
  std::uint32_t announced_batch(std::uint64_t key) const {
    const Announced& entry = announced_[start_of(key) & announced_mask_];
    return entry.tag == tag_of(key) ? entry.batch : 0;
  }

  // --- coming and going ---
  // A free slot within capacity, not yet inserted; kNoCacheSlot when all are in use.
  std::uint32_t take_free();
  // An unpinned slot to evict; kNoCacheSlot when all are pinned. `current_batch`: the batch in use now.
  std::uint32_t choose_victim(std::uint32_t current_batch);
  std::uint32_t take_overflow(Status* status);
  // Gives the memory of all overflow slots back. REQUIRES: none is in use.
  void drop_overflow();
  // Makes the slot findable. REQUIRES: taken, or erased just before.
  void insert(std::uint32_t slot, std::uint64_t key);
  // Forgets the key; the slot stays taken.
  void erase(std::uint32_t slot);
  // Gives an erased slot back.
  void release(std::uint32_t slot);

  // Calls visit(slot) for every slot with a key.
  template <typename Visit>
  void for_each(Visit visit) const {
    for (std::uint32_t slot = 0; slot < states_.size(); ++slot) {
      if (states_[slot].is_used) visit(slot);
    }
  }

 private:
  static constexpr std::uint8_t kMaxFrequency = 7;
  static constexpr std::uint32_t kOverflowChunk = 1024;

  struct State {
    std::uint64_t key = 0;
    std::uint32_t next_batch = 0;
    std::uint16_t num_pins = 0;
    std::uint8_t frequency : 6;
    std::uint8_t is_dirty : 1;
    std::uint8_t is_used : 1;  // has a key
    State() : frequency(0), is_dirty(0), is_used(0) {}
  };
  static_assert(sizeof(State) == 16, "four states to a cache line");

  struct Announced {
    std::uint32_t tag = 0;
    std::uint32_t batch = 0;
  };

  RowCache() = default;
  static std::uint32_t tag_of(std::uint64_t key) { return static_cast<std::uint32_t>(key * 0xFF51AFD7ED558CCDull >> 32); }
  std::size_t start_of(std::uint64_t key) const {
    std::uint64_t h = key * 0x9E3779B97F4A7C15ull;
    h ^= h >> 32;
    return (h * 0xD6E8FEB86659FD93ull) >> shift_;
  }
  void rehash(std::size_t num_entries);

  std::uint32_t stride_ = 0;
  std::uint32_t capacity_ = 0;
  std::uint32_t num_taken_ = 0;  // slots below it were taken at least once
  std::uint32_t num_used_ = 0;
  std::uint32_t num_pinned_ = 0;
  std::uint32_t num_keys_ = 0;
  std::uint32_t hand_ = 0;
  std::uint32_t unprotected_batch_ = UINT32_MAX;  // look-ahead is ignored while this is the current batch
  std::uint32_t num_overflow_ = 0;
  HugeBuffer slots_;
  std::vector<HugeBuffer> overflow_;
  std::vector<State> states_;
  std::vector<std::uint32_t> free_;
  std::vector<std::uint32_t> free_overflow_;
  std::vector<std::uint32_t> entries_;  // open addressing, linear, a power of two, at most half full
  int shift_ = 0;                       // 64 - log2(entries)
  std::vector<Announced> announced_;    // direct-mapped, half as many as entries at first
  std::size_t announced_mask_ = 0;
  std::size_t min_entries_ = 0;         // enough for `capacity` keys
};

}  // namespace kstep
