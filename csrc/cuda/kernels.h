// The CUDA kernels of pyflatness: pointers to device memory, sizes, scalars, a stream. No CUDA header here, so that the
// binding compiles without one. What a kernel computes is said in ../cpu/kernels.h, where the CPU's of the same name
// is.
//
// Every function launches on `stream` (a cudaStream_t) of the current device, allocates nothing, waits for nothing, and
// returns a cudaError_t: 0 is success.
#pragma once

#include <cstdint>

#include "../cpu/kernels.h"

namespace pyflatness::cuda {

// The name and the text of a cudaError_t.
const char* error_name(int status);
const char* error_text(int status);

struct BFloat16;  // half precision, two bytes
struct Float16;

// T is float or double; W is T, or with T = float one of half precision.

template <typename T>
int pair_distances(const T* weight,  // [d, m]
                   int64_t d, int64_t m,
                   T* out,  // [d, d]
                   void* stream);

template <typename T>
int softmax_variance(const T* features,  // [n, m], row i at features + i * stride
                     int64_t stride,
                     const T* weight,     // [d, m]
                     const T* bias,       // [d]
                     const T* distances,  // [d, d]
                     int64_t n, int64_t m, int64_t d,
                     double* out,  // [n]
                     void* stream);

template <typename T>
int exponentiate(T* logits,           // [n, d]
                 const T* row_norms,  // [d] or null
                 T top_value, int64_t n, int64_t d,
                 T* maximum,      // [n]
                 double* rest,    // [n]
                 double* moment,  // [n], written where row_norms is given
                 int64_t* top,    // [n]
                 void* stream);

// Sums over each row's classes but the most probable one t, relative to its exp(z_t).
template <typename T>
struct ClassSums {
  T* maximum;      // [n] z_t; -infinity before the first class
  int64_t* top;    // [n] t; -1: none
  double* rest;    // [n] sum_s e_s
  double* moment;  // [n] sum_s e_s |w_s|^2
};

// Sums over the tiles so far, and what `rejoin` takes.
template <typename T>
struct Running {
  ClassSums<T> sums;
  const T* norms;    // [classes] |w_s|^2
  int64_t* joining;  // [n] the class that was t before, where this tile has a larger logit; else -1
  double* factor;    // [n] from the maximum before to the one now
};

// Tiles [first, first + width) of the rows' classes: logits + bias -> e = exp(z - maximum) in `out`, rounded once, with
// the maximum that this tile may raise; its place takes 0. The sums, of e as it is in `out`, join the running ones.
template <typename T, typename Out>
int exponentiate_tile(T* logits,  // [n, width], row i at logits + i * stride; lost
                      int64_t stride,
                      const T* bias,  // [classes] or null
                      int64_t first, int64_t n, int64_t width,
                      Out* out,  // [n, width], row i at out + i * out_stride; may be the logits
                      int64_t out_stride, const Running<T>& running,
                      const ClassSums<T>& own,  // the tile's, with the maximum so far; those of a row `apart`; or null
                      int64_t apart, void* stream);

template <typename T>
int row_dots(const T* a,  // [n, k], row i at a + i * stride_a
             int64_t stride_a,
             const T* b,  // [n, k], row i at b + i * stride_b
             int64_t stride_b, int64_t n, int64_t k,
             double* out,  // [n]
             void* stream);

template <typename T>
int sigmoid_curvature(const T* logits,        // [n, d]
                      const T* coefficients,  // [n, d]
                      const T* row_norms,     // [d]
                      int64_t n, int64_t d,
                      double* out,  // [n]
                      void* stream);

// out[s] = |w_s - centre|^2
template <typename T, typename W>
int norms_about(const W* weight,  // [d, m]
                const T* centre,  // [m]
                int64_t d, int64_t m,
                T* out,  // [d]
                void* stream);

// summed[i] = factor[i] (summed[i] + w_t - centre) for t = top[i]; a row is left alone where that is no class.
template <typename T, typename W>
int rejoin(T* summed,             // [n, m]
           const W* weight,       // [d, m]
           const T* centre,       // [m] or null: 0
           const int64_t* top,    // [n]
           const double* factor,  // [n]
           int64_t n, int64_t d, int64_t m, void* stream);

// Sums e_s w_s over all classes but t = top[i], in summed[i], become the mean of all rows of the weight with t's 1.
// lengths[0][i] = |mean of the others|^2, [1][i] = |that mean - w_t|^2, [2][i] = |summed + w_t|^2, of rows less
// `centre`.
template <typename T, typename W>
int mean_row(T* summed,                // [n, m]
             const W* weight,          // [d, m]
             const T* centre,          // [m]
             const int64_t* top,       // [n]
             const double* rest,       // [n] sum of e_s
             const double* uncentred,  // [n] or null: that of those in `summed`, if it and the mean are not less centre
             int64_t n, int64_t d, int64_t m,
             double* lengths,  // [3, n]
             void* stream);

// out[i] = sum_s exp(<phi_i, w_s - centre> + b_s - maximum[i]) |w_s - centre - mean[i]|^2 in the chosen rows, else 0.
template <typename T, typename W>
int spread(const T* features,   // [n, m]
           const T* maximum,    // [n]
           const T* mean,       // [n, m]
           const W* weight,     // [d, m]
           const T* centre,     // [m] or null: 0
           const T* bias,       // [d]
           const bool* chosen,  // [n]
           int64_t n, int64_t d, int64_t m,
           int64_t* rows,    // [n + 1], takes the chosen rows, and how many they are at its end
           double* partial,  // [n, spread_splits(d)], takes the sums over parts of the classes
           double* out,      // [n]
           void* stream);

// The parts that `spread` cuts d classes into.
int64_t spread_splits(int64_t d);

int small_eigenvalues(const double* matrices,  // [n, size, size]
                      int64_t n, int64_t size,
                      double* out,  // [n, size]
                      void* stream);

// What the numbers of a layer are and how they are multiplied: Element in memory, Sum for products and their sums.
// Plain float32 and float64 are multiplied on CUDA cores, the others on tensor cores, which round float32 to TF32.
struct F32 {
  using Element = float;
  using Sum = float;
};
struct F64 {
  using Element = double;
  using Sum = double;
};
struct Tf32 {
  using Element = float;
  using Sum = float;
};
struct Bf16 {
  using Element = uint16_t;
  using Sum = float;
};
struct F16 {
  using Element = uint16_t;
  using Sum = float;
};

// Columns of the tiles that `direct` makes M by, bytes of shared memory that a block of it asks for, and those that the
// current device has for one.
template <class Kind>
int64_t direct_columns(int64_t rows, int64_t columns, bool rooted);
template <class Kind>
int64_t direct_shared(int64_t rows, int64_t columns, bool rooted, bool weighted);
int shared_limit(int64_t* bytes);

// Places along a side of the tiles of `gram`.
int64_t gram_tile(int64_t positions, bool tensor_cores);

// As the CPU's, but that each sum over a part of M is written apart. Offsets within a sample are below 2^31.
template <class Kind>
int direct(const Layer& layer,
           const Strided<typename Kind::Element>& inputs,  // [n, groups * channels, size]
           const Strided<typename Kind::Element>& signal,  // [n, groups * rows, places]
           const typename Kind::Sum* root, int64_t roots,  // [groups, roots, rows] or null
           const typename Kind::Sum* weight,               // [groups, rows, columns] or null
           int64_t splits,                                 // 1 to the tiles of columns: blocks that share them
           double* totals,                                 // [n, groups, splits, 3]
           double* by_column,                              // [n, groups, columns]: weight o M over rows
           double* by_row,                                 // [n, groups, splits, rows]: weight o M over columns
           void* stream);

// As the CPU's.
template <class Kind>
int patch_gram(const Layer& layer,
               const Strided<typename Kind::Element>& inputs,  // [n, groups * channels, size]
               typename Kind::Sum* out,                        // [n, groups, positions, positions]
               void* stream);

// Pairs of places of a block of sum_shifts.
constexpr int kShiftThreads = 128;

// out[p, p'] = Σ_taps pixel_gram[pixel(p) + tap, pixel(p') + tap], for layers of stride 1.
template <typename T>
int sum_shifts(const Layer& layer,
               const T* pixel_gram,  // [n, groups, pixels, pixels]
               T* out,               // [n, groups, positions, positions]
               void* stream);

// As the CPU's, but that each pair of tiles of places is written apart; zeros for those below the diagonal.
template <class Kind>
int gram(const Strided<typename Kind::Element>& a,  // [samples, groups, positions, r], the last stride unused
         int64_t samples, int64_t groups, int64_t positions, int64_t r,
         const typename Kind::Sum* g,  // [samples, groups, positions, positions], symmetric
         double* out,                  // [samples, groups, tiles, tiles] with tiles of gram_tile places
         void* stream);

}  // namespace pyflatness::cuda
