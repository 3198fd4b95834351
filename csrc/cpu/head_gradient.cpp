// The gradient of a head's sum. Compiled once per instruction set, as head.cpp is.
#include "head_blocks.h"

namespace {

// For a block of rows: logits become probabilities p, slopes[s] = p_s (q_s - 2 v) with q_s = sum_t p_t D_st, which is
// the gradient of v = sum_s p_s q_s / 2 in the logits.
template <typename T>
PYFLATNESS_INLINE void pair_slopes(T* logits,  // [d, kBlockRows], also the next
                                   T* slopes, const T* bias, const T* distances, int64_t d, T* variance) {
  using S = Simd<T>;
  using Vec = typename S::Vec;
  const auto at = [](T* rows, int64_t s, int v)
                      __attribute__((always_inline)) { return rows + s * kBlockRows<T> + v * S::kLanes; };
  Vec top[2], normaliser[2] = {}, twice[2] = {};
  block_maximum(logits, bias, d, top);
  for (int64_t s = 0; s < d; ++s)
    for (int v = 0; v < 2; ++v) {
      const Vec e = S::exp_nonpositive(S::load(at(logits, s, v)) + bias[s] - top[v]);
      S::store(at(logits, s, v), e);
      normaliser[v] += e;
    }
  for (int64_t s = 0; s < d; ++s)
    for (int v = 0; v < 2; ++v) S::store(at(logits, s, v), S::load(at(logits, s, v)) / normaliser[v]);
  for (int64_t s = 0; s < d; ++s) {
    Vec q[2] = {};
    for (int64_t t = 0; t < d; ++t)
      for (int v = 0; v < 2; ++v) q[v] += S::load(at(logits, t, v)) * distances[s * d + t];
    for (int v = 0; v < 2; ++v) {
      twice[v] += S::load(at(logits, s, v)) * q[v];
      S::store(at(slopes, s, v), q[v]);
    }
  }
  for (int64_t s = 0; s < d; ++s)
    for (int v = 0; v < 2; ++v)
      S::store(at(slopes, s, v), S::load(at(logits, s, v)) * (S::load(at(slopes, s, v)) - twice[v]));
  for (int v = 0; v < 2; ++v) S::store(variance + v * S::kLanes, twice[v] * T(0.5));
}

// to[s, first...] = scale * from[s, ...] for the `count` rows of a block that there are.
template <typename T>
PYFLATNESS_INLINE void write_block(const T* from, const T* scale, int64_t d, int64_t n, int64_t first, int64_t count,
                                   T* to) {
  using S = Simd<T>;
  for (int64_t s = 0; s < d; ++s)
    for (int64_t r = 0; r < count; r += S::kLanes) {
      const typename S::Vec rows = S::load(from + s * kBlockRows<T> + r) * S::load(scale + r);
      T* place = to + s * n + first + r;
      count - r < S::kLanes ? S::store_partial(place, rows, count - r) : S::store(place, rows);
    }
}

template <typename T>
void softmax_variance_gradient(const T* features, int64_t stride, const T* prepared, const double* shares, int64_t n,
                               int64_t m, int64_t d, T* slopes, T* probabilities, T* factors, double* total,
                               int threads) {
  constexpr int64_t kRows = kBlockRows<T>;
  const T *bias = prepared + d * pyflatness::packed_columns(m), *distances = bias + d;
  const auto add = [=](int64_t first, int64_t count, double* part) __attribute__((always_inline)) {
    alignas(64) T logits[pyflatness::kMaxFusedOutputs * kRows], block_slopes[pyflatness::kMaxFusedOutputs * kRows];
    alignas(64) T norms[kRows], variance[kRows], ones[kRows], of_rows[kRows];
    block_products<T, true>(features, stride, first, count, prepared, m, d, logits, norms);
    pair_slopes(logits, block_slopes, bias, distances, d, variance);
    for (int64_t r = 0; r < kRows; ++r) {
      ones[r] = 1, of_rows[r] = 0;
      if (r >= count) continue;
      const double share = shares[first + r], scale = share * static_cast<double>(norms[r]);
      *part += scale * static_cast<double>(variance[r]);
      factors[first + r] = static_cast<T>(2 * share * static_cast<double>(variance[r]));
      factors[n + first + r] = of_rows[r] = static_cast<T>(scale);
    }
    write_block(block_slopes, of_rows, d, n, first, count, slopes);
    write_block(logits, ones, d, n, first, count, probabilities);
  };
  *total = sum_of_blocks<T, double>(n, n * m * d, threads, add);
}

template <typename T>
constexpr pyflatness::HeadGradientKernels<T> kTable = {softmax_variance_gradient<T>};

}  // namespace

PYFLATNESS_EXPORT(HeadGradientTables, head_gradient) = {kTable<float>, kTable<double>};
