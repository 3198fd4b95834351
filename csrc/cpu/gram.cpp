// Gram matrices of the places of a layer: made of patches, and contracted with one another.
// Compiled once per instruction set, so nothing here may have external linkage but the table at the end.
#include "kernels.h"
#include "pack.h"

namespace {

using pyflatness::Layer;
using pyflatness::Strided;

constexpr int64_t kShifts = 9;              // taps whose shifted rows are summed in one pass
constexpr double kShiftCost = 4;            // one addition of a shifted row, in multiply-adds of a product
constexpr int64_t kFewPlaces = 64;          // up to here the lanes of `gram` run along the rows
constexpr int64_t kRootedBytes = 96 << 10;  // rows of R δ that `gram_rooted` makes before it contracts them
constexpr int64_t kDotBytes = 16 << 10;     // rows of `gram` that stay in the first cache
constexpr int64_t kStrip = 96;              // places of a part of an item: a multiple of kPanelColumns

// What is multiplied with itself: pixels of the padded input, of which the Gram matrix of patches is a sum of shifted
// copies, or (with strides, or if the taps reach much further than the places) the patches themselves.
template <typename T>
struct GramPlan {
  static constexpr int64_t kLanes = Simd<T>::kLanes;
  Layer grid;             // one tap per column
  bool shifted;           // by pixels
  int64_t q, depth;       // places of the grid, columns of its patches
  int64_t ld, rows;       // of the grid's own Gram matrix
  int64_t shifts;         // taps
  int64_t input, square;  // buffers of a thread, in elements

