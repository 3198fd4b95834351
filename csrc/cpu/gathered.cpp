// Weight gradients for several signals that share the inputs, made from the positions where a signal is not zero.
// Behind ReLU and max-pooling most are zero, and the same ones in all signals. Where these positions are known, signals
// may come as they are behind the pooling, element by element with its position.
//
// Compiled once per instruction set, so nothing here may have external linkage but the table at the end.
#include "kernels.h"
#include "pack.h"
#include "winograd.h"

namespace {

using pyflatness::Layer;
using pyflatness::Strided;

constexpr int kTileVectors = kManyRegisters ? 5 : 3, kTileSignals = kManyRegisters ? 5 : 3;
constexpr int64_t kSignals = 10;       // signals that are looked at together
constexpr int64_t kMatrices = 131072;  // elements of their matrices that are made together
constexpr int64_t kLines = 262144;     // elements of patches that are there at once, at most where it pays

// The buffers of one call, in elements. A line is what the kernel's last dimension sees along one row of pixels: for
// each place of that dimension, the channels with their taps in it. A patch is `slices` pieces of lines.
template <typename T>
struct GatheredPlan {
  static constexpr int64_t kLanes = Simd<T>::kLanes;
  int64_t d, length, taps, slices, lines;  // length: elements of a row of a signal
  int64_t channels, width;                 // of a tile: how many at most, and of a piece of a line; padded
  int64_t line, columns;                   // elements of a line, columns of a tile of M
  int64_t depth_ld;                        // between columns of pieces
  int64_t signal;                          // a sample's
  int64_t root_size;                       // of a group
  int64_t shared, own;                     // in all, and of a thread

