// Weight gradients of single samples, never whole in memory: a tile of columns at a time is made, looked at, forgotten.
// Compiled once per instruction set, so nothing here may have external linkage but the table at the end.
#include "kernels.h"
#include "pack.h"
#include "winograd.h"

namespace {

using pyflatness::DirectForm;
using pyflatness::Layer;
using pyflatness::Strided;

constexpr int64_t kTogether = 8;       // samples that are looked at together where the weight is as large as all else
constexpr int64_t kTileColumns = 252;  // columns of M at a time: with 512 rows of float, 512 KiB

// The buffers of one call, in elements.
template <typename T>
struct DirectPlan {
  static constexpr int64_t kLanes = Simd<T>::kLanes;
  int64_t d, m, taps, positions, blocks;
  int64_t tile_channels, tile_columns;  // at most; the columns padded
  int64_t depth_ld;                     // between columns of packed patches
  int64_t rows_ld;                      // between columns of M
  int64_t root_size, weight_size;       // of a group
  bool fused;                           // whether no more is to be made of M than its weighted sums
  int64_t weight_ld, weight_panel;      // between columns of the weight, turned; between its strips of so many rows
  int64_t signal_size, block_size;      // of a sample's packed signal, and of a block of it
  int64_t shared, own;                  // in all, and of a thread
  int step;
  TilePlan<T, 2> tiles2;
  TilePlan<T, 4> tiles4;