  explicit GramPlan(const Layer& layer) : grid(layer) {
    const bool unit = layer.stride[0] == 1 && layer.stride[1] == 1 && layer.stride[2] == 1;
    const double pixels = static_cast<double>(layer.size[0] * layer.size[1] * layer.size[2]);
    const double places = static_cast<double>(layer.positions());
    const double by_pixels = static_cast<double>(layer.channels) * pixels * pixels +
                             kShiftCost * static_cast<double>(layer.taps()) * places * pixels;
    shifted = unit && by_pixels < static_cast<double>(layer.columns()) * places * places;
    shifts = 1;
    if (shifted) {
      shifts = layer.taps();
      for (int i = 0; i < 3; ++i) grid.places[i] = grid.size[i], grid.kernel[i] = 1;
    }
    q = grid.positions(), depth = grid.columns();
    ld = round_up(q, kLanes) + maximum(kLanes, kColumnPad);
    rows = round_up(q, kPanelColumns);
    input = kDepth * ld;
    square = rows * ld + kLanes;
  }
  int64_t own() const { return input + square + ld; }
};

template <typename T>
int64_t patch_gram_workspace(const Layer& layer, int threads) {
  return maximum(threads, 1) * GramPlan<T>(layer).own();
}

// square[j, i] = or += Σ_k x[k, j] x[k, i] for first <= j < last and i >= j, and some below; rows of both `ld` apart.
template <typename T, bool Add>
void add_square(const T* x, int64_t depth, int64_t q, int64_t ld, int64_t first, int64_t last, T* square) {
  using S = Simd<T>;
  for (int64_t j = first; j < last; j += kPanelColumns) {
    const auto panel = [&](int64_t i, auto vectors) __attribute__((always_inline)) {
      panel_tile<T, decltype(vectors)::value, kPanelColumns, true>(
          x + i, ld, x + j, ld, depth, [&](int c, int v, typename S::Vec sum) __attribute__((always_inline)) {
            T* place = square + (j + c) * ld + i + v * S::kLanes;
            S::store(place, Add ? S::load(place) + sum : sum);
          });
    };
    int64_t i = j / S::kLanes * S::kLanes;
    for (; i + S::kLanes < q; i += 2 * S::kLanes) panel(i, Count<2>{});
    if (i < q) panel(i, Count<1>{});
  }
}

// x[column][place] of all places of the grid for columns `first` on, zeros behind the last place.
template <typename T>
void pack_grid(const GramPlan<T>& plan, const T* from, const Strided<T>& inputs, int64_t first, int64_t count, T* x) {
  const Layer& grid = plan.grid;
  const Grid places(grid.places, inputs.stride + 2, grid.stride);
  const int64_t taps = grid.taps();
  Runs runs;
  for (int64_t start = 0; start < plan.q; start += kDepth) {
    places.runs(start, minimum(kDepth, plan.q - start), &runs);
    for (int64_t column = first; column < first + count; ++column) {
      const int64_t tap = column % taps;
      const int64_t k2 = tap % grid.kernel[2], k1 = tap / grid.kernel[2] % grid.kernel[1];
      const int64_t k0 = tap / grid.kernel[2] / grid.kernel[1];
      gather(from + column / taps * inputs.stride[1] + k0 * grid.dilation[0] * inputs.stride[2] +
                 k1 * grid.dilation[1] * inputs.stride[3] + k2 * grid.dilation[2] * inputs.stride[4],
             runs, inputs.data + inputs.count, x + (column - first) * plan.ld + start);
    }
  }
  for (int64_t column = 0; column < count; ++column)
    for (int64_t i = plan.q; i < plan.ld; ++i) x[column * plan.ld + i] = 0;
}

// Index of a place's first pixel in the grid's own order.
int64_t pixel(const Layer& layer, const Layer& grid, bool shifted, int64_t p) {
  if (!shifted) return p;
  const int64_t x = p % layer.places[2], y = p / layer.places[2] % layer.places[1];
  const int64_t z = p / layer.places[2] / layer.places[1];
  return (z * grid.size[1] + y) * grid.size[2] + x;
}

// wide[x] = Σ_taps square[from + tap, from + tap + x] for x < length.
template <typename T>
void sum_shifts(const Layer& layer, const GramPlan<T>& plan, const T* square, int64_t from, int64_t length, T* wide) {
  using S = Simd<T>;
  for (int64_t first = 0; first < plan.shifts; first += kShifts) {
    const T* rows[kShifts];
    const int64_t count = minimum(kShifts, plan.shifts - first);
    for (int64_t s = 0; s < count; ++s) {
      const int64_t tap = first + s, k2 = tap % layer.kernel[2], k1 = tap / layer.kernel[2] % layer.kernel[1];
      const int64_t k0 = tap / layer.kernel[2] / layer.kernel[1];
      const int64_t shift =
          (k0 * layer.dilation[0] * layer.size[1] + k1 * layer.dilation[1]) * layer.size[2] + k2 * layer.dilation[2];
      rows[s] = square + (from + shift) * (plan.ld + 1);
    }
    for (int64_t x = 0; x < length; x += S::kLanes) {
      typename S::Vec sum = first ? S::load(wide + x) : typename S::Vec{};
      for (int64_t s = 0; s < count; ++s) sum += S::load(rows[s] + x);
      S::store(wide + x, sum);
    }
  }
}

// out[j, i] = out[i, j] for j > i
template <typename T>
void mirror(T* out, int64_t size) {
  constexpr int64_t lanes = Simd<T>::kLanes;
  for (int64_t first = 0; first < size; first += lanes) {
    const int64_t last = minimum(first + lanes, size);
    for (int64_t r = first; r < last; ++r)
      for (int64_t c = first; c < r; ++c) out[r * size + c] = out[c * size + r];
    if (last < size)
      transpose_rows(out + first * size + last, size, lanes, size - last, out + last * size + first, size);
  }
}

// With fewer items than threads the rows of an item's matrix are shared among them, if no shifts are summed; each
// thread packs the inputs for itself.
template <typename T>
void patch_gram(const Layer& layer, const Strided<T>& inputs, T* out, T* workspace, int threads) {
  const GramPlan<T> plan(layer);
  const int64_t positions = layer.positions(), items = layer.n * layer.groups;
  const int64_t strips = !plan.shifted && items < threads ? blocks_of(positions, kStrip) : 1;
#pragma omp parallel num_threads(product_team(threads, items, plan.depth* plan.q* plan.q))
  {
    T* x = workspace + thread_index() * plan.own();
    T* square = x + plan.input;
    T* wide = square + plan.square;
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < items * strips; ++task) {
      const int64_t item = task / strips, begin = task % strips * kStrip;
      const int64_t end = strips > 1 ? minimum(begin + kStrip, positions) : plan.q;
      const T* from = inputs.data + item / layer.groups * inputs.stride[0] +
                      item % layer.groups * layer.channels * inputs.stride[1];
      for (int64_t first = 0; first < plan.depth; first += kDepth) {
        const int64_t count = minimum(kDepth, plan.depth - first);
        pack_grid(plan, from, inputs, first, count, x);
        if (first == 0)
          add_square<T, false>(x, count, plan.q, plan.ld, begin, end, square);
        else
          add_square<T, true>(x, count, plan.q, plan.ld, begin, end, square);
      }
      T* gram = out + item * positions * positions;
      const int64_t last = pixel(layer, plan.grid, plan.shifted, positions - 1);
      const int64_t run = plan.shifted ? layer.places[2] : positions;  // places that follow one another in the grid
      for (int64_t p = begin; p < minimum(end, positions); ++p) {
        const int64_t start = pixel(layer, plan.grid, plan.shifted, p);
        const T* row = square + start * (plan.ld + 1);
        if (plan.shifts > 1) {
          sum_shifts(layer, plan, square, start, last + 1 - start, wide);
          row = wide;
        }
        for (int64_t to = p; to < positions;) {
          const int64_t stop = minimum(positions, (to / run + 1) * run);
          const T* source = row + pixel(layer, plan.grid, plan.shifted, to) - start;
          for (int64_t k = to; k < stop; ++k) gram[p * positions + k] = source[k - to];
          to = stop;
        }
      }
      if (strips == 1) mirror(gram, positions);
    }
  }
  for (int64_t item = 0; strips > 1 && item < items; ++item) mirror(out + item * positions * positions, positions);
}

