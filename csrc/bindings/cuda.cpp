// Python's door to the CUDA kernels: checks every size against the element count that came with its pointer, launches
// on the stream it is given, throws on a status that is not success. An array comes as (address, element count).
#include "cuda.h"

#ifndef PYFLATNESS_CUDA_MODULE
#define PYFLATNESS_CUDA_MODULE _cuda
#endif

namespace py = pybind11;
using namespace pyflatness;

#ifdef PYFLATNESS_EMULATED
namespace emulation {
void define(py::module_& module);  // tests/cuda_emulation/controls.cpp
}
#endif

PYBIND11_MODULE(PYFLATNESS_CUDA_MODULE, module) {
  module.doc() = "CUDA kernels of pyflatness; see csrc/cpu/kernels.h for what each computes.";
  cuda::define_layers(module);
  cuda::define_head(module);
#ifdef PYFLATNESS_EMULATED
  emulation::define(module);
#endif
}
