// From strided arrays to the dense rows and panels that the tiles of gemm.h read.
#pragma once

#include "gemm.h"
#include "kernels.h"

namespace {

// Up to kDepth places of a grid as runs of places a constant step apart.
struct Runs {
  int64_t step = 0, count = 0, total = 0;
  int64_t reach = 0;  // the largest offset of a place
  int64_t offset[kDepth], length[kDepth];
};

// A grid of places; dimensions that follow one another in memory are joined.
struct Grid {
  int64_t size[3], step[3];

  Grid(const int64_t* sizes, const int64_t* strides, const int64_t* steps) {
    for (int i = 0; i < 3; ++i) size[i] = sizes[i], step[i] = strides[i] * (steps ? steps[i] : 1);
    for (int pass = 0; pass < 2; ++pass)
      for (int i = 2; i > 0; --i)
        if (size[i] == 1 || size[i - 1] == 1 || step[i - 1] == size[i] * step[i]) {
          if (size[i] == 1) step[i] = step[i - 1];
          size[i] *= size[i - 1];
          size[i - 1] = 1;
        }
  }

  int64_t total() const { return size[0] * size[1] * size[2]; }

  void runs(int64_t first, int64_t total, Runs* runs) const {
    int64_t x = first % size[2], y = first / size[2] % size[1], z = first / size[2] / size[1];
    runs->step = step[2];
    runs->total = total;
    runs->count = 0;
    runs->reach = 0;
    for (int64_t done = 0; done < total;) {
      const int64_t length = minimum(total - done, size[2] - x);
      runs->offset[runs->count] = z * step[0] + y * step[1] + x * step[2];
      runs->length[runs->count++] = length;
      runs->reach = maximum(runs->reach, z * step[0] + y * step[1] + (x + length - 1) * step[2]);
      done += length;
      x = 0;
      if (++y == size[1]) y = 0, ++z;
    }
  }
};

// to[k] = from[offset of k] for the places of the runs; up to a vector more is written, and read before `end`.
template <typename T>
PYFLATNESS_INLINE void gather(const T* from, const Runs& runs, const T* end, T* to) {
  using S = Simd<T>;
  if (runs.step == 1 && end - from >= runs.reach + S::kLanes) {  // whole vectors may be read
    for (int64_t run = 0; run < runs.count; ++run) {
      const T* source = from + runs.offset[run];
      const int64_t length = runs.length[run];
      for (int64_t x = 0; x < length; x += S::kLanes) S::store(to + x, S::load(source + x));
      to += length;
    }
    return;
  }
  for (int64_t run = 0; run < runs.count; ++run) {
    const T* __restrict__ source = from + runs.offset[run];
    T* __restrict__ target = to;
    const int64_t length = runs.length[run];
    if (runs.step == 2) {  // a constant that the compiler has shuffles for
      for (int64_t x = 0; x < length; ++x) target[x] = source[2 * x];
    } else {
      for (int64_t x = 0; x < length; ++x) target[x] = source[x * runs.step];
    }
    to += length;
  }
}

// Lane j of vector i and lane i of vector j change places.
template <typename T>
PYFLATNESS_INLINE void transpose(typename Simd<T>::Vec (&v)[Simd<T>::kLanes]) {
  using S = Simd<T>;
  constexpr auto lanes = std::make_index_sequence<static_cast<size_t>(S::kLanes)>{};
#pragma GCC unroll 4
  for (int64_t round = 1; round < S::kLanes; round *= 2) {
    typename S::Vec next[S::kLanes];
#pragma GCC unroll 8
    for (int64_t i = 0; i < S::kLanes / 2; ++i) {
      next[2 * i] = S::template interleave<false>(v[i], v[i + S::kLanes / 2], lanes);
      next[2 * i + 1] = S::template interleave<true>(v[i], v[i + S::kLanes / 2], lanes);
    }
#pragma GCC unroll 16
    for (int64_t i = 0; i < S::kLanes; ++i) v[i] = next[i];
  }
}

// to[k * ld + r] = from[r * stride + k] for r < rows <= kLanes and k < count; zeros for the lanes from `rows` on.
template <typename T>
void transpose_rows(const T* from, int64_t stride, int64_t rows, int64_t count, T* to, int64_t ld) {
  using S = Simd<T>;
  typename S::Vec block[S::kLanes];
  int64_t k = 0;
  if (rows == S::kLanes)
    for (; k + S::kLanes <= count; k += S::kLanes) {
#pragma GCC unroll 16
      for (int64_t r = 0; r < S::kLanes; ++r) block[r] = S::load(from + r * stride + k);
      transpose<T>(block);
#pragma GCC unroll 16
      for (int64_t r = 0; r < S::kLanes; ++r) S::store(to + (k + r) * ld, block[r]);
    }
  for (; k < count; ++k) {
    T lanes[S::kLanes] = {};
    for (int64_t r = 0; r < rows; ++r) lanes[r] = from[r * stride + k];
    S::store(to + k * ld, S::load(lanes));
  }
}

// The left matrix of a product in the form of gemm.h, from rows that lie along the depth.
template <typename T>
void pack_rows(const T* from, int64_t stride, int64_t rows, int64_t depth, T* packed) {
  using S = Simd<T>;
  if (few_rows<T>(rows)) {
    const int64_t length = round_up(depth, S::kLanes);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t k = 0; k < length; ++k) packed[r * length + k] = k < depth ? from[r * stride + k] : 0;
    return;
  }
  for (int64_t row = 0; row < rows; row += S::kLanes) {
    const int64_t pair = row / (2 * S::kLanes) * (2 * S::kLanes),
                  width = minimum(round_up(rows, S::kLanes) - pair, 2 * S::kLanes);
    transpose_rows(from + row * stride, stride, minimum(S::kLanes, rows - row), depth,
                   packed + pair * depth + row - pair, width);
  }
}

