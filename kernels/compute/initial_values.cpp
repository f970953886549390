#include "compute/initial_values.h"

#include <cmath>
#include <cstring>

namespace kstep {
namespace {

constexpr int kBlocks = 16;  // counters computed side by side: one vector of 16 or two of 8 lanes
constexpr int kColumns = 4 * kBlocks;

struct Words {
  std::uint32_t word[4][kBlocks];
};

// Ten rounds on kBlocks consecutive counters. The inner loops are written for the vectoriser.
void philox(std::uint64_t seed, std::uint32_t table_id, std::uint64_t row_id, std::uint32_t first_block, Words* out) {
  std::uint32_t c0[kBlocks], c1[kBlocks], c2[kBlocks], c3[kBlocks];
  for (int i = 0; i < kBlocks; ++i) {
    c0[i] = table_id;
    c1[i] = static_cast<std::uint32_t>(row_id);
    c2[i] = static_cast<std::uint32_t>(row_id >> 32);
    c3[i] = first_block + static_cast<std::uint32_t>(i);
  }
  std::uint32_t k0 = static_cast<std::uint32_t>(seed), k1 = static_cast<std::uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    for (int i = 0; i < kBlocks; ++i) {
      const std::uint64_t p0 = static_cast<std::uint64_t>(c0[i]) * 0xD2511F53u;
      const std::uint64_t p1 = static_cast<std::uint64_t>(c2[i]) * 0xCD9E8D57u;
      c0[i] = static_cast<std::uint32_t>(p1 >> 32) ^ c1[i] ^ k0;
      c2[i] = static_cast<std::uint32_t>(p0 >> 32) ^ c3[i] ^ k1;
      c1[i] = static_cast<std::uint32_t>(p1);
      c3[i] = static_cast<std::uint32_t>(p0);
    }
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  std::memcpy(out->word[0], c0, sizeof c0);
  std::memcpy(out->word[1], c1, sizeof c1);
  std::memcpy(out->word[2], c2, sizeof c2);
  std::memcpy(out->word[3], c3, sizeof c3);
}

// ln(x) for x in [2^-32, 1]: x = m * 2^e with m in [sqrt(1/2), sqrt(2)), ln m = 2 atanh((m - 1) / (m + 1)).
double natural_log(double x) {
  std::uint64_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  int exponent = static_cast<int>(bits >> 52) - 1023;
  bits = (bits & 0x000FFFFFFFFFFFFFull) | 0x3FF0000000000000ull;
  double m;
  std::memcpy(&m, &bits, sizeof m);
  if (m > 1.4142135623730951) {
    m *= 0.5;
    exponent += 1;
  }
  const double s = (m - 1.0) / (m + 1.0), s2 = s * s;
  double series = 1.0 / 17.0;
  for (int odd = 15; odd >= 1; odd -= 2) series = series * s2 + 1.0 / odd;
  return exponent * 0.6931471805599453 + 2.0 * s * series;
}

// cos and sin of `turns` full turns, turns in [0, 1): Taylor series on |angle| <= pi / 4, then a quarter-turn rotation.
void cos_sin(double turns, double* cosine, double* sine) {
  const int quarter = static_cast<int>(turns * 4.0 + 0.5);
  const double angle = (turns - quarter * 0.25) * 6.283185307179586, a2 = angle * angle;
  double s = 1.0, c = 1.0;
  for (int k = 14; k >= 2; k -= 2) {
    s = 1.0 - s * a2 / (k * (k + 1));
    c = 1.0 - c * a2 / (k * (k - 1));
  }
  s *= angle;
  switch (quarter & 3) {
    case 0: *cosine = c, *sine = s; break;
    case 1: *cosine = -s, *sine = c; break;
    case 2: *cosine = -c, *sine = -s; break;
    default: *cosine = s, *sine = -c; break;
  }
}

void to_uniform(const Words& words, double lo, double hi, float* out) {
  const float low = static_cast<float>(lo), width = static_cast<float>(hi - lo);
  for (int i = 0; i < kBlocks; ++i) {
    for (int lane = 0; lane < 4; ++lane) {
      const float unit = static_cast<float>(static_cast<std::int32_t>(words.word[lane][i] >> 8)) * 0x1p-24f;
      out[4 * i + lane] = low + unit * width;
    }
  }
}

void to_normal(const Words& words, double mean, double deviation, float* out) {
  for (int i = 0; i < kBlocks; ++i) {
    for (int pair = 0; pair < 4; pair += 2) {
      const double unit = (static_cast<double>(words.word[pair][i]) + 1.0) * 0x1p-32;
      const double radius = std::sqrt(-2.0 * natural_log(unit));
      double cosine, sine;
      cos_sin(static_cast<double>(words.word[pair + 1][i]) * 0x1p-32, &cosine, &sine);
      out[4 * i + pair] = static_cast<float>(mean + deviation * (radius * cosine));
      out[4 * i + pair + 1] = static_cast<float>(mean + deviation * (radius * sine));
    }
  }
}

}  // namespace

void fill_initial_values(const InitSpec& init, std::uint64_t seed, std::uint32_t table_id, std::uint64_t row_id,
                         std::uint32_t first_column, std::uint32_t num_columns, float* out) {
  if (init.kind == InitKind::Zero) {
    std::memset(out, 0, num_columns * sizeof(float));
    return;
  }
  const std::uint32_t end = first_column + num_columns;
  for (std::uint32_t column = first_column & ~3u; column < end; column += kColumns) {
    Words words;
    alignas(64) float values[kColumns];
    philox(seed, table_id, row_id, column / 4, &words);
    if (init.kind == InitKind::Uniform) {
      to_uniform(words, init.a, init.b, values);
    } else {
      to_normal(words, init.a, init.b, values);
    }
    const std::uint32_t from = column < first_column ? first_column : column;
    const std::uint32_t to = column + kColumns < end ? column + kColumns : end;
    std::memcpy(out + (from - first_column), values + (from - column), (to - from) * sizeof(float));
  }
}

void fill_initial_row(const TableSpec& table, std::uint64_t row_id, std::byte* payload) {
  float* weight = reinterpret_cast<float*>(payload);  // "weight" is the first field of every schema
  fill_initial_values(table.init, table.seed, table.table_id, row_id, table.first_column, table.dim, weight);
  const std::size_t weight_bytes = table.dim * sizeof(float);
  std::memset(payload + weight_bytes, 0, table.schema.payload_bytes() - weight_bytes);
}

}  // namespace kstep
