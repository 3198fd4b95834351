#include "launch.cuh"

namespace pyflatness::cuda {

const char* error_name(int status) { return cudaGetErrorName(static_cast<cudaError_t>(status)); }
const char* error_text(int status) { return cudaGetErrorString(static_cast<cudaError_t>(status)); }

}  // namespace pyflatness::cuda
