#include "cache/row_cache.h"

#include <algorithm>

namespace kstep {

Status RowCache::make(std::uint64_t cache_bytes, std::uint32_t stride_bytes, std::unique_ptr<RowCache>* out) {
  std::unique_ptr<RowCache> cache(new RowCache());
  const std::uint64_t capacity = cache_bytes / (stride_bytes + kOverheadBytes);
  if (capacity > (1u << 31)) {
    return Status::invalid("row cache", std::to_string(capacity) + " slots exceed 2^31; give this rank fewer bytes, or use more ranks");
  }
  cache->stride_ = stride_bytes;
  cache->capacity_ = static_cast<std::uint32_t>(capacity);
  if (capacity > 0) KSTEP_RETURN_IF_ERROR(HugeBuffer::make(capacity * stride_bytes, "row cache", &cache->slots_));
  cache->states_.resize(capacity);
  std::size_t num_entries = 1024;
  while (num_entries < 2 * capacity) num_entries *= 2;
  cache->min_entries_ = num_entries;
  cache->rehash(num_entries);
  cache->announced_.resize(num_entries / 2);
  cache->announced_mask_ = num_entries / 2 - 1;
  *out = std::move(cache);
  return {};
}

std::uint64_t RowCache::memory_bytes() const {
  return std::uint64_t{capacity_} * stride_ + overflow_.size() * std::uint64_t{kOverflowChunk} * stride_ +
         states_.size() * sizeof(State) + entries_.size() * sizeof(std::uint32_t) + announced_.size() * sizeof(Announced);
}

void RowCache::rehash(std::size_t num_entries) {
  entries_.assign(num_entries, kNoCacheSlot);
  shift_ = 64;
  for (std::size_t n = num_entries; n > 1; n /= 2) --shift_;
  const std::size_t mask = num_entries - 1;
  for (std::uint32_t slot = 0; slot < states_.size(); ++slot) {
    if (!states_[slot].is_used) continue;
    std::size_t at = start_of(states_[slot].key);
    while (entries_[at] != kNoCacheSlot) at = (at + 1) & mask;
    entries_[at] = slot;
  }
}

std::uint32_t RowCache::find(std::uint64_t key) const {
  const std::size_t mask = entries_.size() - 1;
  for (std::size_t at = start_of(key);; at = (at + 1) & mask) {
    const std::uint32_t slot = entries_[at];
    if (slot == kNoCacheSlot || states_[slot].key == key) return slot;
  }
}

void RowCache::insert(std::uint32_t slot, std::uint64_t key) {
  if (2 * (std::size_t{num_keys_} + 1) > entries_.size()) rehash(2 * entries_.size());
  State& state = states_[slot];
  state = State();
  state.key = key;
  state.is_used = 1;
  state.frequency = 1;
  ++num_keys_;
  const std::size_t mask = entries_.size() - 1;
  std::size_t at = start_of(key);
  while (entries_[at] != kNoCacheSlot) at = (at + 1) & mask;
  entries_[at] = slot;
}

void RowCache::erase(std::uint32_t slot) {
  const std::size_t mask = entries_.size() - 1;
  std::size_t hole = start_of(states_[slot].key);
  while (entries_[hole] != slot) hole = (hole + 1) & mask;
  states_[slot].is_used = 0;
  states_[slot].is_dirty = 0;
  --num_keys_;
  // Move later entries of the run back into the hole, so that no tombstones are needed.
  for (std::size_t at = (hole + 1) & mask; entries_[at] != kNoCacheSlot; at = (at + 1) & mask) {
    const std::size_t start = start_of(states_[entries_[at]].key);
    if (((at - start) & mask) < ((at - hole) & mask)) continue;  // it would come before its start
    entries_[hole] = entries_[at];
    hole = at;
  }
  entries_[hole] = kNoCacheSlot;
}

std::uint32_t RowCache::take_free() {
  std::uint32_t slot = kNoCacheSlot;
  if (!free_.empty()) {
    slot = free_.back();
    free_.pop_back();
  } else if (num_taken_ < capacity_) {
    slot = num_taken_++;
  }
  if (slot != kNoCacheSlot) ++num_used_;
  return slot;
}

std::uint32_t RowCache::choose_victim(std::uint32_t current_batch) {
  if (capacity_ == 0 || num_pinned_ == capacity_) return kNoCacheSlot;
  for (std::uint64_t step = 0; step < 3ull * capacity_; ++step) {
    const std::uint32_t slot = hand_;
    hand_ = hand_ + 1 == capacity_ ? 0 : hand_ + 1;
    State& state = states_[slot];
    if (state.num_pins > 0 || !state.is_used) continue;
    const bool is_announced = state.next_batch > current_batch && unprotected_batch_ != current_batch;
    if (is_announced && step < capacity_) continue;
    // A whole turn met nothing but announced rows: stop asking until the next batch.
    if (is_announced) unprotected_batch_ = current_batch;
    if (state.frequency > 0 && step < 2ull * capacity_) {
      --state.frequency;
      continue;
    }
    return slot;
  }
  return kNoCacheSlot;
}

std::uint32_t RowCache::take_overflow(Status* status) {
  if (free_overflow_.empty()) {
    HugeBuffer chunk;
    *status = HugeBuffer::make(std::size_t{kOverflowChunk} * stride_, "row cache overflow", &chunk);
    if (!status->ok()) return kNoCacheSlot;
    const auto first = static_cast<std::uint32_t>(capacity_ + overflow_.size() * kOverflowChunk);
    overflow_.push_back(std::move(chunk));
    states_.resize(states_.size() + kOverflowChunk);
    for (std::uint32_t i = kOverflowChunk; i-- > 0;) free_overflow_.push_back(first + i);
  }
  const std::uint32_t slot = free_overflow_.back();
  free_overflow_.pop_back();
  ++num_overflow_;
  return slot;
}

void RowCache::drop_overflow() {
  overflow_.clear();
  free_overflow_ = std::vector<std::uint32_t>();
  states_.resize(capacity_);
  states_.shrink_to_fit();
  if (entries_.size() > min_entries_) {
    rehash(min_entries_);
    entries_.shrink_to_fit();
  }
}

void RowCache::release(std::uint32_t slot) {
  if (is_overflow(slot)) {
    free_overflow_.push_back(slot);
    --num_overflow_;
  } else {
    free_.push_back(slot);
    --num_used_;
  }
}

}  // namespace kstep
