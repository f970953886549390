// What both ends of a merge round need to know of a tracker's fields. Private to merge_collect.cpp and merge_apply.cpp.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "compute/cpu.h"
#include "compute/merge_rows.h"

namespace kstep {

constexpr std::size_t kRowsPerPin = std::size_t{1} << 14;  // bounds what is pinned at once
constexpr std::size_t kRowsAhead = 6;

inline void prefetch(const void* address, std::size_t bytes) {
  constexpr std::size_t kMostBytes = 1024;
  const char* line = static_cast<const char*>(address);
  for (std::size_t at = 0; at < std::min(bytes, kMostBytes); at += kCacheLineBytes) __builtin_prefetch(line + at);
}

// The fields of a row and, behind them, its count of updates.
inline void prefetch_row(const std::byte* payload, std::size_t field_bytes, std::uint32_t counter) {
  prefetch(payload, field_bytes);
  __builtin_prefetch(payload + counter);
}

// b^e, computed once for the small whole exponents that most rows have.
class Powers {
 public:
  explicit Powers(double beta) : beta_(beta) {
    for (std::size_t e = 0; e < kCached; ++e) cached_[e] = std::pow(beta, static_cast<double>(e));
  }
  double operator()(double exponent) const {
    const auto whole = static_cast<std::size_t>(exponent);
    return whole < kCached && static_cast<double>(whole) == exponent ? cached_[whole] : std::pow(beta_, exponent);
  }

 private:
  static constexpr std::size_t kCached = 64;
  const double beta_;
  double cached_[kCached];
};

struct MergedField {
  std::uint32_t offset;
  bool is_weight, is_v;
  Powers powers;  // of the moment's decay; of 1 for the weights
};

// The fields of a tracker, in the order in which it keeps them.
std::vector<MergedField> merged_fields(const TrackedTable& at);
// Fails unless the tracker keeps bases.
Status check_tracked(const TrackedTable& at);

inline std::int32_t& counter_at(std::byte* payload, std::uint32_t offset) { return *reinterpret_cast<std::int32_t*>(payload + offset); }

inline float* floats_at(std::byte* payload, std::uint32_t offset) { return reinterpret_cast<float*>(payload + offset); }

// Positions of ascending rows in a round. Steps double from the last position: rows of one owner lie some positions apart.
class PositionWalk {
 public:
  PositionWalk(const TouchRound& round, std::uint64_t first_row) : sorted_(round.sorted()), at_(round.lower_bound(first_row)) {}
  std::size_t find(std::uint64_t row) {
    if (at_ < sorted_.size() && sorted_[at_] < row) {
      std::size_t step = 1;
      while (at_ + step < sorted_.size() && sorted_[at_ + step] < row) {
        at_ += step;
        step *= 2;
      }
      const auto begin = sorted_.begin() + static_cast<std::ptrdiff_t>(at_ + 1);
      const auto end = sorted_.begin() + static_cast<std::ptrdiff_t>(std::min(at_ + step, sorted_.size()));
      at_ = static_cast<std::size_t>(std::lower_bound(begin, end, row) - sorted_.begin());
    }
    return at_ < sorted_.size() && sorted_[at_] == row ? at_ : TouchRound::kNotFound;
  }

 private:
  const std::vector<std::uint64_t>& sorted_;
  std::size_t at_;
};

}  // namespace kstep
