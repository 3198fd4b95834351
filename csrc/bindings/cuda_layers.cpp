// Python's door to the CUDA kernels of layers. A suffix names the numbers: `_f32`, `_f64`, or their bytes.
#include "cuda.h"

namespace py = pybind11;

namespace pyflatness::cuda {
namespace {

constexpr int64_t kMost = (int64_t{1} << 31) - 1;  // blocks of a launch, and what kernels reckon with 32 bits

void limit_count(const char* what, std::initializer_list<int64_t> sizes) {
  if (product(sizes) > kMost) throw std::invalid_argument(std::string(what) + ": more than 2^31 - 1");
}

// The kernel reckons with 32 bits within a sample's channel.
template <typename T>
void limit_offsets(const Layer& layer, const Strided<T>& inputs) {
  int64_t last = 0;
  for (size_t i = 0; i < 3; ++i) last += layer.size[i] > 1 ? product(layer.size[i] - 1, inputs.stride[2 + i]) : 0;
  if (last > kMost)
    throw std::invalid_argument("a channel of `inputs` spans " + std::to_string(last + 1) +
                                " elements, more than 2^31");
}

template <typename T>
void bind_patches(const LayerSizes& sizes, Array inputs, const std::array<int64_t, 5>& strides, Array out,
                  uintptr_t stream) {
  const Layer layer = checked(sizes);
  const int64_t positions = product({layer.places[0], layer.places[1], layer.places[2]});
  const int64_t planes = product({layer.n, layer.groups, layer.channels});
  limit_count("positions", {positions}), limit_count("blocks", {product(planes, positions) / 256});
  const auto x = layer_inputs<T>(layer, inputs, strides);
  limit_offsets(layer, x);
  T* o = pointer<T>("out", out, product({planes, layer.kernel[0], layer.kernel[1], layer.kernel[2], positions}));
  py::gil_scoped_release release;
  check("patches", patches<T>(layer, x, o, stream_of(stream)));
}

template <typename T>
void bind_weighted(Array matrices, Array weight, int64_t count, int64_t groups, int64_t d, int64_t m, Array totals,
                   Array by_column, Array by_row, uintptr_t stream) {
  if (groups < 1 || d < 1 || m < 1)
    throw std::invalid_argument("weighted: matrices of " + std::to_string(d) + " x " + std::to_string(m) + " of " +
                                std::to_string(groups) + " groups");
  const int64_t splits = (m - 1) / kWeightedColumns + 1;
  limit_count("blocks", {count, splits});
  const T* a = pointer<const T>("matrices", matrices, product({count, d, m}));
  const T* w = pointer<const T>("weight", weight, product({groups, d, m}));
  double* t = pointer<double>("totals", totals, product({count, splits, 2}));
  double* c = pointer<double>("by_column", by_column, product(count, m));
  double* r = pointer<double>("by_row", by_row, product({count, splits, d}));
  py::gil_scoped_release release;
  check("weighted", weighted<T>(a, w, count, groups, d, m, t, c, r, stream_of(stream)));
}

}  // namespace

void define_layers(py::module_& module) {
  module.attr("WEIGHTED_COLUMNS") = kWeightedColumns;
  module.def("patches_2", &bind_patches<uint16_t>);
  module.def("patches_4", &bind_patches<float>);
  module.def("patches_8", &bind_patches<double>);
  module.def("weighted_f32", &bind_weighted<float>);
  module.def("weighted_f64", &bind_weighted<double>);
}

}  // namespace pyflatness::cuda
