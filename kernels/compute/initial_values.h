// Initial values of rows: a pure function of (seed, table_id, row_id, column).
//
// Philox4x32-10 (Salmon et al., SC 2011) with key = seed and counter = (table_id, row_id low, row_id high, column / 4);
// word column % 4 of its output belongs to that column. A row therefore has the same initial value on every machine,
// thread count and sharding, and one that was never touched needs neither a read nor a byte on disk.
//
//   uniform: float32 arithmetic, lo + u * (hi - lo) with u = (word >> 8) * 2^-24 in [0, 1).
//   normal:  Box-Muller on words (0, 1) and (2, 3) in float64, rounded once to float32. Logarithm, sine and cosine are the
//            polynomials of initial_values.cpp, made of + - * / sqrt only, so that the bits do not depend on a libm.
//            |z| <= 6.67: the smallest uniform is 2^-32.
//   zero:    zero.
//
// `torchrec_kstep.ops.reference.initial_values` computes the same bits for all three. REQUIRES: a build without
// contraction of a * b + c to FMA (-ffp-contract=off).
// Threads: pure functions.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/schema.h"

namespace kstep {

// Writes the values of columns [first_column, first_column + num_columns) of a row.
void fill_initial_values(const InitSpec& init, std::uint64_t seed, std::uint32_t table_id, std::uint64_t row_id,
                         std::uint32_t first_column, std::uint32_t num_columns, float* out);

// Writes the whole payload of a never-touched row: initial weights, and zero in every other field.
void fill_initial_row(const TableSpec& table, std::uint64_t row_id, std::byte* payload);

}  // namespace kstep
