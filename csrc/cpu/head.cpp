// Head kernels. Compiled once per instruction set (PYFLATNESS_ISA names it), so nothing here may have external linkage
// but the table at the end.
#include "common.h"
#include "kernels.h"
#include "simd.h"

namespace {

constexpr int64_t kDepth = 256;           // features added in T before the sum is folded: cache and rounding
constexpr int64_t kDistanceDepth = 1024;  // the same for distances, whose tiles have sixteen sums to fold

// sum_j a_j b_j: vectors of T over kDepth elements, double beyond.
template <typename T>
double dot(const T* a, const T* b, int64_t length) {
  using S = Simd<T>;
  double total = 0;
  for (int64_t start = 0; start < length; start += kDepth) {
    const int64_t stop = minimum(length, start + kDepth);
    typename S::Vec sums[2] = {};
    int64_t j = start;
    for (; j + 2 * S::kLanes <= stop; j += 2 * S::kLanes) {
      sums[0] += S::load(a + j) * S::load(b + j);
      sums[1] += S::load(a + j + S::kLanes) * S::load(b + j + S::kLanes);
    }
    for (; j + S::kLanes <= stop; j += S::kLanes) sums[0] += S::load(a + j) * S::load(b + j);
    if (j < stop) sums[1] += S::load_tail(a + stop, stop - j, stop) * S::load_tail(b + stop, stop - j, stop);
    total += S::sum(sums[0] + sums[1]);
  }
  return total;
}

template <typename T>
void row_dots(const T* a, int64_t stride_a, const T* b, int64_t stride_b, int64_t n, int64_t k, double* out,
              int threads) {
#pragma omp parallel for num_threads(team(threads, n* k)) schedule(static)
  for (int64_t i = 0; i < n; ++i) out[i] = dot(a + i * stride_a, b + i * stride_b, k);
}

// Squared distances of Rows x Columns pairs of rows of w, accumulated over one slice of features.
template <typename T, int Rows, int Columns>
PYFLATNESS_INLINE void distance_tile(const T* const* left, const T* const* right, int64_t start, int64_t stop,
                                     double (*total)[Columns]) {
  using S = Simd<T>;
  typename S::Vec sums[Rows][Columns] = {};
  int64_t j = start;
  for (; j + S::kLanes <= stop; j += S::kLanes)
    for (int r = 0; r < Rows; ++r)
      for (int c = 0; c < Columns; ++c) {
        const typename S::Vec difference = S::load(left[r] + j) - S::load(right[c] + j);
        sums[r][c] += difference * difference;
      }
  if (j < stop)
    for (int r = 0; r < Rows; ++r)
      for (int c = 0; c < Columns; ++c) {
        const typename S::Vec difference =
            S::load_tail(left[r] + stop, stop - j, stop) - S::load_tail(right[c] + stop, stop - j, stop);
        sums[r][c] += difference * difference;
      }
  for (int r = 0; r < Rows; ++r)
    for (int c = 0; c < Columns; ++c) total[r][c] += S::sum(sums[r][c]);
}

template <typename T>
void pair_distances(const T* weight, int64_t d, int64_t m, T* out, int threads) {
  constexpr int kTile = 4;
  const int64_t tiles = (d + kTile - 1) / kTile;
#pragma omp parallel for num_threads(team(threads, d * d * m)) schedule(dynamic)
  for (int64_t row = 0; row < tiles; ++row) {
    for (int64_t column = 0; column <= row; ++column) {
      const T *left[kTile], *right[kTile];
      for (int k = 0; k < kTile; ++k) {  // beyond the last row: that row again, not written
        left[k] = weight + minimum(row * kTile + k, d - 1) * m;
        right[k] = weight + minimum(column * kTile + k, d - 1) * m;
      }
      double total[kTile][kTile] = {};
      for (int64_t start = 0; start < m; start += kDistanceDepth)
        distance_tile<T, kTile, kTile>(left, right, start, minimum(m, start + kDistanceDepth), total);
      for (int64_t s = row * kTile; s < minimum(d, row * kTile + kTile); ++s)
        for (int64_t t = column * kTile; t < minimum(d, column * kTile + kTile); ++t)
          out[s * d + t] = out[t * d + s] = static_cast<T>(total[s - row * kTile][t - column * kTile]);
    }
  }
}

// softmax_variance goes by blocks of two vectors of rows. Products of a tile of rows and outputs are summed in
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

// Logits (by outputs: one vector holds one output of many rows) and squared norms of a block of rows.
template <typename T, bool Packed>
void block_products(const T* const* rows, int64_t ahead, const T* weight, int64_t m, int64_t d, T* logits, T* norms) {
  const int64_t columns = Packed ? pyflatness::packed_columns(m) : m;
  block_tile<T, true, Packed>(rows, ahead, weight, m, minimum(d, kTileOutputs), logits, norms);
  for (int64_t s = kTileOutputs; s < d; s += kTileOutputs)
    block_tile<T, false, Packed>(rows, ahead, weight + s * columns, m, minimum(d - s, kTileOutputs),
                                 logits + s * kBlockRows<T>, norms);
}

// variance[r] = sum_{s<t} p_s p_t D_st for a block of rows. Every term is >= 0, so nothing cancels, however close to
// one the largest probability is. Two vectors go side by side, as every sum waits for its last addition.
template <typename T>
PYFLATNESS_INLINE void pair_variance(T* logits,  // [d, kBlockRows]
                                     const T* bias, const T* distances, int64_t d, T* variance) {
  using S = Simd<T>;
  using Vec = typename S::Vec;
  const auto at = [&](int64_t s, int v)
                      __attribute__((always_inline)) { return logits + s * kBlockRows<T> + v * S::kLanes; };
  Vec top[2];
  for (int v = 0; v < 2; ++v) top[v] = S::load(at(0, v)) + bias[0];
  for (int64_t s = 1; s < d; ++s)
    for (int v = 0; v < 2; ++v) {
      const Vec z = S::load(at(s, v)) + bias[s];
      top[v] = z > top[v] ? z : top[v];
    }
  Vec normaliser[2] = {}, pairs[2] = {};
  for (int64_t s = 0; s < d; ++s) {
    Vec e[2], inner[2] = {};
    for (int v = 0; v < 2; ++v) {
      e[v] = S::exp_nonpositive(S::load(at(s, v)) + bias[s] - top[v]);
      S::store(at(s, v), e[v]);
      normaliser[v] += e[v];
    }
    for (int64_t t = 0; t < s; ++t)
      for (int v = 0; v < 2; ++v) inner[v] += S::load(at(t, v)) * distances[s * d + t];
    for (int v = 0; v < 2; ++v) pairs[v] += e[v] * inner[v];
  }
  for (int v = 0; v < 2; ++v) S::store(variance + v * S::kLanes, pairs[v] / (normaliser[v] * normaliser[v]));
}

// values[r] = |phi_r|^2 variance_r for the rows of one block.
template <typename T, bool Packed>
PYFLATNESS_INLINE void block_values(const T* features, int64_t stride, const T* weight, const T* bias,
                                    const T* distances, int64_t n, int64_t m, int64_t d, int64_t first,
                                    double* values) {
  constexpr int64_t kRows = kBlockRows<T>;
  const int64_t count = minimum(kRows, n - first);
  const T* rows[kRows];  // beyond the last row: that row again, not written
  for (int64_t r = 0; r < kRows; ++r) rows[r] = features + (first + minimum(r, count - 1)) * stride;
  alignas(64) T logits[pyflatness::kMaxFusedOutputs * kRows];
  alignas(64) T norms[kRows], variance[kRows];
  block_products<T, Packed>(rows, count == kRows ? 2 * kRows * stride : 0, weight, m, d, logits, norms);
  pair_variance(logits, bias, distances, d, variance);
  for (int64_t r = 0; r < count; ++r) values[r] = static_cast<double>(norms[r]) * static_cast<double>(variance[r]);
}

template <typename T>
void softmax_variance(const T* features, int64_t stride, const T* weight, const T* bias, const T* distances, int64_t n,
                      int64_t m, int64_t d, double* out, int threads) {
  const int64_t blocks = blocks_of(n, kBlockRows<T>);
#pragma omp parallel for num_threads(team(threads, n * m * d)) schedule(static)
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t first = block * kBlockRows<T>;
    block_values<T, false>(features, stride, weight, bias, distances, n, m, d, first, out + first);
  }
}

