// Head kernels. Compiled once per instruction set (PYFLATNESS_ISA names it), so nothing here may have external linkage
// but the table at the end.
#include "head_blocks.h"

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

// variance[r] = sum_{s<t} p_s p_t D_st for a block of rows. Every term is >= 0, so nothing cancels, however close to
// one the largest probability is. Two vectors go side by side, as every sum waits for its last addition.
template <typename T>
PYFLATNESS_INLINE void pair_variance(T* logits,  // [d, kBlockRows]
                                     const T* bias, const T* distances, int64_t d, T* variance) {
  using S = Simd<T>;
  using Vec = typename S::Vec;
  const auto at = [&](int64_t s, int v)
                      __attribute__((always_inline)) { return logits + s * kBlockRows<T> + v * S::kLanes; };
  Vec top[2], normaliser[2] = {}, pairs[2] = {};
  block_maximum(logits, bias, d, top);
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
  alignas(64) T logits[pyflatness::kMaxFusedOutputs * kRows];
  alignas(64) T norms[kRows], variance[kRows];
  block_products<T, Packed>(features, stride, first, count, weight, m, d, logits, norms);
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

  void operator+=(const Part& other) {
    total += other.total, counted += other.counted;
    wrong |= other.wrong;
  }
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

template <typename T>
void softmax_variance_sum(const T* features, int64_t stride, const T* prepared, const int64_t* labels, int64_t ignored,
                          int64_t n, int64_t m, int64_t d, double* values, double* total, int64_t* counted,
                          int threads) {
  const T *bias = prepared + d * pyflatness::packed_columns(m), *distances = bias + d;
  const auto add = [=](int64_t first, int64_t count, Part* part) __attribute__((always_inline)) {
    alignas(64) double of_rows[kBlockRows<T>];
    block_values<T, true>(features, stride, prepared, bias, distances, n, m, d, first, of_rows);
    add_block<T>(of_rows, count, labels ? labels + first : nullptr, ignored, d, part);
    if (values) std::memcpy(values + first, of_rows, static_cast<size_t>(count) * sizeof(double));
  };
  const Part whole = sum_of_blocks<T, Part>(n, n * m * d, threads, add);
  *total = whole.total;
  *counted = whole.wrong ? -1 : whole.counted;
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
constexpr pyflatness::HeadKernels<T> kTable = {
    pair_distances<T>, softmax_variance<T>, prepare_softmax_variance<T>, softmax_variance_sum<T>,
    exponentiate<T>,   row_dots<T>,         sigmoid_curvature<T>};

}  // namespace

PYFLATNESS_EXPORT(HeadTables, head) = {kTable<float>, kTable<double>};
