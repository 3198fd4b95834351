// What stands between and behind a head's products: a block takes a row, sums go on in double after one access.
#include "elements.cuh"
#include "reduce.cuh"

namespace pyflatness::cuda {
namespace {

// Bytes of a row's logits in shared memory: two large blocks stay on a processor, or four small ones, which compute
// while another reads.
constexpr size_t kMostKept = 96 << 10, kSmall = kMostKept / 2;
constexpr int kFewThreads = 256;

template <typename T, typename Out>
struct Exponents {
  T* logits;           // [n, d], row i at logits + i * stride; lost
  int64_t stride;      //
  const T* bias;       // [d] or null
  const T* row_norms;  // [d] or null
  T top_value;         // at a class that raises the maximum
  int64_t n, d;        //
  Out* out;            // [n, d], row i at out + i * out_stride; may be the logits
  int64_t out_stride;  //
  int64_t first;       // the first class
  Running<T> running;  // or a call's own sums: its `norms`, `joining` and `factor` are null
};

// The sums of a row over the tiles before.
template <typename T>
struct Before {
  int64_t top;
  double rest, moment;
  T norm;  // of the class `top`
};

template <int Count, typename T>
__device__ Pack<T, Count> load_or_zeros(const T* array, int place) {
  return array ? load<Count>(array + place) : Pack<T, Count>{};
}

template <typename Out, typename T>
__device__ T exponential(T x) {
  if constexpr (sizeof(Out) < sizeof(float))
    return coarse_exp(x);
  else
    return exp(x);
}

// The sums are those of the values as they are written: rounded once.
template <typename T, typename Out, int Most, bool Kept, bool Runs>
__global__ void __launch_bounds__(kMostThreads, sizeof(T) == 4 ? 2 : 1) exponentiate_kernel(Exponents<T, Out> call) {
  const int64_t row = blockIdx.x;
  T* const brought = call.logits + row * call.stride;
  T* const z = Kept ? dynamic_shared<T>() : brought;  // a thread reads what it wrote itself, till the first barrier
  if (Kept)
    each_access<Most>(
        call.d, [](auto, int) { return 0; },
        [&](auto count, int s, int) { copy_async<sizeof(T) * count>(z + s, brought + s); });
  const Running<T>& running = call.running;
  const T old = running.maximum[row];
  __shared__ Before<T> before;
  if (Runs && threadIdx.x == 0) {  // on their way together with the copies
    const int64_t top = running.top[row];
    before = {top, running.rest[row], running.moment[row], top < 0 ? T(0) : running.norms[top]};
  }
  if (Kept) wait_for_copies();
  Largest<T> largest{-INFINITY, 0};
  const auto take = [&](auto count, int s, const auto& pack) {  // a NaN shows in the sums
    T most = pack.value[0];
#pragma unroll
    for (int v = 1; v < count; ++v) most = fmax(most, pack.value[v]);
    if (most > largest.value) largest = {most, s};
  };
  if (call.bias)
    each_access<Most>(
        call.d, [&](auto count, int s) { return load<count>(call.bias + s); },
        [&](auto count, int s, auto& pack) {
          const Pack<T, count> product = load<count>(z + s);
#pragma unroll
          for (int v = 0; v < count; ++v) pack.value[v] += product.value[v];
          store(z + s, pack);
          take(count, s, pack);
        });
  else
    each_access<Most>(call.d, [&](auto count, int s) { return load<count>(z + s); }, take);
  largest = block_largest(largest);
  const bool raised = largest.value > old;
  const T maximum = raised ? largest.value : old, reference = maximum > -INFINITY ? maximum : T(0);
  if (raised) {  // the place itself, in the access that was found
    while (z[largest.place] != largest.value) ++largest.place;
    __syncthreads();
    if (threadIdx.x == 0 && isfinite(maximum)) z[largest.place] = -INFINITY;  // infinity stays: the sums are NaN
    __syncthreads();
  }
  Out* const out = call.out + row * call.out_stride;
  double rest = 0, moment = 0;
  each_access<Most>(
      call.d, [&](auto count, int s) { return load_or_zeros<count>(call.row_norms, s); },
      [&](auto count, int s, const auto& norms) {
        Pack<T, count> pack = load<count>(z + s);
#pragma unroll
        for (int v = 0; v < count; ++v) pack.value[v] = exponential<Out>(pack.value[v] - reference);
        const Pack<Out, count> written = narrowed<Out>(pack);
        store(out + s, written);
        T sum = 0, weighted = 0;
#pragma unroll
        for (int v = 0; v < count; ++v) {
          const T value = widen(written.value[v]);
          sum += value, weighted += value * norms.value[v];
        }
        rest += sum, moment += weighted;
      });
  rest = block_sum(rest), moment = block_sum(moment);
  if (threadIdx.x > 0) return;
  const int64_t top = raised ? call.first + largest.place : -1;
  running.maximum[row] = maximum;
  if (raised) store(out + largest.place, narrowed<Out>(Pack<T, 1>{call.top_value}));
  if constexpr (Runs) {  // the class that was the most probable one joins the others
    const bool joins = raised && before.top >= 0;
    const double factor = joins ? exp(static_cast<double>(old) - static_cast<double>(maximum)) : 1.0;
    rest += factor * (before.rest + (joins ? 1 : 0));
    moment += factor * (before.moment + (joins ? before.norm : T(0)));
    running.joining[row] = joins ? before.top : -1;
    running.factor[row] = factor;
  }
  if (raised || !Runs) running.top[row] = top;
  running.rest[row] = rest;
  if (running.moment) running.moment[row] = moment;
}

template <bool Runs, typename T, typename Out>
int launch_exponentiate(const Exponents<T, Out>& call, void* stream) {
  const size_t bytes = call.d * sizeof(T);
  const bool kept = bytes <= kMostKept;
  const bool wide = packed(call.logits, call.stride) && packed(call.out, call.out_stride) &&
                    (!call.bias || packed(call.bias, 0)) && (!call.row_norms || packed(call.row_norms, 0));
  constexpr int kWide = kPack<T>;
  const auto kernel =
      wide ? (kept ? exponentiate_kernel<T, Out, kWide, true, Runs> : exponentiate_kernel<T, Out, kWide, false, Runs>)
           : (kept ? exponentiate_kernel<T, Out, 1, true, Runs> : exponentiate_kernel<T, Out, 1, false, Runs>);
  const int threads = min(threads_for(call.d, wide ? kWide : 1), bytes <= kSmall ? kFewThreads : kMostThreads);
  return launch(kernel, dim3(static_cast<unsigned>(call.n)), threads, kept ? bytes : 0, stream, call);
}

template <typename T, int Most>
__global__ void row_dots_kernel(const T* a, int64_t stride_a, const T* b, int64_t stride_b, int k, double* out) {
  a += blockIdx.x * stride_a, b += blockIdx.x * stride_b;
  double total = 0;
  each_access<Most>(
      k, [&](auto count, int j) { return Two<Pack<T, count>>{load<count>(a + j), load<count>(b + j)}; },
      [&](auto count, int, const auto& both) {
        T sum = 0;
#pragma unroll
        for (int v = 0; v < count; ++v) sum += both.first.value[v] * both.second.value[v];
        total += sum;
      });
  total = block_sum(total);
  if (threadIdx.x == 0) out[blockIdx.x] = total;
}

template <typename T, int Most>
__global__ void sigmoid_curvature_kernel(const T* logits, const T* coefficients, const T* row_norms, int d,
                                         double* out) {
  logits += int64_t{blockIdx.x} * d, coefficients += int64_t{blockIdx.x} * d;
  double total = 0;
  each_access<Most>(
      d,
      [&](auto count, int s) {
        using Access = Pack<T, count>;
        return Two<Access, Two<Access>>{load<count>(logits + s),
                                        {load<count>(coefficients + s), load<count>(row_norms + s)}};
      },
      [&](auto count, int, const auto& all) {
        T sum = 0;
#pragma unroll
        for (int v = 0; v < count; ++v) {
          const T e = exp(-fabs(all.first.value[v]));  // the tail that does not cancel
          sum += all.second.first.value[v] * all.second.second.value[v] * e / ((e + T(1)) * (e + T(1)));
        }
        total += sum;
      });
  total = block_sum(total);
  if (threadIdx.x == 0) out[blockIdx.x] = total;
}

}  // namespace

template <typename T>
int exponentiate(T* logits, const T* row_norms, T top_value, int64_t n, int64_t d, T* maximum, double* rest,
                 double* moment, int64_t* top, void* stream) {
  const Running<T> own{maximum, top, rest, row_norms ? moment : nullptr, nullptr, nullptr, nullptr};
  const Exponents<T, T> call{logits, d, nullptr, row_norms, top_value, n, d, logits, d, 0, own};
  return launch_exponentiate<false>(call, stream);
}

template <typename T, typename Out>
int exponentiate_tile(T* logits, int64_t stride, const T* bias, int64_t first, int64_t n, int64_t width, Out* out,
                      int64_t out_stride, const Running<T>& running, void* stream) {
  const T* norms = running.norms + first;
  const Exponents<T, Out> call{logits, stride, bias ? bias + first : nullptr, norms, 0, n, width, out, out_stride,
                               first,  running};
  return launch_exponentiate<true>(call, stream);
}

template <typename T>
int row_dots(const T* a, int64_t stride_a, const T* b, int64_t stride_b, int64_t n, int64_t k, double* out,
             void* stream) {
  const bool wide = packed(a, stride_a) && packed(b, stride_b);
  const auto kernel = wide ? row_dots_kernel<T, kPack<T>> : row_dots_kernel<T, 1>;
  const int threads = threads_for(k, wide ? kPack<T> : 1);
  return launch(kernel, dim3(static_cast<unsigned>(n)), threads, 0, stream, a, stride_a, b, stride_b, k, out);
}

template <typename T>
int sigmoid_curvature(const T* logits, const T* coefficients, const T* row_norms, int64_t n, int64_t d, double* out,
                      void* stream) {
  const bool wide = packed(logits, d) && packed(coefficients, d) && packed(row_norms, 0);
  const auto kernel = wide ? sigmoid_curvature_kernel<T, kPack<T>> : sigmoid_curvature_kernel<T, 1>;
  const int threads = threads_for(d, wide ? kPack<T> : 1);
  return launch(kernel, dim3(static_cast<unsigned>(n)), threads, 0, stream, logits, coefficients, row_norms, d, out);
}

template int exponentiate(float*, const float*, float, int64_t, int64_t, float*, double*, double*, int64_t*, void*);
template int exponentiate(double*, const double*, double, int64_t, int64_t, double*, double*, double*, int64_t*, void*);
#define PYFLATNESS_TILE(T, Out)                                                                                      \
  template int exponentiate_tile(T*, int64_t, const T*, int64_t, int64_t, int64_t, Out*, int64_t, const Running<T>&, \
                                 void*);
PYFLATNESS_TILE(float, float)
PYFLATNESS_TILE(double, double)
PYFLATNESS_TILE(float, BFloat16)
#undef PYFLATNESS_TILE
template int row_dots(const float*, int64_t, const float*, int64_t, int64_t, int64_t, double*, void*);
template int row_dots(const double*, int64_t, const double*, int64_t, int64_t, int64_t, double*, void*);
template int sigmoid_curvature(const float*, const float*, const float*, int64_t, int64_t, double*, void*);
template int sigmoid_curvature(const double*, const double*, const double*, int64_t, int64_t, double*, void*);

}  // namespace pyflatness::cuda
