// The CUDA kernels of pyflatness: pointers to device memory, sizes, scalars, a stream. No CUDA header here, so that the
// binding compiles without one. What a kernel computes is said in ../kernels.h, where the CPU's of the same name is.
//
// Every function launches on `stream` (a cudaStream_t) of the current device, allocates nothing, waits for nothing, and
// returns a cudaError_t: 0 is success.
#pragma once

#include <cstdint>

#include "../kernels.h"

namespace pyflatness::cuda {

// The name and the text of a cudaError_t.
const char* error_name(int status);
const char* error_text(int status);

int small_eigenvalues(const double* matrices,  // [n, size, size]
                      int64_t n, int64_t size,
                      double* out,  // [n, size]
                      void* stream);

}  // namespace pyflatness::cuda
