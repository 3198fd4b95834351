// Launching kernels, and what they ask of a warp. Tests compile the kernels for the CPU with PYFLATNESS_EMULATED, where
// tests/cuda_emulation stands in for CUDA.
#pragma once

#include <cstdint>
#include <tuple>

#ifdef PYFLATNESS_EMULATED
#include "emulation.h"
#else
#include <cuda_runtime.h>
#endif

#include "kernels.h"

namespace pyflatness::cuda {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr size_t kPlainShared = 48 << 10;  // bytes of shared memory, static ones too, that a block gets without asking
constexpr size_t kMostStatic = 2 << 10;    // of them are declared in kernels that ask for more

inline int64_t blocks_of(int64_t n, int64_t size) { return (n + size - 1) / size; }

#ifndef PYFLATNESS_EMULATED
// The block's dynamic shared memory.
template <typename T>
__device__ T* dynamic_shared() {
  extern __shared__ __align__(16) unsigned char pool[];
  return reinterpret_cast<T*>(pool);
}

// Lets a kernel have as much shared memory as there is: always the same amount, so that threads do not disturb each
// other.
inline int allow_shared(const void* function) {
  int device = 0, most = 0;
  cudaFuncAttributes facts;
  auto status = cudaGetDevice(&device);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (status == cudaSuccess) status = cudaFuncGetAttributes(&facts, function);
  if (status != cudaSuccess) return status;
  return cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              most - static_cast<int>(facts.sharedSizeBytes));
}

// Launches a kernel on a grid of blocks; an empty grid is no launch. Grids are at most 2^31 - 1 by 65,535 by 65,535.
template <typename... Parameters, typename... Arguments>
int launch(void (*kernel)(Parameters...), dim3 grid, int threads, size_t shared, void* stream, Arguments... arguments) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return cudaSuccess;
  const void* function = reinterpret_cast<const void*>(kernel);
  if (shared + kMostStatic > kPlainShared) {
    const int status = allow_shared(function);
    if (status != cudaSuccess) return status;
  }
  std::tuple<Parameters...> values(static_cast<Parameters>(arguments)...);
  return std::apply(
      [&](auto&... value) {
        void* addresses[] = {const_cast<void*>(static_cast<const void*>(&value))...};
        return cudaLaunchKernel(function, grid, dim3(threads), addresses, shared, static_cast<cudaStream_t>(stream));
      },
      values);
}
#endif

// The sum over a warp, in every lane, added in the same order in each.
template <typename T>
__device__ T warp_sum(T value) {
  for (int offset = kWarp / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(kAllLanes, value, offset);
  return value;
}

template <typename T>
__device__ T warp_max(T value) {
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    const T other = __shfl_xor_sync(kAllLanes, value, offset);
    value = other > value ? other : value;
  }
  return value;
}

}  // namespace pyflatness::cuda
