// M of a 3 x 3 kernel, stride 1, as the correlation of the input with the signal, by Winograd's minimal filtering: the
// signal in tiles of Step x Step places, the input in tiles of (Step + 2)^2 pixels that overlap by two, both
// transformed to (Step + 2)^2 numbers, whose products are summed over all tiles of a sample before the one transform
// back.
#pragma once

#include "pack.h"

namespace {

constexpr int64_t kTileDepth = 32;              // tiles packed at a time
constexpr int64_t kTransformedBytes = 1048576;  // of transformed M at a time

// Places along a side of Winograd's tiles, if M is to be made by his transforms; else 0.
inline int step_of(const pyflatness::Layer& layer, pyflatness::DirectForm form) {
  for (int i = 0; i < 3; ++i)
    if (layer.kernel[i] != (i ? 3 : 1) || layer.stride[i] != 1 || (i && layer.dilation[i] != 1)) return 0;
  if (form != pyflatness::DirectForm::automatic)
    return form == pyflatness::DirectForm::tiles4 ? 4 : form == pyflatness::DirectForm::tiles2 ? 2 : 0;
  // Where it was the faster: fewer rows or channels leave lanes empty, smaller planes cost more to transform than to
  // multiply, and of the larger tiles a small plane has too few.
  const int64_t plane = layer.places[1] * layer.places[2];
  if (layer.rows < 16 || layer.channels < 16 || plane < 64) return 0;
  return plane >= 144 ? 4 : 2;
}

// One dimension, Toom and Cook: polynomials at the points 0, 1, -1 (2, -2) and infinity. Scales are with `input` and
// `back`.
template <int Step>
struct Transform;

template <>
struct Transform<2> {
  template <typename V>
  static PYFLATNESS_INLINE void signal(const V* g, V* to) {
    to[0] = g[0], to[1] = g[0] + g[1], to[2] = g[0] - g[1], to[3] = g[1];
  }
  template <typename V>
  static PYFLATNESS_INLINE void input(const V* d, V* to) {
    to[0] = d[0] - d[2], to[1] = d[1] + d[2], to[2] = d[2] - d[1], to[3] = d[3] - d[1];
  }
  template <typename V>
  static PYFLATNESS_INLINE void back(const V* m, V* to) {
    const V sum = (m[1] + m[2]) / 2;
    to[0] = m[0] + sum, to[1] = (m[1] - m[2]) / 2, to[2] = sum + m[3];
  }
};

template <>
struct Transform<4> {
  template <typename V>
  static PYFLATNESS_INLINE void signal(const V* g, V* to) {
    const V even = g[0] + g[2], odd = g[1] + g[3], even2 = g[0] + 4 * g[2], odd2 = 2 * g[1] + 8 * g[3];
    to[0] = g[0], to[1] = even + odd, to[2] = even - odd, to[3] = even2 + odd2, to[4] = even2 - odd2, to[5] = g[3];
  }
  template <typename V>
  static PYFLATNESS_INLINE void input(const V* d, V* to) {
    const V a = d[4] - 4 * d[2], b = d[3] - 4 * d[1], c = d[4] - d[2], e = 2 * (d[3] - d[1]);
    to[0] = 4 * (d[0] - d[2]) + c, to[1] = a + b, to[2] = a - b, to[3] = c + e, to[4] = c - e;
    to[5] = 4 * (d[1] - d[3]) + d[5] - d[3];
  }
  template <typename V>
  static PYFLATNESS_INLINE void back(const V* m, V* to) {
    constexpr auto sixth = static_cast<typename std::remove_reference<decltype(m[0][0])>::type>(1) / 6;
    const V sum = (m[1] + m[2]) * -sixth, difference = (m[1] - m[2]) * -sixth;
    const V sum2 = (m[3] + m[4]) * (sixth / 4), difference2 = (m[3] - m[4]) * (sixth / 4);
    to[0] = m[0] / 4 + sum + sum2, to[1] = difference + 2 * difference2, to[2] = sum + 4 * sum2 + m[5];
  }
};

// A plane of pixels (channel, row, column) as it lies in memory, zero outside its sizes.
template <typename T>
struct Plane {
  const T* data;
  int64_t channel_stride, row_stride, column_stride;
  int64_t height, width;

