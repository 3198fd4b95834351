// What the parts of the CUDA binding share.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "../cuda/kernels.h"
#include "checks.h"

namespace pyflatness::cuda {

inline void check(const char* kernel, int status) {
  if (status == 0) return;
  throw std::runtime_error(std::string(kernel) + ": CUDA says " + error_name(status) + ", " + error_text(status));
}

inline void* stream_of(uintptr_t stream) { return reinterpret_cast<void*>(stream); }

// The kernels of layers: cuda_layers.cpp.
void define_layers(pybind11::module_& module);
// The kernels of heads: cuda_head.cpp.
void define_head(pybind11::module_& module);

}  // namespace pyflatness::cuda
