// Python's door to the CUDA kernels of layers. A suffix names the kind of numbers: `_f32`, `_f64`, `_tf32`, `_bf16`,
// `_f16`; `root`, `weight` and Gram matrices are float32 for all of these but `_f64`.
#include "cuda.h"

namespace py = pybind11;

namespace pyflatness::cuda {
namespace {

constexpr int64_t kMost = (int64_t{1} << 31) - 1;  // blocks of a launch, and what kernels reckon with 32 bits

void limit_count(const char* what, std::initializer_list<int64_t> sizes) {
  if (product(sizes) > kMost) throw std::invalid_argument(std::string(what) + ": more than 2^31 - 1");
}

// Kernels reckon with 32 bits within a sample.
template <typename T>
void limit_offsets(const char* name, const Strided<T>& array, const std::array<int64_t, 5>& sizes) {
  int64_t last = 0;
  for (size_t i = 1; i < 5; ++i) last += sizes[i] > 1 ? product(sizes[i] - 1, array.stride[i]) : 0;
  if (last > kMost)
    throw std::invalid_argument(std::string("a sample of `") + name + "` spans " + std::to_string(last + 1) +
                                " elements, more than 2^31");
}

template <typename T>
Strided<T> sample_array(const char* name, Array array, const std::array<int64_t, 5>& sizes,
                        const std::array<int64_t, 5>& strides) {
  const auto result = strided_array<T>(name, array, sizes, strides);
  limit_offsets(name, result, sizes);
  return result;
}

template <typename T>
Strided<T> checked_inputs(const Layer& layer, Array inputs, const std::array<int64_t, 5>& strides) {
  return sample_array<T>("inputs", inputs,
                         {layer.n, product(layer.groups, layer.channels), layer.size[0], layer.size[1], layer.size[2]},
                         strides);
}

template <typename T>
void bind_patches(const LayerSizes& sizes, Array inputs, const std::array<int64_t, 5>& strides, Array out,
                  uintptr_t stream) {
  const Layer layer = checked(sizes);
  for (int64_t taps : layer.kernel) limit_count("kernel elements", {taps});
  for (int64_t by : layer.dilation) limit_count("dilation", {by});
  const int64_t positions = product({layer.places[0], layer.places[1], layer.places[2]});
  const int64_t planes = product({layer.n, layer.groups, layer.channels});
  limit_count("positions", {positions}), limit_count("blocks", {product(planes, positions) / 256});
  const auto x = checked_inputs<T>(layer, inputs, strides);
  T* o = pointer<T>("out", out,
                    product({planes, layer.kernel[0], layer.kernel[1], layer.kernel[2], positions}));
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

template <class Kind>
void bind_direct(const LayerSizes& sizes, Array inputs, const std::array<int64_t, 5>& input_strides, Array signal,
                 const std::array<int64_t, 5>& signal_strides, Array root, int64_t roots, Array weight, int64_t splits,
                 Array totals, Array by_column, Array by_row, uintptr_t stream) {
  using Element = typename Kind::Element;
  using Sum = typename Kind::Sum;
  const Layer layer = checked(sizes);
  limit_direct(layer, roots);
  const bool rooted = root.second != 0, weighted = weight.second != 0;
  const int64_t n = layer.n, groups = layer.groups, d = layer.rows, m = layer.columns();
  const auto x = checked_inputs<Element>(layer, inputs, input_strides);
  const auto s = sample_array<Element>(
      "signal", signal, {n, product(groups, d), layer.places[0], layer.places[1], layer.places[2]}, signal_strides);
  const Sum* r = pointer<const Sum>("root", root, rooted ? product({groups, roots, d}) : 0);
  const Sum* w = pointer<const Sum>("weight", weight, weighted ? product({groups, d, m}) : 0);
  limit_count("places", {layer.positions()}), limit_count("weights", {d, m}), limit_count("root", {roots, d});
  const int64_t across = direct_columns<Kind>(d, m, rooted && roots), tiles = (m + across - 1) / across;
  if (splits < 1 || splits > tiles)
    throw std::invalid_argument("direct: " + std::to_string(splits) + " splits of " + std::to_string(tiles) +
                                " tiles of columns");
  limit_count("blocks", {n, groups, splits});
  int64_t limit = 0;
  check("direct", shared_limit(&limit));
  if (direct_shared<Kind>(d, m, rooted && roots, weighted) > limit)
    throw std::invalid_argument("direct: " + std::to_string(d) + " rows do not fit " + std::to_string(limit) +
                                " bytes of shared memory");
  double* t = pointer<double>("totals", totals, product({n, groups, splits, 3}));
  double* c = pointer<double>("by_column", by_column, weighted ? product({n, groups, m}) : 0);
  double* o = pointer<double>("by_row", by_row, weighted ? product({n, groups, splits, d}) : 0);
  py::gil_scoped_release release;
  check("direct", direct<Kind>(layer, x, s, rooted ? r : nullptr, roots, weighted ? w : nullptr, splits, t, c, o,
                               stream_of(stream)));
}

template <class Kind, bool TensorCores>
void bind_patch_gram(const LayerSizes& sizes, Array inputs, const std::array<int64_t, 5>& input_strides, Array out,
                     uintptr_t stream) {
  const Layer layer = checked(sizes);
  limit_patch_gram(layer);
  const auto x = checked_inputs<typename Kind::Element>(layer, inputs, input_strides);
  const int64_t positions = layer.positions(), side = gram_tile(1, TensorCores), tiles = (positions + side - 1) / side;
  limit_count("columns", {layer.columns()}), limit_count("blocks", {layer.n, layer.groups, tiles, tiles});
  auto* o = pointer<typename Kind::Sum>("out", out, product({layer.n, layer.groups, positions, positions}));
  py::gil_scoped_release release;
  check("patch_gram", patch_gram<Kind>(layer, x, o, stream_of(stream)));
}

template <typename T>
void bind_sum_shifts(const LayerSizes& sizes, Array pixel_gram, Array out, uintptr_t stream) {
  const Layer layer = checked(sizes);
  limit_patch_gram(layer);
  for (int64_t stride : layer.stride)
    if (stride != 1) throw std::invalid_argument("sum_shifts: stride " + std::to_string(stride) + " is not 1");
  const int64_t pixels = layer.size[0] * layer.size[1] * layer.size[2], positions = layer.positions();
  limit_count("pixels", {pixels}), limit_count("pairs of places and a block", {positions * positions + kShiftThreads});
  limit_count("blocks", {layer.n, layer.groups, positions * positions / kShiftThreads + 1});
  const T* g = pointer<const T>("pixel_gram", pixel_gram, product({layer.n, layer.groups, pixels, pixels}));
  T* o = pointer<T>("out", out, product({layer.n, layer.groups, positions, positions}));
  py::gil_scoped_release release;
  check("sum_shifts", sum_shifts<T>(layer, g, o, stream_of(stream)));
}

template <class Kind, bool TensorCores>
void bind_gram(Array rows, const std::array<int64_t, 4>& strides, int64_t n, int64_t groups, int64_t positions,
               int64_t r, Array patch_gram, Array out, uintptr_t stream) {
  using Sum = typename Kind::Sum;
  limit_work({std::max<int64_t>(n, 1), groups, positions, positions, r});
  if (positions < 1 || r < 1)
    throw std::invalid_argument("gram: rows of " + std::to_string(positions) + " places and " + std::to_string(r) +
                                " elements");
  const auto a = sample_array<typename Kind::Element>("rows", rows, {n, groups, positions, r, 1},
                                                      {strides[0], strides[1], strides[2], strides[3], 0});
  const Sum* g = pointer<const Sum>("patch_gram", patch_gram, product({n, groups, positions, positions}));
  const int64_t tile = gram_tile(positions, TensorCores), tiles = (positions + tile - 1) / tile;
  limit_count("elements", {r}), limit_count("blocks", {n, groups, tiles, tiles});
  double* o = pointer<double>("out", out, product({n, groups, tiles, tiles}));
  py::gil_scoped_release release;
  check("gram", gram<Kind>(a, n, groups, positions, r, g, o, stream_of(stream)));
}

template <class Kind, bool TensorCores>
void define(py::module_& module, const std::string& suffix) {
  module.def(("direct_columns" + suffix).c_str(), &direct_columns<Kind>);
  module.def(("direct_shared" + suffix).c_str(), [](int64_t rows, int64_t columns, bool rooted, bool weighted) {
    limit_count("weights", {rows, columns});
    return direct_shared<Kind>(rows, columns, rooted, weighted);
  });
  module.def(("direct" + suffix).c_str(), &bind_direct<Kind>);
  module.def(("patch_gram" + suffix).c_str(), &bind_patch_gram<Kind, TensorCores>);
  module.def(("gram_tile" + suffix).c_str(), [](int64_t positions) { return gram_tile(positions, TensorCores); });
  module.def(("gram" + suffix).c_str(), &bind_gram<Kind, TensorCores>);
}

}  // namespace

void define_layers(py::module_& module) {
  module.def("shared_limit", [] {
    int64_t bytes = 0;
    check("shared_limit", shared_limit(&bytes));
    return bytes;
  });
  module.attr("WEIGHTED_COLUMNS") = kWeightedColumns;
  module.def("patches_2", &bind_patches<uint16_t>);
  module.def("patches_4", &bind_patches<float>);
  module.def("patches_8", &bind_patches<double>);
  module.def("weighted_f32", &bind_weighted<float>);
  module.def("weighted_f64", &bind_weighted<double>);
  define<F32, false>(module, "_f32");
  define<F64, false>(module, "_f64");
  define<Tf32, true>(module, "_tf32");
  define<Bf16, true>(module, "_bf16");
  define<F16, true>(module, "_f16");
  module.def("sum_shifts_f32", &bind_sum_shifts<float>);
  module.def("sum_shifts_f64", &bind_sum_shifts<double>);
}

}  // namespace pyflatness::cuda
