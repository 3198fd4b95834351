// Weight gradients of few elements, such as a depthwise convolution's: a tile of direct.cu would be nearly empty. A
// block has one M, in shared memory; a warp has some columns of a row at a time, its lanes the positions.
#include "small.cuh"

namespace pyflatness::cuda {
namespace {

constexpr int kSmallThreads = 128, kSmallWarps = kSmallThreads / kWarp;
constexpr int kStrip = 8;  // of a warp, for each reading of the signal

struct SmallSizes {
  int64_t groups;
  int rows, columns, positions, roots;  // roots: 0 for none
};

// The sums over a warp of eight values of each lane, the one numbered lane / 4 in every lane: lanes that are one bit
// apart share the values out, half of them each.
template <typename T>
__device__ T strip_sum(T (&values)[kStrip], int lane) {
  static_assert(kStrip == 8);
  int offset = kWarp / 2;
#pragma unroll
  for (int half = kStrip / 2; half > 0; half /= 2, offset /= 2) {
    const bool upper = lane & offset;
#pragma unroll
    for (int j = 0; j < half; ++j) {
      const T given = upper ? values[j] : values[j + half], kept = upper ? values[j + half] : values[j];
      values[j] = kept + __shfl_xor_sync(kAllLanes, given, offset);
    }
  }
  for (; offset > 0; offset /= 2) values[0] += __shfl_xor_sync(kAllLanes, values[0], offset);
  return values[0];
}

template <class Kind>
__device__ void make_small(const Operand<typename Kind::Element>& signal, const Operand<typename Kind::Element>& inputs,
                           const SmallSizes& sizes, int64_t item, typename Kind::Sum* m) {
  const int64_t sample = item / sizes.groups, group = item % sizes.groups;
  const auto* delta = signal.data + sample * signal.of_sample + group * signal.of_group;
  const auto* phi = inputs.data + sample * inputs.of_sample + group * inputs.of_group;
  const int lane = threadIdx.x % kWarp, strips = (sizes.columns + kStrip - 1) / kStrip;
  for (int job = threadIdx.x / kWarp; job < sizes.rows * strips; job += kSmallWarps) {
    const int row = job / strips, first = job % strips * kStrip, count = min(kStrip, sizes.columns - first);
    const auto* from = delta + signal.place.offset(row);
    int32_t columns[kStrip];
    typename Kind::Sum sums[kStrip] = {};
#pragma unroll
    for (int j = 0; j < kStrip; ++j) columns[j] = inputs.place.offset(first + min(j, count - 1));
    for (int p = lane; p < sizes.positions; p += kWarp) {
      const auto left = widened(Kind{}, from[signal.depth.offset(p)]);
      const auto* pixel = phi + inputs.depth.offset(p);
#pragma unroll
      for (int j = 0; j < kStrip; ++j) sums[j] += left * widened(Kind{}, pixel[columns[j]]);
    }
    const auto sum = strip_sum(sums, lane);
    if (lane % 4 == 0 && lane / 4 < count) m[row * sizes.columns + first + lane / 4] = sum;
  }
}

// Σ_j a[j step] b[j other]
template <typename T>
__device__ T dot(const T* a, int step, const T* b, int other, int count) {
  T sum = 0;
  for (int j = 0; j < count; ++j) sum += a[j * step] * b[j * other];
  return sum;
}

template <class Kind>
__global__ void __launch_bounds__(kSmallThreads)
    small_kernel(Operand<typename Kind::Element> signal, Operand<typename Kind::Element> inputs, SmallSizes sizes,
                 const typename Kind::Sum* root, const typename Kind::Sum* weight, double* totals, double* by_column,
                 double* by_row) {
  using Sum = typename Kind::Sum;
  __shared__ Sum m[kSmall];
  const int64_t item = blockIdx.x, group = item % sizes.groups;
  const int d = sizes.rows, c = sizes.columns;
  make_small<Kind>(signal, inputs, sizes, item, m);
  __syncthreads();
  double found[3] = {0, 0, 0};
  for (int e = threadIdx.x; e < d * c; e += kSmallThreads) {
    found[0] += static_cast<double>(m[e] * m[e]);
    const Sum x = weight ? weight[group * d * c + e] * m[e] : 0;
    found[2] += static_cast<double>(x * x);
  }
  for (int e = threadIdx.x; e < sizes.roots * c; e += kSmallThreads) {
    const Sum x = dot(root + (group * sizes.roots + e / c) * d, 1, m + e % c, c, d);
    found[1] += static_cast<double>(x * x);
  }
  for (int row = threadIdx.x; row < d && weight; row += kSmallThreads)
    by_row[item * d + row] = static_cast<double>(dot(weight + (group * d + row) * c, 1, m + row * c, 1, c));
  for (int column = threadIdx.x; column < c && weight; column += kSmallThreads)
    by_column[item * c + column] = static_cast<double>(dot(weight + group * d * c + column, c, m + column, c, d));
  for (int i = 0; i < 3; ++i) {
    const double total = block_sum(found[i]);
    if (threadIdx.x == 0) totals[item * 3 + i] = total;
  }
}

}  // namespace

template <class Kind>
int small_direct(const Layer& layer, const Operand<typename Kind::Element>& signal,
                 const Operand<typename Kind::Element>& inputs, const typename Kind::Sum* root, int64_t roots,
                 const typename Kind::Sum* weight, double* totals, double* by_column, double* by_row, void* stream) {
  const SmallSizes sizes{layer.groups, static_cast<int>(layer.rows), static_cast<int>(layer.columns()),
                         static_cast<int>(layer.positions()), static_cast<int>(root ? roots : 0)};
  const dim3 grid(static_cast<unsigned>(layer.n * layer.groups));
  return launch(small_kernel<Kind>, grid, kSmallThreads, 0, stream, signal, inputs, sizes, root, weight, totals,
                by_column, by_row);
}

#define PYFLATNESS_SMALL(Kind)                                                                                \
  template int small_direct<Kind>(const Layer&, const Operand<Kind::Element>&, const Operand<Kind::Element>&, \
                                  const Kind::Sum*, int64_t, const Kind::Sum*, double*, double*, double*, void*);
PYFLATNESS_SMALL(F32)
PYFLATNESS_SMALL(F64)
PYFLATNESS_SMALL(Bf16)
PYFLATNESS_SMALL(F16)

}  // namespace pyflatness::cuda
