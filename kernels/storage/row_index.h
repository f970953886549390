// RowIndex: where the newest record of each row of one table is.
//
// Purpose: row_id -> record slot (a 32-bit number: segment ordinal x slots per segment + record).
// Rows are grouped in chunks of 65,536. A chunk with few materialised rows is a small hash table
// (8 to 16 bytes per row, by its load), a well-filled one a plain array (4 bytes per row), an
// untouched one a null pointer; so a table of a billion rows costs 240 KB until rows are touched.
// Ownership: owns its memory. Thread rule: one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace kstep {

constexpr std::uint32_t kNoSlot = UINT32_MAX;
constexpr std::size_t kIndexAhead = 16;  // how many rows ahead prefetch() pays

class RowIndex {
 public:
  explicit RowIndex(std::uint64_t num_rows);

  // kNoSlot for a row that was never materialised. REQUIRES: row < num_rows.
  std::uint32_t find(std::uint64_t row) const;
  // Starts fetching what find() of this row will look at. Callers with many rows do it some rows ahead: in an index
  // larger than the processor's caches a lookup is otherwise one wait for memory.
  void prefetch(std::uint64_t row) const;
  // Sets the slot of a row and returns the earlier one (kNoSlot for the first).
  std::uint32_t exchange(std::uint64_t row, std::uint32_t slot);

  std::uint64_t num_materialised() const { return num_materialised_; }
  std::uint64_t memory_bytes() const { return memory_bytes_; }

  // Calls visit(row, slot) for every materialised row, chunks in ascending order.
  template <typename Visit>
  void for_each(Visit visit) const {
    for (std::size_t c = 0; c < chunks_.size(); ++c) {
      const Chunk* chunk = chunks_[c].get();
      if (chunk == nullptr) continue;
      const std::uint64_t base = std::uint64_t{c} << kChunkBits;
      for (std::uint32_t i = 0; i < chunk->capacity; ++i) {
        if (chunk->slots[i] == kNoSlot) continue;
        visit(base + (chunk->is_dense() ? i : chunk->keys[i]), chunk->slots[i]);
      }
    }
  }

 private:
  static constexpr int kChunkBits = 16;
  static constexpr std::uint32_t kChunkRows = 1u << kChunkBits;

  struct Chunk {
    std::uint32_t count = 0;
    std::uint32_t capacity = 0;                // entries in slots (and keys)
    std::unique_ptr<std::uint32_t[]> slots;    // kNoSlot marks a free entry
    std::unique_ptr<std::uint16_t[]> keys;     // null in a dense chunk
    bool is_dense() const { return keys == nullptr; }
    std::uint32_t* locate(std::uint16_t key) const;
  };

  void grow(Chunk* chunk);

  std::vector<std::unique_ptr<Chunk>> chunks_;
  std::uint64_t num_materialised_ = 0;
  std::uint64_t memory_bytes_ = 0;
};

}  // namespace kstep
