// Tiles of matrix products held in vector registers. Unlike a library's product, what becomes of the sums is the
// caller's: stored, squared, weighted, without a trip through memory.
//
// Two forms. `panel`: the lanes are rows of the left matrix, and an element of the right one meets all of them. `dots`:
// the lanes run along the depth, for few rows, or where both matrices lie along the depth in memory anyway.
#pragma once

#include <type_traits>

#include "common.h"
#include "simd.h"

namespace {

constexpr int64_t kDepth = 256;  // products summed in T in one go: cache and rounding

// Threads for `items` products of so many multiply-adds each: many of those are made at once, and an item has its own
// cost besides.
inline int product_team(int threads, int64_t items, int64_t multiply_adds) {
  return team(threads, items * (multiply_adds / 32 + 1024));
}

constexpr bool kManyRegisters = PYFLATNESS_VECTOR_REGISTERS == 32;
constexpr int kPanelVectors = 2;
constexpr int kPanelColumns = kManyRegisters ? 12 : 6;
// Columns come in multiples of this, at most a vector of double: rows in whole vectors have no more behind them.
constexpr int kPanelStep = PYFLATNESS_VECTOR_BYTES == 64 ? 4 : 2;
constexpr int kDotRows = 4, kDotColumns = 12, kDotStep = 3;
constexpr int kDotSums = kManyRegisters ? 24 : 12;
constexpr int64_t kColumnPad = 12;  // a multiple of both steps and of the widest tiles

// finish(c, v, sum) with the vectors sum = Σ_k a[k, v] b[k, c]; a[k, 0] at a + k * lda; b[k, c] at b + c * ldb + k, or
// at b + k * ldb + c.
template <typename T, int Vectors, int Columns, bool DepthMajor, typename Finish>
PYFLATNESS_INLINE void panel_tile(const T* a, int64_t lda, const T* b, int64_t ldb, int64_t depth,
                                  const Finish& finish) {
  using S = Simd<T>;
  typename S::Vec sums[Columns][Vectors] = {};
  for (int64_t k = 0; k < depth; ++k) {
    typename S::Vec x[Vectors];
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) x[v] = S::load(a + k * lda + v * S::kLanes);
#pragma GCC unroll 12
    for (int c = 0; c < Columns; ++c) {
      const T y = DepthMajor ? b[k * ldb + c] : b[c * ldb + k];
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) sums[c][v] += x[v] * y;
    }
  }
#pragma GCC unroll 12
  for (int c = 0; c < Columns; ++c)
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) finish(c, v, sums[c][v]);
}

// finish(r, c, sum) with the vectors whose lanes add up to Σ_k a[r, k] b[c, k]; depth in whole vectors.
template <typename T, int Rows, int Columns, typename Finish>
PYFLATNESS_INLINE void dot_tile(const T* const* a, const T* const* b, int64_t depth, const Finish& finish) {
  using S = Simd<T>;
  typename S::Vec sums[Columns][Rows] = {};
  for (int64_t k = 0; k < depth; k += S::kLanes) {
    typename S::Vec x[Rows];
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) x[r] = S::load(a[r] + k);
#pragma GCC unroll 12
    for (int c = 0; c < Columns; ++c) {
      const typename S::Vec y = S::load(b[c] + k);
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r) sums[c][r] += x[r] * y;
    }
  }
#pragma GCC unroll 12
  for (int c = 0; c < Columns; ++c)
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) finish(r, c, sums[c][r]);
}

template <int N>
using Count = std::integral_constant<int, N>;

// body(Count<C>) for the smallest multiple C of Step that holds `count` columns, at most Columns.
template <int Columns, int Step, typename Body>
PYFLATNESS_INLINE void with_columns(int64_t count, const Body& body) {
  if constexpr (Columns > Step) {
    if (count <= Columns - Step) return with_columns<Columns - Step, Step>(count, body);
  }
  body(Count<Columns>{});
}

// Whether lanes along the depth, not along the rows, suit a left matrix of so many rows.
template <typename T>
constexpr bool few_rows(int64_t rows) {
  return 2 * rows <= Simd<T>::kLanes;
}

// Packed left matrix of a product of `rows` x `depth`. Panels: rows padded with zeros to whole vectors, two vectors
// (the last time, one) side by side for each k. Dots: row after row, depth padded to whole vectors.
template <typename T>
int64_t packed_size(int64_t rows, int64_t depth) {
  return few_rows<T>(rows) ? rows * round_up(depth, Simd<T>::kLanes) : round_up(rows, Simd<T>::kLanes) * depth;
}

