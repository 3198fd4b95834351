// Behind the products of a wide head: kernels that read rows of the weight as they lie, in half precision too, and
// leave rows out that need nothing, so that no host has to know how many do.
#include "elements.cuh"
#include "reduce.cuh"

namespace pyflatness::cuda {
namespace {

template <typename T, typename W, int Width>
__global__ void norms_about_kernel(const W* weight, const T* centre, int64_t m, T* out) {
  weight += blockIdx.x * m;
  double total = 0;
#pragma unroll 4
  for (int64_t j = threadIdx.x * Width; j < m; j += static_cast<int64_t>(blockDim.x) * Width) {
    const Pack<W, Width> w = load<Width>(weight + j);
    T sum = 0;
#pragma unroll
    for (int v = 0; v < Width; ++v) {
      const T difference = widen(w.value[v]) - centre[j + v];
      sum += difference * difference;
    }
    total += sum;
  }
  total = block_sum(total);
  if (threadIdx.x == 0) out[blockIdx.x] = static_cast<T>(total);
}

template <typename T, typename W>
__global__ void rejoin_kernel(T* summed, const W* weight, const T* centre, const int64_t* top, const double* factor,
                              int64_t d, int64_t m) {
  const int64_t t = top[blockIdx.x];
  if (t < 0 || t >= d) return;
  summed += blockIdx.x * m, weight += t * m;
  const T scale = static_cast<T>(factor[blockIdx.x]);
  for (int64_t j = threadIdx.x; j < m; j += blockDim.x)
    summed[j] = (summed[j] + (widen(weight[j]) - (centre ? centre[j] : T(0)))) * scale;
}

unsigned rows_of(int64_t n) { return static_cast<unsigned>(n); }

}  // namespace

template <typename T, typename W>
int norms_about(const W* weight, const T* centre, int64_t d, int64_t m, T* out, void* stream) {
  const auto kernel = packed(weight, m, m) ? norms_about_kernel<T, W, kPack<W>> : norms_about_kernel<T, W, 1>;
  return launch(kernel, dim3(rows_of(d)), threads_for(m), 0, stream, weight, centre, m, out);
}

template <typename T, typename W>
int rejoin(T* summed, const W* weight, const T* centre, const int64_t* top, const double* factor, int64_t n, int64_t d,
           int64_t m, void* stream) {
  return launch(rejoin_kernel<T, W>, dim3(rows_of(n)), threads_for(m), 0, stream, summed, weight, centre, top, factor,
                d, m);
}

#define PYFLATNESS_WIDE(T, W)                                \
  template int norms_about(const W*, const T*, int64_t, int64_t, T*, void*); \
  template int rejoin(T*, const W*, const T*, const int64_t*, const double*, int64_t, int64_t, int64_t, void*);
PYFLATNESS_WIDE(float, float)
PYFLATNESS_WIDE(double, double)
PYFLATNESS_WIDE(float, BFloat16)
PYFLATNESS_WIDE(float, Float16)
#undef PYFLATNESS_WIDE

}  // namespace pyflatness::cuda