  Plane(const T* data, const int64_t* strides, int64_t height, int64_t width)  // strides of an array of Strided
      : data(data),
        channel_stride(strides[1]),
        row_stride(strides[3]),
        column_stride(strides[4]),
        height(height),
        width(width) {}
};

// to[row, column, lane] for `count` <= kLanes channels and rows x columns pixels from (row, column) on; zeros for the
// other lanes.
template <typename T>
void stage(const Plane<T>& plane, int64_t channel, int64_t count, int64_t row, int64_t column, int64_t rows,
           int64_t columns, T* to) {
  using S = Simd<T>;
  const int64_t height = minimum(rows, plane.height - row), width = minimum(columns, plane.width - column);
  const T* from = plane.data + channel * plane.channel_stride + row * plane.row_stride + column * plane.column_stride;
  if (plane.column_stride == 1 && width == columns && plane.row_stride == width) {  // the rows are one
    transpose_rows(from, plane.channel_stride, count, height * width, to, S::kLanes);
  } else {
    for (int64_t y = 0; y < height; ++y) {
      const T* source = from + y * plane.row_stride;
      T* target = to + y * columns * S::kLanes;
      if (plane.column_stride == 1) {
        transpose_rows(source, plane.channel_stride, count, width, target, S::kLanes);
      } else if (plane.channel_stride == 1) {
        for (int64_t x = 0; x < width; ++x) {
          const T* pixel = source + x * plane.column_stride;
          S::store(target + x * S::kLanes, count == S::kLanes ? S::load(pixel) : S::load_partial(pixel, count, 0));
        }
      } else {
        for (int64_t x = 0; x < width; ++x)
          for (int64_t l = 0; l < S::kLanes; ++l)
            target[x * S::kLanes + l] =
                l < count ? source[l * plane.channel_stride + x * plane.column_stride] : static_cast<T>(0);
      }
      for (int64_t x = width; x < columns; ++x) S::store(target + x * S::kLanes, typename S::Vec{});
    }
  }
  for (int64_t i = height * columns; i < rows * columns; ++i) S::store(to + i * S::kLanes, typename S::Vec{});
}

// The transforms of tiles_y x tiles_x tiles of Size x Size staged pixels, Step apart, in rows of `columns`: number i of
// tile k to to[i * size + k * ld].
template <typename T, int Step, int Size, typename F>
PYFLATNESS_INLINE void transform_tiles(const T* staged, int64_t columns, int64_t tiles_y, int64_t tiles_x, T* to,
                                       int64_t size, int64_t ld, const F& transform) {
  using S = Simd<T>;
  using V = typename S::Vec;
  constexpr int kSide = Step + 2;
  for (int64_t y = 0; y < tiles_y; ++y)
    for (int64_t x = 0; x < tiles_x; ++x, to += ld) {
      const T* from = staged + (y * columns + x) * Step * S::kLanes;
      V half[kSide][Size];
#pragma GCC unroll 6
      for (int j = 0; j < Size; ++j) {
        V column[Size], turned[kSide];
#pragma GCC unroll 6
        for (int i = 0; i < Size; ++i) column[i] = S::load(from + (i * columns + j) * S::kLanes);
        transform(column, turned);
#pragma GCC unroll 6
        for (int i = 0; i < kSide; ++i) half[i][j] = turned[i];
      }
#pragma GCC unroll 6
      for (int i = 0; i < kSide; ++i) {
        V turned[kSide];
        transform(half[i], turned);
#pragma GCC unroll 6
        for (int j = 0; j < kSide; ++j) S::store(to + (i * kSide + j) * size, turned[j]);
      }
    }
}

// The buffers of one thread, in elements, and the blocks of tiles.
template <typename T, int Step>
struct TilePlan {
  static constexpr int64_t kLanes = Simd<T>::kLanes;
  static constexpr int64_t kNumbers = (Step + 2) * (Step + 2);
  int64_t rows, places[3];
  int64_t tiles_y, tiles_x, block_y, block_x;  // of a plane; at most of a block
  int64_t channels;                            // at a time
  int64_t depth;                               // tiles of a block, at most
  int64_t signal_size, input_ld, input_size;   // of one of the kNumbers
  int64_t rows_ld, sums_size;
  int64_t staged, own;

