// Behind the products of a wide head: kernels that read rows of the weight as they lie, in half precision too, and
// leave rows out that need nothing, so that no host has to know how many do.
#include "elements.cuh"
#include "reduce.cuh"

namespace pyflatness::cuda {
namespace {

template <typename T, typename W, int Most>
__global__ void norms_about_kernel(const W* weight, const T* centre, int m, T* out) {
  weight += blockIdx.x * m;
  double total = 0;
  each_access<Most>(
      m, [&](auto count, int j) { return load<count>(weight + j); },
      [&](auto count, int j, const auto& pack) {
        const Pack<T, count> c = load<count>(centre + j);
        T sum = 0;
#pragma unroll
        for (int v = 0; v < count; ++v) {
          const T difference = widen(pack.value[v]) - c.value[v];
          sum += difference * difference;
        }
        total += sum;
      });
  total = block_sum(total);
  if (threadIdx.x == 0) out[blockIdx.x] = static_cast<T>(total);
}

template <typename T, typename W, int Most>
__global__ void rejoin_kernel(T* summed, const W* weight, const T* centre, const int64_t* top, const double* factor,
                              int64_t d, int m) {
  const int64_t t = top[blockIdx.x];
  if (t < 0 || t >= d) return;
  summed += blockIdx.x * m, weight += t * m;
  const T scale = static_cast<T>(factor[blockIdx.x]);
  each_access<Most>(
      m,
      [&](auto count, int j) {
        return Two<Pack<T, count>, Pack<W, count>>{load<count>(summed + j), load<count>(weight + j)};
      },
      [&](auto count, int j, auto& both) {
        const Pack<T, count> c = centre ? load<count>(centre + j) : Pack<T, count>{};
#pragma unroll
        for (int v = 0; v < count; ++v)
          both.first.value[v] = (both.first.value[v] + (widen(both.second.value[v]) - c.value[v])) * scale;
        store(summed + j, both.first);
      });
}

unsigned rows_of(int64_t n) { return static_cast<unsigned>(n); }

}  // namespace

template <typename T, typename W>
int norms_about(const W* weight, const T* centre, int64_t d, int64_t m, T* out, void* stream) {
  const bool wide = packed(weight, m) && packed(centre, 0);
  const auto kernel = wide ? norms_about_kernel<T, W, kPack<W>> : norms_about_kernel<T, W, 1>;
  return launch(kernel, dim3(rows_of(d)), threads_for(m, wide ? kPack<W> : 1), 0, stream, weight, centre, m, out);
}

template <typename T, typename W>
int rejoin(T* summed, const W* weight, const T* centre, const int64_t* top, const double* factor, int64_t n, int64_t d,
           int64_t m, void* stream) {
  const bool wide = packed(summed, m) && packed(weight, m) && (!centre || packed(centre, 0));
  const auto kernel = wide ? rejoin_kernel<T, W, kPack<W>> : rejoin_kernel<T, W, 1>;
  return launch(kernel, dim3(rows_of(n)), threads_for(m, wide ? kPack<W> : 1), 0, stream, summed, weight, centre, top,
                factor, d, m);
}

#define PYFLATNESS_WIDE(T, W)                                                \
  template int norms_about(const W*, const T*, int64_t, int64_t, T*, void*); \
  template int rejoin(T*, const W*, const T*, const int64_t*, const double*, int64_t, int64_t, int64_t, void*);
PYFLATNESS_WIDE(float, float)
PYFLATNESS_WIDE(double, double)
PYFLATNESS_WIDE(float, BFloat16)
PYFLATNESS_WIDE(float, Float16)
#undef PYFLATNESS_WIDE

}  // namespace pyflatness::cuda
