#include "compute/touch_tracker.h"

#include <algorithm>
#include <utility>

namespace kstep {
namespace {

constexpr std::size_t kSmallChunkBytes = std::size_t{1} << 20, kHugeChunkBytes = std::size_t{8} << 20;

constexpr unsigned kDigitBits = 11;
constexpr std::size_t kDigits = std::size_t{1} << kDigitBits;

constexpr std::size_t kFewItems = 1024;  // below it the counting costs more than it saves

// Sorts by the bits [first_bit, end_bit) of `key_of(item)`, which no two items share, some bits at a time from the lowest.
// `swap` is scratch.
template <typename Item, typename Key>
void sort_by_bits(std::vector<Item>* items, std::vector<Item>* swap, unsigned first_bit, unsigned end_bit, const Key& key_of) {
  if (items->size() < kFewItems) {
    std::sort(items->begin(), items->end(), [&](const Item& left, const Item& right) { return key_of(left) < key_of(right); });
    return;
  }
  swap->resize(items->size());
  for (unsigned shift = first_bit; shift < end_bit; shift += kDigitBits) {
    std::size_t begin[kDigits + 1] = {};
    for (const Item& item : *items) ++begin[((key_of(item) >> shift) & (kDigits - 1)) + 1];
    for (std::size_t digit = 0; digit < kDigits; ++digit) begin[digit + 1] += begin[digit];
    for (const Item& item : *items) (*swap)[begin[(key_of(item) >> shift) & (kDigits - 1)]++] = item;
    items->swap(*swap);
  }
}

unsigned bits_of(std::uint64_t number) {
  unsigned bits = 0;
  for (; number != 0; number >>= 1) ++bits;
  return bits;
}

}  // namespace

const std::vector<std::uint64_t>& TouchRound::rows() {
  // REQUIRES of is_merging: no row is added once a position is cleared, so nothing below is lost.
  if (sorted_rows_.size() == num_rows()) return sorted_rows_;  // rows are only ever added
  const std::size_t count = num_rows();
  const unsigned row_bits = bits_of(count == 0 ? 0 : *std::max_element(slot_rows_.begin(), slot_rows_.begin() + static_cast<std::ptrdiff_t>(count)));
  sorted_rows_.resize(count);
  order_.resize(count);
  if (row_bits <= 32) {  // row and slot in one number: half the memory to move
    constexpr unsigned kSlotBits = 32;
    std::vector<std::uint64_t> items(count), swap;
    for (std::size_t slot = 0; slot < count; ++slot) items[slot] = slot_rows_[slot] << kSlotBits | slot;
    sort_by_bits(&items, &swap, kSlotBits, kSlotBits + row_bits, [](std::uint64_t item) { return item; });
    for (std::size_t i = 0; i < count; ++i) {
      sorted_rows_[i] = items[i] >> kSlotBits;
      order_[i] = static_cast<std::uint32_t>(items[i]);
    }
  } else {
    std::vector<std::pair<std::uint64_t, std::uint32_t>> items(count), swap;
    for (std::size_t slot = 0; slot < count; ++slot) items[slot] = {slot_rows_[slot], static_cast<std::uint32_t>(slot)};
    sort_by_bits(&items, &swap, 0, row_bits, [](const auto& item) { return item.first; });
    for (std::size_t i = 0; i < count; ++i) {
      sorted_rows_[i] = items[i].first;
      order_[i] = items[i].second;
    }
  }
  is_cleared.assign(count, 0);
  counts.assign(count, 0);
  return sorted_rows_;
}

std::size_t TouchRound::lower_bound(std::uint64_t row) const {
  return static_cast<std::size_t>(std::lower_bound(sorted_rows_.begin(), sorted_rows_.end(), row) - sorted_rows_.begin());
}

void TouchTracker::keep(std::vector<Span> spans) {
  spans_ = std::move(spans);
  reset(&current_);
  reset(&spare_);
}

void TouchTracker::reset(TouchRound* round) const {
  *round = TouchRound();
  for (const Span& span : spans_) round->base_floats_ += span.floats;
  const std::size_t base_bytes = std::max<std::size_t>(round->base_floats_ * sizeof(float), sizeof(float));
  const std::size_t chunk_bytes = num_table_rows_ >= kHugeChunkBytes / base_bytes ? kHugeChunkBytes : kSmallChunkBytes;
  while ((base_bytes << (round->chunk_shift_ + 1)) <= chunk_bytes) ++round->chunk_shift_;
}

Status TouchTracker::reserve(std::size_t num_rows) {
  const std::size_t needed = current_.num_rows() + num_rows;
  if (current_.slot_rows_.size() < needed) current_.slot_rows_.resize(std::max(needed, 2 * current_.slot_rows_.size()));
  if (current_.base_floats_ == 0) return Status();
  const std::size_t chunk_slots = std::size_t{1} << current_.chunk_shift_, chunk_floats = chunk_slots * current_.base_floats_;
  const std::size_t chunk_bytes = chunk_floats * sizeof(float);
  while (current_.chunks_.size() * chunk_slots < needed) {
    // Left as it comes: memory is taken page by page when bases are written.
    TouchRound::Chunk chunk;
    if (chunk_bytes > kSmallChunkBytes) {
      const std::size_t rounded = (chunk_bytes + HugeBuffer::kPageBytes - 1) / HugeBuffer::kPageBytes * HugeBuffer::kPageBytes;
      KSTEP_RETURN_IF_ERROR(HugeBuffer::make(rounded, "bases of touched rows", &chunk.huge));
      current_.chunk_pointers_.push_back(reinterpret_cast<float*>(chunk.huge.data()));
    } else {
      chunk.small.reset(new float[chunk_floats]);
      current_.chunk_pointers_.push_back(chunk.small.get());
    }
    current_.chunks_.push_back(std::move(chunk));
  }
  return Status();
}

TouchSink TouchTracker::sink() {
  TouchSink sink;
  sink.counter = counter_;
  sink.num_spans = static_cast<std::uint32_t>(spans_.size());
  std::copy(spans_.begin(), spans_.end(), sink.spans);
  sink.base_floats = current_.base_floats_;
  sink.chunk_shift = current_.chunk_shift_;
  sink.chunks = current_.chunk_pointers_.data();
  sink.rows = current_.slot_rows_.data();
  sink.num_rows = &current_.num_rows_;
  return sink;
}

void TouchTracker::detach() {
  detached_ = std::move(current_);
  has_detached_ = true;
  current_ = std::move(spare_);
  reset(&spare_);
}

void TouchTracker::clear() {
  if (!has_detached_) {
    current_ = emptied(&current_);
    return;
  }
  spare_ = emptied(&detached_);
  reset(&detached_);
  has_detached_ = false;
}

TouchRound TouchTracker::emptied(TouchRound* round) const {
  const std::size_t chunk_slots = std::size_t{1} << round->chunk_shift_;
  const std::size_t used = (round->num_rows() + chunk_slots - 1) / chunk_slots;
  TouchRound next;
  reset(&next);
  // A later round will touch about as many rows: keep the memory, whose pages are already there.
  next.slot_rows_.swap(round->slot_rows_);
  next.slot_rows_.resize(round->num_rows());
  for (std::size_t c = 0; c < std::min(used, round->chunks_.size()); ++c) {
    next.chunks_.push_back(std::move(round->chunks_[c]));
    next.chunk_pointers_.push_back(round->chunk_pointers_[c]);
  }
  return next;
}

std::size_t TouchTracker::base_bytes() const {
  return (current_.num_rows() + detached_.num_rows()) * current_.base_floats_ * sizeof(float);
}

}  // namespace kstep
