// Elements in memory: half precision as bits, which a kernel widens to float, and several elements in one access.
#pragma once

#include <cstring>

#include "launch.cuh"

namespace pyflatness::cuda {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

template <typename To, typename From>
__device__ To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

__device__ inline float widen(float x) { return x; }
__device__ inline double widen(double x) { return x; }
__device__ inline float widen(BFloat16 x) { return same_bits<float>(uint32_t{x.bits} << 16); }
__device__ inline float widen(Float16 x) {
  const uint32_t magnitude = (x.bits & 0x7fffu) << 13;
  const bool finite = magnitude < (0x7c00u << 13);
  const float size = finite ? same_bits<float>(magnitude) * 0x1p112f : same_bits<float>(magnitude | 0x7f800000u);
  return x.bits & 0x8000u ? -size : size;
}

// To the nearest element, ties to even.
template <typename To>
__device__ To narrowed(double x) {
  return static_cast<To>(x);
}
template <typename To>
__device__ To narrowed(float x) {
  if constexpr (sizeof(To) == sizeof(BFloat16)) {
    const uint32_t bits = same_bits<uint32_t>(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return {0x7fff};  // NaN, which rounding could turn into infinity
    return {static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
  } else {
    return x;
  }
}

template <typename T>
constexpr int kPack = 16 / sizeof(T);  // elements of the widest access

// Count elements in one access; the address must be a multiple of its size.
template <typename T, int Count>
struct alignas(sizeof(T) * Count) Pack {
  T value[Count];
};

template <int Count, typename T>
__device__ Pack<T, Count> load(const T* place) {
  return *reinterpret_cast<const Pack<T, Count>*>(place);
}

template <typename T, int Count>
__device__ void store(T* place, const Pack<T, Count>& pack) {
  *reinterpret_cast<Pack<T, Count>*>(place) = pack;
}

// Whether rows of k elements, `stride` apart, can be read in accesses of 16 bytes.
template <typename T>
bool packed(const T* data, int64_t stride, int64_t k) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride % kPack<T> == 0 && k % kPack<T> == 0;
}

}  // namespace pyflatness::cuda