// out[item] = Σ of its shares
void add_shares(const double* sums, int64_t items, int64_t shares, double* out) {
  for (int64_t item = 0; item < items; ++item) {
    out[item] = 0;
    for (int64_t share = 0; share < shares; ++share) out[item] += sums[item * shares + share];
  }
}

// How `gram` reads the rows a_p of a matrix: along r for few places (dots), else along the places (panels), and where
// they are if they lie so in whole vectors.
template <typename T>
struct RowsPlan {
  static constexpr int64_t kLanes = Simd<T>::kLanes;
  bool dots, in_place;
  int64_t ld;

  RowsPlan(const int64_t* strides, int64_t positions, int64_t r) {
    const bool whole = strides[2] == 1 && positions % kLanes == 0;
    dots = !whole && strides[3] == 1 && positions <= kFewPlaces;
    in_place = whole || (dots && r % kLanes == 0);
    ld = whole ? strides[3] : dots && in_place ? strides[2] : dots ? round_up(r, kLanes) : columns_ld(positions);
  }
  static int64_t columns_ld(int64_t positions) { return round_up(positions, kLanes) + kLanes; }
};

// Elements of T that `gram` packs the rows of an item to.
template <typename T>
int64_t gram_packed(int64_t positions, int64_t r) {
  return maximum(positions * round_up(r, Simd<T>::kLanes), r * RowsPlan<T>::columns_ld(positions));
}

template <typename T>
int64_t gram_workspace(int64_t positions, int64_t r, int threads) {
  const int64_t sums = blocks_of(positions, kStrip) * static_cast<int64_t>(sizeof(double) / sizeof(T));
  return maximum(threads, 1) * (gram_packed<T>(positions, r) + sums);
}

// rows[p * ld + k] = a_p[k] (dots) or rows[k * ld + p] = a_p[k], with zeros behind the last k or p.
template <typename T>
void pack_gram_rows(const T* from, const T* end, const int64_t* strides, int64_t positions, int64_t r,
                    const RowsPlan<T>& plan, T* rows) {
  constexpr int64_t lanes = Simd<T>::kLanes;
  if (plan.dots) {
    for (int64_t p = 0; p < positions; ++p)
      for (int64_t k = 0; k < plan.ld; ++k) rows[p * plan.ld + k] = k < r ? from[p * strides[2] + k] : 0;
    return;
  }
  if (strides[3] == 1 && strides[2] != 1) {
    for (int64_t p = 0; p < positions; p += lanes)
      transpose_rows(from + p * strides[2], strides[2], minimum(lanes, positions - p), r, rows + p, plan.ld);
    return;
  }
  const int64_t size[3] = {1, 1, positions}, step[3] = {0, 0, strides[2]};
  const Grid line(size, step, nullptr);
  Runs runs;
  for (int64_t first = 0; first < positions; first += kDepth) {
    line.runs(first, minimum(kDepth, positions - first), &runs);
    for (int64_t k = 0; k < r; ++k) gather(from + k * strides[3], runs, end, rows + k * plan.ld + first);
  }
  for (int64_t k = 0; k < r; ++k)
    for (int64_t p = positions; p < plan.ld; ++p) rows[k * plan.ld + p] = 0;
}

