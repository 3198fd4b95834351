// The kernels of pyflatness: raw pointers, sizes and scalars; no Python, no torch.
//
// Letters: n rows (one loss term each), d outputs (classes), m features. Matrices are row-major and dense unless a
// stride is named. Statistics of a row come out in double whatever the element type T is.
#pragma once

#include <cstdint>

namespace pyflatness {

// Most outputs for which softmax_variance keeps a row's logits in registers and cache; a wider head takes products
// from a matrix library and the kernels behind them.
constexpr int64_t kMaxFusedOutputs = 64;

template <typename T>
struct HeadKernels {
  // out[s, t] = |w_s - w_t|^2, from the differences themselves: exact zeros for equal rows, no cancellation.
  void (*pair_distances)(const T* weight,  // [d, m]
                         int64_t d, int64_t m,
                         T* out,  // [d, d]
                         int threads);

  // out[i] = |phi_i|^2 sum_{s<t} p_s p_t |w_s - w_t|^2 with p = softmax(W phi_i + b): one pass over phi.
  void (*softmax_variance)(const T* features,  // [n, m], row i at features + i * stride
                           int64_t stride,
                           const T* weight,     // [d, m]
                           const T* bias,       // [d]
                           const T* distances,  // [d, d]
                           int64_t n, int64_t m, int64_t d,
                           double* out,  // [n]
                           int threads);

  // A block of each row's logits, in place: z_s -> exp(z_s - maximum), where `maximum` (that of the blocks before,
  // -infinity for the first) is raised to this block's own largest logit first. If that raises it, the place t of that
  // logit takes `top_value`, and stays out of the sums; else t = -1.
  // rest[i] = sum_{s != t} exp(z_s - maximum); moment[i] = the same sum weighted by row_norms (skipped where null).
  void (*exponentiate)(T* logits,           // [n, d]
                       const T* row_norms,  // [d] or null
                       T top_value, int64_t n, int64_t d,
                       T* maximum,      // [n]
                       double* rest,    // [n]
                       double* moment,  // [n], written where row_norms is given
                       int64_t* top,    // [n]
                       int threads);

  // out[i] = sum_j a[i, j] b[i, j]
  void (*row_dots)(const T* a,  // [n, k], row i at a + i * stride_a
                   int64_t stride_a,
                   const T* b,  // [n, k], row i at b + i * stride_b
                   int64_t stride_b, int64_t n, int64_t k,
                   double* out,  // [n]
                   int threads);

  // out[i] = sum_s coefficients[i, s] row_norms[s] sigma'(z[i, s])
  void (*sigmoid_curvature)(const T* logits,        // [n, d]
                            const T* coefficients,  // [n, d]
                            const T* row_norms,     // [d]
                            int64_t n, int64_t d,
                            double* out,  // [n]
                            int threads);
};

struct Kernels {
  const char* name;
  HeadKernels<float> f32;
  HeadKernels<double> f64;
};

template <typename T>
const HeadKernels<T>& head(const Kernels& kernels);
template <>
inline const HeadKernels<float>& head<float>(const Kernels& kernels) {
  return kernels.f32;
}
template <>
inline const HeadKernels<double>& head<double>(const Kernels& kernels) {
  return kernels.f64;
}

// The instruction sets in this build that this processor can run, widest first; the last is always "base".
int available(const Kernels* const** list);

}  // namespace pyflatness
