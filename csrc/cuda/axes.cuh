// Where the elements of an array lie whose index is a pair (depth, place): each of the two is a number of digits with a
// stride each, so that the patches of a convolution are read where the input has them and never written out.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "launch.cuh"

namespace pyflatness::cuda {

// Divides numbers below 2^31 by a constant: a multiplication and a shift.
struct Divisor {
  uint32_t value, factor, shift;
};

inline Divisor divisor(int64_t value) {
  int log = 0;
  while ((int64_t{1} << log) < value) ++log;
  const uint64_t factor = ((uint64_t{1} << (31 + log)) + value - 1) / value;
  return {static_cast<uint32_t>(value), static_cast<uint32_t>(factor), static_cast<uint32_t>(log ? log - 1 : 0)};
}

__device__ inline uint32_t quotient(uint32_t n, const Divisor& by) {
  if (by.value == 1) return n;
  return static_cast<uint32_t>(static_cast<uint64_t>(n) * by.factor >> 32) >> by.shift;
}

// Offsets of the numbers 0, 1, ...: up to four digits, the first running fastest.
struct Axis {
  Divisor size[3];  // of the first three digits
  int32_t stride[4];

  __device__ int32_t offset(uint32_t index) const {
    int32_t total = 0;
    for (int i = 0; i < 3; ++i) {
      const uint32_t next = quotient(index, size[i]);
      total += static_cast<int32_t>(index - next * size[i].value) * stride[i];
      index = next;
    }
    return total + static_cast<int32_t>(index) * stride[3];
  }
};

struct Digit {
  int64_t size, stride;
};

// Digits of one value are left out, and those that continue one another are made one.
inline Axis axis(std::initializer_list<Digit> digits) {
  Digit kept[4] = {};
  int count = 0;
  for (const Digit& digit : digits) {
    if (digit.size == 1) continue;
    if (count && kept[count - 1].size * kept[count - 1].stride == digit.stride)
      kept[count - 1].size *= digit.size;
    else
      kept[count++] = digit;
  }
  Axis result{};
  for (int i = 0; i < 3; ++i) {
    const bool last = i + 1 >= count;  // the last digit needs no division: it moves to the end
    result.size[i] = divisor(last ? 1 : kept[i].size);
    result.stride[i] = last ? 0 : static_cast<int32_t>(kept[i].stride);
  }
  result.stride[3] = count ? static_cast<int32_t>(kept[count - 1].stride) : 0;
  return result;
}

// The stride between an axis's first two numbers.
inline int32_t first_stride(const Axis& axis) {
  for (int i = 0; i < 3; ++i)
    if (axis.size[i].value > 1) return axis.stride[i];
  return axis.stride[3];
}

// X[depth, place] of each sample and group.
template <typename X>
struct Operand {
  const X* data;
  int64_t of_sample, of_group;
  Axis depth, place;
  bool along_depth;  // neighbours in depth are the closer ones in memory
  bool wide;         // and come in whole, aligned 16 bytes
};

template <typename X>
Operand<X> operand(const X* data, int64_t of_sample, int64_t of_group, int64_t depths, const Axis& depth,
                   const Axis& place) {
  Operand<X> result{data, of_sample, of_group, depth, place, false, false};
  const int32_t by_depth = first_stride(depth), by_place = first_stride(place);
  result.along_depth = by_place == 0 || (by_depth != 0 && by_depth < by_place);
  constexpr int64_t kWhole = 16 / sizeof(X);
  const auto whole = [](int64_t stride) { return stride % kWhole == 0; };
  bool wide = by_depth == 1 && whole(of_sample) && whole(of_group) && depths % kWhole == 0;
  wide = wide && reinterpret_cast<uintptr_t>(data) % 16 == 0;
  bool first = true;
  for (int i = 0; i < 4; ++i) {
    const bool empty = i < 3 && depth.size[i].value == 1;
    wide = wide && whole(place.stride[i]);
    if (!empty && !first) wide = wide && whole(depth.stride[i]);
    if (!empty && first && i < 3) wide = wide && whole(depth.size[i].value);
    first = first && empty;
  }
  result.wide = wide;
  return result;
}

// The pixels under a kernel's first tap, place by place, and the columns of a patch, for inputs of these strides.
inline Axis patch_places(const Layer& layer, const int64_t* strides) {
  const int64_t *places = layer.places, *step = layer.stride;
  return axis(
      {{places[2], step[2] * strides[4]}, {places[1], step[1] * strides[3]}, {places[0], step[0] * strides[2]}});
}
inline Axis patch_columns(const Layer& layer, const int64_t* strides) {
  const int64_t *taps = layer.kernel, *by = layer.dilation;
  return axis({{taps[2], by[2] * strides[4]},
               {taps[1], by[1] * strides[3]},
               {taps[0], by[0] * strides[2]},
               {layer.channels, strides[1]}});
}

}  // namespace pyflatness::cuda
