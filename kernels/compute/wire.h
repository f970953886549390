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

// Bytes of one packed row; Fp32 is listed for completeness, nothing packs it.
std::size_t wire_row_bytes(Wire wire, std::size_t dim);

// `rows` (int64 or int32) and `salt` determine the noise. encoded: [num_rows, wire_row_bytes].
void wire_encode(const float* values, std::size_t num_rows, std::size_t dim, Wire wire, const void* rows, bool rows_are_int32,
                 std::uint64_t salt, int num_threads, std::uint8_t* encoded);
void wire_decode(const std::uint8_t* encoded, std::size_t num_rows, std::size_t dim, Wire wire, int num_threads, float* values);

}  // namespace kstep