  GatheredPlan(const Layer& layer, int64_t row_length, int64_t roots, int64_t signals) {
    d = layer.rows, length = row_length, taps = layer.kernel[2];
    slices = layer.kernel[0] * layer.kernel[1], lines = layer.size[0] * layer.size[1];
    const int64_t together = maximum(1, minimum(signals, kSignals));
    const int64_t fits = maximum(1, kMatrices / (together * d * slices * taps));
    channels = blocks_of(layer.channels, blocks_of(layer.channels, fits));
    width = round_up(channels * taps, kLanes);
    line = layer.places[2] * width, columns = slices * width;
    depth_ld = kDepth + kLanes;
    signal = round_up(d * length, kLanes) + kLanes;
    root_size = round_up(round_up(roots, kColumnPad) * d, kLanes);
    shared = layer.groups * root_size;
    own = lines * line + width * depth_ld + (1 + together) * signal + together * d * columns;
  }
};

template <typename T>
int64_t gathered_workspace(const Layer& layer, int64_t length, int64_t roots, int64_t signals, int threads) {
  const GatheredPlan<T> plan(layer, length, roots, signals);
  return plan.shared + maximum(1, minimum(threads, layer.n * layer.groups)) * plan.own;
}

// Where that was the faster: Winograd's transforms save more, larger matrices and images leave the cache.
template <typename T>
bool gathered_pays(const Layer& layer) {
  const GatheredPlan<T> plan(layer, layer.positions(), 0, kSignals);
  return step_of(layer, pyflatness::DirectForm::automatic) == 0 && plan.lines * plan.line <= kLines &&
         layer.rows * layer.columns() <= kMatrices / 8;
}

// Where the patches of some elements of the signals begin, and which elements are not zero in all signals.
struct Gathered {
  int64_t patch[kDepth];
  int64_t count;
  int32_t element[kDepth + 1];
};

// to[s, v] = or += Σ_p signals[s][p] * patches[v][p] over gathered elements p, s and v the rows and vectors of a tile.
template <typename T, int Vectors, int Signals>
PYFLATNESS_INLINE void add_positions(const T* const* patches, const T* const* signals, const Gathered& gathered,
                                     bool add, T* to, int64_t ld) {
  using S = Simd<T>;
  typename S::Vec sums[Signals][Vectors] = {};
  for (int64_t i = 0; i < gathered.count; ++i) {
    const int64_t p = gathered.element[i], patch = gathered.patch[p];
    typename S::Vec x[Vectors];
#pragma GCC unroll 5
    for (int v = 0; v < Vectors; ++v) x[v] = S::load(patches[v] + patch);
#pragma GCC unroll 5
    for (int s = 0; s < Signals; ++s) {
      const T y = signals[s][p];
#pragma GCC unroll 5
      for (int v = 0; v < Vectors; ++v) sums[s][v] += x[v] * y;
    }
  }
#pragma GCC unroll 5
  for (int s = 0; s < Signals; ++s)
#pragma GCC unroll 5
    for (int v = 0; v < Vectors; ++v) {
      T* own = to + s * ld + v * S::kLanes;
      S::store(own, add ? S::load(own) + sums[s][v] : sums[s][v]);
    }
}

// body(first, Count<C>) for about equal parts of `count` items, at most Most in each.
template <int Most, typename Body>
PYFLATNESS_INLINE void in_even_parts(int64_t count, const Body& body) {
  for (int64_t first = 0; first < count;) {
    const int64_t size = blocks_of(count - first, blocks_of(count - first, Most));
    with_columns<Most, 1>(size, [&](auto part) __attribute__((always_inline)) { body(first, part); });
    first += size;
  }
}

// One sample, one group.
template <typename T>
struct GatheredSample {
  const T *inputs, *inputs_end;
  const int64_t* input_strides;
  const T* signals[kSignals];  // rows of places that are neighbours
  int64_t row_stride;
};

// A copy of one sample's signal, places of a row side by side.
template <typename T>
void copy_rows(const int64_t* places, const GatheredPlan<T>& plan, const Strided<T>& signal, const T* from, T* to) {
  const Grid grid(places, signal.stride + 2, nullptr);
  Runs runs;
  T scratch[kDepth + Simd<T>::kLanes];
  for (int64_t start = 0; start < plan.length; start += kDepth) {
    grid.runs(start, minimum(kDepth, plan.length - start), &runs);
    for (int64_t r = 0; r < plan.d; ++r) {
      gather(from + r * signal.stride[1], runs, signal.data + signal.count, scratch);
      for (int64_t p = 0; p < runs.total; ++p) to[r * plan.length + start + p] = scratch[p];
    }
  }
}

// Some signals of sample i: as they lie where places are neighbours, else copied.
template <typename T>
GatheredSample<T> gathered_sample(const Layer& layer, const GatheredPlan<T>& plan, const Strided<T>& inputs,
                                  const Strided<T>* signals, int64_t count, const int64_t* places, int64_t i,
                                  int64_t group, T* copies) {
  GatheredSample<T> sample = {inputs.data + i * inputs.stride[0] + group * layer.channels * inputs.stride[1],
                              inputs.data + inputs.count,
                              inputs.stride,
                              {},
                              signals[0].stride[1]};
  bool neighbours = true;
  for (int64_t k = 0; k < count; ++k) {
    const Grid grid(places, signals[k].stride + 2, nullptr);
    neighbours &= grid.size[2] == plan.length && (grid.step[2] == 1 || plan.length == 1) &&
                  signals[k].stride[1] == sample.row_stride;
    sample.signals[k] = signals[k].data + i * signals[k].stride[0] + group * plan.d * signals[k].stride[1];
  }
  if (neighbours) return sample;
  for (int64_t k = 0; k < count; ++k) {
    copy_rows(places, plan, signals[k], sample.signals[k], copies + k * plan.signal);
    sample.signals[k] = copies + k * plan.signal;
  }
  sample.row_stride = plan.length;
  return sample;
}

// any[r * length + p] = 1 where a signal is not zero, or not a number.
template <typename T>
void mark(const GatheredPlan<T>& plan, const GatheredSample<T>& sample, int64_t count, T* any) {
  using S = Simd<T>;
  const typename S::Vec one = S::splat(1);
  const bool whole = sample.row_stride == plan.length;  // rows follow one another
  const int64_t rows = whole ? 1 : plan.d, length = whole ? plan.d * plan.length : plan.length;
  for (int64_t k = 0; k < count; ++k)
    for (int64_t r = 0; r < rows; ++r) {
      const T* signal = sample.signals[k] + r * sample.row_stride;
      T* to = any + r * plan.length;
      int64_t p = 0;
      for (; p + S::kLanes <= length; p += S::kLanes) {
        const typename S::Vec before = k ? S::load(to + p) : typename S::Vec{};
        S::store(to + p, S::load(signal + p) != 0 ? one : before);
      }
      for (; p < length; ++p) to[p] = signal[p] != 0 ? 1 : k ? to[p] : 0;
    }
}

// Lines of some channels.
template <typename T>
void pack_lines(const Layer& layer, const GatheredPlan<T>& plan, const GatheredSample<T>& sample, int64_t channel,
                int64_t channels, T* strip, T* lines) {
  using S = Simd<T>;
  Layer along = layer;
  for (int i = 0; i < 2; ++i) along.kernel[i] = along.stride[i] = 1, along.places[i] = layer.size[i];
  const Grid grid(along.places, sample.input_strides + 2, along.stride);
  const int64_t total = grid.total(), columns = channels * plan.taps;
  Runs runs;
  for (int64_t start = 0; start < total; start += kDepth) {
    const int64_t depth = minimum(kDepth, total - start);
    grid.runs(start, depth, &runs);
    pack_patches(along, sample.inputs, sample.input_strides, runs, sample.inputs_end, channel, channel + channels,
                 strip, plan.depth_ld);
    for (int64_t c = columns; c < plan.width; ++c)
      for (int64_t k = 0; k < depth; ++k) strip[c * plan.depth_ld + k] = 0;
    for (int64_t c = 0; c < plan.width; c += S::kLanes)
      transpose_rows(strip + c * plan.depth_ld, plan.depth_ld, S::kLanes, depth, lines + start * plan.width + c,
                     plan.width);
  }
}

// Whether a tap of some place sees this pixel of a dimension.
inline bool is_seen(const Layer& layer, int i, int64_t pixel) {
  for (int64_t k = 0; k < layer.kernel[i]; ++k) {
    const int64_t behind = pixel - k * layer.dilation[i];
    if (behind >= 0 && behind % layer.stride[i] == 0 && behind / layer.stride[i] < layer.places[i]) return true;
  }
  return false;
}

// 0; NaN if a patch holds what is not finite, as its product with a zero that is left out would be.
template <typename T>
double left_out(const Layer& layer, const GatheredPlan<T>& plan, const T* lines) {
  using S = Simd<T>;
  typename S::Vec total = {};
  for (int64_t z = 0; z < layer.size[0]; ++z)
    for (int64_t y = 0; y < layer.size[1]; ++y) {
      if (!is_seen(layer, 0, z) || !is_seen(layer, 1, y)) continue;
      const T* line = lines + (z * layer.size[1] + y) * plan.line;
      for (int64_t j = 0; j < plan.line; j += S::kLanes) total += S::load(line + j) * 0;
    }
  return S::sum(total);
}

// Elements of a row that are marked.
template <typename T>
void gather_marked(const T* any, int64_t depth, Gathered* gathered) {
  gathered->count = 0;
  for (int64_t p = 0; p < depth; ++p) {
    gathered->element[gathered->count] = static_cast<int32_t>(p);
    gathered->count += static_cast<int64_t>(any[p]);
  }
}

// Elements of a row that are at a position of the layer, and where its patch begins.
inline void gather_sources(const Layer& layer, const int64_t* strides, const int32_t* sources, int64_t depth,
                           Gathered* gathered) {
  const auto last = static_cast<uint32_t>(layer.positions());
  const auto width = static_cast<uint32_t>(layer.places[2]), height = static_cast<uint32_t>(layer.places[1]);
  gathered->count = 0;
  for (int64_t p = 0; p < depth; ++p) {
    const auto source = static_cast<uint32_t>(sources[p]);  // -1: beyond the last
    const bool counts = source < last;
    const uint32_t at = counts ? source : 0, line = at / width;
    gathered->patch[p] = line / height * strides[0] + line % height * strides[1] + at % width * strides[2];
    gathered->element[gathered->count] = static_cast<int32_t>(p);
    gathered->count += counts;
  }
}

// A tile of M for each signal, [signals, d, columns].
template <typename T>
void make_tiles(const Layer& layer, const GatheredPlan<T>& plan, const GatheredSample<T>& sample, int64_t count,
                const T* any, const int32_t* sources, const T* lines, T* tiles) {
  using S = Simd<T>;
  const int64_t strides[3] = {layer.stride[0] * layer.size[1] * plan.line, layer.stride[1] * plan.line, plan.width};
  const int64_t pieces = plan.width / S::kLanes;
  const Grid grid(layer.places, strides, nullptr);
  Runs runs;
  for (int64_t start = 0; start < plan.length; start += kDepth) {
    const int64_t depth = minimum(kDepth, plan.length - start);
    Gathered gathered;
    if (!sources) {
      grid.runs(start, depth, &runs);
      int64_t* patch = gathered.patch;
      for (int64_t run = 0; run < runs.count; ++run)
        for (int64_t x = 0; x < runs.length[run]; ++x) *patch++ = runs.offset[run] + x * runs.step;
    }
    for (int64_t r = 0; r < plan.d; ++r) {
      if (sources)
        gather_sources(layer, strides, sources + r * plan.length + start, depth, &gathered);
      else
        gather_marked(any + r * plan.length + start, depth, &gathered);
      const T* rows[kSignals];
      for (int64_t k = 0; k < count; ++k) rows[k] = sample.signals[k] + r * sample.row_stride + start;
      in_even_parts<kTileVectors>(plan.slices * pieces, [&](int64_t v, auto vectors) __attribute__((always_inline)) {
        constexpr int kVectors = decltype(vectors)::value;
        const T* patches[kVectors];
        for (int64_t i = 0; i < kVectors; ++i) {
          const int64_t slice = (v + i) / pieces, k0 = slice / layer.kernel[1], k1 = slice % layer.kernel[1];
          patches[i] = lines + (k0 * layer.dilation[0] * layer.size[1] + k1 * layer.dilation[1]) * plan.line +
                       (v + i) % pieces * S::kLanes;
        }
        in_even_parts<kTileSignals>(count, [&](int64_t k, auto signals) __attribute__((always_inline)) {
          add_positions<T, kVectors, decltype(signals)::value>(patches, rows + k, gathered, start > 0,
                                                               tiles + (k * plan.d + r) * plan.columns + v * S::kLanes,
                                                               plan.d * plan.columns);
        });
      });
    }
  }
}

// |tile|^2 and |root tile|^2 of a tile [d, columns]; behind the root's rows there are zeros up to kColumnPad of them.
template <typename T>
void add_squares(const GatheredPlan<T>& plan, const T* tile, const T* root, int64_t roots, double* totals) {
  using S = Simd<T>;
  for (int64_t start = 0; start < plan.d * plan.columns; start += kDepth * S::kLanes) {
    typename S::Vec squares[2] = {};
    const int64_t stop = minimum(start + kDepth * S::kLanes, plan.d * plan.columns);
    int64_t i = start;
    for (; i + S::kLanes < stop; i += 2 * S::kLanes)
      for (int v = 0; v < 2; ++v) {
        const typename S::Vec x = S::load(tile + i + v * S::kLanes);
        squares[v] += x * x;
      }
    for (; i < stop; i += S::kLanes) squares[0] += S::load(tile + i) * S::load(tile + i);
    totals[0] += S::sum(squares[0] + squares[1]);
  }
  if (roots == 0) return;
  typename S::Vec sums[2] = {};
  int64_t added = 0;
  const auto strip = [&](int64_t j, auto vectors) __attribute__((always_inline)) {
    in_even_parts<kPanelColumns / kPanelStep>(
        blocks_of(roots, kPanelStep), [&](int64_t step, auto steps) __attribute__((always_inline)) {
          panel_tile<T, decltype(vectors)::value, decltype(steps)::value * kPanelStep, false>(
              tile + j, plan.columns, root + step * kPanelStep * plan.d, plan.d, plan.d,
              [&](int, int v, typename S::Vec sum) __attribute__((always_inline)) { sums[v] += sum * sum; });
        });
    if ((added += roots) < kDepth && j + 2 * S::kLanes < plan.columns) return;
    totals[1] += S::sum(sums[0] + sums[1]);
    sums[0] = sums[1] = typename S::Vec{};
    added = 0;
  };
  int64_t j = 0;
  for (; j + S::kLanes < plan.columns; j += 2 * S::kLanes) strip(j, Count<2>{});
  if (j < plan.columns) strip(j, Count<1>{});
}

template <typename T>
void direct_gathered(const Layer& layer, const Strided<T>& inputs, const Strided<T>* signals, int64_t count,
                     const int32_t* sources, int64_t length, const T* root, int64_t roots, double* totals, T* workspace,
                     int threads) {
  const GatheredPlan<T> plan(layer, length, root ? roots : 0, count);
  const int64_t row[3] = {1, 1, length}, *places = sources ? row : layer.places;
  T* padded_root = workspace;
  for (int64_t group = 0; root && group < layer.groups; ++group)
    for (int64_t i = 0; i < plan.root_size; ++i)
      padded_root[group * plan.root_size + i] = i < roots * plan.d ? root[group * roots * plan.d + i] : 0;
  const int64_t items = layer.n * layer.groups;
  const int64_t work = count * plan.d * layer.columns() * (plan.length + (root ? roots : 0));
  const int team = static_cast<int>(maximum(1, minimum(product_team(threads, items, work), items)));
#pragma omp parallel for num_threads(team) schedule(dynamic)
  for (int64_t item = 0; item < items; ++item) {
    const int64_t i = item / layer.groups, group = item % layer.groups;
    const int32_t* own_sources = sources ? sources + item * plan.d * length : nullptr;
    T* lines = workspace + plan.shared + thread_index() * plan.own;
    T* strip = lines + plan.lines * plan.line;
    T* any = strip + plan.width * plan.depth_ld;
    T* copies = any + plan.signal;
    T* tiles = copies + minimum(count, kSignals) * plan.signal;
    for (int64_t first = 0; first < count; first += kSignals) {
      const int64_t some = minimum(kSignals, count - first);
      const GatheredSample<T> sample =
          gathered_sample(layer, plan, inputs, signals + first, some, places, i, group, copies);
      if (!sources) mark(plan, sample, some, any);
      for (int64_t k = 0; k < some; ++k)
        totals[((first + k) * items + item) * 2] = totals[((first + k) * items + item) * 2 + 1] = 0;
      for (int64_t channel = 0; channel < layer.channels; channel += plan.channels) {
        pack_lines(layer, plan, sample, channel, minimum(plan.channels, layer.channels - channel), strip, lines);
        make_tiles(layer, plan, sample, some, any, own_sources, lines, tiles);
        const double rest = left_out(layer, plan, lines);
        for (int64_t k = 0; k < some; ++k) {
          double* own = totals + ((first + k) * items + item) * 2;
          own[0] += rest, own[1] += rest;
          add_squares(plan, tiles + k * plan.d * plan.columns, padded_root + group * plan.root_size, root ? roots : 0,
                      own);
        }
      }
    }
  }
}

template <typename T>
constexpr pyflatness::GatheredKernels<T> kTable = {gathered_pays<T>, gathered_workspace<T>, direct_gathered<T>};

}  // namespace

PYFLATNESS_EXPORT(GatheredTables, gathered) = {kTable<float>, kTable<double>};
