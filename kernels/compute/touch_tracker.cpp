#include "compute/touch_tracker.h"

#include <algorithm>
#include <utility>

namespace kstep {
namespace {

constexpr std::size_t kChunkBytes = std::size_t{1} << 20;

// Sorts (row, slot) pairs by row, a byte at a time from the lowest; bytes that are equal in all rows cost one count.
void sort_by_row(std::vector<std::pair<std::uint64_t, std::uint32_t>>* pairs) {
  std::vector<std::pair<std::uint64_t, std::uint32_t>> swap(pairs->size());
  for (unsigned shift = 0; shift < 48; shift += 8) {
    std::size_t begin[257] = {};
    for (const auto& pair : *pairs) ++begin[((pair.first >> shift) & 0xff) + 1];
    if (std::find(begin + 1, begin + 257, pairs->size()) != begin + 257) continue;
    for (std::size_t digit = 0; digit < 256; ++digit) begin[digit + 1] += begin[digit];
    for (const auto& pair : *pairs) swap[begin[(pair.first >> shift) & 0xff]++] = pair;
    pairs->swap(swap);
  }
}

}  // namespace

const std::vector<std::uint64_t>& TouchRound::rows() {
  // REQUIRES of is_merging: no row is added once a position is cleared, so nothing below is lost.
  if (sorted_rows_.size() == num_rows()) return sorted_rows_;  // rows are only ever added
  std::vector<std::pair<std::uint64_t, std::uint32_t>> pairs(num_rows());
  for (std::size_t slot = 0; slot < pairs.size(); ++slot) pairs[slot] = {slot_rows_[slot], static_cast<std::uint32_t>(slot)};
  sort_by_row(&pairs);
  sorted_rows_.resize(pairs.size());
  order_.resize(pairs.size());
  for (std::size_t i = 0; i < pairs.size(); ++i) {
    sorted_rows_[i] = pairs[i].first;
    order_[i] = pairs[i].second;
  }
  is_cleared.assign(pairs.size(), 0);
  counts.assign(pairs.size(), 0);
  return sorted_rows_;
}

std::size_t TouchRound::lower_bound(std::uint64_t row) const {
  return static_cast<std::size_t>(std::lower_bound(sorted_rows_.begin(), sorted_rows_.end(), row) - sorted_rows_.begin());
}

void TouchTracker::keep(std::vector<Span> spans) {
  spans_ = std::move(spans);
  reset(&current_);
}

void TouchTracker::reset(TouchRound* round) const {
  *round = TouchRound();
  for (const Span& span : spans_) round->base_floats_ += span.floats;
  const std::size_t base_bytes = std::max<std::size_t>(round->base_floats_ * sizeof(float), sizeof(float));
  while ((base_bytes << (round->chunk_shift_ + 1)) <= kChunkBytes) ++round->chunk_shift_;
}

void TouchTracker::reserve(std::size_t num_rows) {
  const std::size_t needed = current_.num_rows() + num_rows;
  if (current_.slot_rows_.size() < needed) current_.slot_rows_.resize(std::max(needed, 2 * current_.slot_rows_.size()));
  if (current_.base_floats_ == 0) return;
  const std::size_t chunk_slots = std::size_t{1} << current_.chunk_shift_;
  while (current_.chunks_.size() * chunk_slots < needed) {
    // Left as it comes: memory is taken page by page when bases are written.
    current_.chunks_.emplace_back(new float[chunk_slots * current_.base_floats_]);
    current_.chunk_pointers_.push_back(current_.chunks_.back().get());
  }
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
  reset(&current_);
}

void TouchTracker::clear() {
  if (has_detached_) {
    reset(&detached_);
    has_detached_ = false;
    return;
  }
  const std::size_t chunk_slots = std::size_t{1} << current_.chunk_shift_;
  const std::size_t used = (current_.num_rows() + chunk_slots - 1) / chunk_slots;
  TouchRound next;
  reset(&next);
  // The next round will touch about as many rows: keep the memory, whose pages are already there.
  next.slot_rows_.swap(current_.slot_rows_);
  next.slot_rows_.resize(current_.num_rows());
  for (std::size_t c = 0; c < std::min(used, current_.chunks_.size()); ++c) {
    next.chunks_.push_back(std::move(current_.chunks_[c]));
    next.chunk_pointers_.push_back(next.chunks_.back().get());
  }
  current_ = std::move(next);
}

std::size_t TouchTracker::base_bytes() const {
  return (current_.num_rows() + detached_.num_rows()) * current_.base_floats_ * sizeof(float);
}

}  // namespace kstep
