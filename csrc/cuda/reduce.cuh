// Sums and maxima over a block, the same in every thread and in every run: no atomics.
#pragma once

#include "launch.cuh"

namespace pyflatness::cuda {

constexpr int kMostWarps = 32;

template <typename T>
__device__ T block_sum(T value) {
  __shared__ T parts[kMostWarps];
  value = warp_sum(value);
  __syncthreads();  // parts of an earlier sum have been read
  if (threadIdx.x % kWarp == 0) parts[threadIdx.x / kWarp] = value;
  __syncthreads();
  T total = 0;
  for (int warp = 0; warp < static_cast<int>(blockDim.x) / kWarp; ++warp) total += parts[warp];
  return total;
}

template <typename T>
struct Largest {
  T value;
  int place;

  __device__ void take(const Largest& other) {  // of equal ones the first
    if (other.value > value || (other.value == value && other.place < place)) *this = other;
  }
};

// Once in a kernel: nothing waits here until an earlier call's parts have been read.
template <typename T>
__device__ Largest<T> block_largest(Largest<T> own) {
  __shared__ Largest<T> parts[kMostWarps];
  for (int offset = kWarp / 2; offset > 0; offset /= 2)
    own.take({__shfl_xor_sync(kAllLanes, own.value, offset), __shfl_xor_sync(kAllLanes, own.place, offset)});
  if (threadIdx.x % kWarp == 0) parts[threadIdx.x / kWarp] = own;
  __syncthreads();
  Largest<T> largest = parts[0];
  for (int warp = 1; warp < static_cast<int>(blockDim.x) / kWarp; ++warp) largest.take(parts[warp]);
  return largest;
}

}  // namespace pyflatness::cuda
