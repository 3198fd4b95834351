// What both bindings check before a kernel sees an address: every array comes as (address, element count), and the
// count must be what the sizes ask for.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#include "../cpu/kernels.h"

namespace pyflatness {

using Array = std::pair<uintptr_t, int64_t>;

inline int64_t product(int64_t a, int64_t b) {
  int64_t result;
  if (a < 0 || b < 0 || __builtin_mul_overflow(a, b, &result))
    throw std::invalid_argument("sizes " + std::to_string(a) + " x " + std::to_string(b) +
                                " are not those of an array");
  return result;
}

inline int64_t product(std::initializer_list<int64_t> sizes) {
  int64_t total = 1;
  for (int64_t size : sizes) total = product(total, size);
  return total;
}

// The elements of n rows of m, `stride` apart.
inline int64_t strided(int64_t n, int64_t m, int64_t stride) {
  if (stride < m)
    throw std::invalid_argument("row stride " + std::to_string(stride) + " < row length " + std::to_string(m));
  return n == 0 || m == 0 ? 0 : product(n - 1, stride) + m;
}

template <typename T>
T* pointer(const char* name, Array array, int64_t needed) {
  if (array.second != needed)
    throw std::invalid_argument(std::string("`") + name + "` has " + std::to_string(array.second) +
                                " elements, its sizes ask for " + std::to_string(needed));
  if (array.first == 0 && needed > 0) throw std::invalid_argument(std::string("`") + name + "` is a null pointer");
  return reinterpret_cast<T*>(array.first);
}

// (n, groups, channels and rows of a group), pixels of the padded input, places, kernel, stride, dilation.
using Triple = std::array<int64_t, 3>;
using LayerSizes = std::tuple<std::array<int64_t, 4>, Triple, Triple, Triple, Triple, Triple>;

// Multiply-adds of one call: within it buffers, padded and for thousands of threads, are far from an overflow.
constexpr int64_t kMostWork = int64_t{1} << 48;

inline Layer checked(const LayerSizes& sizes) {
  const auto& [counts, size, places, kernel, stride, dilation] = sizes;
  Layer layer{counts[0], counts[1], counts[2], counts[3], {}, {}, {}, {}, {}};
  if (layer.n < 0 || layer.groups < 1 || layer.channels < 1 || layer.rows < 1)
    throw std::invalid_argument("a layer of " + std::to_string(layer.groups) + " groups of " +
                                std::to_string(layer.channels) + " channels and " + std::to_string(layer.rows) +
                                " rows, " + std::to_string(layer.n) + " samples");
  for (size_t i = 0; i < 3; ++i) {
    if (kernel[i] < 1 || stride[i] < 1 || dilation[i] < 1 || size[i] < 1 || places[i] < 1 || size[i] > kMostWork ||
        product(kernel[i] - 1, dilation[i]) >= size[i] ||
        places[i] != (size[i] - 1 - (kernel[i] - 1) * dilation[i]) / stride[i] + 1)
      throw std::invalid_argument("a kernel of " + std::to_string(kernel[i]) + " pixels, stride " +
                                  std::to_string(stride[i]) + " and dilation " + std::to_string(dilation[i]) +
                                  " does not have " + std::to_string(places[i]) + " places in " +
                                  std::to_string(size[i]) + " pixels");
    layer.size[i] = size[i], layer.places[i] = places[i], layer.kernel[i] = kernel[i];
    layer.stride[i] = stride[i], layer.dilation[i] = dilation[i];
  }
  return layer;
}

inline void limit_work(std::initializer_list<int64_t> sizes) {
  if (product(sizes) > kMostWork) throw std::invalid_argument("sizes of more than 2^48 multiply-adds");
}

inline void limit_direct(const Layer& layer, int64_t roots, int64_t signals = 1) {
  limit_work({std::max<int64_t>(signals, 1), std::max<int64_t>(layer.n, 1), layer.groups, layer.rows, layer.channels,
              layer.kernel[0], layer.kernel[1], layer.kernel[2],
              std::max(product({layer.places[0], layer.places[1], layer.places[2]}), roots)});
}

inline void limit_gathered(const Layer& layer, int64_t length, int64_t roots, int64_t signals) {
  if (length < 1) throw std::invalid_argument("direct_gathered: rows of " + std::to_string(length) + " elements");
  limit_direct(layer, std::max(length, roots), signals);
  limit_work({layer.size[0], layer.size[1], layer.places[2], layer.channels, layer.kernel[2]});
}

inline void limit_patch_gram(const Layer& layer) {
  const int64_t places = product({layer.places[0], layer.places[1], layer.places[2]});
  limit_work({layer.size[0], layer.size[1], layer.size[2]});
  limit_work({std::max<int64_t>(layer.n, 1), layer.groups, layer.channels, layer.kernel[0], layer.kernel[1],
              layer.kernel[2], places, places});
}

// An array of these sizes and strides, whose count is that of the elements from its first to its last.
template <typename T>
Strided<T> strided_array(const char* name, Array array, const std::array<int64_t, 5>& sizes,
                         const std::array<int64_t, 5>& strides) {
  int64_t last = 0;
  Strided<T> result{};
  for (size_t i = 0; i < 5; ++i) {
    if (__builtin_add_overflow(last, product(std::max<int64_t>(sizes[i] - 1, 0), strides[i]), &last))
      throw std::invalid_argument(std::string("the strides of `") + name + "` are not those of an array");
    result.stride[i] = strides[i];
  }
  const bool empty = std::find(sizes.begin(), sizes.end(), 0) != sizes.end();
  result.count = empty ? 0 : last + 1;
  result.data = pointer<const T>(name, array, result.count);
  return result;
}

template <typename T>
Strided<T> layer_inputs(const Layer& layer, Array inputs, const std::array<int64_t, 5>& strides) {
  return strided_array<T>("inputs", inputs,
                          {layer.n, product(layer.groups, layer.channels), layer.size[0], layer.size[1], layer.size[2]},
                          strides);
}

inline Triple places_of(const Layer& layer) { return {layer.places[0], layer.places[1], layer.places[2]}; }

template <typename T>
Strided<T> layer_signal(const Layer& layer, const Triple& places, Array signal, const std::array<int64_t, 5>& strides) {
  return strided_array<T>("signal", signal,
                          {layer.n, product(layer.groups, layer.rows), places[0], places[1], places[2]}, strides);
}

}  // namespace pyflatness