  TilePlan(const pyflatness::Layer& layer) {
    rows = layer.rows;
    for (int i = 0; i < 3; ++i) places[i] = layer.places[i];
    tiles_y = blocks_of(places[1], Step), tiles_x = blocks_of(places[2], Step);
    block_x = blocks_of(tiles_x, blocks_of(tiles_x, kTileDepth));
    block_y = blocks_of(tiles_y, blocks_of(tiles_y, maximum(1, kTileDepth / block_x)));
    depth = block_y * block_x;
    rows_ld = round_up(rows, kLanes) + kLanes;
    const int64_t most =
        maximum(kLanes, kTransformedBytes / static_cast<int64_t>(sizeof(T)) / (kNumbers * rows_ld) / kLanes * kLanes);
    channels = round_up(blocks_of(layer.channels, blocks_of(layer.channels, most)), kLanes);
    signal_size = round_up(rows, kLanes) * depth;
    input_ld = channels + kLanes + round_up(kColumnPad, kLanes);  // not a power of two
    input_size = depth * input_ld;
    sums_size = round_up(channels, kColumnPad) * rows_ld;
    staged = (block_y * Step + 2) * (block_x * Step + 2) * kLanes;
    own = kNumbers * (signal_size + input_size + sums_size) + staged;
  }
};

// sums[number, channel, row] = or += the products of a block's transformed signal and input.
template <bool Add, typename T, int Step>
void add_block(const TilePlan<T, Step>& plan, const T* signals, const T* pixels, int64_t depth, int64_t channels,
               T* sums) {
  using S = Simd<T>;
  for (int64_t i = 0; i < plan.kNumbers; ++i) {
    T* to = sums + i * plan.sums_size;
    multiply_panels<true>(signals + i * plan.signal_size, plan.rows, depth, pixels + i * plan.input_size, plan.input_ld,
                          channels, [=](int64_t row, int64_t c, typename S::Vec sum) __attribute__((always_inline)) {
                            T* place = to + c * plan.rows_ld + row;
                            S::store(place, Add ? S::load(place) + sum : sum);
                          });
  }
}

// sums[number, channel, row] = transformed M of the channels from `first` to `last` (at most plan.channels). A signal
// of one block is transformed if `fresh`; else it still is in the buffers.
template <typename T, int Step>
void transformed_sums(const TilePlan<T, Step>& plan, const T* inputs, const int64_t* input_strides, const T* signal,
                      const int64_t* signal_strides, int64_t first, int64_t last, bool fresh, T* sums, T* buffers) {
  using S = Simd<T>;
  T* signals = buffers;
  T* pixels = signals + plan.kNumbers * plan.signal_size;
  T* staged = pixels + plan.kNumbers * plan.input_size;
  const int64_t blocks_y = blocks_of(plan.tiles_y, plan.block_y), blocks_x = blocks_of(plan.tiles_x, plan.block_x);
  const int64_t blocks = plan.places[0] * blocks_y * blocks_x;
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t z = block / blocks_x / blocks_y, y = block / blocks_x % blocks_y * plan.block_y,
                  x = block % blocks_x * plan.block_x;
    const int64_t height = minimum(plan.block_y, plan.tiles_y - y), width = minimum(plan.block_x, plan.tiles_x - x);
    const int64_t depth = height * width;
    const Plane<T> from_signal(signal + z * signal_strides[2], signal_strides, plan.places[1], plan.places[2]);
    const Plane<T> from_inputs(inputs + z * input_strides[2], input_strides, plan.places[1] + 2, plan.places[2] + 2);
    for (int64_t row = 0; row < plan.rows && (fresh || blocks > 1); row += S::kLanes) {
      const int64_t pair = row / (2 * S::kLanes) * (2 * S::kLanes),
                    ld = minimum(round_up(plan.rows, S::kLanes) - pair, 2 * S::kLanes);
      stage(from_signal, row, minimum(S::kLanes, plan.rows - row), y * Step, x * Step, height * Step, width * Step,
            staged);
      transform_tiles<T, Step, Step>(
          staged, width * Step, height, width, signals + pair * depth + row - pair, plan.signal_size, ld,
          [](const auto* from, auto* to) __attribute__((always_inline)) { Transform<Step>::signal(from, to); });
    }
    for (int64_t c = first; c < last; c += S::kLanes) {
      stage(from_inputs, c, minimum(S::kLanes, last - c), y * Step, x * Step, height * Step + 2, width * Step + 2,
            staged);
      transform_tiles<T, Step, Step + 2>(
          staged, width * Step + 2, height, width, pixels + c - first, plan.input_size, plan.input_ld,
          [](const auto* from, auto* to) __attribute__((always_inline)) { Transform<Step>::input(from, to); });
    }
    if (block == 0)
      add_block<false>(plan, signals, pixels, depth, last - first, sums);
    else
      add_block<true>(plan, signals, pixels, depth, last - first, sums);
  }
}

// tile[(channel, tap), row] = M of `channels` channels, from the sums of the first of them.
template <typename T, int Step>
void transform_back(const TilePlan<T, Step>& plan, const T* sums, int64_t channels, T* tile, int64_t rows_ld) {
  using S = Simd<T>;
  using V = typename S::Vec;
  constexpr int kSide = Step + 2;
  for (int64_t c = 0; c < channels; ++c)
    for (int64_t row = 0; row < plan.rows; row += S::kLanes) {
      V half[3][kSide];
#pragma GCC unroll 6
      for (int j = 0; j < kSide; ++j) {
        V column[kSide], turned[3];
#pragma GCC unroll 6
        for (int i = 0; i < kSide; ++i)
          column[i] = S::load(sums + (i * kSide + j) * plan.sums_size + c * plan.rows_ld + row);
        Transform<Step>::back(column, turned);
        for (int i = 0; i < 3; ++i) half[i][j] = turned[i];
      }
      for (int i = 0; i < 3; ++i) {
        V turned[3];
        Transform<Step>::back(half[i], turned);
        for (int j = 0; j < 3; ++j) S::store(tile + (c * 9 + i * 3 + j) * rows_ld + row, turned[j]);
      }
    }
}

}  // namespace
