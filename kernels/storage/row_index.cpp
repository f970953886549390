#include "storage/row_index.h"

#include <algorithm>

namespace kstep {
namespace {

constexpr std::uint32_t kFirstCapacity = 16;
// A sparse entry takes 6 bytes and a dense one 4: at 3/4 load of half the chunk dense is no larger.
constexpr std::uint32_t kMaxSparseCapacity = 1u << 15;

std::uint32_t start_of(std::uint16_t key, std::uint32_t mask) {
  return (key * 40503u >> 3) & mask;  // 2^16 / golden ratio: neighbours spread
}

}  // namespace

std::uint32_t* RowIndex::Chunk::locate(std::uint16_t key) const {
  if (is_dense()) return &slots[key];
  const std::uint32_t mask = capacity - 1;
  for (std::uint32_t i = start_of(key, mask);; i = (i + 1) & mask) {
    if (slots[i] == kNoSlot || keys[i] == key) return &slots[i];
  }
}

RowIndex::RowIndex(std::uint64_t num_rows) : chunks_((num_rows + kChunkRows - 1) >> kChunkBits) {
  memory_bytes_ = chunks_.size() * sizeof(chunks_[0]);
}

std::uint32_t RowIndex::find(std::uint64_t row) const {
  const Chunk* chunk = chunks_[row >> kChunkBits].get();
  return chunk == nullptr ? kNoSlot : *chunk->locate(static_cast<std::uint16_t>(row));
}

void RowIndex::prefetch(std::uint64_t row) const {
  const Chunk* chunk = chunks_[row >> kChunkBits].get();
  if (chunk == nullptr) return;
  const auto key = static_cast<std::uint16_t>(row);
  const std::uint32_t at = chunk->is_dense() ? key : start_of(key, chunk->capacity - 1);
  __builtin_prefetch(&chunk->slots[at], 1);
  if (!chunk->is_dense()) __builtin_prefetch(&chunk->keys[at]);
}

std::uint32_t RowIndex::exchange(std::uint64_t row, std::uint32_t slot) {
  std::unique_ptr<Chunk>& chunk = chunks_[row >> kChunkBits];
  if (chunk == nullptr) {
    chunk = std::make_unique<Chunk>();
    memory_bytes_ += sizeof(Chunk);
    grow(chunk.get());
  }
  const auto key = static_cast<std::uint16_t>(row);
  std::uint32_t* entry = chunk->locate(key);
  const std::uint32_t earlier = *entry;
  if (earlier == kNoSlot) {
    if (!chunk->is_dense() && 4 * (chunk->count + 1) > 3 * chunk->capacity) {
      grow(chunk.get());
      entry = chunk->locate(key);
    }
    if (!chunk->is_dense()) chunk->keys[entry - chunk->slots.get()] = key;
    ++chunk->count;
    ++num_materialised_;
  }
  *entry = slot;
  return earlier;
}

void RowIndex::grow(Chunk* chunk) {
  const bool will_be_dense = chunk->capacity >= kMaxSparseCapacity;
  Chunk grown;
  grown.count = chunk->count;
  grown.capacity = will_be_dense ? kChunkRows : std::max(kFirstCapacity, 2 * chunk->capacity);
  grown.slots.reset(new std::uint32_t[grown.capacity]);
  std::fill_n(grown.slots.get(), grown.capacity, kNoSlot);
  if (!will_be_dense) grown.keys.reset(new std::uint16_t[grown.capacity]());
  memory_bytes_ += grown.capacity * (will_be_dense ? 4u : 6u);
  memory_bytes_ -= chunk->capacity * 6u;
  for (std::uint32_t i = 0; i < chunk->capacity; ++i) {
    if (chunk->slots[i] == kNoSlot) continue;
    std::uint32_t* entry = grown.locate(chunk->keys[i]);
    *entry = chunk->slots[i];
    if (!will_be_dense) grown.keys[entry - grown.slots.get()] = chunk->keys[i];
  }
  *chunk = std::move(grown);
}

}  // namespace kstep