// Panels of a left matrix times `columns` columns of `b` (b[k, c] at b + c * ldb + k, or at b + k * ldb + c, with
// memory for whole steps of columns). use_vector(row, column, sums) gets the rows from `row` on, one per lane. Columns
// up to the next step are used too.
template <bool DepthMajor, typename T, typename UseVector>
PYFLATNESS_INLINE void multiply_panels(const T* packed, int64_t rows, int64_t depth, const T* b, int64_t ldb,
                                       int64_t columns, const UseVector& use_vector) {
  using S = Simd<T>;
  const auto panel = [&](int64_t first, auto vectors) __attribute__((always_inline)) {
    constexpr int kVectors = decltype(vectors)::value;
    for (int64_t j = 0; j < columns; j += kPanelColumns)
      with_columns<kPanelColumns, kPanelStep>(columns - j, [&](auto width) __attribute__((always_inline)) {
        panel_tile<T, kVectors, decltype(width)::value, DepthMajor>(
            packed + first * depth, kVectors * S::kLanes, b + (DepthMajor ? j : j * ldb), ldb, depth,
            [&](int c, int v, typename S::Vec sum)
                __attribute__((always_inline)) { use_vector(first + v * S::kLanes, j + c, sum); });
      });
  };
  int64_t row = 0;
  for (; row + S::kLanes < rows; row += 2 * S::kLanes) panel(row, Count<2>{});
  if (row < rows) panel(row, Count<1>{});
}

// Left matrix times `columns` columns of `b` (b[k, c] at b + c * ldb + k, with memory for whole steps of columns, and
// for few rows zeros in depth to whole vectors). use_vector(row, column, sums) gets the rows from `row` on, one per
// lane; use_number(row, column, sum), for few rows, one sum. Columns up to the next step are used too.
template <typename T, typename UseVector, typename UseNumber>
PYFLATNESS_INLINE void multiply(const T* packed, int64_t rows, int64_t depth, const T* b, int64_t ldb, int64_t columns,
                                const UseVector& use_vector, const UseNumber& use_number) {
  using S = Simd<T>;
  if (few_rows<T>(rows)) {
    const int64_t length = round_up(depth, S::kLanes);
    const auto strip = [&](int64_t first, auto tile_rows) __attribute__((always_inline)) {
      constexpr int kRows = decltype(tile_rows)::value;
      constexpr int kWidth = kDotSums / kRows < kDotColumns ? kDotSums / kRows : kDotColumns;
      const T* a[kRows];
      for (int r = 0; r < kRows; ++r) a[r] = packed + (first + r) * length;
      for (int64_t j = 0; j < columns; j += kWidth)
        with_columns<kWidth, kDotStep>(columns - j, [&](auto width) __attribute__((always_inline)) {
          constexpr int kTile = decltype(width)::value;
          const T* right[kTile];
          for (int c = 0; c < kTile; ++c) right[c] = b + (j + c) * ldb;
          constexpr int64_t kSums = kRows * kTile, kFolds = (kSums + S::kLanes - 1) / S::kLanes;
          typename S::Vec sums[kFolds][S::kLanes] = {};
          dot_tile<T, kRows, kTile>(a, right, length,
                                    [&](int r, int c, typename S::Vec sum) __attribute__((always_inline)) {
                                      sums[(c * kRows + r) / S::kLanes][(c * kRows + r) % S::kLanes] = sum;
                                    });
          T lanes[kFolds * S::kLanes];
#pragma GCC unroll 12
          for (int64_t fold = 0; fold < kFolds; ++fold) S::store(lanes + fold * S::kLanes, S::fold(sums[fold]));
          for (int c = 0; c < kTile; ++c)
            for (int r = 0; r < kRows; ++r) use_number(first + r, j + c, lanes[c * kRows + r]);
        });
    };
    int64_t row = 0;
    for (; row + 4 <= rows; row += 4) strip(row, Count<4>{});
    for (; row + 2 <= rows; row += 2) strip(row, Count<2>{});
    for (; row < rows; ++row) strip(row, Count<1>{});
    return;
  }
  multiply_panels<false>(packed, rows, depth, b, ldb, columns, use_vector);
}

}  // namespace
