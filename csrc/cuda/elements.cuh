// Elements in memory: half precision as bits, which a kernel widens to float, and several elements in one access.
#pragma once

#include <cstring>
#include <type_traits>

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

template <typename T>
constexpr int kPack = 16 / sizeof(T);  // elements of the widest access

// Count elements side by side, in one access if they take at most 16 bytes; the address must be a multiple of its size.
template <typename T, int Count>
struct alignas(sizeof(T) * Count < 16 ? sizeof(T) * Count : 16) Pack {
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

#ifndef PYFLATNESS_EMULATED
// Two numbers in bfloat16, the nearest ones, ties to even: the first below.
__device__ inline uint32_t narrowed(float first, float second) {
  uint32_t bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
  return bits;
}

// e^x for x <= 0, to what bfloat16 can show: the product is off by up to 2^-24 |x|.
__device__ inline float coarse_exp(float x) {
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(x) : "f"(x * 1.44269504f));
  return x;
}

// Brings Bytes of memory to shared memory, without waiting for them.
template <int Bytes>
__device__ void copy_async(void* shared, const void* global) {
  const auto place = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  if constexpr (Bytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(place), "l"(global) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(place), "l"(global), "n"(Bytes) : "memory");
}

// Waits for what this thread has on its way.
__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
#endif

template <typename Out, typename T, int Count>
__device__ Pack<Out, Count> narrowed(const Pack<T, Count>& pack) {
  if constexpr (sizeof(Out) == sizeof(T)) {
    return pack;
  } else {
    Pack<Out, Count> result;
#pragma unroll
    for (int v = 0; v < Count; v += 2) {
      const uint32_t bits = narrowed(pack.value[v], v + 1 < Count ? pack.value[v + 1] : T(0));
      result.value[v].bits = static_cast<uint16_t>(bits);
      if (v + 1 < Count) result.value[v + 1].bits = static_cast<uint16_t>(bits >> 16);
    }
    return result;
  }
}

template <typename First, typename Second = First>
struct Two {
  First first;
  Second second;
};

template <int Count>
struct Elements {
  __host__ __device__ constexpr operator int() const { return Count; }
};

constexpr int kBatch = 4;          // accesses to an array that a thread has on their way
constexpr int kMostThreads = 512;  // of a block that takes a row

// Threads of a block that takes a row of k elements in accesses of `most`.
inline int threads_for(int64_t k, int most) {
  const int64_t warps = blocks_of(k, int64_t{kBatch} * kWarp * most), limit = kMostThreads / kWarp;
  return static_cast<int>(kWarp * (warps < 1 ? 1 : warps > limit ? limit : warps));
}

// Calls use(count, j, load(count, j)) for each access to a row of k elements that is this thread's: Most elements from
// j on, and one by one those behind the last whole access. kBatch loads are on their way before the first is used.
template <int Most, typename Load, typename Use>
__device__ void each_access(int k, Load load, Use use) {
  constexpr Elements<Most> most;
  const int whole = k / Most * Most, step = blockDim.x * Most;
  const auto batch = [&](int start, auto there) {
    decltype(load(most, start)) held[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b)
      if (there(start + b * step)) held[b] = load(most, start + b * step);
#pragma unroll
    for (int b = 0; b < kBatch; ++b)
      if (there(start + b * step)) use(most, start + b * step, held[b]);
  };
  int start = threadIdx.x * Most;
  for (; start + (kBatch - 1) * step < whole; start += kBatch * step) batch(start, [](int) { return true; });
  batch(start, [&](int j) { return j < whole; });
  if constexpr (Most > 1)
    for (int j = whole + threadIdx.x; j < k; j += blockDim.x) {
      auto held = load(Elements<1>{}, j);
      use(Elements<1>{}, j, held);
    }
}

// Whether rows, `stride` elements apart, all begin at a multiple of 16 bytes.
template <typename T>
bool packed(const T* data, int64_t stride) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride % kPack<T> == 0;
}

}  // namespace pyflatness::cuda
