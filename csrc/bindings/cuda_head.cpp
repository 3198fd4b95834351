// The binding of the head's kernels.
#include "cuda.h"

namespace py = pybind11;

namespace pyflatness::cuda {
namespace {

// A grid has a block for every row, or for fewer.
int64_t grid_rows(int64_t n) {
  if (n > INT32_MAX) throw std::invalid_argument(std::to_string(n) + " rows are more than a grid of blocks has");
  return n;
}

// Kernels count the elements of a row in 32 bits, and go a few thousand beyond its end.
int64_t row_length(int64_t k) {
  if (k > 1 << 30) throw std::invalid_argument("rows of " + std::to_string(k) + " elements, at most 2^30");
  return k;
}

template <typename T>
void bind_pair_distances(Array weight, int64_t d, int64_t m, Array out, uintptr_t stream) {
  const T* w = pointer<const T>("weight", weight, product(d, m));
  T* o = pointer<T>("out", out, product(d, d));
  py::gil_scoped_release release;
  check("pair_distances", pair_distances(w, d, m, o, stream_of(stream)));
}

template <typename T>
void bind_softmax_variance(Array features, int64_t stride, Array weight, Array bias, Array distances, int64_t n,
                           int64_t m, int64_t d, Array out, uintptr_t stream) {
  if (d < 1 || d > kMaxFusedOutputs)
    throw std::invalid_argument("softmax_variance: takes 1 to " + std::to_string(kMaxFusedOutputs) + " outputs, got " +
                                std::to_string(d));
  const T* x = pointer<const T>("features", features, strided(n, m, stride));
  const T* w = pointer<const T>("weight", weight, product(d, m));
  const T* b = pointer<const T>("bias", bias, d);
  const T* pairs = pointer<const T>("distances", distances, product(d, d));
  double* o = pointer<double>("out", out, grid_rows(n));
  py::gil_scoped_release release;
  check("softmax_variance", softmax_variance(x, stride, w, b, pairs, n, m, d, o, stream_of(stream)));
}

template <typename T>
void bind_exponentiate(Array logits, Array row_norms, double top_value, int64_t n, int64_t d, Array maximum, Array rest,
                       Array moment, Array top, uintptr_t stream) {
  T* z = pointer<T>("logits", logits, product(grid_rows(n), row_length(d)));
  const bool weighted = row_norms.second > 0;
  const T* norms = weighted ? pointer<const T>("row_norms", row_norms, d) : nullptr;
  T* largest = pointer<T>("maximum", maximum, n);
  double* sums = pointer<double>("rest", rest, n);
  double* moments = pointer<double>("moment", moment, weighted ? n : 0);
  int64_t* places = pointer<int64_t>("top", top, n);
  py::gil_scoped_release release;
  check("exponentiate",
        exponentiate(z, norms, static_cast<T>(top_value), n, d, largest, sums, moments, places, stream_of(stream)));
}

template <typename T, typename Out>
void bind_exponentiate_tile(Array logits, int64_t stride, Array bias, Array norms, int64_t classes, int64_t first,
                            int64_t n, int64_t width, Array out, int64_t out_stride, Array maximum, Array top,
                            Array rest, Array moment, Array joining, Array factor, uintptr_t stream) {
  if (first < 0 || width < 0 || width > classes - first)
    throw std::invalid_argument(std::to_string(width) + " classes from " + std::to_string(first) +
                                " on: sizes that are not those of an array of " + std::to_string(classes));
  T* z = pointer<T>("logits", logits, strided(grid_rows(n), row_length(width), stride));
  Out* e = pointer<Out>("out", out, strided(n, width, out_stride));
  const T* b = bias.second > 0 ? pointer<const T>("bias", bias, classes) : nullptr;
  const Running<T> running{pointer<T>("maximum", maximum, n),         pointer<int64_t>("top", top, n),
                           pointer<double>("rest", rest, n),          pointer<double>("moment", moment, n),
                           pointer<const T>("norms", norms, classes), pointer<int64_t>("joining", joining, n),
                           pointer<double>("factor", factor, n)};
  py::gil_scoped_release release;
  check("exponentiate_tile",
        exponentiate_tile(z, stride, b, first, n, width, e, out_stride, running, stream_of(stream)));
}

template <typename T>
void bind_row_dots(Array a, int64_t stride_a, Array b, int64_t stride_b, int64_t n, int64_t k, Array out,
                   uintptr_t stream) {
  const T* x = pointer<const T>("a", a, strided(grid_rows(n), row_length(k), stride_a));
  const T* y = pointer<const T>("b", b, strided(n, k, stride_b));
  double* o = pointer<double>("out", out, n);
  py::gil_scoped_release release;
  check("row_dots", row_dots(x, stride_a, y, stride_b, n, k, o, stream_of(stream)));
}

template <typename T>
void bind_sigmoid_curvature(Array logits, Array coefficients, Array row_norms, int64_t n, int64_t d, Array out,
                            uintptr_t stream) {
  const T* z = pointer<const T>("logits", logits, product(grid_rows(n), row_length(d)));
  const T* c = pointer<const T>("coefficients", coefficients, product(n, d));
  const T* norms = pointer<const T>("row_norms", row_norms, d);
  double* o = pointer<double>("out", out, n);
  py::gil_scoped_release release;
  check("sigmoid_curvature", sigmoid_curvature(z, c, norms, n, d, o, stream_of(stream)));
}

template <typename T, typename W>
void bind_norms_about(Array weight, Array centre, int64_t d, int64_t m, Array out, uintptr_t stream) {
  const W* w = pointer<const W>("weight", weight, product(grid_rows(d), row_length(m)));
  const T* c = pointer<const T>("centre", centre, m);
  T* o = pointer<T>("out", out, d);
  py::gil_scoped_release release;
  check("norms_about", norms_about(w, c, d, m, o, stream_of(stream)));
}

template <typename T, typename W>
void bind_rejoin(Array summed, Array weight, Array centre, Array top, Array factor, int64_t n, int64_t d, int64_t m,
                 uintptr_t stream) {
  T* sums = pointer<T>("summed", summed, product(grid_rows(n), row_length(m)));
  const W* w = pointer<const W>("weight", weight, product(d, m));
  const T* c = centre.second > 0 ? pointer<const T>("centre", centre, m) : nullptr;
  const int64_t* places = pointer<const int64_t>("top", top, n);
  const double* factors = pointer<const double>("factor", factor, n);
  py::gil_scoped_release release;
  check("rejoin", rejoin(sums, w, c, places, factors, n, d, m, stream_of(stream)));
}

template <typename T, typename W>
void bind_mean_row(Array summed, Array weight, Array centre, Array top, Array rest, Array uncentred, int64_t n,
                   int64_t d, int64_t m, Array lengths, uintptr_t stream) {
  T* sums = pointer<T>("summed", summed, product(grid_rows(n), row_length(m)));
  const W* w = pointer<const W>("weight", weight, product(d, m));
  const T* c = pointer<const T>("centre", centre, m);
  const int64_t* places = pointer<const int64_t>("top", top, n);
  const double* all = pointer<const double>("rest", rest, n);
  const double* inside = uncentred.second > 0 ? pointer<const double>("uncentred", uncentred, n) : nullptr;
  double* o = pointer<double>("lengths", lengths, product(3, n));
  py::gil_scoped_release release;
  check("mean_row", mean_row(sums, w, c, places, all, inside, n, d, m, o, stream_of(stream)));
}

template <typename T, typename W>
void bind_spread(Array features, Array maximum, Array mean, Array weight, Array centre, Array bias, Array chosen,
                 int64_t n, int64_t d, int64_t m, Array rows, Array partial, Array out, uintptr_t stream) {
  const T* x = pointer<const T>("features", features, product(grid_rows(n), m));
  const T* largest = pointer<const T>("maximum", maximum, n);
  const T* means = pointer<const T>("mean", mean, product(n, m));
  const W* w = pointer<const W>("weight", weight, product(d, m));
  const T* c = centre.second > 0 ? pointer<const T>("centre", centre, m) : nullptr;
  const T* b = pointer<const T>("bias", bias, d);
  const bool* taken = pointer<const bool>("chosen", chosen, n);
  int64_t* list = pointer<int64_t>("rows", rows, n + 1);
  double* parts = pointer<double>("partial", partial, product(n, spread_splits(d)));
  double* o = pointer<double>("out", out, n);
  py::gil_scoped_release release;
  check("spread", spread(x, largest, means, w, c, b, taken, n, d, m, list, parts, o, stream_of(stream)));
}

template <typename T>
void define(py::module_& module, const std::string& suffix) {
  module.def(("pair_distances" + suffix).c_str(), &bind_pair_distances<T>);
  module.def(("softmax_variance" + suffix).c_str(), &bind_softmax_variance<T>);
  module.def(("exponentiate" + suffix).c_str(), &bind_exponentiate<T>);
  module.def(("row_dots" + suffix).c_str(), &bind_row_dots<T>);
  module.def(("sigmoid_curvature" + suffix).c_str(), &bind_sigmoid_curvature<T>);
}

// Named by the weight's elements.
template <typename T, typename W>
void define_wide(py::module_& module, const std::string& suffix) {
  module.def(("norms_about" + suffix).c_str(), &bind_norms_about<T, W>);
  module.def(("rejoin" + suffix).c_str(), &bind_rejoin<T, W>);
  module.def(("mean_row" + suffix).c_str(), &bind_mean_row<T, W>);
  module.def(("spread" + suffix).c_str(), &bind_spread<T, W>);
}

}  // namespace

void define_head(py::module_& module) {
  module.attr("MAX_FUSED_OUTPUTS") = kMaxFusedOutputs;
  module.def("spread_splits", &spread_splits);
  define<float>(module, "_f32");
  define<double>(module, "_f64");
  define_wide<float, float>(module, "_f32");
  define_wide<double, double>(module, "_f64");
  define_wide<float, BFloat16>(module, "_bf16");
  define_wide<float, Float16>(module, "_f16");
  module.def("exponentiate_tile_f32", &bind_exponentiate_tile<float, float>);
  module.def("exponentiate_tile_f64", &bind_exponentiate_tile<double, double>);
  module.def("exponentiate_tile_bf16", &bind_exponentiate_tile<float, BFloat16>);
}

}  // namespace pyflatness::cuda
