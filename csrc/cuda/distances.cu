// Squared distances of all pairs of rows, from the differences themselves: tiles of 64 x 64 pairs, 4 x 4 to a thread,
// features by slices through shared memory. Tiles above the diagonal are mirrored.
#include "elements.cuh"

namespace pyflatness::cuda {
namespace {

constexpr int kPairTile = 64, kPairSide = 4, kPairThreads = (kPairTile / kPairSide) * (kPairTile / kPairSide);
constexpr int kPairDepth = 16;                      // features of a slice
constexpr int kPairSlices = 4;                      // slices whose sum stays in T before it goes on in double
constexpr int kPairStride = kPairTile + kPairSide;  // rows of a slice begin in banks of their own

template <typename T>
__device__ void put_slice(const T* weight, int64_t d, int64_t m, int64_t first, int64_t start,
                          T (*slice)[kPairStride]) {
  for (int place = threadIdx.x; place < kPairTile * kPairDepth; place += kPairThreads) {
    const int row = place / kPairDepth, j = place % kPairDepth;
    const bool inside = first + row < d && start + j < m;
    slice[j][row] = inside ? weight[(first + row) * m + start + j] : T(0);
  }
}

template <typename T>
__device__ void add_differences(const T (*left)[kPairStride], const T (*right)[kPairStride], int down, int across,
                                T (*sum)[kPairSide]) {
#pragma unroll 2
  for (int j = 0; j < kPairDepth; ++j) {
    T a[kPairSide], b[kPairSide];
#pragma unroll
    for (int k = 0; k < kPairSide; ++k) a[k] = left[j][down + k], b[k] = right[j][across + k];
#pragma unroll
    for (int r = 0; r < kPairSide; ++r)
#pragma unroll
      for (int c = 0; c < kPairSide; ++c) {
        const T difference = a[r] - b[c];
        sum[r][c] += difference * difference;
      }
  }
}

template <typename T>
__global__ void __launch_bounds__(kPairThreads, 2)
    pair_distances_kernel(const T* weight, int64_t d, int64_t m, T* out) {
  if (blockIdx.y > blockIdx.x) return;
  __shared__ __align__(16) T left[kPairDepth][kPairStride];
  __shared__ __align__(16) T right[kPairDepth][kPairStride];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kPairTile;
  const int64_t other = static_cast<int64_t>(blockIdx.y) * kPairTile;
  const int across = threadIdx.x % (kPairTile / kPairSide) * kPairSide;
  const int down = threadIdx.x / (kPairTile / kPairSide) * kPairSide;
  double total[kPairSide][kPairSide] = {};
  for (int64_t start = 0; start < m;) {
    T sum[kPairSide][kPairSide] = {};
    for (int slice = 0; slice < kPairSlices && start < m; ++slice, start += kPairDepth) {
      __syncthreads();
      put_slice(weight, d, m, first, start, left);
      put_slice(weight, d, m, other, start, right);
      __syncthreads();
      add_differences(left, right, down, across, sum);
    }
#pragma unroll
    for (int r = 0; r < kPairSide; ++r)
#pragma unroll
      for (int c = 0; c < kPairSide; ++c) total[r][c] += sum[r][c];
  }
#pragma unroll
  for (int r = 0; r < kPairSide; ++r)
#pragma unroll
    for (int c = 0; c < kPairSide; ++c) {
      const int64_t s = first + down + r, t = other + across + c;
      if (t <= s && s < d) out[s * d + t] = out[t * d + s] = static_cast<T>(total[r][c]);
    }
}

}  // namespace

template <typename T>
int pair_distances(const T* weight, int64_t d, int64_t m, T* out, void* stream) {
  const auto tiles = static_cast<unsigned>(blocks_of(d, kPairTile));
  return launch(pair_distances_kernel<T>, dim3(tiles, tiles), kPairThreads, 0, stream, weight, d, m, out);
}

template int pair_distances(const float*, int64_t, int64_t, float*, void*);
template int pair_distances(const double*, int64_t, int64_t, double*, void*);

}  // namespace pyflatness::cuda
