// A head of few outputs goes by blocks of rows: their logits and norms, and what blocks add up to.
#pragma once

#include "common.h"
#include "kernels.h"
#include "simd.h"

namespace {

// A block is two vectors of rows. Products of a tile of rows and outputs are summed in
// registers, lanes along the features; then the sums are folded into vectors with lanes along the rows.
template <typename T>
constexpr int64_t kBlockRows = 2 * Simd<T>::kLanes;
constexpr int64_t kTileRows = PYFLATNESS_VECTOR_BYTES == 64 ? 4 : 2;  // at most the lanes of a vector of double
constexpr int kTileOutputs = PYFLATNESS_VECTOR_REGISTERS == 32 && kTileRows == 2 ? 10 : 5;  // fills the registers
template <typename T>
constexpr int64_t kTileStep = Simd<T>::kLanes / kTileRows;  // a tile's rows lie so far apart, as folding wants them

// The address may lie behind the array: a prefetch never faults, but a pointer there must not be formed.
template <typename T>
PYFLATNESS_INLINE void prefetch(const T* place, int64_t ahead) {
  const uintptr_t bytes = static_cast<uintptr_t>(ahead) * sizeof(T);
  __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(place) + bytes), 0, 2);
}

// sums[s, 0] = sum_j weight[s, j] rows[0, kTileStep, ...][j], folded as far as a tile's rows go. The first tile adds
// rows[r][j]^2 behind them, and brings the rows of a block to come (`ahead` elements on) into the second cache: the
// first is full of this block.
template <typename T, int Outputs, bool First, bool Packed>
PYFLATNESS_INLINE void product_tile(const T* const* rows, int64_t ahead, const T* weight, int64_t m,
                                    typename Simd<T>::Vec* sums) {  // [Outputs + First, 2 kTileStep]
  using S = Simd<T>;
  typename S::Vec tile[Outputs + First][kTileRows] = {}, x[kTileRows];
  const auto add = [&](const auto& weight_at) __attribute__((always_inline)) {
    for (int s = 0; s < Outputs; ++s) {
      const typename S::Vec w = weight_at(weight + s * (Packed ? pyflatness::packed_columns(m) : m));
      for (int64_t r = 0; r < kTileRows; ++r) tile[s][r] += w * x[r];
    }
    if (First)
      for (int64_t r = 0; r < kTileRows; ++r) tile[Outputs + First - 1][r] += x[r] * x[r];
  };
  int64_t j = 0;
  for (; j + S::kLanes <= m; j += S::kLanes) {
    for (int64_t r = 0; r < kTileRows; ++r) {
      x[r] = S::load(rows[r * kTileStep<T>] + j);
      if (First) prefetch(rows[r * kTileStep<T>] + j, ahead);
    }
    add([j](const T* w) { return S::load(w + j); });
  }
  if (j < m) {  // x holds the last features where the weight has them, and zeros in the lanes that were added already
    for (int64_t r = 0; r < kTileRows; ++r) x[r] = S::load_tail(rows[r * kTileStep<T>] + m, m - j, m);
    if constexpr (Packed)
      add([j](const T* w) { return S::load(w + j); });
    else
      add([m](const T* w) { return m < S::kLanes ? S::load_partial(w, m, 0) : S::load(w + m - S::kLanes); });
  }
  for (int s = 0; s < Outputs + First; ++s) {
    sums[s * 2 * kTileStep<T>] = S::fold(tile[s]);
  }
}

template <typename T, bool First, bool Packed, int Outputs = kTileOutputs>
PYFLATNESS_INLINE void product_tile(const T* const* rows, int64_t ahead, const T* weight, int64_t m, int64_t outputs,
                                    typename Simd<T>::Vec* sums) {
  if constexpr (Outputs > 1) {
    if (outputs < Outputs) return product_tile<T, First, Packed, Outputs - 1>(rows, ahead, weight, m, outputs, sums);
  }
  product_tile<T, Outputs, First, Packed>(rows, ahead, weight, m, sums);
}