// The lower median of each column of up to kCentreRows rows, `stride` apart: lanes are columns, which an odd-even
// transposition sorts. NaN for a column with NaN in it.
template <typename T>
PYFLATNESS_INLINE typename Simd<T>::Vec column_medians(const T* rows, int64_t stride, int64_t count, int64_t columns) {
  using S = Simd<T>;
  using Vec = typename S::Vec;
  Vec sorted[pyflatness::kCentreRows], poison = {};
  for (int64_t k = 0; k < count; ++k) {
    sorted[k] = columns < S::kLanes ? S::load_partial(rows + k * stride, columns, 0) : S::load(rows + k * stride);
    poison = sorted[k] != sorted[k] ? sorted[k] : poison;
  }
  for (int64_t round = 0; round < count; ++round)
    for (int64_t k = round % 2; k + 1 < count; k += 2) {
      const Vec a = sorted[k], b = sorted[k + 1];
      sorted[k] = b < a ? b : a;
      sorted[k + 1] = b < a ? a : b;
    }
  return poison != poison ? poison : sorted[(count - 1) / 2];
}

// The lower median of up to kMaxFusedOutputs numbers; NaN if one is.
template <typename T>
T median(const T* numbers, int64_t count) {
  T sorted[pyflatness::kMaxFusedOutputs];
  for (int64_t k = 0; k < count; ++k) {
    if (numbers[k] != numbers[k]) return numbers[k];
    int64_t place = k;
    for (; place > 0 && numbers[k] < sorted[place - 1]; --place) sorted[place] = sorted[place - 1];
    sorted[place] = numbers[k];
  }
  return sorted[(count - 1) / 2];
}

