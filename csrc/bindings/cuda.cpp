// Python's door to the CUDA kernels: checks every size against the element count that came with its pointer, launches
// on the stream it is given, throws on a status that is not success. An array comes as (address, element count).
#include "cuda.h"

#ifndef PYFLATNESS_CUDA_MODULE
#define PYFLATNESS_CUDA_MODULE _cuda
#endif

namespace py = pybind11;
using namespace pyflatness;

namespace {

void small_eigenvalues(Array matrices, int64_t n, int64_t size, Array out, uintptr_t stream) {
  if (size < 1 || size > kMaxEigenSize)
    throw std::invalid_argument("small_eigenvalues: takes matrices of 1 to " + std::to_string(kMaxEigenSize) +
                                " rows, got " + std::to_string(size));
  const double* a = pointer<const double>("matrices", matrices, product({n, size, size}));
  double* o = pointer<double>("out", out, product(n, size));
  py::gil_scoped_release release;
  cuda::check("small_eigenvalues", cuda::small_eigenvalues(a, n, size, o, cuda::stream_of(stream)));
}

}  // namespace

#ifdef PYFLATNESS_EMULATED
namespace emulation {
void define(py::module_& module);  // tests/cuda_emulation/controls.cpp
}
#endif

PYBIND11_MODULE(PYFLATNESS_CUDA_MODULE, module) {
  module.doc() = "CUDA kernels of pyflatness; see csrc/cpu/kernels.h for what each computes.";
  module.attr("MAX_EIGEN_SIZE") = kMaxEigenSize;
  module.def("small_eigenvalues_f64", &small_eigenvalues);
  cuda::define_layers(module);
  cuda::define_head(module);
#ifdef PYFLATNESS_EMULATED
  emulation::define(module);
#endif
}