// logits[s, r] for a tile of outputs and the block's rows; the first tile writes the squared norms too.
template <typename T, bool First, bool Packed>
PYFLATNESS_INLINE void block_tile(const T* const* rows, int64_t ahead, const T* weight, int64_t m, int64_t outputs,
                                  T* logits, T* norms) {
  using S = Simd<T>;
  typename S::Vec sums[kTileOutputs + 1][2][kTileStep<T>];
  for (int64_t vector = 0; vector < 2; ++vector)
    for (int64_t r = 0; r < kTileStep<T>; ++r)
      product_tile<T, First, Packed>(rows + vector * S::kLanes + r, ahead, weight, m, outputs, &sums[0][vector][r]);
  for (int64_t s = 0; s < outputs + First; ++s)
    for (int64_t vector = 0; vector < 2; ++vector)
      S::store((s < outputs ? logits + s * kBlockRows<T> : norms) + vector * S::kLanes, S::fold(sums[s][vector]));
}

// Logits (by outputs: one vector holds one output of many rows) and squared norms of the block of `count` rows from
// `first` on.
template <typename T, bool Packed>
void block_products(const T* features, int64_t stride, int64_t first, int64_t count, const T* weight, int64_t m,
                    int64_t d, T* logits, T* norms) {
  const T* rows[kBlockRows<T>];  // beyond the last row: that row again
  for (int64_t r = 0; r < kBlockRows<T>; ++r) rows[r] = features + (first + minimum(r, count - 1)) * stride;
  const int64_t ahead = count == kBlockRows<T> ? 2 * kBlockRows<T> * stride : 0;
  const int64_t columns = Packed ? pyflatness::packed_columns(m) : m;
  block_tile<T, true, Packed>(rows, ahead, weight, m, minimum(d, kTileOutputs), logits, norms);
  for (int64_t s = kTileOutputs; s < d; s += kTileOutputs)
    block_tile<T, false, Packed>(rows, ahead, weight + s * columns, m, minimum(d - s, kTileOutputs),
                                 logits + s * kBlockRows<T>, norms);
}

// The largest logit of each row of a block, with the bias added.
template <typename T>
PYFLATNESS_INLINE void block_maximum(const T* logits,  // [d, kBlockRows]
                                     const T* bias, int64_t d, typename Simd<T>::Vec (&top)[2]) {
  using S = Simd<T>;
  for (int v = 0; v < 2; ++v) top[v] = S::load(logits + v * S::kLanes) + bias[0];
  for (int64_t s = 1; s < d; ++s)
    for (int v = 0; v < 2; ++v) {
      const typename S::Vec z = S::load(logits + s * kBlockRows<T> + v * S::kLanes) + bias[s];
      top[v] = z > top[v] ? z : top[v];
    }
}

// Blocks are added up in parts, whose number the threads do not change: nor do they the sum.
constexpr int64_t kParts = 256;

// What add(first, count, &sum) adds to a sum for the blocks of n rows.
template <typename T, typename Sum, typename Add>
PYFLATNESS_INLINE Sum sum_of_blocks(int64_t n, int64_t work, int threads, const Add& add) {
  const int64_t blocks = blocks_of(n, kBlockRows<T>), parts = minimum(blocks, kParts);
  Sum found[kParts];
#pragma omp parallel for num_threads(team(threads, work)) schedule(static)
  for (int64_t p = 0; p < parts; ++p) {
    const Add own = add;  // what it holds lies in registers
    Sum part = {};
    for (int64_t block = p * blocks / parts; block < (p + 1) * blocks / parts; ++block) {
      const int64_t first = block * kBlockRows<T>;
      own(first, minimum(kBlockRows<T>, n - first), &part);
    }
    found[p] = part;
  }
  Sum whole = {};
  for (int64_t p = 0; p < parts; ++p) whole += found[p];
  return whole;
}

}  // namespace
