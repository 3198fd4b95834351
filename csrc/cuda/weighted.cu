// What is made of M and w o M for matrices M that lie in memory: one read of both.
#include "elements.cuh"
#include "reduce.cuh"

namespace pyflatness::cuda {
namespace {

constexpr int kRowWarps = 8;  // of a block; each takes every eighth row

template <typename T>
struct Weighted {
  const T* matrices;             // [count, d, m]
  const T* weight;               // [groups, d, m]
  int64_t groups, d, m, splits;  //
  double* totals;                // [count, splits, 2]
  double* by_column;             // [count, m]
  double* by_row;                // [count, splits, d]
};

// A block has kWeightedColumns columns of a matrix: a lane every 32nd pack of them.
template <typename T, int Width>
__global__ void weighted_kernel(Weighted<T> call) {
  constexpr int kPacks = kWeightedColumns / (kWarp * Width);
  __shared__ double parts[kRowWarps][kWeightedColumns];
  const int64_t matrix = blockIdx.x / call.splits, split = blockIdx.x % call.splits;
  const int64_t first = split * kWeightedColumns, size = call.d * call.m;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const T* from = call.matrices + matrix * size + first;
  const T* weight = call.weight + matrix % call.groups * size + first;
  double squares = 0, weighted = 0, columns[kPacks][Width] = {};
  for (int64_t row = warp; row < call.d; row += kRowWarps) {
    double sum = 0;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int64_t column = (p * kWarp + lane) * Width;
      if (first + column >= call.m) continue;
      const Pack<T, Width> x = load<Width>(from + row * call.m + column);
      const Pack<T, Width> w = load<Width>(weight + row * call.m + column);
      T square = 0, product = 0, along = 0;
#pragma unroll
      for (int v = 0; v < Width; ++v) {
        const T y = w.value[v] * x.value[v];
        square += x.value[v] * x.value[v], product += y * y, along += y;
        columns[p][v] += y;
      }
      squares += square, weighted += product, sum += along;
    }
    sum = warp_sum(sum);
    if (lane == 0) call.by_row[blockIdx.x * call.d + row] = sum;
  }
#pragma unroll
  for (int p = 0; p < kPacks; ++p)
#pragma unroll
    for (int v = 0; v < Width; ++v) parts[warp][(p * kWarp + lane) * Width + v] = columns[p][v];
  squares = block_sum(squares), weighted = block_sum(weighted);  // whose barriers `parts` needs too
  if (threadIdx.x == 0) call.totals[2 * blockIdx.x] = squares, call.totals[2 * blockIdx.x + 1] = weighted;
  for (int column = threadIdx.x; column < kWeightedColumns && first + column < call.m; column += kRowWarps * kWarp) {
    double total = 0;
    for (int other = 0; other < kRowWarps; ++other) total += parts[other][column];
    call.by_column[matrix * call.m + first + column] = total;
  }
}

}  // namespace

template <typename T>
int weighted(const T* matrices, const T* weight, int64_t count, int64_t groups, int64_t d, int64_t m, double* totals,
             double* by_column, double* by_row, void* stream) {
  const int64_t splits = blocks_of(m, kWeightedColumns);
  const bool wide = packed(matrices, m) && packed(weight, m);
  const Weighted<T> call{matrices, weight, groups, d, m, splits, totals, by_column, by_row};
  return launch(wide ? weighted_kernel<T, kPack<T>> : weighted_kernel<T, 1>,
                dim3(static_cast<unsigned>(count * splits)), kRowWarps * kWarp, 0, stream, call);
}

template int weighted(const float*, const float*, int64_t, int64_t, int64_t, int64_t, double*, double*, double*, void*);
template int weighted(const double*, const double*, int64_t, int64_t, int64_t, int64_t, double*, double*, double*,
                      void*);

}  // namespace pyflatness::cuda
