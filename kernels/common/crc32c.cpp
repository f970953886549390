#include "common/crc32c.h"

#include <array>
#include <cstring>

#if defined(__SSE4_2__)
#include <nmmintrin.h>
#endif

namespace kstep {

#if defined(__SSE4_2__)

std::uint32_t crc32c(const void* data, std::size_t num_bytes) {
  const auto* p = static_cast<const unsigned char*>(data);
  std::uint64_t crc = 0xffffffffu;
  for (; num_bytes >= 8; num_bytes -= 8, p += 8) {
    std::uint64_t word;
    std::memcpy(&word, p, 8);
    crc = _mm_crc32_u64(crc, word);
  }
  auto crc_32 = static_cast<std::uint32_t>(crc);
  for (; num_bytes > 0; --num_bytes, ++p) crc_32 = _mm_crc32_u8(crc_32, *p);
  return ~crc_32;
}

#else

namespace {

std::array<std::uint32_t, 256> make_table() {
  constexpr std::uint32_t kReversedPolynomial = 0x82f63b78u;
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    std::uint32_t value = i;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((value & 1) != 0 ? kReversedPolynomial : 0);
    table[i] = value;
  }
  return table;
}

}  // namespace

std::uint32_t crc32c(const void* data, std::size_t num_bytes) {
  static const std::array<std::uint32_t, 256> table = make_table();
  const auto* p = static_cast<const unsigned char*>(data);
  std::uint32_t crc = 0xffffffffu;
  for (; num_bytes > 0; --num_bytes, ++p) crc = (crc >> 8) ^ table[(crc ^ *p) & 0xff];
  return ~crc;
}

#endif

}  // namespace kstep
