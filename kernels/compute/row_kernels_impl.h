// Body of the row kernels; included by row_kernels_baseline.cpp and row_kernels_avx512.cpp, nowhere else.
//
// The includer sets KSTEP_KERNELS (name of the table it defines) and KSTEP_ISA (its text). Everything here has internal
// linkage and calls no inline library function: a shared symbol built for AVX-512 would crash a lesser processor.
// Loops are written so that the vectoriser turns them into full vectors; dims 8, 16, 32, 64 and 128 get their own copy.

#include "compute/row_math_impl.h"

namespace kstep {
namespace {

// ---- forward ---------------------------------------------------------------------------------------------------------

template <int kDim>
void gather_pooled(const PooledArgs& a, std::size_t bag_begin, std::size_t bag_end) {
  const int dim = width<kDim>(a.dim);
  const std::size_t row_bytes = static_cast<std::size_t>(dim) * sizeof(float);
  const std::int64_t last = a.offsets[bag_end], num_ahead = positions_ahead(row_bytes);
  for (std::int64_t i = a.offsets[bag_begin]; i < last && i < a.offsets[bag_begin] + num_ahead; ++i) {
    if (a.inverse[i] >= 0) prefetch_weights(a.payload[a.inverse[i]], row_bytes);
  }
  bool streamed = false;
  for (std::size_t bag = bag_begin; bag < bag_end; ++bag) {
    const std::int64_t begin = a.offsets[bag], end = a.offsets[bag + 1];
    float* out = a.out + bag * a.out_stride;
    std::int64_t count = 0;
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t ahead = i + num_ahead;
      if (ahead < last && a.inverse[ahead] >= 0) prefetch_weights(a.payload[a.inverse[ahead]], row_bytes);
      if (a.inverse[i] < 0) continue;
      const float* __restrict row = weight_of(a.payload[a.inverse[i]]);
      ++count;
      if (count == 1 && a.weights == nullptr) {
        const bool stream = a.stream && end - begin == 1 && can_stream(out, dim);
        copy_row(out, row, dim, stream);
        streamed |= stream;
      } else if (count == 1) {
        for (int j = 0; j < dim; ++j) out[j] = a.weights[i] * row[j];
      } else if (a.weights == nullptr) {
        for (int j = 0; j < dim; ++j) out[j] += row[j];
      } else {
        for (int j = 0; j < dim; ++j) out[j] += a.weights[i] * row[j];
      }
    }
    if (count == 0) {
      for (int j = 0; j < dim; ++j) out[j] = 0.0f;
    } else if (a.is_mean && count > 1) {
      const float scale = 1.0f / static_cast<float>(count);
      for (int j = 0; j < dim; ++j) out[j] *= scale;
    }
  }
  fence_streams(streamed);
}

template <int kDim>
void gather_rows(const GatherArgs& a, std::size_t position_begin, std::size_t position_end) {
  const int dim = width<kDim>(a.dim);
  const std::size_t row_bytes = static_cast<std::size_t>(dim) * sizeof(float);
  const bool stream = a.stream && can_stream(a.out, dim);
  for (std::size_t i = position_begin; i < position_end; ++i) {
    const std::size_t ahead = i + static_cast<std::size_t>(positions_ahead(row_bytes));
    if (ahead < position_end && a.inverse[ahead] >= 0) prefetch_weights(a.payload[a.inverse[ahead]], row_bytes);
    float* out = a.out + i * static_cast<std::size_t>(dim);
    if (a.inverse[i] < 0) {
      for (int j = 0; j < dim; ++j) out[j] = 0.0f;
    } else {
      copy_row(out, weight_of(a.payload[a.inverse[i]]), dim, stream);
    }
  }
  fence_streams(stream);
}

// ---- backward --------------------------------------------------------------------------------------------------------

template <int kDim>
void weight_grads(const WeightGradArgs& a, std::size_t bag_begin, std::size_t bag_end) {
  for (std::size_t bag = bag_begin; bag < bag_end; ++bag) {
    const std::int64_t begin = a.offsets[bag], end = a.offsets[bag + 1];
    const float* grad = a.grad + bag * a.grad_stride;
    const float scale = a.is_mean ? 1.0f / static_cast<float>(valid_in_bag(a.inverse, begin, end)) : 1.0f;
    for (std::int64_t i = begin; i < end; ++i) {
      a.out[i] = a.inverse[i] < 0 ? 0.0f : dot<kDim>(grad, weight_of(a.payload[a.inverse[i]]), a.dim) * scale;
    }
  }
}

// Asks for the gradient that is needed some positions after `k`; `last` ends the positions of the running range.
KSTEP_INLINE void prefetch_gradient(const ReduceArgs& a, std::int32_t k, std::int32_t last, std::size_t grad_bytes) {
  if (grad_bytes <= kShortGradBytes) {
    if (k + kShortGradsAhead < last) prefetch<kCacheLineBytes, 3>(a.grad + a.grad_offsets[a.positions[k + kShortGradsAhead]], grad_bytes);
  } else if (k + kGradsAhead < last) {
    prefetch<kCacheLineBytes, 2>(a.grad + a.grad_offsets[a.positions[k + kGradsAhead]], grad_bytes);
  }
}

// Sum of a row's gradients in ascending position. Returns `acc`, or the gradient itself where there is just one.
template <int kDim>
KSTEP_INLINE const float* reduce_row(const ReduceArgs& a, int dim, std::size_t row, std::int32_t last, float* __restrict acc) {
  const std::size_t grad_bytes = static_cast<std::size_t>(dim) * sizeof(float);
  const std::int32_t begin = a.row_offsets[row], end = a.row_offsets[row + 1];
  const float* __restrict first = a.grad + a.grad_offsets[a.positions[begin]];
  prefetch_gradient(a, begin, last, grad_bytes);
  if (a.scales == nullptr) {
    if (end - begin == 1) return first;
    for (int j = 0; j < dim; ++j) acc[j] = first[j];
    for (std::int32_t k = begin + 1; k < end; ++k) {
      const float* __restrict grad = a.grad + a.grad_offsets[a.positions[k]];
      prefetch_gradient(a, k, last, grad_bytes);
      for (int j = 0; j < dim; ++j) acc[j] += grad[j];
    }
    return acc;
  }
  const float first_scale = a.scales[a.positions[begin]];
  for (int j = 0; j < dim; ++j) acc[j] = first_scale * first[j];
  for (std::int32_t k = begin + 1; k < end; ++k) {
    const float* __restrict grad = a.grad + a.grad_offsets[a.positions[k]];
    const float scale = a.scales[a.positions[k]];
    prefetch_gradient(a, k, last, grad_bytes);
    for (int j = 0; j < dim; ++j) acc[j] += scale * grad[j];
  }
  return acc;
}

template <int kDim>
void reduce_rows(const ReduceArgs& a, std::uint32_t dim_, std::size_t row_begin, std::size_t row_end) {
  const int dim = width<kDim>(dim_);
  const std::int32_t last = a.row_offsets[row_end];
  alignas(kCacheLineBytes) float acc[kDim != 0 ? kDim : kMaxDim];
  for (std::size_t row = row_begin; row < row_end; ++row) {
    copy_row(a.row_grads + row * static_cast<std::size_t>(dim), reduce_row<kDim>(a, dim, row, last, acc), dim, false);
  }
}

// ---- optimizers ------------------------------------------------------------------------------------------------------

KSTEP_INLINE float row_bias(const float* table, std::uint32_t size, double beta, std::int32_t step) {
  const std::uint32_t at = static_cast<std::uint32_t>(step);
  return at < size ? table[at] : static_cast<float>(inverse_bias(beta, at));
}

template <int kDim>
KSTEP_INLINE void adam_row(const UpdateParams& p, std::byte* payload, const float* __restrict g, int dim) {
  float* __restrict w = field(payload, 0);
  float* __restrict m = field(payload, p.layout.m);
  float* __restrict v = field(payload, p.layout.v);
  float bias1 = p.inverse_bias1, bias2 = p.inverse_bias2;
  if (p.row_bias1 != nullptr) {
    const std::int32_t step = ++*counter(payload, p.layout.step);
    bias1 = row_bias(p.row_bias1, p.row_bias1_size, p.row_beta1, step);
    const std::int32_t step_v = p.layout.step_v == RecordSchema::kNoField ? step : ++*counter(payload, p.layout.step_v);
    bias2 = row_bias(p.row_bias2, p.row_bias2_size, p.row_beta2, step_v);
  }
  const float step_size = p.lr * bias1, eps = p.eps;
  const float beta1 = p.beta1, beta2 = p.beta2, rest1 = p.one_minus_beta1, rest2 = p.one_minus_beta2;
  if (p.layout.v_hat == RecordSchema::kNoField) {
    for (int j = 0; j < dim; ++j) {
      const float moment = beta1 * m[j] + rest1 * g[j];
      const float square = beta2 * v[j] + (rest2 * g[j]) * g[j];
      m[j] = moment;
      v[j] = square;
      w[j] -= (step_size * moment) / (__builtin_sqrtf(square * bias2) + eps);
    }
    return;
  }
  const float* __restrict v_hat = field(payload, p.layout.v_hat);
  for (int j = 0; j < dim; ++j) {
    const float moment = beta1 * m[j] + rest1 * g[j];
    const float square = beta2 * v[j] + (rest2 * g[j]) * g[j];
    const float corrected = square * bias2;
    m[j] = moment;
    v[j] = square;
    w[j] -= (step_size * moment) / (__builtin_sqrtf(corrected > v_hat[j] ? corrected : v_hat[j]) + eps);
  }
}

template <int kDim>
KSTEP_INLINE void sgd_row(const UpdateParams& p, std::byte* payload, const float* __restrict g, int dim) {
  float* __restrict w = field(payload, 0);
  const float lr = p.lr;
  for (int j = 0; j < dim; ++j) w[j] -= lr * g[j];
}

template <int kDim>
KSTEP_INLINE void adagrad_row(const UpdateParams& p, std::byte* payload, const float* __restrict g, int dim) {
  float* __restrict w = field(payload, 0);
  float* sum = field(payload, p.layout.sum);
  *sum += dot<kDim>(g, g, static_cast<std::uint32_t>(dim)) / static_cast<float>(dim);
  const float step_size = p.lr / (__builtin_sqrtf(*sum) + p.eps);
  for (int j = 0; j < dim; ++j) w[j] -= step_size * g[j];
}

// A gradient whose square is below this share of its bound's is no longer than the bound, however the roots of both are rounded.
constexpr float kSafelyBelow = 0.99f;

// L2, then CowClip or the factor that `scale` points to. Returns the gradient to use: `g` itself, or `acc` once something had to change.
// Adds 1 to *num_clipped if the gradient was scaled down.
template <int kDim>
KSTEP_INLINE const float* shape_gradient(const UpdateParams& p, const std::byte* payload, const float* g, std::int32_t count,
                                   const float* scale, int dim, float* acc, std::uint64_t* num_clipped) {
  const float* w = weight_of(payload);
  if (p.l2 != 0.0f) {
    for (int j = 0; j < dim; ++j) acc[j] = g[j] + p.l2 * w[j];
    g = acc;
  }
  if (scale != nullptr) {
    *num_clipped += p.has_clip && *scale < 1.0f ? 1 : 0;
    for (int j = 0; j < dim; ++j) acc[j] = *scale * g[j];
    return acc;
  }
  if (!p.has_clip) return g;
  const float grad_square = dot<kDim>(g, g, static_cast<std::uint32_t>(dim));
  const float reach = p.clip_ratio * static_cast<float>(count);
  // A part of the weight is no longer than the whole. With it, and without roots, nearly every row of a mean loss is done.
  constexpr int kPart = kDim > kLanes ? kLanes : kDim;
  const float part_square = dot<kPart>(w, w, static_cast<std::uint32_t>(dim < kLanes ? dim : kLanes));
  const float floor_square = p.clip_floor * p.clip_floor;
  if (grad_square < kSafelyBelow * (reach * (part_square > floor_square ? part_square : floor_square)) * reach) return g;
  const float weight_square = dot<kDim>(w, w, static_cast<std::uint32_t>(dim));
  const float weight_norm = __builtin_sqrtf(weight_square);
  const float limit = reach * (weight_norm > p.clip_floor ? weight_norm : p.clip_floor);
  const float grad_norm = __builtin_sqrtf(grad_square);
  if (!(grad_norm > limit)) return g;
  ++*num_clipped;
  const float factor = limit / grad_norm;
  for (int j = 0; j < dim; ++j) acc[j] = factor * g[j];
  return acc;
}

// Counts the update. The first since the counter was cleared also takes a slot of the tracker and leaves the row's base there.
// Returns whether it was the first.
KSTEP_INLINE bool note_touch(const TouchSink& sink, std::byte* payload, std::int64_t row) {
  std::int32_t* touches = counter(payload, sink.counter);
  if ((*touches)++ != 0) return false;
  const std::uint64_t slot = __atomic_fetch_add(sink.num_rows, std::uint64_t{1}, __ATOMIC_RELAXED);
  sink.rows[slot] = static_cast<std::uint64_t>(row);
  if (sink.base_floats == 0) return true;
  const std::uint64_t in_chunk = slot & ((std::uint64_t{1} << sink.chunk_shift) - 1);
  float* base = sink.chunks[slot >> sink.chunk_shift] + in_chunk * sink.base_floats;
  for (std::uint32_t s = 0; s < sink.num_spans; ++s) {
    copy_row(base, field(payload, sink.spans[s].offset), static_cast<int>(sink.spans[s].floats), false);
    base += sink.spans[s].floats;
  }
  return true;
}

KSTEP_INLINE void note_touches(const UpdateParams& p, std::byte* payload, std::int64_t row, int dim) {
  for (std::uint32_t tracker = 0; tracker < p.num_sinks; ++tracker) {
    const bool is_first = note_touch(p.sinks[tracker], payload, row);
    if (tracker == 0 && is_first && p.layout.base != RecordSchema::kNoField) {
      copy_row(field(payload, p.layout.base), weight_of(payload), dim, false);
    }
  }
}

template <int kDim>
KSTEP_INLINE void update_row(const UpdateParams& p, std::byte* payload, const float* g, std::int32_t count, const float* scale,
                       std::int64_t row, float* acc, std::uint64_t* num_clipped) {
  const int dim = width<kDim>(p.layout.dim);
  note_touches(p, payload, row, dim);
  g = shape_gradient<kDim>(p, payload, g, count, scale, dim, acc, num_clipped);
  switch (p.kind) {
    case OptimizerKind::Adam: adam_row<kDim>(p, payload, g, dim); break;
    case OptimizerKind::Sgd: sgd_row<kDim>(p, payload, g, dim); break;
    case OptimizerKind::RowwiseAdagrad: adagrad_row<kDim>(p, payload, g, dim); break;
    case OptimizerKind::None: break;
  }
}

KSTEP_INLINE void note_clipped(const UpdateParams& p, std::uint64_t num_rows) {
  if (num_rows != 0) __atomic_fetch_add(p.num_clipped, num_rows, __ATOMIC_RELAXED);  // a std::atomic's members could be shared between units
}

template <int kDim>
void reduce_update(const ReduceArgs& a, const UpdateParams& p, std::size_t row_begin, std::size_t row_end) {
  const int dim = width<kDim>(p.layout.dim);
  const std::int32_t last = a.row_offsets[row_end];
  alignas(kCacheLineBytes) float acc[kDim != 0 ? kDim : kMaxDim];
  std::uint64_t num_clipped = 0;
  for (std::size_t row = row_begin; row < row_end; ++row) {
    prefetch_update(a.payload, row, row_end, p.layout.payload_bytes);
    const float* g = reduce_row<kDim>(a, dim, row, last, acc);
    update_row<kDim>(p, a.payload[row], g, a.row_offsets[row + 1] - a.row_offsets[row], nullptr, a.unique_rows[row], acc,
                     &num_clipped);
  }
  note_clipped(p, num_clipped);
}

template <int kDim>
void apply_update(const ApplyArgs& a, const UpdateParams& p, std::size_t row_begin, std::size_t row_end) {
  const std::size_t dim = p.layout.dim;
  alignas(kCacheLineBytes) float acc[kDim != 0 ? kDim : kMaxDim];
  std::uint64_t num_clipped = 0;
  for (std::size_t row = row_begin; row < row_end; ++row) {
    prefetch_update(a.payload, row, row_end, p.layout.payload_bytes);
    update_row<kDim>(p, a.payload[row], a.row_grads + row * dim, a.counts[row], a.scales != nullptr ? a.scales + row : nullptr,
                     a.unique_rows[row], acc, &num_clipped);
  }
  note_clipped(p, num_clipped);
}

// ---- replay of missed steps ------------------------------------------------------------------------------------------

// Below these a weight or moment becomes zero: denormal numbers are slow, and decay only until they round to themselves.
constexpr float kLeastWeight = 0x1p-63f, kLeastMoment = 0x1p-126f;
constexpr std::int32_t kStepsPerLook = 32;  // between two looks whether a row has become zero

KSTEP_INLINE float decayed_weight(float w) { return __builtin_fabsf(w) < kLeastWeight ? 0.0f : w; }
KSTEP_INLINE float decayed_moment(float m) { return __builtin_fabsf(m) < kLeastMoment ? 0.0f : m; }

KSTEP_INLINE bool is_zero(const float* x, int n) {
  bool found = false;
  for (int j = 0; j < n; ++j) found |= x[j] != 0.0f;
  return !found;
}

// As row_bias; a table that has come to 1 stays there.
KSTEP_INLINE float step_bias(const float* table, std::uint32_t size, double beta, std::int32_t step) {
  const std::uint32_t at = static_cast<std::uint32_t>(step);
  if (at < size) return table[at];
  return table[size - 1] == 1.0f ? 1.0f : static_cast<float>(inverse_bias(beta, at));
}

// The clocks [first, last] of the steps that one row missed, and, if it counts its updates itself, the count at the first of them.
struct MissedSteps {
  std::int32_t first, last;
  bool has_counts;
  std::int32_t first_count1, first_count2;
};

// Calls update(lr, count1, count2) for each step with its rate and what corrects the biases, until they are done or `is_done` says so.
template <typename Update, typename Done>
KSTEP_INLINE void for_each_step(const ReplayArgs& a, const MissedSteps& steps, Update update, Done is_done) {
  std::size_t run = a.num_runs - 1;
  while (run > 0 && a.runs[run].first_clock > steps.first) --run;
  for (std::int32_t clock = steps.first; clock <= steps.last; ++clock) {
    while (run + 1 < a.num_runs && a.runs[run + 1].first_clock <= clock) ++run;
    const std::int32_t i = clock - steps.first, step = clock + a.runs[run].shift;
    if (i % kStepsPerLook == 0 && is_done()) return;
    update(a.runs[run].lr, steps.has_counts ? steps.first_count1 + i : step, steps.has_counts ? steps.first_count2 + i : step);
  }
}

// Columns [0, count) of a row; kWidth >= count columns are computed, those beyond are zero and stay so.
template <int kWidth>
KSTEP_INLINE void replay_adam_columns(const ReplayArgs& a, const UpdateParams& p, const MissedSteps& steps, float* w_, float* m_, float* v_,
                                      int count) {
  alignas(kCacheLineBytes) float w[kWidth] = {}, m[kWidth] = {}, v[kWidth] = {};
  for (int j = 0; j < count; ++j) w[j] = w_[j], m[j] = m_[j], v[j] = v_[j];
  const float beta1 = p.beta1, beta2 = p.beta2, rest1 = p.one_minus_beta1, rest2 = p.one_minus_beta2, l2 = p.l2, eps = p.eps;
  for_each_step(
      a, steps,
      [&](float lr, std::int32_t count1, std::int32_t count2) {
        const float step_size = lr * step_bias(a.bias1, a.bias1_size, a.beta1, count1);
        const float bias2 = step_bias(a.bias2, a.bias2_size, a.beta2, count2);
        for (int j = 0; j < kWidth; ++j) {
          const float g = l2 * w[j];
          const float moment = beta1 * m[j] + rest1 * g;
          const float square = beta2 * v[j] + (rest2 * g) * g;
          m[j] = decayed_moment(moment);
          v[j] = decayed_moment(square);
          w[j] = decayed_weight(w[j] - (step_size * moment) / (__builtin_sqrtf(square * bias2) + eps));
        }
      },
      [&] { return is_zero(w, kWidth) && is_zero(m, kWidth) && is_zero(v, kWidth); });
  for (int j = 0; j < count; ++j) w_[j] = w[j], m_[j] = m[j], v_[j] = v[j];
}

// Blocks of columns stay in registers over all steps; wide ones first, because a narrow one waits for its own divisions.
void replay_adam(const ReplayArgs& a, const UpdateParams& p, const MissedSteps& steps, std::byte* payload) {
  const int dim = static_cast<int>(p.layout.dim);
  float* w = field(payload, 0);
  float* m = field(payload, p.layout.m);
  float* v = field(payload, p.layout.v);
  int j = 0;
  for (; j + 4 * kLanes <= dim; j += 4 * kLanes) replay_adam_columns<4 * kLanes>(a, p, steps, w + j, m + j, v + j, 4 * kLanes);
  if (dim - j > kLanes) {
    const int count = dim - j < 2 * kLanes ? dim - j : 2 * kLanes;
    replay_adam_columns<2 * kLanes>(a, p, steps, w + j, m + j, v + j, count);
    j += count;
  }
  for (; j < dim; j += kLanes) replay_adam_columns<kLanes>(a, p, steps, w + j, m + j, v + j, dim - j < kLanes ? dim - j : kLanes);
}

void replay_sgd(const ReplayArgs& a, const UpdateParams& p, const MissedSteps& steps, std::byte* payload) {
  const int dim = static_cast<int>(p.layout.dim);
  float* w = field(payload, 0);
  const float l2 = p.l2;
  for_each_step(
      a, steps,
      [&](float lr, std::int32_t, std::int32_t) {
        for (int j = 0; j < dim; ++j) w[j] = decayed_weight(w[j] - lr * (l2 * w[j]));
      },
      [&] { return is_zero(w, dim); });
}

void replay_adagrad(const ReplayArgs& a, const UpdateParams& p, const MissedSteps& steps, std::byte* payload) {
  const int dim = static_cast<int>(p.layout.dim);
  float* w = field(payload, 0);
  float* sum = field(payload, p.layout.sum);
  alignas(kCacheLineBytes) float g[kMaxDim];
  for_each_step(
      a, steps,
      [&](float lr, std::int32_t, std::int32_t) {
        for (int j = 0; j < dim; ++j) g[j] = p.l2 * w[j];
        *sum += dot<0>(g, g, p.layout.dim) / static_cast<float>(dim);
        const float step_size = lr / (__builtin_sqrtf(*sum) + p.eps);
        for (int j = 0; j < dim; ++j) w[j] = decayed_weight(w[j] - step_size * g[j]);
      },
      [&] { return is_zero(w, dim); });
}

void replay_row(const ReplayArgs& a, const UpdateParams& p, std::byte* payload) {
  std::int32_t* last_step = counter(payload, p.layout.last_step);
  MissedSteps steps{*last_step + 1, a.until, p.row_bias1 != nullptr, 0, 0};
  if (*last_step < a.mark) *last_step = a.mark;
  if (a.max_steps > 0 && steps.last - steps.first >= a.max_steps) steps.last = steps.first + a.max_steps - 1;
  if (steps.first > steps.last) return;
  const std::int32_t count = steps.last - steps.first + 1;
  if (steps.has_counts) {
    std::int32_t* step = counter(payload, p.layout.step);
    steps.first_count1 = steps.first_count2 = *step + 1;
    *step += count;
    if (p.layout.step_v != RecordSchema::kNoField) {
      std::int32_t* step_v = counter(payload, p.layout.step_v);
      steps.first_count2 = *step_v + 1;
      *step_v += count;
    }
  }
  switch (p.kind) {
    case OptimizerKind::Adam: replay_adam(a, p, steps, payload); break;
    case OptimizerKind::Sgd: replay_sgd(a, p, steps, payload); break;
    case OptimizerKind::RowwiseAdagrad: replay_adagrad(a, p, steps, payload); break;
    case OptimizerKind::None: break;
  }
}

void replay_rows(const ReplayArgs& a, const UpdateParams& p, std::size_t row_begin, std::size_t row_end) {
  for (std::size_t row = row_begin; row < row_end; ++row) {
    prefetch_update(a.payload, row, row_end, p.layout.payload_bytes);
    replay_row(a, p, a.payload[row]);
  }
}

template <int kDim>
void row_norms(const NormArgs& a, std::uint32_t dim_, std::size_t row_begin, std::size_t row_end) {
  const int dim = width<kDim>(dim_);
  alignas(kCacheLineBytes) float acc[kDim != 0 ? kDim : kMaxDim];
  for (std::size_t row = row_begin; row < row_end; ++row) {
    if (row + kShortRowsAhead < row_end) prefetch_weights(a.payload[row + kShortRowsAhead], static_cast<std::size_t>(dim) * sizeof(float));
    const float* w = weight_of(a.payload[row]);
    const float* g = a.row_grads + row * static_cast<std::size_t>(dim);
    if (a.l2 != 0.0f) {
      for (int j = 0; j < dim; ++j) acc[j] = g[j] + a.l2 * w[j];
      g = acc;
    }
    a.grad_squares[row] = dot<kDim>(g, g, dim_);
    a.weight_squares[row] = dot<kDim>(w, w, dim_);
  }
}

// ---- dispatch by dim -------------------------------------------------------------------------------------------------

#define KSTEP_BY_DIM(dim, function, ...)             \
  switch (dim) {                                     \
    case 8: function<8>(__VA_ARGS__); break;         \
    case 16: function<16>(__VA_ARGS__); break;       \
    case 32: function<32>(__VA_ARGS__); break;       \
    case 64: function<64>(__VA_ARGS__); break;       \
    case 128: function<128>(__VA_ARGS__); break;     \
    default: function<0>(__VA_ARGS__); break;        \
  }

void gather_pooled_any(const PooledArgs& a, std::size_t begin, std::size_t end) {
  KSTEP_BY_DIM(a.dim, gather_pooled, a, begin, end)
}
void gather_rows_any(const GatherArgs& a, std::size_t begin, std::size_t end) {
  KSTEP_BY_DIM(a.dim, gather_rows, a, begin, end)
}
void weight_grads_any(const WeightGradArgs& a, std::size_t begin, std::size_t end) {
  KSTEP_BY_DIM(a.dim, weight_grads, a, begin, end)
}
void reduce_rows_any(const ReduceArgs& a, std::uint32_t dim, std::size_t begin, std::size_t end) {
  KSTEP_BY_DIM(dim, reduce_rows, a, dim, begin, end)
}
void reduce_update_any(const ReduceArgs& a, const UpdateParams& p, std::size_t begin, std::size_t end) {
  KSTEP_BY_DIM(p.layout.dim, reduce_update, a, p, begin, end)
}
void apply_update_any(const ApplyArgs& a, const UpdateParams& p, std::size_t begin, std::size_t end) {
  KSTEP_BY_DIM(p.layout.dim, apply_update, a, p, begin, end)
}
void row_norms_any(const NormArgs& a, std::uint32_t dim, std::size_t begin, std::size_t end) {
  KSTEP_BY_DIM(dim, row_norms, a, dim, begin, end)
}

#undef KSTEP_BY_DIM
#undef KSTEP_INLINE

}  // namespace

extern const RowKernels KSTEP_KERNELS;
const RowKernels KSTEP_KERNELS = {KSTEP_ISA,       gather_pooled_any, gather_rows_any,  reduce_rows_any,
                                  reduce_update_any, apply_update_any, replay_rows,     row_norms_any,
                                  weight_grads_any};

}  // namespace kstep
