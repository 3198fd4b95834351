// Kinds of numbers, and tensor cores by warps of 32: C += A Bᵀ for tiles of 16 rows of A and 8 rows of B, both 8 words
// of 32 bits long. A word is one float32 number of which the first 19 bits count (TF32), or two of half precision, the
// earlier one below.
//
// Lane 4 g + t holds, as the PTX manual has it for m16n8k8 (TF32) and m16n8k16 (half precision), which are the same in
// words:
//
//     a[0], a[1], a[2], a[3]   words (row, word) = (g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4) of A
//     b[0], b[1]               words (g, t), (g, t + 4) of B
//     c[0], c[1], c[2], c[3]   (row of A, row of B) = (g, 2 t), (g, 2 t + 1), (g + 8, 2 t), (g + 8, 2 t + 1)
#pragma once

#include <cstring>

#include "launch.cuh"

#ifdef PYFLATNESS_EMULATED
#include "mma.h"
#else

namespace pyflatness::cuda {

// The nearest number that TF32 has, ties away from zero: what the tensor cores do by themselves is to cut digits off.
__device__ inline uint32_t nearest(Tf32, float value) {
  uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
  return bits;
}

__device__ inline float widened(F16, uint16_t value) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value));
  return wide;
}

#define PYFLATNESS_MMA(Kind, instruction)                                                           \
  __device__ inline void mma(Kind, float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) { \
    asm volatile(instruction " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"     \
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                   \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));               \
  }
PYFLATNESS_MMA(Tf32, "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32")
PYFLATNESS_MMA(Bf16, "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32")
PYFLATNESS_MMA(F16, "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32")
#undef PYFLATNESS_MMA

// All M x N tiles of a warp.
template <class Kind, int M, int N>
__device__ void multiply_fragments(float (&c)[M][N][4], const uint32_t (&a)[M][4], const uint32_t (&b)[N][2]) {
#pragma unroll
  for (int i = 0; i < M; ++i)
#pragma unroll
    for (int j = 0; j < N; ++j) mma(Kind{}, c[i][j], a[i], b[j]);
}

}  // namespace pyflatness::cuda
#endif

namespace pyflatness::cuda {

// An element of a kind of numbers, to be reckoned with.
__device__ inline float widened(F32, float value) { return value; }
__device__ inline double widened(F64, double value) { return value; }
__device__ inline float widened(Bf16, uint16_t value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float wide;
  memcpy(&wide, &bits, sizeof wide);
  return wide;
}

}  // namespace pyflatness::cuda
