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
// Most rows of a weight whose median is its centre.
constexpr int64_t kCentreRows = 31;
// Columns that the rows of m are padded to in a packed weight, so that each begins at a vector.
constexpr int64_t packed_columns(int64_t m) { return (m + 15) / 16 * 16; }

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

  // What softmax_variance_sum wants to know of a weight: weight - centre, packed; bias - its median; the distances of
  // pair_distances. The centre is the median of up to kCentreRows rows, evenly spaced.
  void (*prepare_softmax_variance)(const T* weight,  // [d, m]
                                   const T* bias,    // [d] or null
                                   int64_t d, int64_t m,
                                   T* prepared,  // [d * (packed_columns(m) + 1 + d)]
                                   int threads);

  // The values of softmax_variance and their sum, which is the same for any number of threads. Rows whose label is
  // `ignored` add 0. counted: the others; -1 if one of them has a label that is no class.
  void (*softmax_variance_sum)(const T* features,  // [n, m], row i at features + i * stride
                               int64_t stride,
                               const T* prepared,      // [d * (packed_columns(m) + 1 + d)]
                               const int64_t* labels,  // [n] or null
                               int64_t ignored, int64_t n, int64_t m, int64_t d,
                               double* values,  // [n] or null
                               double* total, int64_t* counted, int threads);

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

template <typename T>
struct HeadGradientKernels {
  // The sum of the values of softmax_variance times `shares`, and what its gradient is made of, for v_i = var_{p_i}(w):
  // slopes[s, i] = shares_i |phi_i|^2 dv_i/dz_is, the probabilities p_is, factors[0, i] = 2 shares_i v_i and
  // factors[1, i] = shares_i |phi_i|^2. The total is the same for any number of threads.
  void (*softmax_variance_gradient)(const T* features,  // [n, m], row i at features + i * stride
                                    int64_t stride,
                                    const T* prepared,     // [d * (packed_columns(m) + 1 + d)]
                                    const double* shares,  // [n]
                                    int64_t n, int64_t m, int64_t d,
                                    T* slopes,         // [d, n]
                                    T* probabilities,  // [d, n]
                                    T* factors,        // [2, n]
                                    double* total, int threads);
};

// A linear or convolutional layer. For each sample and group, M = sum_p delta_p phi_p^T (rows x columns): the patches
// phi_p hold the input channels of the group, each with the pixels that the kernel's taps see from place p; a column of
// M is a channel and a tap, the tap running fastest.
struct Layer {
  int64_t n, groups, channels, rows;  // samples, groups, channels and rows (outputs) of one group
  int64_t size[3], places[3];         // pixels of the padded input; places of the kernel
  int64_t kernel[3], stride[3], dilation[3];

  int64_t taps() const { return kernel[0] * kernel[1] * kernel[2]; }
  int64_t columns() const { return channels * taps(); }
  int64_t positions() const { return places[0] * places[1] * places[2]; }
};

// An array (samples, channels, three of space) anywhere in `count` elements: the strides may be any, 0 too.
template <typename T>
struct Strided {
  const T* data;
  int64_t count;
  int64_t stride[5];
};

// How `direct` makes M: as a product of the signal and the patches or, for 3 x 3 kernels of stride and dilation 1, as a
// correlation of the two by Winograd's transforms of tiles of 2 x 2 or 4 x 4 places: 9/4 and 4 times fewer
// multiply-adds, twice and six times the rounding. Other kernels take the patches whatever is asked; `automatic` takes
// the fastest.
enum class DirectForm { automatic, patches, tiles2, tiles4 };

template <typename T>
struct LayerKernels {
  // Elements of T that `direct` works in.
  int64_t (*direct_workspace)(const Layer& layer, DirectForm form, int64_t roots, bool weighted, int threads);

  // Each sample's M by blocks of columns, and what is asked of it. Each of `splits` takes a share of the channels.
  void (*direct)(const Layer& layer, DirectForm form,
                 const Strided<T>& inputs,      // [n, groups * channels, size]
                 const Strided<T>& signal,      // [n, groups * rows, places]
                 const T* root, int64_t roots,  // [groups, roots, rows] or null
                 const T* weight,               // [groups, rows, columns] or null
                 int64_t splits,                //
                 double* totals,                // [n, groups, splits, 3]: |M|^2, |root M|^2, |weight o M|^2
                 double* by_column,             // [n, groups * channels]: weight o M over rows and taps
                 double* by_row,                // [n, groups, splits, rows]: weight o M over columns
                 T* workspace,                  // [direct_workspace]
                 int threads);
};