// The same from a strided grid of places: rows `stride` apart; `scratch` holds kLanes rows of kDepth + kLanes.
template <typename T>
void pack_places(const T* from, int64_t stride, int64_t rows, const Runs& runs, const T* end, T* scratch, T* packed) {
  using S = Simd<T>;
  const int64_t depth = runs.total, length = round_up(depth, S::kLanes);
  if (few_rows<T>(rows)) {
    for (int64_t r = 0; r < rows; ++r) {
      gather(from + r * stride, runs, end, scratch);
      for (int64_t k = depth; k < length; ++k) scratch[k] = 0;
      for (int64_t k = 0; k < length; k += S::kLanes) S::store(packed + r * length + k, S::load(scratch + k));
    }
    return;
  }
  for (int64_t row = 0; row < rows; row += S::kLanes) {
    const int64_t count = minimum(S::kLanes, rows - row);
    const int64_t pair = row / (2 * S::kLanes) * (2 * S::kLanes),
                  width = minimum(round_up(rows, S::kLanes) - pair, 2 * S::kLanes);
    T* to = packed + pair * depth + row - pair;
    if (stride == 1 && runs.step != 1) {  // the rows of a place are neighbours: nothing to turn
      for (int64_t run = 0; run < runs.count; ++run)
        for (int64_t x = 0; x < runs.length[run]; ++x, to += width) {
          const T* source = from + row + runs.offset[run] + x * runs.step;
          S::store(to, count == S::kLanes ? S::load(source) : S::load_partial(source, count, 0));
        }
      continue;
    }
    constexpr int64_t ld = kDepth + S::kLanes;
    for (int64_t r = 0; r < count; ++r) gather(from + (row + r) * stride, runs, end, scratch + r * ld);
    transpose_rows(scratch, ld, count, depth, to, width);
  }
}

// The columns (channel, tap) of patches, channels `first` to `last`: to[(c - first) * taps + tap][k], rows `ld` apart
// and ld >= places + kLanes. `from` is the place 0 of channel 0.
template <typename T>
void pack_patches(const pyflatness::Layer& layer, const T* from, const int64_t* strides, const Runs& runs, const T* end,
                  int64_t first, int64_t last, T* to, int64_t ld) {
  using S = Simd<T>;
  const int64_t channel_stride = strides[1], taps = layer.kernel[0] * layer.kernel[1] * layer.kernel[2];
  const bool turn = channel_stride == 1 && runs.step != 1 && last - first > 1;
  int64_t place[kDepth + S::kLanes];
  if (turn) {
    int64_t k = 0;
    for (int64_t run = 0; run < runs.count; ++run)
      for (int64_t x = 0; x < runs.length[run]; ++x) place[k++] = runs.offset[run] + x * runs.step;
    for (int64_t l = 0; l < S::kLanes; ++l) place[k + l] = place[k - 1];
  }
  int64_t tap = 0;
  for (int64_t k0 = 0; k0 < layer.kernel[0]; ++k0)
    for (int64_t k1 = 0; k1 < layer.kernel[1]; ++k1)
      for (int64_t k2 = 0; k2 < layer.kernel[2]; ++k2, ++tap) {
        const T* source = from + k0 * layer.dilation[0] * strides[2] + k1 * layer.dilation[1] * strides[3] +
                          k2 * layer.dilation[2] * strides[4];
        if (!turn) {
          for (int64_t c = first; c < last; ++c)
            gather(source + c * channel_stride, runs, end, to + ((c - first) * taps + tap) * ld);
          continue;
        }
        for (int64_t c = first; c < last; c += S::kLanes)
          for (int64_t k = 0; k < runs.total; k += S::kLanes) {
            typename S::Vec block[S::kLanes];
            const int64_t count = minimum(S::kLanes, last - c);
#pragma GCC unroll 16
            for (int64_t l = 0; l < S::kLanes; ++l) {
              const T* channels = source + place[k + l] + c;
              block[l] = end - channels >= S::kLanes ? S::load(channels) : S::load_partial(channels, count, 0);
            }
            transpose<T>(block);
            T* rows = to + ((c - first) * taps + tap) * ld + k;
            if (count == S::kLanes) {
#pragma GCC unroll 16
              for (int64_t l = 0; l < S::kLanes; ++l) S::store(rows + l * taps * ld, block[l]);
            } else {
              T lanes[S::kLanes * S::kLanes];
#pragma GCC unroll 16
              for (int64_t l = 0; l < S::kLanes; ++l) S::store(lanes + l * S::kLanes, block[l]);
              for (int64_t l = 0; l < count; ++l) S::store(rows + l * taps * ld, S::load(lanes + l * S::kLanes));
            }
          }
      }
}

}  // namespace
