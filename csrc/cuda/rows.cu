// What stands between and behind a head's products: a block takes a row, sums go on in double after one access.
#include "elements.cuh"
#include "reduce.cuh"

namespace pyflatness::cuda {
namespace {

constexpr size_t kMostKept = 96 << 10;  // bytes of a row's logits in shared memory: two blocks stay on a processor

template <typename T, typename Out>
struct Exponents {
  const T* logits;     // [n, d]
  const T* bias;       // [d] or null
  const T* row_norms;  // [d] or null
  T top_value;         //
  int64_t n, d;        //
  T* maximum;          // [n]
  Out* out;            // [n, d], may be the logits
  double* rest;        // [n]
  double* moment;      // [n], written where row_norms is given
  int64_t* top;        // [n]
};

template <int Width, typename T, typename Out>
__device__ Pack<T, Width> logits_at(const Exponents<T, Out>& call, int64_t row, int64_t s) {
  Pack<T, Width> z = load<Width>(call.logits + row * call.d + s);
  if (call.bias) {
    const Pack<T, Width> b = load<Width>(call.bias + s);
#pragma unroll
    for (int v = 0; v < Width; ++v) z.value[v] += b.value[v];
  }
  return z;
}

// The sums are those of the values as they are written: rounded once.
template <typename T, typename Out, int Width, bool Kept>
__global__ void exponentiate_kernel(Exponents<T, Out> call) {
  T* kept = dynamic_shared<T>();  // [d]
  const int64_t row = blockIdx.x, step = static_cast<int64_t>(blockDim.x) * Width;
  Largest<T> largest{-INFINITY, 0};
#pragma unroll 4
  for (int64_t s = threadIdx.x * Width; s < call.d; s += step) {
    const Pack<T, Width> z = logits_at<Width>(call, row, s);
#pragma unroll
    for (int v = 0; v < Width; ++v)
      if (z.value[v] > largest.value) largest = {z.value[v], static_cast<int>(s) + v};  // a NaN shows in the sums
    if (Kept) store(kept + s, z);
  }
  const T before = call.maximum[row];
  largest = block_largest(largest);
  const bool raised = largest.value > before;
  const bool hidden = raised && isfinite(largest.value);  // infinity stays, and makes the sums NaN
  const T maximum = raised ? largest.value : before;
  const T reference = maximum > -INFINITY ? maximum : T(0);
  double rest = 0, moment = 0;
  for (int64_t s = threadIdx.x * Width; s < call.d; s += step) {
    const Pack<T, Width> z = Kept ? load<Width>(kept + s) : logits_at<Width>(call, row, s);
    const Pack<T, Width> norms = call.row_norms ? load<Width>(call.row_norms + s) : Pack<T, Width>{};
    Pack<Out, Width> e;
    T sum = 0, weighted = 0;
#pragma unroll
    for (int v = 0; v < Width; ++v) {
      const bool top = raised && s + v == largest.place;
      e.value[v] = narrowed<Out>(exp(z.value[v] - reference));
      const T value = hidden && top ? T(0) : widen(e.value[v]);
      sum += value;
      weighted += value * norms.value[v];
      if (top) e.value[v] = narrowed<Out>(call.top_value);
    }
    store(call.out + row * call.d + s, e);
    rest += sum, moment += weighted;
  }
  rest = block_sum(rest), moment = block_sum(moment);
  if (threadIdx.x > 0) return;
  call.maximum[row] = maximum;
  call.rest[row] = rest;
  if (call.row_norms) call.moment[row] = moment;
  call.top[row] = raised ? largest.place : -1;
}

template <typename T, typename Out>
int launch_exponentiate(const Exponents<T, Out>& call, void* stream) {
  const size_t bytes = call.d * sizeof(T);
  const bool kept = bytes <= kMostKept;
  const bool wide = packed(call.logits, call.d, call.d) && packed(call.out, call.d, call.d) &&
                    (!call.bias || packed(call.bias, call.d, call.d)) &&
                    (!call.row_norms || packed(call.row_norms, call.d, call.d));
  constexpr int kWide = kPack<T>;
  const auto kernel =
      wide ? (kept ? exponentiate_kernel<T, Out, kWide, true> : exponentiate_kernel<T, Out, kWide, false>)
           : (kept ? exponentiate_kernel<T, Out, 1, true> : exponentiate_kernel<T, Out, 1, false>);
  return launch(kernel, dim3(static_cast<unsigned>(call.n)), threads_for(call.d), kept ? bytes : 0, stream, call);
}

template <typename T, int Width>
__global__ void row_dots_kernel(const T* a, int64_t stride_a, const T* b, int64_t stride_b, int64_t k, double* out) {
  a += blockIdx.x * stride_a, b += blockIdx.x * stride_b;
  double total = 0;
#pragma unroll 4
  for (int64_t j = threadIdx.x * Width; j < k; j += static_cast<int64_t>(blockDim.x) * Width) {
    const Pack<T, Width> x = load<Width>(a + j), y = load<Width>(b + j);
    T sum = 0;
#pragma unroll
    for (int v = 0; v < Width; ++v) sum += x.value[v] * y.value[v];
    total += sum;
  }
  total = block_sum(total);
  if (threadIdx.x == 0) out[blockIdx.x] = total;
}

template <typename T>
__global__ void sigmoid_curvature_kernel(const T* logits, const T* coefficients, const T* row_norms, int64_t d,
                                         double* out) {
  logits += blockIdx.x * d, coefficients += blockIdx.x * d;
  double total = 0;
  for (int64_t s = threadIdx.x; s < d; s += blockDim.x) {
    const T e = exp(-fabs(logits[s]));  // the tail that does not cancel
    total += coefficients[s] * row_norms[s] * e / ((e + T(1)) * (e + T(1)));
  }
  total = block_sum(total);
  if (threadIdx.x == 0) out[blockIdx.x] = total;
}

}  // namespace

template <typename T>
int exponentiate(T* logits, const T* row_norms, T top_value, int64_t n, int64_t d, T* maximum, double* rest,
                 double* moment, int64_t* top, void* stream) {
  const Exponents<T, T> call{logits, nullptr, row_norms, top_value, n, d, maximum, logits, rest, moment, top};
  return launch_exponentiate(call, stream);
}

int exponentiate_rounded(const float* logits, const float* bias, const float* row_norms, int64_t n, int64_t d,
                         float* maximum, BFloat16* out, double* rest, double* moment, int64_t* top, void* stream) {
  const Exponents<float, BFloat16> call{logits, bias, row_norms, 0, n, d, maximum, out, rest, moment, top};
  return launch_exponentiate(call, stream);
}

template <typename T>
int row_dots(const T* a, int64_t stride_a, const T* b, int64_t stride_b, int64_t n, int64_t k, double* out,
             void* stream) {
  const bool wide = packed(a, stride_a, k) && packed(b, stride_b, k);
  const auto kernel = wide ? row_dots_kernel<T, kPack<T>> : row_dots_kernel<T, 1>;
  return launch(kernel, dim3(static_cast<unsigned>(n)), threads_for(k), 0, stream, a, stride_a, b, stride_b, k, out);
}

template <typename T>
int sigmoid_curvature(const T* logits, const T* coefficients, const T* row_norms, int64_t n, int64_t d, double* out,
                      void* stream) {
  return launch(sigmoid_curvature_kernel<T>, dim3(static_cast<unsigned>(n)), threads_for(d), 0, stream, logits,
                coefficients, row_norms, d, out);
}

template int exponentiate(float*, const float*, float, int64_t, int64_t, float*, double*, double*, int64_t*, void*);
template int exponentiate(double*, const double*, double, int64_t, int64_t, double*, double*, double*, int64_t*, void*);
template int row_dots(const float*, int64_t, const float*, int64_t, int64_t, int64_t, double*, void*);
template int row_dots(const double*, int64_t, const double*, int64_t, int64_t, int64_t, double*, void*);
template int sigmoid_curvature(const float*, const float*, const float*, int64_t, int64_t, double*, void*);
template int sigmoid_curvature(const double*, const double*, const double*, int64_t, int64_t, double*, void*);

}  // namespace pyflatness::cuda