// Σ over a tile of places i .. and j .. of <a_i, a_j> g[i, j], twice below the diagonal and not at all above it.
template <typename T, int Rows, int Columns>
PYFLATNESS_INLINE typename Simd<T>::Vec gram_tile(const T* a, int64_t stride, int64_t depth, const T* g,
                                                  int64_t positions, int64_t i, int64_t j) {
  using S = Simd<T>;
  const T *left[Rows], *right[Columns];  // beyond the last place: that place again, with no weight
  for (int r = 0; r < Rows; ++r) left[r] = a + minimum(i + r, positions - 1) * stride;
  for (int c = 0; c < Columns; ++c) right[c] = a + minimum(j + c, positions - 1) * stride;
  T weights[Columns][Rows];
  for (int c = 0; c < Columns; ++c)
    for (int r = 0; r < Rows; ++r) {
      const bool counts = i + r < positions && j + c <= i + r;
      weights[c][r] = counts ? (j + c < i + r ? 2 : 1) * g[(i + r) * positions + j + c] : 0;
    }
  typename S::Vec total = {};
  dot_tile<T, Rows, Columns>(left, right, depth, [&](int r, int c, typename S::Vec sum) __attribute__((always_inline)) {
    total += sum * weights[c][r];
  });
  return total;
}

template <typename T>
double gram_of_rows(const T* a, int64_t stride, int64_t positions, int64_t r, const T* g) {
  using S = Simd<T>;
  constexpr int kColumns = kDotSums / kDotRows;
  double total = 0;
  const int64_t length = round_up(r, S::kLanes), step = 4 * kDepth;
  for (int64_t first = 0; first < length; first += step) {
    const int64_t depth = minimum(step, length - first);
    const int64_t width = maximum(kDotBytes / (depth * static_cast<int64_t>(sizeof(T))) / kColumns, 1) * kColumns;
    for (int64_t block = 0; block < positions; block += width)
      for (int64_t i = block / kDotRows * kDotRows; i < positions; i += kDotRows) {
        typename S::Vec sum = {};
        for (int64_t j = block; j < minimum(minimum(block + width, i + kDotRows), positions); j += kColumns)
          sum += gram_tile<T, kDotRows, kColumns>(a + first, stride, depth, g, positions, i, j);
        total += S::sum(sum);
      }
  }
  return total;
}

// The same with the lanes along the places i ..., from a[k, p].
template <typename T, int Vectors, int Columns>
PYFLATNESS_INLINE double panel_gram(const T* a, int64_t stride, int64_t depth, const T* g, int64_t positions, int64_t i,
                                    int64_t j) {
  using S = Simd<T>;
  typename S::Vec total = {};
  panel_tile<T, Vectors, Columns, true>(
      a + i, stride, a + j, stride, depth, [&](int c, int v, typename S::Vec sum) __attribute__((always_inline)) {
        const typename S::Ints behind = S::lane() + static_cast<typename Format<T>::Int>(i + v * S::kLanes - j - c);
        const typename S::Vec none = {}, counted = behind > 0 ? sum + sum : behind == 0 ? sum : none;
        total += counted * S::load(g + (j + c) * positions + i + v * S::kLanes);
      });
  return S::sum(total);
}

// The same where the lanes or the columns reach beyond the last place.
template <typename T, int Vectors, int Columns>
double edge_gram(const T* a, int64_t stride, int64_t depth, const T* g, int64_t positions, int64_t i, int64_t j) {
  using S = Simd<T>;
  constexpr int64_t kWidth = Vectors * S::kLanes;
  T sums[Columns * kWidth];
  panel_tile<T, Vectors, Columns, true>(a + i, stride, a + j, stride, depth,
                                        [&](int c, int v, typename S::Vec sum) __attribute__((always_inline)) {
                                          S::store(sums + c * kWidth + v * S::kLanes, sum);
                                        });
  double total = 0;
  for (int64_t c = j; c < minimum(j + Columns, positions); ++c)
    for (int64_t p = maximum(i, c); p < minimum(i + kWidth, positions); ++p)
      total += static_cast<double>((p > c ? 2 : 1) * sums[(c - j) * kWidth + p - i] * g[c * positions + p]);
  return total;
}