template <typename T>
void prepare_softmax_variance(const T* weight, const T* bias, int64_t d, int64_t m, T* prepared, int threads) {
  using S = Simd<T>;
  const int64_t step = blocks_of(d, pyflatness::kCentreRows), chosen = blocks_of(d, step);
#pragma omp parallel for num_threads(team(threads, d* m)) schedule(static)
  for (int64_t j = 0; j < m; j += S::kLanes) {
    const int64_t columns = minimum(S::kLanes, m - j), ahead = maximum(0, minimum(j, j + columns - S::kLanes));
    const int64_t read = minimum(S::kLanes, m);  // the last vector ends with the row, as the features' does
    const typename S::Vec centre = column_medians(weight + ahead, step * m, chosen, read);
    for (int64_t s = 0; s < d; ++s) {
      const T* from = weight + s * m + ahead;
      const typename S::Vec w = read == S::kLanes ? S::load(from) : S::load_partial(from, read, 0);
      S::store(prepared + s * pyflatness::packed_columns(m) + j, w - centre);
    }
  }
  T* shifted = prepared + d * pyflatness::packed_columns(m);
  const T middle = bias ? median(bias, d) : 0, shift = middle - middle == 0 ? middle : 0;
  for (int64_t s = 0; s < d; ++s) shifted[s] = bias ? bias[s] - shift : 0;
  pair_distances(weight, d, m, shifted + d, threads);
}

// What a part of the rows adds up to.
struct Part {
  double total = 0;
  int64_t counted = 0;
  bool wrong = false;
};

// Adds a block's values; those of rows that are ignored become 0.
template <typename T>
PYFLATNESS_INLINE void add_block(double* values, int64_t count, const int64_t* labels, int64_t ignored, int64_t d,
                                 Part* part) {
  using D = Simd<double>;
  constexpr int64_t kRows = kBlockRows<T>;
  for (int64_t r = count; r < kRows; ++r) values[r] = 0;
  part->counted += count;
  if (labels) {
    alignas(64) int64_t classes[kRows];
    for (int64_t r = 0; r < kRows; ++r) classes[r] = r < count ? labels[r] : ignored;
    part->counted += kRows - count;  // beyond the last row all are ignored
    typename D::Ints skipped = {}, wrong = {};
    for (int64_t r = 0; r < kRows; r += D::kLanes) {
      typename D::Ints c;
      std::memcpy(&c, classes + r, sizeof c);
      const typename D::Ints skip = c == ignored;
      D::store(values + r, skip ? typename D::Vec{} : D::load(values + r));
      wrong |= ~skip & ((c < 0) | (c >= d));
      skipped += skip;  // -1 each
    }
    for (int64_t l = 0; l < D::kLanes; ++l) part->counted += skipped[l], part->wrong |= wrong[l] != 0;
  }
  typename D::Vec sum = {};
  for (int64_t r = 0; r < kRows; r += D::kLanes) sum += D::load(values + r);
  part->total += D::sum(sum);
}