  DirectPlan(const Layer& layer, DirectForm form, int64_t roots, bool weighted)
      : step(step_of(layer, form)), tiles2(layer), tiles4(layer) {
    d = layer.rows, m = layer.columns(), taps = layer.taps(), positions = layer.positions();
    blocks = blocks_of(positions, kDepth);
    tile_channels = blocks_of(layer.channels, blocks_of(m, kTileColumns));
    tile_columns = round_up(tile_channels * taps, kColumnPad);
    depth_ld = round_up(minimum(positions, kDepth), kLanes) + kLanes;
    rows_ld = round_up(d, kLanes) + kLanes;  // not a power of two: the columns of a tile must not share cache sets
    root_size = round_up(packed_size<T>(roots, d), kLanes);
    fused = weighted && roots == 0 && step == 0 && blocks == 1 && !few_rows<T>(d);
    weight_ld = fused ? kPanelVectors * kLanes : rows_ld;
    weight_panel = (m + kColumnPad) * weight_ld;
    weight_size = !weighted ? 0 : fused ? blocks_of(d, weight_ld) * weight_panel : weight_panel;
    block_size = round_up(packed_size<T>(d, minimum(positions, kDepth)), kLanes);
    signal_size = blocks * block_size;
    shared = layer.groups * (root_size + weight_size);
    const int64_t packed = (fused ? kTogether : 1) * signal_size + tile_columns * depth_ld + kLanes * (kDepth + kLanes);
    own = (tile_columns + 1) * rows_ld + (step == 4 ? tiles4.own : step == 2 ? tiles2.own : packed);
  }
};

template <typename T>
int64_t direct_workspace(const Layer& layer, DirectForm form, int64_t roots, bool weighted, int threads) {
  const DirectPlan<T> plan(layer, form, roots, weighted);
  return plan.shared + maximum(threads, 1) * plan.own;
}

// tile[c, row] = or += the product of the packed signal and patches.
template <bool Add, typename T>
void make_tile(const T* signal, int64_t rows, int64_t depth, const T* patches, int64_t depth_ld, int64_t columns,
               T* tile, int64_t rows_ld) {
  using S = Simd<T>;
  multiply(
      signal, rows, depth, patches, depth_ld, columns,
      [=](int64_t row, int64_t c, typename S::Vec sum) __attribute__((always_inline)) {
        T* place = tile + c * rows_ld + row;
        S::store(place, Add ? S::load(place) + sum : sum);
      },
      [=](int64_t row, int64_t c, T sum) __attribute__((always_inline)) {
        T* place = tile + c * rows_ld + row;
        *place = Add ? *place + sum : sum;
      });
}

// |root tile|^2. The sums of a panel of rows go to double: a tile has up to 4,032 terms a lane.
template <typename T>
double rooted_squares(const T* root, int64_t roots, int64_t rows, const T* tile, int64_t rows_ld, int64_t columns) {
  using S = Simd<T>;
  constexpr int64_t kPanel = kPanelVectors * S::kLanes;
  double total = 0;
  if (few_rows<T>(roots))
    multiply(
        root, roots, rows, tile, rows_ld, columns, [](int64_t, int64_t, typename S::Vec) {},
        [&](int64_t, int64_t, T sum) __attribute__((always_inline)) { total += static_cast<double>(sum * sum); });
  else
    for (int64_t first = 0; first < roots; first += kPanel) {
      typename S::Vec sums[2] = {};
      multiply_panels<false>(root + first * rows, minimum(kPanel, roots - first), rows, tile, rows_ld, columns,
                             [&](int64_t, int64_t c, typename S::Vec sum)
                                 __attribute__((always_inline)) { sums[c % 2] += sum * sum; });
      total += S::sum(sums[0] + sums[1]);
    }
  return total;
}

// Adds to totals[0] the squares of a tile of M; with its weight, laid out as the tile, the three weighted reductions.
template <typename T, bool Weighted>
void reduce_tile(const T* tile, const T* weight, int64_t rows_ld, int64_t rows, int64_t channels, int64_t taps,
                 T* row_sums,                                          // [rows_ld]
                 double* totals, double* by_column, double* by_row) {  // [3], [channels], [rows]
  using S = Simd<T>;
  const int64_t length = round_up(rows, S::kLanes);
  if (Weighted)
    for (int64_t r = 0; r < length; ++r) row_sums[r] = 0;
  for (int64_t channel = 0; channel < channels; ++channel) {
    double column_sum = 0;
    for (int64_t tap = 0; tap < taps; ++tap) {
      typename S::Vec squares = {}, weighted_squares = {}, column = {};
      for (int64_t r = 0; r < length; r += S::kLanes) {
        const typename S::Vec v = S::load(tile + r);
        squares += v * v;
        if (Weighted) {
          const typename S::Vec x = v * S::load(weight + r);
          weighted_squares += x * x;
          column += x;
          S::store(row_sums + r, S::load(row_sums + r) + x);
        }
      }
      totals[0] += S::sum(squares);
      if (Weighted) {
        totals[2] += S::sum(weighted_squares);
        column_sum += S::sum(column);
        weight += rows_ld;
      }
      tile += rows_ld;
    }
    if (Weighted) by_column[channel] = column_sum;
  }
  if (Weighted)
    for (int64_t r = 0; r < rows; ++r) by_row[r] += static_cast<double>(row_sums[r]);
}

// The same, of a tile that is never written: the products are reduced as they come.
template <typename T>
void reduce_products(const T* signal, int64_t rows, int64_t depth, const T* patches, int64_t depth_ld,
                     const T* weight,  // of these columns: strips of weight_ld rows, weight_panel apart
                     int64_t weight_ld, int64_t weight_panel, int64_t channels, int64_t taps,
                     T* sums,  // [columns and the last step's padding, lanes]
                     double* totals, double* by_column, double* by_row) {
  using S = Simd<T>;
  const int64_t columns = channels * taps;
  for (int64_t i = 0; i < round_up(columns, kColumnPad) * S::kLanes; ++i) sums[i] = 0;
  const auto strip = [&](int64_t first, auto vectors) __attribute__((always_inline)) {
    constexpr int kVectors = decltype(vectors)::value;
    const T* own_weight = weight + first / weight_ld * weight_panel;
    typename S::Vec squares = {}, weighted_squares = {}, row_sums[kVectors] = {};
    for (int64_t j = 0; j < columns; j += kPanelColumns)
      with_columns<kPanelColumns, kPanelStep>(columns - j, [&](auto width) __attribute__((always_inline)) {
        typename S::Vec all[kVectors] = {}, weighted[kVectors] = {}, by_strip[kVectors] = {}, column = {};
        panel_tile<T, kVectors, decltype(width)::value, false>(
            signal + first * depth, kVectors * S::kLanes, patches + j * depth_ld, depth_ld, depth,
            [&](int c, int v, typename S::Vec sum) __attribute__((always_inline)) {
              const typename S::Vec x = sum * S::load(own_weight + (j + c) * weight_ld + v * S::kLanes);
              all[v] += sum * sum;
              weighted[v] += x * x;
              by_strip[v] += x;
              column = v == 0 ? x : column + x;
              if (v == kVectors - 1) S::store(sums + (j + c) * S::kLanes, S::load(sums + (j + c) * S::kLanes) + column);
            });
        for (int v = 0; v < kVectors; ++v)
          squares += all[v], weighted_squares += weighted[v], row_sums[v] += by_strip[v];
      });
    totals[0] += S::sum(squares);
    totals[2] += S::sum(weighted_squares);
    T lanes[kVectors * S::kLanes];
    for (int v = 0; v < kVectors; ++v) S::store(lanes + v * S::kLanes, row_sums[v]);
    for (int64_t r = 0; r < minimum(kVectors * S::kLanes, rows - first); ++r)
      by_row[first + r] += static_cast<double>(lanes[r]);
  };
  int64_t row = 0;
  for (; row + S::kLanes < rows; row += 2 * S::kLanes) strip(row, Count<2>{});
  if (row < rows) strip(row, Count<1>{});
  for (int64_t channel = 0; channel < channels; ++channel) {
    typename S::Vec column = {};
    for (int64_t tap = 0; tap < taps; ++tap) column += S::load(sums + (channel * taps + tap) * S::kLanes);
    by_column[channel] = S::sum(column);
  }
}

// One sample's input and signal, one group.
template <typename T>
struct Sample {
  const T *inputs, *inputs_end;
  const int64_t* input_strides;
  const T *signal, *signal_end;
  const int64_t* signal_strides;
};

template <typename T>
void pack_signal(const Layer& layer, const DirectPlan<T>& plan, const Sample<T>& sample, T* scratch, T* packed) {
  const Grid grid(layer.places, sample.signal_strides + 2, nullptr);
  Runs runs;
  for (int64_t block = 0; block < plan.blocks; ++block) {
    grid.runs(block * kDepth, minimum(kDepth, plan.positions - block * kDepth), &runs);
    pack_places(sample.signal, sample.signal_strides[1], plan.d, runs, sample.signal_end, scratch,
                packed + block * plan.block_size);
  }
}

// The patches of some channels at the places of the runs, and zeros for what the product reads beyond them.
template <typename T>
void pack_tile(const Layer& layer, const DirectPlan<T>& plan, const Sample<T>& sample, const Runs& runs,
               int64_t channel, int64_t channels, T* patches) {
  const int64_t columns = channels * plan.taps, depth = runs.total, length = round_up(depth, Simd<T>::kLanes);
  pack_patches(layer, sample.inputs, sample.input_strides, runs, sample.inputs_end, channel, channel + channels,
               patches, plan.depth_ld);
  if (few_rows<T>(plan.d))
    for (int64_t c = 0; c < columns; ++c)
      for (int64_t k = depth; k < length; ++k) patches[c * plan.depth_ld + k] = 0;
  for (int64_t c = columns; c < round_up(columns, kColumnPad); ++c)
    for (int64_t k = 0; k < length; ++k) patches[c * plan.depth_ld + k] = 0;
}

// use(channel, channels) with the tiles of M of the channels from `first` to `last`, by products of packed patches.
template <typename T, typename Use>
PYFLATNESS_INLINE void patch_products(const Layer& layer, const DirectPlan<T>& plan, const Sample<T>& sample,
                                      int64_t first, int64_t last, T* tile, T* buffers, const Use& use) {
  T* packed = buffers;
  T* patches = packed + plan.signal_size;
  pack_signal(layer, plan, sample, patches + plan.tile_columns * plan.depth_ld, packed);
  const Grid grid(layer.places, sample.input_strides + 2, layer.stride);
  Runs runs;
  for (int64_t channel = first; channel < last; channel += plan.tile_channels) {
    const int64_t channels = minimum(plan.tile_channels, last - channel), columns = channels * plan.taps;
    for (int64_t block = 0; block < plan.blocks; ++block) {
      const int64_t depth = minimum(kDepth, plan.positions - block * kDepth);
      if (block == 0 || plan.blocks > 1) grid.runs(block * kDepth, depth, &runs);
      pack_tile(layer, plan, sample, runs, channel, channels, patches);
      const T* block_signal = packed + block * plan.block_size;
      if (block == 0)
        make_tile<false>(block_signal, plan.d, depth, patches, plan.depth_ld, columns, tile, plan.rows_ld);
      else
        make_tile<true>(block_signal, plan.d, depth, patches, plan.depth_ld, columns, tile, plan.rows_ld);
    }
    use(channel, channels);
  }
}

// The same by Winograd's transforms.
template <typename T, int Step, typename Use>
PYFLATNESS_INLINE void tile_products(const DirectPlan<T>& plan, const TilePlan<T, Step>& tiles, const Sample<T>& sample,
                                     int64_t first, int64_t last, T* tile, T* buffers, const Use& use) {
  T* sums = buffers + tiles.own - tiles.kNumbers * tiles.sums_size;
  for (int64_t start = first; start < last; start += tiles.channels) {
    const int64_t stop = minimum(start + tiles.channels, last);
    transformed_sums(tiles, sample.inputs, sample.input_strides, sample.signal, sample.signal_strides, start, stop,
                     start == first, sums, buffers);
    for (int64_t channel = start; channel < stop; channel += plan.tile_channels) {
      const int64_t channels = minimum(plan.tile_channels, stop - channel);
      transform_back(tiles, sums + (channel - start) * tiles.rows_ld, channels, tile, plan.rows_ld);
      use(channel, channels);
    }
  }
}

// One sample, one group, the channels from `first` to `last`.
template <typename T>
void direct_share(const Layer& layer, const DirectPlan<T>& plan, const Sample<T>& sample, const T* root, int64_t roots,
                  const T* weight, int64_t first, int64_t last, double* totals, double* by_column, double* by_row,
                  T* own) {
  T* tile = own;
  T* row_sums = tile + plan.tile_columns * plan.rows_ld;
  T* buffers = row_sums + plan.rows_ld;
  const auto use = [&](int64_t channel, int64_t channels) {
    const int64_t columns = channels * plan.taps, padded = round_up(columns, kColumnPad);
    // What the tiles of the next product read beyond the columns, and beyond the few rows that are not written whole.
    for (int64_t c = columns; c < padded; ++c)
      for (int64_t r = 0; r < plan.rows_ld; ++r) tile[c * plan.rows_ld + r] = 0;
    if (few_rows<T>(plan.d))
      for (int64_t c = 0; c < columns; ++c)
        for (int64_t r = plan.d; r < Simd<T>::kLanes; ++r) tile[c * plan.rows_ld + r] = 0;
    if (weight)
      reduce_tile<T, true>(tile, weight + channel * plan.taps * plan.rows_ld, plan.rows_ld, plan.d, channels, plan.taps,
                           row_sums, totals, by_column + channel, by_row);
    else
      reduce_tile<T, false>(tile, nullptr, plan.rows_ld, plan.d, channels, plan.taps, nullptr, totals, nullptr,
                            nullptr);
    if (root) totals[1] += rooted_squares(root, roots, plan.d, tile, plan.rows_ld, columns);
  };
  if (plan.step == 4)
    tile_products(plan, plan.tiles4, sample, first, last, tile, buffers, use);
  else if (plan.step == 2)
    tile_products(plan, plan.tiles2, sample, first, last, tile, buffers, use);
  else
    patch_products(layer, plan, sample, first, last, tile, buffers, use);
}

// Of some samples, one group, the channels from `first` to `last`, for a fused plan: a tile of the weight, which is as
// large as M, is read once for all of them.
template <typename T>
void fused_share(const Layer& layer, const DirectPlan<T>& plan, const Sample<T>* samples, int64_t count,
                 const T* weight, int64_t first, int64_t last, double* const* totals, double* const* by_column,
                 double* const* by_row, T* own) {  // [count]
  T* sums = own;
  T* packed = sums + plan.tile_columns * Simd<T>::kLanes;
  T* patches = packed + kTogether * plan.signal_size;
  for (int64_t i = 0; i < count; ++i)
    pack_signal(layer, plan, samples[i], patches + plan.tile_columns * plan.depth_ld, packed + i * plan.signal_size);
  const Grid grid(layer.places, samples[0].input_strides + 2, layer.stride);
  Runs runs;
  grid.runs(0, plan.positions, &runs);
  for (int64_t channel = first; channel < last; channel += plan.tile_channels) {
    const int64_t channels = minimum(plan.tile_channels, last - channel);
    for (int64_t i = 0; i < count; ++i) {
      pack_tile(layer, plan, samples[i], runs, channel, channels, patches);
      reduce_products(packed + i * plan.signal_size, plan.d, plan.positions, patches, plan.depth_ld,
                      weight + channel * plan.taps * plan.weight_ld, plan.weight_ld, plan.weight_panel, channels,
                      plan.taps, sums, totals[i], by_column[i] + channel, by_row[i]);
    }
  }
}

template <typename T>
void direct(const Layer& layer, DirectForm form, const Strided<T>& inputs, const Strided<T>& signal, const T* root,
            int64_t roots, const T* weight, int64_t splits, double* totals, double* by_column, double* by_row,
            T* workspace, int threads) {
  const DirectPlan<T> plan(layer, form, root ? roots : 0, weight != nullptr);
  const int64_t lanes = Simd<T>::kLanes, m = plan.m, d = plan.d;
  const int64_t root_strips = root ? 1 : 0, weight_strips = weight ? blocks_of(d, lanes) : 0;
  T* roots_packed = workspace;
  T* weights_turned = roots_packed + layer.groups * plan.root_size;
  const int64_t together = plan.fused ? maximum(1, minimum(kTogether, layer.n / maximum(threads, 1))) : 1;
  const int64_t items = blocks_of(layer.n, together) * layer.groups * splits;
#pragma omp parallel num_threads(product_team(threads, layer.n* layer.groups, d * m * (plan.positions + roots)))
  {
#pragma omp for schedule(dynamic)
    for (int64_t job = 0; job < layer.groups * (root_strips + weight_strips); ++job) {
      const int64_t group = job / (root_strips + weight_strips), strip = job % (root_strips + weight_strips);
      if (strip < root_strips) {
        pack_rows(root + group * roots * d, d, roots, d, roots_packed + group * plan.root_size);
      } else {
        const int64_t row = (strip - root_strips) * lanes, ld = plan.weight_ld;
        T* turned = weights_turned + group * plan.weight_size + row / ld * plan.weight_panel + row % ld;
        transpose_rows(weight + (group * d + row) * m, m, minimum(lanes, d - row), m, turned, ld);
        for (int64_t c = m; c < m + kColumnPad; ++c)  // columns of the last step
          for (int64_t r = 0; r < lanes; ++r) turned[c * ld + r] = 0;
      }
    }
    T* own = workspace + plan.shared + thread_index() * plan.own;
#pragma omp for schedule(dynamic)
    for (int64_t item = 0; item < items; ++item) {
      const int64_t share = item % splits, group = item / splits % layer.groups,
                    start = item / splits / layer.groups * together, count = minimum(together, layer.n - start);
      const int64_t first = layer.channels * share / splits, last = layer.channels * (share + 1) / splits;
      Sample<T> samples[kTogether];
      double *own_totals[kTogether], *own_columns[kTogether], *own_rows[kTogether];
      for (int64_t i = 0; i < count; ++i) {
        const int64_t matrix = (start + i) * layer.groups + group, place = matrix * splits + share;
        samples[i] = {inputs.data + (start + i) * inputs.stride[0] + group * layer.channels * inputs.stride[1],
                      inputs.data + inputs.count,
                      inputs.stride,
                      signal.data + (start + i) * signal.stride[0] + group * d * signal.stride[1],
                      signal.data + signal.count,
                      signal.stride};
        own_totals[i] = totals + place * 3;
        own_columns[i] = weight ? by_column + matrix * layer.channels : nullptr;
        own_rows[i] = weight ? by_row + place * d : nullptr;
        for (int j = 0; j < 3; ++j) own_totals[i][j] = 0;
        for (int64_t r = 0; r < (weight ? d : 0); ++r) own_rows[i][r] = 0;
      }
      const T* own_weight = weight ? weights_turned + group * plan.weight_size : nullptr;
      if (plan.fused)
        fused_share(layer, plan, samples, count, own_weight, first, last, own_totals, own_columns, own_rows, own);
      else
        direct_share(layer, plan, samples[0], root ? roots_packed + group * plan.root_size : nullptr, roots, own_weight,
                     first, last, own_totals[0], own_columns[0], own_rows[0], own);
    }
  }
}

template <typename T>
constexpr pyflatness::LayerKernels<T> kTable = {direct_workspace<T>, direct<T>};

}  // namespace

PYFLATNESS_EXPORT(LayerTables, layer) = {kTable<float>, kTable<double>};
