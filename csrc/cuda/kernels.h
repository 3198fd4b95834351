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

// Sums over each row's classes but the most probable one t so far, relative to its exp(z_t); and what `rejoin` takes.
template <typename T>
struct Running {
  T* maximum;        // [n] z_t; -infinity before the first class
  int64_t* top;      // [n] t; -1: none
  double* rest;      // [n] sum_s e_s
  double* moment;    // [n] sum_s e_s |w_s|^2
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
                      int64_t out_stride, const Running<T>& running, void* stream);

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

// The patches of a layer, column by column: out[n, group, column, position] for T of 2, 4 or 8 bytes.
template <typename T>
int patches(const Layer& layer,        // its rows do not matter
            const Strided<T>& inputs,  // [n, groups * channels, size], a channel's within 2^31
            T* out,                    // [n, groups, columns, positions]
            void* stream);

// Columns of a block of `weighted`.
constexpr int64_t kWeightedColumns = 256;

// |M|^2 and |weight o M|^2, and the sums of weight o M, for matrices M that belong to the groups in turn. `splits`
// blocks share a matrix, kWeightedColumns columns each.
template <typename T>
int weighted(const T* matrices,  // [count, d, m]
             const T* weight,    // [groups, d, m]
             int64_t count, int64_t groups, int64_t d, int64_t m,
             double* totals,     // [count, splits, 2]
             double* by_column,  // [count, m]: over rows
             double* by_row,     // [count, splits, d]: over the columns of a split
             void* stream);

}  // namespace pyflatness::cuda
