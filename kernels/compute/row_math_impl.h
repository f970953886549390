// What all row kernels are made of: prefetching, copies, fixed-order sums, fields of a record. Included by row_kernels_impl.h, nowhere else;
// what that says of linkage and instruction sets holds here too.
#pragma once

// Without it a helper that is not inlined loses the constant dim of its caller and runs at half the speed.
#define KSTEP_INLINE inline __attribute__((always_inline))

namespace kstep {
namespace {

constexpr std::size_t kPositionsAhead = 10;       // rows fetched ahead of a gather
constexpr std::size_t kSmallPositionsAhead = 24;  // the same for rows of at most two lines, which take less time each
// Rows and gradients fetched ahead of an update. Both go to the L2 cache and far ahead: an update takes long enough that lines
// asked for into the L1 cache fill its 16 line buffers and hold up the loads of the row in work. Of a row every other line is
// asked for: the L2 cache's own prefetcher brings the neighbour without a line buffer. Gradients of neighbouring positions lie on
// different pages, so each costs a page walk and is asked for line by line. Measured with dim 64: 9 % of a backward with few
// duplicates. Short rows (dim 16) lose by it; they are fetched into the L1 cache, just ahead.
constexpr std::size_t kRowsAhead = 16, kShortRowsAhead = 3;
constexpr std::int32_t kGradsAhead = 24, kShortGradsAhead = 12;
constexpr std::size_t kShortPayloadBytes = 384, kShortGradBytes = 128;
constexpr std::size_t kMaxPrefetchBytes = 1024;  // the rest of a longer row comes by the hardware's own prefetcher
constexpr int kLanes = 16;

template <int kDim>
KSTEP_INLINE int width(std::uint32_t dim) {
  return kDim != 0 ? kDim : static_cast<int>(dim);
}

// kStrideBytes: one line in each so many bytes. kLocality: as of __builtin_prefetch, 3 for the L1 cache and 2 for the L2.
template <int kStrideBytes, int kLocality>
KSTEP_INLINE void prefetch(const void* address, std::size_t bytes) {
  const char* line = static_cast<const char*>(address);
  const std::size_t end = bytes < kMaxPrefetchBytes ? bytes : kMaxPrefetchBytes;
  for (std::size_t at = 0; at < end; at += kStrideBytes) __builtin_prefetch(line + at, 0, kLocality);
}

// The weights of a row that a lookup copies soon.
KSTEP_INLINE void prefetch_weights(const void* payload, std::size_t bytes) { prefetch<kCacheLineBytes, 3>(payload, bytes); }

KSTEP_INLINE std::int64_t positions_ahead(std::size_t row_bytes) {
  return static_cast<std::int64_t>(row_bytes <= 2 * kCacheLineBytes ? kSmallPositionsAhead : kPositionsAhead);
}

// Asks for the row that an update needs some rows after `row`.
KSTEP_INLINE void prefetch_update(std::byte* const* payload, std::size_t row, std::size_t row_end, std::size_t bytes) {
  if (bytes <= kShortPayloadBytes) {
    if (row + kShortRowsAhead < row_end) prefetch<kCacheLineBytes, 3>(payload[row + kShortRowsAhead], bytes);
  } else if (row + kRowsAhead < row_end) {
    prefetch<2 * kCacheLineBytes, 2>(payload[row + kRowsAhead], bytes);
  }
}

KSTEP_INLINE void fence_streams(bool streamed) {
#if defined(__x86_64__)
  if (streamed) _mm_sfence();
#else
  (void)streamed;
#endif
}

KSTEP_INLINE bool can_stream(const float* out, int dim) {
#if defined(__x86_64__)
  return dim % kLanes == 0 && reinterpret_cast<std::uintptr_t>(out) % kCacheLineBytes == 0;
#else
  (void)out, (void)dim;
  return false;
#endif
}

// REQUIRES: can_stream(out, dim).
KSTEP_INLINE void stream_row(float* out, const float* row, int dim) {
#if defined(__AVX512F__)
  for (int j = 0; j < dim; j += 16) _mm512_stream_ps(out + j, _mm512_loadu_ps(row + j));
#elif defined(__AVX__)
  for (int j = 0; j < dim; j += 8) _mm256_stream_ps(out + j, _mm256_loadu_ps(row + j));
#else
  for (int j = 0; j < dim; ++j) out[j] = row[j];
#endif
}

KSTEP_INLINE void copy_row(float* __restrict out, const float* __restrict row, int dim, bool stream) {
  if (stream) {
    stream_row(out, row, dim);
  } else {
    for (int j = 0; j < dim; ++j) out[j] = row[j];
  }
}

using Lanes = float __attribute__((vector_size(kLanes * sizeof(float))));

// The products go to 16 lanes, and those to one sum in a fixed tree, so the result is the same with every vector length. Vectors are
// spelled out: what the vectoriser makes of the tree are single sums, ten times as many instructions.
template <int kDim>
KSTEP_INLINE float dot(const float* a, const float* b, std::uint32_t dim) {
  const int n = width<kDim>(dim);
  Lanes sum = {};
  int j = 0;
  for (; j + kLanes <= n; j += kLanes) {
    Lanes x, y;
    __builtin_memcpy(&x, a + j, sizeof x);
    __builtin_memcpy(&y, b + j, sizeof y);
    sum += x * y;
  }
  for (int l = 0; j + l < n; ++l) sum[l] += a[j + l] * b[j + l];
  const auto eight = __builtin_shufflevector(sum, sum, 0, 1, 2, 3, 4, 5, 6, 7) + __builtin_shufflevector(sum, sum, 8, 9, 10, 11, 12, 13, 14, 15);
  const auto four = __builtin_shufflevector(eight, eight, 0, 1, 2, 3) + __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
  const auto two = four + __builtin_shufflevector(four, four, 2, 3, 0, 1);
  return two[0] + two[1];
}

KSTEP_INLINE float* field(std::byte* payload, std::uint32_t offset) { return reinterpret_cast<float*>(payload + offset); }

KSTEP_INLINE std::int32_t* counter(std::byte* payload, std::uint32_t offset) {
  return reinterpret_cast<std::int32_t*>(payload + offset);
}

KSTEP_INLINE const float* weight_of(const std::byte* payload) { return reinterpret_cast<const float*>(payload); }

}  // namespace
}  // namespace kstep