// The rows are added up in parts, whose number the threads do not change: nor do they the sum.
constexpr int64_t kParts = 256;

template <typename T>
void softmax_variance_sum(const T* features, int64_t stride, const T* prepared, const int64_t* labels, int64_t ignored,
                          int64_t n, int64_t m, int64_t d, double* values, double* total, int64_t* counted,
                          int threads) {
  constexpr int64_t kRows = kBlockRows<T>;
  const T *bias = prepared + d * pyflatness::packed_columns(m), *distances = bias + d;
  const int64_t blocks = blocks_of(n, kRows), parts = minimum(blocks, kParts);
  Part found[kParts];
#pragma omp parallel for num_threads(team(threads, n * m * d)) schedule(static)
  for (int64_t p = 0; p < parts; ++p) {
    Part part;
    for (int64_t block = p * blocks / parts; block < (p + 1) * blocks / parts; ++block) {
      const int64_t first = block * kRows, count = minimum(kRows, n - first);
      alignas(64) double of_rows[kRows];
      block_values<T, true>(features, stride, prepared, bias, distances, n, m, d, first, of_rows);
      add_block<T>(of_rows, count, labels ? labels + first : nullptr, ignored, d, &part);
      if (values) std::memcpy(values + first, of_rows, static_cast<size_t>(count) * sizeof(double));
    }
    found[p] = part;
  }
  Part whole;
  for (int64_t p = 0; p < parts; ++p) {
    whole.total += found[p].total, whole.counted += found[p].counted;
    whole.wrong |= found[p].wrong;
  }
  *total = whole.total;
  *counted = whole.wrong ? -1 : whole.counted;
}

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
  for (int v = 0; v < 2; ++v) top[v] = S::load(at(logits, 0, v)) + bias[0];
  for (int64_t s = 1; s < d; ++s)
    for (int v = 0; v < 2; ++v) {
      const Vec z = S::load(at(logits, s, v)) + bias[s];
      top[v] = z > top[v] ? z : top[v];
    }
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
  const int64_t blocks = blocks_of(n, kRows), parts = minimum(blocks, kParts);
  double found[kParts];
#pragma omp parallel for num_threads(team(threads, n * m * d)) schedule(static)
  for (int64_t p = 0; p < parts; ++p) {
    alignas(64) T logits[pyflatness::kMaxFusedOutputs * kRows], block_slopes[pyflatness::kMaxFusedOutputs * kRows];
    alignas(64) T norms[kRows], variance[kRows], ones[kRows], of_rows[kRows];
    double part = 0;
    for (int64_t block = p * blocks / parts; block < (p + 1) * blocks / parts; ++block) {
      const int64_t first = block * kRows, count = minimum(kRows, n - first);
      const T* rows[kRows];  // beyond the last row: that row again, not written
      for (int64_t r = 0; r < kRows; ++r) rows[r] = features + (first + minimum(r, count - 1)) * stride;
      block_products<T, true>(rows, count == kRows ? 2 * kRows * stride : 0, prepared, m, d, logits, norms);
      pair_slopes(logits, block_slopes, bias, distances, d, variance);
      for (int64_t r = 0; r < kRows; ++r) {
        ones[r] = 1, of_rows[r] = 0;
        if (r >= count) continue;
        const double share = shares[first + r], scale = share * static_cast<double>(norms[r]);
        part += scale * static_cast<double>(variance[r]);
        factors[first + r] = static_cast<T>(2 * share * static_cast<double>(variance[r]));
        factors[n + first + r] = of_rows[r] = static_cast<T>(scale);
      }
      write_block(block_slopes, of_rows, d, n, first, count, slopes);
      write_block(logits, ones, d, n, first, count, probabilities);
    }
    found[p] = part;
  }
  *total = 0;
  for (int64_t p = 0; p < parts; ++p) *total += found[p];
}

// The maximum of a row and its first place. A NaN is never the maximum; it shows in the sums instead.
template <typename T>
T row_maximum(const T* z, int64_t d, int64_t* place) {
  using S = Simd<T>;
  const T lowest = -__builtin_huge_val();
  typename S::Vec best = S::splat(lowest);
  typename S::Ints where = {};
  int64_t s = 0;
  for (; s < d; s += S::kLanes) {
    const typename S::Vec v = s + S::kLanes <= d ? S::load(z + s) : S::load_partial(z + s, d - s, lowest);
    where = v > best ? static_cast<typename Format<T>::Int>(s) - typename S::Ints{} : where;
    best = v > best ? v : best;
  }
  T top = lowest;
  *place = 0;
  for (int64_t l = 0; l < S::kLanes; ++l) {
    const int64_t candidate = static_cast<int64_t>(where[l]) + l;
    if (candidate < d && (best[l] > top || (best[l] == top && candidate < *place))) {
      top = best[l];
      *place = candidate;
    }
  }
  return top;
}