// Several signals that share the inputs, from the positions where one of them is not zero.
template <typename T>
struct GatheredKernels {
  // Whether that is faster than one signal after the other by `direct`.
  bool (*pays)(const Layer& layer);

  // Elements of T that `direct_gathered` works in.
  int64_t (*workspace)(const Layer& layer, int64_t length, int64_t roots, int64_t signals, int threads);

  // What `direct` makes of each signal's M, but for the weighted sums. An element of a row of a signal is at the
  // position of the layer that `sources` says, beyond the last at none; without them the elements are the places.
  void (*direct_gathered)(const Layer& layer,
                          const Strided<T>& inputs,                  // [n, groups * channels, size]
                          const Strided<T>* signals, int64_t count,  // [n, groups * rows, places or length] each
                          const int32_t* sources, int64_t length,    // [n, groups * rows, length] or null
                          const T* root, int64_t roots,              // [groups, roots, rows] or null
                          double* totals,                            // [count, n, groups, 2]: |M|^2, |root M|^2
                          T* workspace,                              // [workspace]
                          int threads);
};

constexpr int64_t kRootRows = 4;  // of which the rows of a root are a multiple

template <typename T>
struct GramKernels {
  // Elements of T that `patch_gram` works in.
  int64_t (*patch_gram_workspace)(const Layer& layer, int threads);

  // out[p, p'] = <phi_p, phi_p'>; `rows` of the layer are not looked at.
  void (*patch_gram)(const Layer& layer,
                     const Strided<T>& inputs,  // [n, groups * channels, size]
                     T* out,                    // [n, groups, positions, positions]
                     T* workspace,              // [patch_gram_workspace]
                     int threads);

  // Elements of T that `gram` works in.
  int64_t (*gram_workspace)(int64_t positions, int64_t r, int threads);

  // out = sum_pp' <a_p, a_p'> g[p, p'] for each of n matrices.
  void (*gram)(const Strided<T>& a,  // [samples, groups, positions, r], the last stride unused
               int64_t samples, int64_t groups, int64_t positions, int64_t r,
               const T* g,    // [samples, groups, positions, positions], symmetric
               double* out,   // [samples, groups]
               T* workspace,  // [gram_workspace]
               int threads);

  // Elements of T that `gram_rooted` works in.
  int64_t (*gram_rooted_workspace)(int64_t positions, int64_t d, int64_t roots, int threads);

  // out = sum_pp' <root a_p, root a_p'> g[p, p'] for each of n matrices; a triangular root has zeros below its
  // diagonal.
  void (*gram_rooted)(const Strided<T>& a,  // [samples, groups, positions, d], the last stride unused
                      int64_t samples, int64_t groups, int64_t positions, int64_t d, const T* root,
                      int64_t roots,  // [groups, roots, d], a multiple of kRootRows, zeros the last of them
                      bool triangular,
                      const T* g,    // [samples, groups, positions, positions], symmetric
                      double* out,   // [samples, groups]
                      T* workspace,  // [gram_rooted_workspace]
                      int threads);
};

// Largest matrices for small_eigenvalues.
constexpr int64_t kMaxEigenSize = 32;

struct EigenKernels {
  // Eigenvalues of symmetric matrices, ascending, from their upper halves; NaN for a matrix that is not finite.
  void (*small_eigenvalues)(const double* matrices,  // [n, size, size]
                            int64_t n, int64_t size,
                            double* out,  // [n, size]
                            int threads);
};

// The same kernels for both element types.
template <template <typename> class Table>
struct Tables {
  Table<float> f32;
  Table<double> f64;
};
using HeadTables = Tables<HeadKernels>;
using HeadGradientTables = Tables<HeadGradientKernels>;
using LayerTables = Tables<LayerKernels>;
using GatheredTables = Tables<GatheredKernels>;
using GramTables = Tables<GramKernels>;

template <typename T, template <typename> class Table>
const Table<T>& of(const Tables<Table>& tables) {
  if constexpr (sizeof(T) == sizeof(float))
    return tables.f32;
  else
    return tables.f64;
}

struct Kernels {
  const char* name;
  const HeadTables& head;
  const HeadGradientTables& head_gradient;
  const LayerTables& layer;
  const GatheredTables& gathered;
  const GramTables& gram;
  const EigenKernels& eigen;
};

// The instruction sets in this build that this processor can run, widest first; the last is always "base".
int available(const Kernels* const** list);

}  // namespace pyflatness
