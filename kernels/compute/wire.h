// Rows packed for the wire in fewer bits, rounded up or down at random so that the expectation is the value itself.
//
// bf16: the upper half of the float32. int8: per row [float32 scale][dim x int8], scale = max |x| / 127.
// The noise is a function of (salt, row, column) alone: the same bytes on every machine, in every order, for any number of
// threads. `torchrec_kstep/ops/reference_merge.py` computes the same. Values that are not finite stay so: bf16 keeps them,
// an int8 row that has one gets the scale NaN.
// Ownership: the caller's arrays. Threads: pure functions.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kstep {

enum class Wire : int { Fp32 = 0, Bf16 = 1, Int8 = 2 };

// Bytes of one packed row.
std::size_t wire_row_bytes(Wire wire, std::size_t dim);

// Rows of one field as they lie in a message: [num_rows, wire_row_bytes], at a multiple of 4 bytes.
struct WireRows {
  const std::uint8_t* data = nullptr;
  Wire wire = Wire::Fp32;
};

// Where rows of one field are to be packed, and what their noise depends on beside row and column.
struct WireTarget {
  std::uint8_t* data = nullptr;
  Wire wire = Wire::Fp32;
  std::uint64_t salt = 0;
};

// The noise of one row under a salt.
class RowNoise {
 public:
  explicit RowNoise(std::uint64_t salt);
  std::uint64_t key(std::uint64_t row) const;

 private:
  std::uint64_t mixed_;
};

// One row; `key` is its noise. Fp32 is a copy.
void wire_encode_row(Wire wire, const float* values, std::size_t dim, std::uint64_t key, std::uint8_t* encoded);
// Row `index` as floats: where it lies if it travels as such, else in `scratch` [dim].
const float* wire_decode_row(const WireRows& rows, std::size_t index, std::size_t dim, float* scratch);
// Whether none of the values is NaN or infinite.
bool all_finite(const float* values, std::size_t count);

// `rows` (int64 or int32) and `salt` determine the noise. encoded: [num_rows, wire_row_bytes].
void wire_encode(const float* values, std::size_t num_rows, std::size_t dim, Wire wire, const void* rows, bool rows_are_int32,
                 std::uint64_t salt, int num_threads, std::uint8_t* encoded);
void wire_decode(const std::uint8_t* encoded, std::size_t num_rows, std::size_t dim, Wire wire, int num_threads, float* values);

}  // namespace kstep