template <typename T>
void exponentiate_row(T* z, const T* row_norms, T top_value, int64_t d, T* maximum, double* rest, double* moment,
                      int64_t* top) {
  using S = Simd<T>;
  const T lowest = -__builtin_huge_val();
  int64_t place;
  const T largest = row_maximum(z, d, &place);
  const bool raised = largest > *maximum;
  if (raised) {
    *maximum = largest;
    if (largest - largest == 0) z[place] = lowest;  // out of the sums; infinity stays, and makes them NaN
  }
  *top = raised ? place : -1;
  const T reference = *maximum > lowest ? *maximum : 0;  // only logits of -infinity so far: exp(-infinity) is 0
  *rest = 0;
  double weighted = 0;
  for (int64_t start = 0; start < d; start += kDepth) {
    const int64_t stop = minimum(d, start + kDepth);
    typename S::Vec sum = {}, weighted_sum = {};
    int64_t s = start;
    for (; s + S::kLanes <= stop; s += S::kLanes) {
      const typename S::Vec e = S::exp_nonpositive(S::load(z + s) - reference);
      S::store(z + s, e);
      sum += e;
      if (row_norms) weighted_sum += e * S::load(row_norms + s);
    }
    if (s < stop) {
      const typename S::Vec e = S::exp_nonpositive(S::load_partial(z + s, stop - s, lowest) - reference);
      S::store_partial(z + s, e, stop - s);
      sum += e;
      if (row_norms) weighted_sum += e * S::load_partial(row_norms + s, stop - s, 0);
    }
    *rest += S::sum(sum);
    weighted += S::sum(weighted_sum);
  }
  if (row_norms) *moment = weighted;
  if (raised) z[place] = top_value;
}

template <typename T>
void exponentiate(T* logits, const T* row_norms, T top_value, int64_t n, int64_t d, T* maximum, double* rest,
                  double* moment, int64_t* top, int threads) {
#pragma omp parallel for num_threads(team(threads, n* d)) schedule(static)
  for (int64_t i = 0; i < n; ++i)
    exponentiate_row(logits + i * d, row_norms, top_value, d, maximum + i, rest + i, moment + i, top + i);
}

template <typename T>
double sigmoid_row(const T* z, const T* coefficients, const T* row_norms, int64_t d) {
  using S = Simd<T>;
  double total = 0;
  for (int64_t s = 0; s < d; s += S::kLanes) {
    const bool whole = s + S::kLanes <= d;
    const typename S::Vec v = whole ? S::load(z + s) : S::load_partial(z + s, d - s, 0);
    const typename S::Vec c = whole ? S::load(coefficients + s) : S::load_partial(coefficients + s, d - s, 0);
    const typename S::Vec w = whole ? S::load(row_norms + s) : S::load_partial(row_norms + s, d - s, 0);
    const typename S::Vec e = S::exp_nonpositive(v > T(0) ? -v : v);
    total += S::sum(c * w * e / ((e + T(1)) * (e + T(1))));
  }
  return total;
}

template <typename T>
void sigmoid_curvature(const T* logits, const T* coefficients, const T* row_norms, int64_t n, int64_t d, double* out,
                       int threads) {
#pragma omp parallel for num_threads(team(threads, n* d)) schedule(static)
  for (int64_t i = 0; i < n; ++i) out[i] = sigmoid_row(logits + i * d, coefficients + i * d, row_norms, d);
}

template <typename T>
constexpr pyflatness::HeadKernels<T> kTable = {pair_distances<T>,
                                               softmax_variance<T>,
                                               prepare_softmax_variance<T>,
                                               softmax_variance_sum<T>,
                                               softmax_variance_gradient<T>,
                                               exponentiate<T>,
                                               row_dots<T>,
                                               sigmoid_curvature<T>};

}  // namespace

PYFLATNESS_EXPORT(HeadTables, head) = {kTable<float>, kTable<double>};
