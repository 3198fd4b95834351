// Behind the products of a wide head: kernels that read rows of the weight as they lie, in half precision too, and
// leave rows out that need nothing, so that no host has to know how many do.
#include "elements.cuh"
#include "reduce.cuh"

namespace pyflatness::cuda {
namespace {

template <typename T>
constexpr T kTiny = sizeof(T) == sizeof(double) ? T(0x1p-1022) : T(0x1p-126f);  // the smallest normal number

template <typename T, typename W, int Most>
__global__ void norms_about_kernel(const W* weight, const T* centre, int m, T* out) {
  weight += int64_t{blockIdx.x} * m;
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
  summed += int64_t{blockIdx.x} * m, weight += t * m;
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

template <typename T, typename W>
struct MeanRow {
  T* summed;                // [n, m]
  const W* weight;          // [d, m]
  const T* centre;          // [m]
  const int64_t* top;       // [n]
  const double* rest;       // [n]
  const double* uncentred;  // [n] or null
  int64_t n, d, m;          //
  double* lengths;          // [3, n]
};

template <typename T, typename W, int Most>
__global__ void mean_row_kernel(MeanRow<T, W> call) {
  const int64_t row = blockIdx.x, t = call.top[row];
  T* const summed = call.summed + row * call.m;
  const W* const weight = call.weight + (t > 0 && t < call.d ? t : 0) * call.m;
  const T rest = static_cast<T>(call.rest[row]), share = static_cast<T>(-1 / (1 + call.rest[row]));
  const T others = rest > kTiny<T> ? rest : kTiny<T>;
  const T inside = call.uncentred ? static_cast<T>(call.uncentred[row]) : T(0);
  double squares[3] = {};
  each_access<Most>(
      static_cast<int>(call.m),
      [&](auto count, int j) {
        return Two<Pack<T, count>, Pack<W, count>>{load<count>(summed + j), load<count>(weight + j)};
      },
      [&](auto count, int j, auto& both) {
        const Pack<T, count> centre = load<count>(call.centre + j);
        T sum[3] = {};
#pragma unroll
        for (int v = 0; v < count; ++v) {
          const T c = centre.value[v], w = widen(both.second.value[v]) - c;
          const T about = both.first.value[v] - inside * c, mean = about / others, away = mean - w;
          sum[0] += mean * mean, sum[1] += away * away, sum[2] += (about + w) * (about + w);
          both.first.value[v] = mean + away * share + (call.uncentred ? c : T(0));
        }
        store(summed + j, both.first);
#pragma unroll
        for (int i = 0; i < 3; ++i) squares[i] += sum[i];
      });
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    squares[i] = block_sum(squares[i]);
    if (threadIdx.x == 0) call.lengths[i * call.n + row] = squares[i];
  }
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

template <typename T, typename W>
int mean_row(T* summed, const W* weight, const T* centre, const int64_t* top, const double* rest,
             const double* uncentred, int64_t n, int64_t d, int64_t m, double* lengths, void* stream) {
  const bool wide = packed(summed, m) && packed(weight, m) && packed(centre, 0);
  const auto kernel = wide ? mean_row_kernel<T, W, kPack<W>> : mean_row_kernel<T, W, 1>;
  const MeanRow<T, W> call{summed, weight, centre, top, rest, uncentred, n, d, m, lengths};
  return launch(kernel, dim3(rows_of(n)), threads_for(m, wide ? kPack<W> : 1), 0, stream, call);
}

#define PYFLATNESS_WIDE(T, W)                                                                                   \
  template int norms_about(const W*, const T*, int64_t, int64_t, T*, void*);                                    \
  template int rejoin(T*, const W*, const T*, const int64_t*, const double*, int64_t, int64_t, int64_t, void*); \
  template int mean_row(T*, const W*, const T*, const int64_t*, const double*, const double*, int64_t, int64_t, \
                        int64_t, double*, void*);
PYFLATNESS_WIDE(float, float)
PYFLATNESS_WIDE(double, double)
PYFLATNESS_WIDE(float, BFloat16)
PYFLATNESS_WIDE(float, Float16)
#undef PYFLATNESS_WIDE

}  // namespace pyflatness::cuda
