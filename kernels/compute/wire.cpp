#include "compute/wire.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "compute/thread_pool.h"

namespace kstep {
namespace {

constexpr std::size_t kRowsPerTask = 512;
constexpr std::uint32_t kSign = 0x80000000u, kMagnitude = 0x7FFFFFFFu, kInfinity = 0x7F800000u, kMaxFinite = 0x7F7FFFFFu, kNan = 0x7FC00000u;
constexpr std::uint64_t kGolden = 0x9E3779B97F4A7C15ull;
constexpr float kSmallestScaled = 0x1p-120f;  // below it 127 / max overflows
constexpr std::size_t kBlock = 256;           // columns whose noise is made at once

std::uint64_t mix64(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

// 32 random bits of a column of a row.
inline std::uint32_t noise_word(std::uint32_t low, std::uint32_t high, std::uint32_t column) {
  std::uint32_t x = (column + 1) * 0x9E3779B9u + low;
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x ^= high;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}

void encode_bf16(const float* values, std::size_t dim, std::uint64_t key, std::uint8_t* encoded) {
  const auto low = static_cast<std::uint32_t>(key), high = static_cast<std::uint32_t>(key >> 32);
  std::uint32_t bits[kBlock];
  std::uint16_t packed[kBlock];
  for (std::size_t begin = 0; begin < dim; begin += kBlock) {
    const std::size_t count = std::min(kBlock, dim - begin);
    std::memcpy(bits, values + begin, count * sizeof(float));
    for (std::size_t j = 0; j < count; ++j) {
      const std::uint32_t magnitude = bits[j] & kMagnitude;
      const std::uint32_t noise = noise_word(low, high, static_cast<std::uint32_t>(begin + j)) >> 16;
      const std::uint32_t finite = std::min(magnitude + noise, kMaxFinite);
      const std::uint32_t special = magnitude > kInfinity ? kNan : magnitude;
      const std::uint32_t rounded = magnitude < kInfinity ? finite : special;
      packed[j] = static_cast<std::uint16_t>(((bits[j] & kSign) | rounded) >> 16);
    }
    std::memcpy(encoded + begin * sizeof(std::uint16_t), packed, count * sizeof(std::uint16_t));
  }
}

void decode_bf16(const std::uint8_t* encoded, std::size_t dim, float* values) {
  std::uint16_t packed[kBlock];
  std::uint32_t bits[kBlock];
  for (std::size_t begin = 0; begin < dim; begin += kBlock) {
    const std::size_t count = std::min(kBlock, dim - begin);
    std::memcpy(packed, encoded + begin * sizeof(std::uint16_t), count * sizeof(std::uint16_t));
    for (std::size_t j = 0; j < count; ++j) bits[j] = static_cast<std::uint32_t>(packed[j]) << 16;
    std::memcpy(values + begin, bits, count * sizeof(float));
  }
}

// Largest |x| by its bits, which order as the values do and put a NaN above everything.
std::uint32_t largest_bits(const float* values, std::size_t dim) {
  std::uint32_t largest = 0, bits[kBlock];
  for (std::size_t begin = 0; begin < dim; begin += kBlock) {
    const std::size_t count = std::min(kBlock, dim - begin);
    std::memcpy(bits, values + begin, count * sizeof(float));
    for (std::size_t j = 0; j < count; ++j) largest = std::max(largest, bits[j] & kMagnitude);
  }
  return largest;
}

// Whole units of a row, rounded at random. Loops over local arrays: a store through a char pointer would keep them scalar.
void quantize(const float* values, std::size_t dim, float inverse, std::uint64_t key, std::uint8_t* packed) {
  const auto low = static_cast<std::uint32_t>(key), high = static_cast<std::uint32_t>(key >> 32);
  float unit[kBlock];
  std::int32_t level[kBlock];
  std::int8_t narrow[kBlock];
  for (std::size_t begin = 0; begin < dim; begin += kBlock) {
    const std::size_t count = std::min(kBlock, dim - begin);
    for (std::size_t j = 0; j < count; ++j) {
      const std::uint32_t word = noise_word(low, high, static_cast<std::uint32_t>(begin + j));
      unit[j] = static_cast<float>(static_cast<std::int32_t>(word >> 8)) * 0x1p-24f;
    }
    for (std::size_t j = 0; j < count; ++j) level[j] = static_cast<std::int32_t>(__builtin_floorf(values[begin + j] * inverse + unit[j]));
    for (std::size_t j = 0; j < count; ++j) narrow[j] = static_cast<std::int8_t>(std::min(std::max(level[j], -127), 127));
    std::memcpy(packed + begin, narrow, count);
  }
}

void encode_int8(const float* values, std::size_t dim, std::uint64_t key, std::uint8_t* encoded) {
  const std::uint32_t bits = largest_bits(values, dim);
  float largest = 0.0f;
  std::memcpy(&largest, &bits, sizeof largest);
  const bool is_finite = bits < kInfinity, is_scaled = is_finite && largest >= kSmallestScaled;
  const float scale = !is_finite ? std::numeric_limits<float>::quiet_NaN() : is_scaled ? largest / 127.0f : 0.0f;
  std::memcpy(encoded, &scale, sizeof scale);
  if (is_scaled) {
    quantize(values, dim, 127.0f / largest, key, encoded + sizeof scale);
  } else {
    std::memset(encoded + sizeof scale, 0, dim);
  }
}

void decode_int8(const std::uint8_t* __restrict encoded, std::size_t dim, float* __restrict values) {
  float scale = 0.0f;
  std::memcpy(&scale, encoded, sizeof scale);
  const auto* packed = reinterpret_cast<const std::int8_t*>(encoded + sizeof scale);
  for (std::size_t j = 0; j < dim; ++j) values[j] = static_cast<float>(packed[j]) * scale;
}

template <typename Function>
void for_rows(int num_threads, std::size_t num_rows, Function&& function) {
  parallel_tasks(num_threads, (num_rows + kRowsPerTask - 1) / kRowsPerTask, [&](std::size_t task) {
    const std::size_t end = std::min(num_rows, (task + 1) * kRowsPerTask);
    for (std::size_t row = task * kRowsPerTask; row < end; ++row) function(row);
  });
}

}  // namespace

std::size_t wire_row_bytes(Wire wire, std::size_t dim) {
  if (wire == Wire::Fp32) return dim * sizeof(float);
  return wire == Wire::Bf16 ? dim * sizeof(std::uint16_t) : sizeof(float) + dim;
}

RowNoise::RowNoise(std::uint64_t salt) : mixed_(mix64(salt)) {}

std::uint64_t RowNoise::key(std::uint64_t row) const { return mix64(mixed_ + (row + 1) * kGolden); }

void wire_encode_row(Wire wire, const float* values, std::size_t dim, std::uint64_t key, std::uint8_t* encoded) {
  switch (wire) {
    case Wire::Fp32: std::memcpy(encoded, values, dim * sizeof(float)); return;
    case Wire::Bf16: encode_bf16(values, dim, key, encoded); return;
    case Wire::Int8: encode_int8(values, dim, key, encoded); return;
  }
}

const float* wire_decode_row(const WireRows& rows, std::size_t index, std::size_t dim, float* scratch) {
  const std::uint8_t* encoded = rows.data + index * wire_row_bytes(rows.wire, dim);
  if (rows.wire == Wire::Fp32) return reinterpret_cast<const float*>(encoded);
  if (rows.wire == Wire::Bf16) {
    decode_bf16(encoded, dim, scratch);
  } else {
    decode_int8(encoded, dim, scratch);
  }
  return scratch;
}

bool all_finite(const float* values, std::size_t count) {
  std::uint32_t found = 0, bits[kBlock];
  for (std::size_t begin = 0; begin < count; begin += kBlock) {
    const std::size_t size = std::min(kBlock, count - begin);
    std::memcpy(bits, values + begin, size * sizeof(float));
    for (std::size_t j = 0; j < size; ++j) found |= (bits[j] & kMagnitude) >= kInfinity ? 1u : 0u;
  }
  return found == 0;
}

void wire_encode(const float* values, std::size_t num_rows, std::size_t dim, Wire wire, const void* rows, bool rows_are_int32,
                 std::uint64_t salt, int num_threads, std::uint8_t* encoded) {
  const RowNoise noise(salt);
  const std::size_t row_bytes = wire_row_bytes(wire, dim);
  for_rows(num_threads, num_rows, [&](std::size_t i) {
    const auto row = rows_are_int32 ? static_cast<std::uint64_t>(static_cast<const std::int32_t*>(rows)[i])
                                    : static_cast<std::uint64_t>(static_cast<const std::int64_t*>(rows)[i]);
    wire_encode_row(wire, values + i * dim, dim, noise.key(row), encoded + i * row_bytes);
  });
}

void wire_decode(const std::uint8_t* encoded, std::size_t num_rows, std::size_t dim, Wire wire, int num_threads, float* values) {
  const std::size_t row_bytes = wire_row_bytes(wire, dim);
  for_rows(num_threads, num_rows, [&](std::size_t i) {
    if (wire == Wire::Bf16) {
      decode_bf16(encoded + i * row_bytes, dim, values + i * dim);
    } else {
      decode_int8(encoded + i * row_bytes, dim, values + i * dim);
    }
  });
}

}  // namespace kstep