// Σ <a_p, a_p'> g[p, p'] over begin <= p' < end from a[k, p], with zeros behind the last place; the triangle is cut by
// whole vectors.
template <typename T>
double gram_of_columns(const T* a, int64_t stride, int64_t positions, int64_t r, int64_t begin, int64_t end,
                       const T* g) {
  using S = Simd<T>;
  double total = 0;
  for (int64_t first = 0; first < r; first += kDepth) {
    const int64_t depth = minimum(kDepth, r - first);
    const T* rows = a + first * stride;
    for (int64_t j = begin; j < end; j += kPanelColumns)
      with_columns<kPanelColumns, kPanelStep>(end - j, [&](auto width) __attribute__((always_inline)) {
        const auto panel = [&](int64_t i, auto vectors) __attribute__((always_inline)) {
          constexpr int kVectors = decltype(vectors)::value, kWidth = decltype(width)::value;
          if (i + kVectors * S::kLanes <= positions && j + kWidth <= positions)
            total += panel_gram<T, kVectors, kWidth>(rows, stride, depth, g, positions, i, j);
          else
            total += edge_gram<T, kVectors, kWidth>(rows, stride, depth, g, positions, i, j);
        };
        int64_t i = j / S::kLanes * S::kLanes;
        for (; i + S::kLanes < positions; i += 2 * S::kLanes) panel(i, Count<2>{});
        if (i < positions) panel(i, Count<1>{});
      });
  }
  return total;
}

// Strips of places are summed apart and added in their order, whatever the threads; with fewer items than threads they
// are shared among them.
template <typename T>
void gram(const Strided<T>& a, int64_t samples, int64_t groups, int64_t positions, int64_t r, const T* g, double* out,
          T* workspace, int threads) {
  const int64_t own = gram_packed<T>(positions, r), items = samples * groups;
  const RowsPlan<T> plan(a.stride, positions, r);
  const int64_t parts = plan.dots ? 1 : blocks_of(positions, kStrip), together = items < threads ? 1 : parts;
  const int64_t shares = blocks_of(parts, together);
  double* sums = reinterpret_cast<double*>(workspace + maximum(threads, 1) * own);
#pragma omp parallel num_threads(product_team(threads, items, positions * positions * r))
  {
    int64_t held = -1;  // the item whose rows are packed
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < items * shares; ++task) {
      const int64_t item = task / shares, part = task % shares * together;
      const T* rows = a.data + item / groups * a.stride[0] + item % groups * a.stride[1];
      if (!plan.in_place) {
        T* packed = workspace + thread_index() * own;
        if (item != held) pack_gram_rows(rows, a.data + a.count, a.stride, positions, r, plan, packed);
        rows = packed, held = item;
      }
      const T* square = g + item * positions * positions;
      double sum = plan.dots ? gram_of_rows(rows, plan.ld, positions, r, square) : 0;
      for (int64_t strip = part; !plan.dots && strip < part + together; ++strip)
        sum += gram_of_columns(rows, plan.ld, positions, r, strip * kStrip, minimum((strip + 1) * kStrip, positions),
                               square);
      (shares > 1 ? sums[task] : out[item]) = sum;
    }
  }
  if (shares > 1) add_shares(sums, items, shares, out);
}

// How `gram_rooted` reads δ, places along the lanes: where it is, or packed to rows `ld` apart with zeros behind them.
template <typename T>
struct RootedPlan {
  static constexpr int64_t kLanes = Simd<T>::kLanes;
  RowsPlan<T> delta;
  int64_t ld, rows;  // of R δ: how many at a time stay in the second cache

  RootedPlan(const int64_t* strides, int64_t positions, int64_t d) : delta(strides, positions, d) {
    delta.in_place = strides[2] == 1 && positions % kLanes == 0;
    delta.dots = false;
    ld = RowsPlan<T>::columns_ld(positions);
    delta.ld = delta.in_place ? strides[3] : ld;
    rows = maximum(kRootedBytes / (ld * static_cast<int64_t>(sizeof(T))) / kPanelColumns, 2) * kPanelColumns;
  }
  int64_t own(int64_t d) const { return (d + rows + kPanelColumns) * ld; }
};

template <typename T>
int64_t gram_rooted_workspace(int64_t positions, int64_t d, int64_t roots, int threads) {
  const int64_t strides[5] = {0, 0, 0, 0, 0};
  const RootedPlan<T> plan(strides, positions, d);
  const int64_t sums = blocks_of(roots, plan.rows) * static_cast<int64_t>(sizeof(double) / sizeof(T));
  return maximum(threads, 1) * (plan.own(d) + sums);
}

// a[c, p] = Σ_k root[c, k] delta[k, p] for `count` rows of the root from `first` on; of a triangular one k begins at c.
template <typename T>
void turn_rows(const T* root, int64_t d, bool triangular, int64_t first, int64_t count, const T* delta, int64_t stride,
               int64_t positions, T* a, int64_t ld) {
  using S = Simd<T>;
  const auto strip = [&](int64_t i, auto vectors) __attribute__((always_inline)) {
    for (int64_t c = 0; c < count; c += kPanelColumns)
      with_columns<kPanelColumns, kPanelStep>(count - c, [&](auto width) __attribute__((always_inline)) {
        int64_t from = triangular ? minimum(first + c, d) : 0;
        bool add = false;
        do {
          const int64_t depth = minimum(kDepth, d - from);
          panel_tile<T, decltype(vectors)::value, decltype(width)::value, false>(
              delta + from * stride + i, stride, root + (first + c) * d + from, d, depth,
              [&](int r, int v, typename S::Vec sum) __attribute__((always_inline)) {
                T* place = a + (c + r) * ld + i + v * S::kLanes;
                S::store(place, add ? S::load(place) + sum : sum);
              });
          from += depth, add = true;
        } while (from < d);
      });
  };
  int64_t i = 0;
  for (; i + S::kLanes < positions; i += 2 * S::kLanes) strip(i, Count<2>{});
  if (i < positions) strip(i, Count<1>{});
}

// With fewer items than threads (long sequences, one at a time) an item's rows of R δ are shared among them, and each
// packs δ for itself. The parts of an item are added in their order, whatever the threads.
template <typename T>
void gram_rooted(const Strided<T>& delta, int64_t samples, int64_t groups, int64_t positions, int64_t d, const T* root,
                 int64_t roots, bool triangular, const T* g, double* out, T* workspace, int threads) {
  const RootedPlan<T> plan(delta.stride, positions, d);
  const int64_t own = plan.own(d), items = samples * groups, parts = blocks_of(roots, plan.rows);
  const int64_t together = items < threads ? 1 : parts, shares = blocks_of(parts, together);
  double* sums = reinterpret_cast<double*>(workspace + maximum(threads, 1) * own);
#pragma omp parallel num_threads(product_team(threads, items, positions * roots * (positions + d)))
  {
    T* packed = workspace + thread_index() * own;
    T* turned = packed + d * plan.ld;
    int64_t held = -1;  // the item whose δ is packed
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < items * shares; ++task) {
      const int64_t item = task / shares, part = task % shares * together;
      const T* rows = delta.data + item / groups * delta.stride[0] + item % groups * delta.stride[1];
      if (!plan.delta.in_place) {
        if (item != held)
          pack_gram_rows(rows, delta.data + delta.count, delta.stride, positions, d, plan.delta, packed);
        rows = packed, held = item;
      }
      double sum = 0;
      for (int64_t first = part * plan.rows; first < minimum((part + together) * plan.rows, roots);
           first += plan.rows) {
        const int64_t count = minimum(plan.rows, roots - first);
        turn_rows(root + item % groups * roots * d, d, triangular, first, count, rows, plan.delta.ld, positions, turned,
                  plan.ld);
        sum += gram_of_columns(turned, plan.ld, positions, count, 0, positions, g + item * positions * positions);
      }
      (shares > 1 ? sums[task] : out[item]) = sum;
    }
  }
  if (shares > 1) add_shares(sums, items, shares, out);
}

template <typename T>
constexpr pyflatness::GramKernels<T> kTable = {patch_gram_workspace<T>,  patch_gram<T>, gram_workspace<T>, gram<T>,
                                               gram_rooted_workspace<T>, gram_rooted<T>};

}  // namespace

PYFLATNESS_EXPORT(GramTables, gram) = {kTable<float>, kTable<double>};
