// Python's door to the CPU kernels: checks every size against the element count that came with its pointer, releases
// the GIL, calls. An array comes as (address, element count); `_f32` and `_f64` name the element type.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>
#include <vector>

#include "checks.h"

namespace py = pybind11;
using namespace pyflatness;

namespace {

const Kernels* selected = [] {
  const Kernels* const* list;
  pyflatness::available(&list);
  return list[0];
}();

py::list instruction_sets() {
  const Kernels* const* list;
  const int count = available(&list);
  py::list names;
  for (int i = 0; i < count; ++i) names.append(list[i]->name);
  return names;
}

void select_instruction_set(const std::string& name) {
  const Kernels* const* list;
  const int count = available(&list);
  std::string names;
  for (int i = 0; i < count; ++i) {
    if (name == list[i]->name) {
      selected = list[i];
      return;
    }
    names += std::string(i ? ", " : "") + list[i]->name;
  }
  throw std::invalid_argument("instruction set '" + name +
                              "' cannot run here; this build and processor have: " + names);
}

const std::array<const char*, 4> kDirectForms = {"automatic", "patches", "tiles2", "tiles4"};
DirectForm direct_form = DirectForm::automatic;

void select_direct_form(const std::string& name) {
  for (size_t i = 0; i < kDirectForms.size(); ++i)
    if (name == kDirectForms[i]) {
      direct_form = static_cast<DirectForm>(i);
      return;
    }
  throw std::invalid_argument("direct has no form '" + name + "'; it has: automatic, patches, tiles2, tiles4");
}

template <typename T>
void pair_distances(Array weight, int64_t d, int64_t m, Array out, int threads) {
  const T* w = pointer<const T>("weight", weight, product(d, m));
  T* o = pointer<T>("out", out, product(d, d));
  const auto& kernels = of<T>(selected->head);  // while the GIL is held
  py::gil_scoped_release release;
  kernels.pair_distances(w, d, m, o, threads);
}

void limit_fused(int64_t d) {
  if (d < 1 || d > kMaxFusedOutputs)
    throw std::invalid_argument("softmax_variance: takes 1 to " + std::to_string(kMaxFusedOutputs) + " outputs, got " +
                                std::to_string(d));
}

template <typename T>
void softmax_variance(Array features, int64_t stride, Array weight, Array bias, Array distances, int64_t n, int64_t m,
                      int64_t d, Array out, int threads) {
  limit_fused(d);
  const T* x = pointer<const T>("features", features, strided(n, m, stride));
  const T* w = pointer<const T>("weight", weight, product(d, m));
  const T* b = pointer<const T>("bias", bias, d);
  const T* g = pointer<const T>("distances", distances, product(d, d));
  double* o = pointer<double>("out", out, n);
  const auto& kernels = of<T>(selected->head);  // while the GIL is held
  py::gil_scoped_release release;
  kernels.softmax_variance(x, stride, w, b, g, n, m, d, o, threads);
}

template <typename T>
std::pair<double, int64_t> softmax_variance_sum(Array features, int64_t stride, Array weight, Array bias,
                                                Array prepared, bool fresh, Array labels, int64_t ignored, int64_t n,
                                                int64_t m, int64_t d, Array values, int threads) {
  limit_fused(d);
  const T* x = pointer<const T>("features", features, strided(n, m, stride));
  const T* w = pointer<const T>("weight", weight, product(d, m));
  const T* b = pointer<const T>("bias", bias, bias.second ? d : 0);
  T* p = pointer<T>("prepared", prepared, product(d, packed_columns(m) + 1 + d));
  const int64_t* l = pointer<const int64_t>("labels", labels, labels.second ? n : 0);
  double* v = pointer<double>("values", values, values.second ? n : 0);
  double total;
  int64_t counted;
  const auto& kernels = of<T>(selected->head);  // while the GIL is held
  py::gil_scoped_release release;
  if (fresh) kernels.prepare_softmax_variance(w, bias.second ? b : nullptr, d, m, p, threads);
  kernels.softmax_variance_sum(x, stride, p, labels.second ? l : nullptr, ignored, n, m, d, values.second ? v : nullptr,
                               &total, &counted, threads);
  return {total, counted};
}

template <typename T>
double softmax_variance_gradient(Array features, int64_t stride, Array weight, Array bias, Array prepared, Array shares,
                                 int64_t n, int64_t m, int64_t d, Array slopes, Array probabilities, Array factors,
                                 int threads) {
  limit_fused(d);
  const T* x = pointer<const T>("features", features, strided(n, m, stride));
  const T* w = pointer<const T>("weight", weight, product(d, m));
  const T* b = pointer<const T>("bias", bias, bias.second ? d : 0);
  T* p = pointer<T>("prepared", prepared, product(d, packed_columns(m) + 1 + d));
  const double* a = pointer<const double>("shares", shares, n);
  T* g = pointer<T>("slopes", slopes, product(d, n));
  T* q = pointer<T>("probabilities", probabilities, product(d, n));
  T* f = pointer<T>("factors", factors, product(2, n));
  double total;
  const auto &head = of<T>(selected->head), &gradient = of<T>(selected->head_gradient);  // while the GIL is held
  py::gil_scoped_release release;
  head.prepare_softmax_variance(w, bias.second ? b : nullptr, d, m, p, threads);
  gradient.softmax_variance_gradient(x, stride, p, a, n, m, d, g, q, f, &total, threads);
  return total;
}

template <typename T>
void exponentiate(Array logits, Array row_norms, T top_value, int64_t n, int64_t d, Array maximum, Array rest,
                  Array moment, Array top, int threads) {
  if (d < 1) throw std::invalid_argument("exponentiate: rows of " + std::to_string(d) + " logits");
  const bool weighted = row_norms.second != 0;
  T* z = pointer<T>("logits", logits, product(n, d));
  const T* norms = pointer<const T>("row_norms", row_norms, weighted ? d : 0);
  T* largest = pointer<T>("maximum", maximum, n);
  double* r = pointer<double>("rest", rest, n);
  double* mo = pointer<double>("moment", moment, weighted ? n : 0);
  int64_t* t = pointer<int64_t>("top", top, n);
  const auto& kernels = of<T>(selected->head);  // while the GIL is held
  py::gil_scoped_release release;
  kernels.exponentiate(z, weighted ? norms : nullptr, top_value, n, d, largest, r, mo, t, threads);
}

template <typename T>
void row_dots(Array a, int64_t stride_a, Array b, int64_t stride_b, int64_t n, int64_t k, Array out, int threads) {
  const T* x = pointer<const T>("a", a, strided(n, k, stride_a));
  const T* y = pointer<const T>("b", b, strided(n, k, stride_b));
  double* o = pointer<double>("out", out, n);
  const auto& kernels = of<T>(selected->head);  // while the GIL is held
  py::gil_scoped_release release;
  kernels.row_dots(x, stride_a, y, stride_b, n, k, o, threads);
}

template <typename T>
void sigmoid_curvature(Array logits, Array coefficients, Array row_norms, int64_t n, int64_t d, Array out,
                       int threads) {
  const T* z = pointer<const T>("logits", logits, product(n, d));
  const T* c = pointer<const T>("coefficients", coefficients, product(n, d));
  const T* w = pointer<const T>("row_norms", row_norms, d);
  double* o = pointer<double>("out", out, n);
  const auto& kernels = of<T>(selected->head);  // while the GIL is held
  py::gil_scoped_release release;
  kernels.sigmoid_curvature(z, c, w, n, d, o, threads);
}

template <typename T>
int64_t direct_workspace(const LayerSizes& sizes, int64_t roots, bool weighted, int threads) {
  const Layer layer = checked(sizes);
  limit_direct(layer, roots);
  return of<T>(selected->layer).direct_workspace(layer, direct_form, roots, weighted, threads);
}

template <typename T>
void direct(const LayerSizes& sizes, Array inputs, const std::array<int64_t, 5>& input_strides, Array signal,
            const std::array<int64_t, 5>& signal_strides, Array root, int64_t roots, Array weight, int64_t splits,
            Array totals, Array by_column, Array by_row, Array workspace, int threads) {
  const Layer layer = checked(sizes);
  limit_direct(layer, roots);
  if (splits < 1) throw std::invalid_argument("direct: " + std::to_string(splits) + " splits");
  const bool rooted = root.second != 0, weighted = weight.second != 0;
  const int64_t n = layer.n, groups = layer.groups, d = layer.rows, channels = product(groups, layer.channels);
  const auto x = layer_inputs<T>(layer, inputs, input_strides);
  const auto s = layer_signal<T>(layer, places_of(layer), signal, signal_strides);
  const T* r = pointer<const T>("root", root, rooted ? product({groups, roots, d}) : 0);
  const T* w = pointer<const T>("weight", weight, weighted ? product({groups, d, layer.columns()}) : 0);
  double* t = pointer<double>("totals", totals, product({n, groups, splits, 3}));
  double* c = pointer<double>("by_column", by_column, weighted ? product(n, channels) : 0);
  double* o = pointer<double>("by_row", by_row, weighted ? product({n, groups, splits, d}) : 0);
  const auto& kernels = of<T>(selected->layer);  // while the GIL is held
  const auto form = direct_form;
  T* b =
      pointer<T>("workspace", workspace, kernels.direct_workspace(layer, form, rooted ? roots : 0, weighted, threads));
  py::gil_scoped_release release;
  kernels.direct(layer, form, x, s, rooted ? r : nullptr, roots, weighted ? w : nullptr, splits, t, c, o, b, threads);
}

template <typename T>
bool gathered_pays(const LayerSizes& sizes) {
  return of<T>(selected->gathered).pays(checked(sizes));
}

template <typename T>
int64_t direct_gathered_workspace(const LayerSizes& sizes, int64_t length, int64_t roots, int64_t signals,
                                  int threads) {
  const Layer layer = checked(sizes);
  limit_gathered(layer, length, roots, signals);
  return of<T>(selected->gathered).workspace(layer, length, roots, signals, threads);
}

template <typename T>
void direct_gathered(const LayerSizes& sizes, Array inputs, const std::array<int64_t, 5>& input_strides,
                     const std::vector<Array>& signals, const std::vector<std::array<int64_t, 5>>& signal_strides,
                     Array sources, int64_t length, Array root, int64_t roots, Array totals, Array workspace,
                     int threads) {
  const Layer layer = checked(sizes);
  const auto count = static_cast<int64_t>(signals.size());
  limit_gathered(layer, length, roots, count);
  const bool placed = sources.second != 0 || layer.n == 0;
  if (placed ? layer.positions() > INT32_MAX : length != layer.positions())
    throw std::invalid_argument("direct_gathered: rows of " + std::to_string(length) + " elements with " +
                                std::to_string(sources.second) + " sources");
  if (signal_strides.size() != signals.size())
    throw std::invalid_argument("direct_gathered: " + std::to_string(count) + " signals, strides of " +
                                std::to_string(signal_strides.size()));
  const bool rooted = root.second != 0;
  const auto x = layer_inputs<T>(layer, inputs, input_strides);
  std::vector<Strided<T>> all;
  for (size_t k = 0; k < signals.size(); ++k)
    all.push_back(
        layer_signal<T>(layer, placed ? Triple{1, 1, length} : places_of(layer), signals[k], signal_strides[k]));
  const int32_t* at =
      pointer<const int32_t>("sources", sources, placed ? product({layer.n, layer.groups, layer.rows, length}) : 0);
  const T* r = pointer<const T>("root", root, rooted ? product({layer.groups, roots, layer.rows}) : 0);
  double* t = pointer<double>("totals", totals, product({count, layer.n, layer.groups, 2}));
  const auto& kernels = of<T>(selected->gathered);  // while the GIL is held
  T* b = pointer<T>("workspace", workspace, kernels.workspace(layer, length, rooted ? roots : 0, count, threads));
  py::gil_scoped_release release;
  kernels.direct_gathered(layer, x, all.data(), count, placed ? at : nullptr, length, rooted ? r : nullptr, roots, t, b,
                          threads);
}

template <typename T>
int64_t patch_gram_workspace(const LayerSizes& sizes, int threads) {
  const Layer layer = checked(sizes);
  limit_patch_gram(layer);
  return of<T>(selected->gram).patch_gram_workspace(layer, threads);
}

template <typename T>
void patch_gram(const LayerSizes& sizes, Array inputs, const std::array<int64_t, 5>& input_strides, Array out,
                Array workspace, int threads) {
  const Layer layer = checked(sizes);
  limit_patch_gram(layer);
  const auto x = layer_inputs<T>(layer, inputs, input_strides);
  T* o = pointer<T>("out", out, product({layer.n, layer.groups, layer.positions(), layer.positions()}));
  const auto& kernels = of<T>(selected->gram);  // while the GIL is held
  T* b = pointer<T>("workspace", workspace, kernels.patch_gram_workspace(layer, threads));
  py::gil_scoped_release release;
  kernels.patch_gram(layer, x, o, b, threads);
}

template <typename T>
int64_t gram_workspace(int64_t positions, int64_t r, int threads) {
  limit_work({positions, positions, r});
  return of<T>(selected->gram).gram_workspace(positions, r, threads);
}

template <typename T>
void gram(Array rows, const std::array<int64_t, 4>& strides, int64_t n, int64_t groups, int64_t positions, int64_t r,
          Array patch_gram, Array out, Array workspace, int threads) {
  limit_work({std::max<int64_t>(n, 1), groups, positions, positions, r});
  if (positions < 1 || r < 1)
    throw std::invalid_argument("gram: rows of " + std::to_string(positions) + " places and " + std::to_string(r) +
                                " elements");
  const auto a =
      strided_array<T>("rows", rows, {n, groups, positions, r, 1}, {strides[0], strides[1], strides[2], strides[3], 0});
  const T* g = pointer<const T>("patch_gram", patch_gram, product({n, groups, positions, positions}));
  double* o = pointer<double>("out", out, product(n, groups));
  const auto& kernels = of<T>(selected->gram);  // while the GIL is held
  T* b = pointer<T>("workspace", workspace, kernels.gram_workspace(positions, r, threads));
  py::gil_scoped_release release;
  kernels.gram(a, n, groups, positions, r, g, o, b, threads);
}

template <typename T>
int64_t gram_rooted_workspace(int64_t positions, int64_t d, int64_t roots, int threads) {
  limit_work({positions, positions, d});
  return of<T>(selected->gram).gram_rooted_workspace(positions, d, roots, threads);
}

template <typename T>
void gram_rooted(Array rows, const std::array<int64_t, 4>& strides, int64_t n, int64_t groups, int64_t positions,
                 int64_t d, Array root, int64_t roots, bool triangular, Array patch_gram, Array out, Array workspace,
                 int threads) {
  limit_work({std::max<int64_t>(n, 1), groups, positions, positions + d, roots});
  if (positions < 1 || d < 1 || roots < 1 || roots % kRootRows)
    throw std::invalid_argument("gram_rooted: rows of " + std::to_string(positions) + " places and " +
                                std::to_string(d) + " elements, a root of " + std::to_string(roots) + " rows");
  const auto a =
      strided_array<T>("rows", rows, {n, groups, positions, d, 1}, {strides[0], strides[1], strides[2], strides[3], 0});
  const T* r = pointer<const T>("root", root, product({groups, roots, d}));
  const T* g = pointer<const T>("patch_gram", patch_gram, product({n, groups, positions, positions}));
  double* o = pointer<double>("out", out, product(n, groups));
  const auto& kernels = of<T>(selected->gram);  // while the GIL is held
  T* b = pointer<T>("workspace", workspace, kernels.gram_rooted_workspace(positions, d, roots, threads));
  py::gil_scoped_release release;
  kernels.gram_rooted(a, n, groups, positions, d, r, roots, triangular, g, o, b, threads);
}

void small_eigenvalues(Array matrices, int64_t n, int64_t size, Array out, int threads) {
  if (size < 1 || size > kMaxEigenSize)
    throw std::invalid_argument("small_eigenvalues: takes matrices of 1 to " + std::to_string(kMaxEigenSize) +
                                " rows, got " + std::to_string(size));
  const double* a = pointer<const double>("matrices", matrices, product({n, size, size}));
  double* o = pointer<double>("out", out, product(n, size));
  const auto& kernels = selected->eigen;  // while the GIL is held
  py::gil_scoped_release release;
  kernels.small_eigenvalues(a, n, size, o, threads);
}

template <typename T>
void define(py::module_& module, const std::string& suffix) {
  module.def(("pair_distances" + suffix).c_str(), &pair_distances<T>);
  module.def(("softmax_variance" + suffix).c_str(), &softmax_variance<T>);
  module.def(("softmax_variance_sum" + suffix).c_str(), &softmax_variance_sum<T>);
  module.def(("softmax_variance_gradient" + suffix).c_str(), &softmax_variance_gradient<T>);
  module.def(("exponentiate" + suffix).c_str(), &exponentiate<T>);
  module.def(("row_dots" + suffix).c_str(), &row_dots<T>);
  module.def(("sigmoid_curvature" + suffix).c_str(), &sigmoid_curvature<T>);
  module.def(("direct_workspace" + suffix).c_str(), &direct_workspace<T>);
  module.def(("direct" + suffix).c_str(), &direct<T>);
  module.def(("gathered_pays" + suffix).c_str(), &gathered_pays<T>);
  module.def(("direct_gathered_workspace" + suffix).c_str(), &direct_gathered_workspace<T>);
  module.def(("direct_gathered" + suffix).c_str(), &direct_gathered<T>);
  module.def(("patch_gram_workspace" + suffix).c_str(), &patch_gram_workspace<T>);
  module.def(("patch_gram" + suffix).c_str(), &patch_gram<T>);
  module.def(("gram_workspace" + suffix).c_str(), &gram_workspace<T>);
  module.def(("gram" + suffix).c_str(), &gram<T>);
  module.def(("gram_rooted_workspace" + suffix).c_str(), &gram_rooted_workspace<T>);
  module.def(("gram_rooted" + suffix).c_str(), &gram_rooted<T>);
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.doc() = "CPU kernels of pyflatness; see csrc/cpu/kernels.h for what each computes.";
  module.def("packed_columns", &packed_columns);
  module.attr("MAX_FUSED_OUTPUTS") = kMaxFusedOutputs;
  module.attr("MAX_EIGEN_SIZE") = kMaxEigenSize;
  module.def("small_eigenvalues_f64", &small_eigenvalues);
  module.def("instruction_sets", &instruction_sets, "Those this build and processor have, widest first.");
  module.def("instruction_set", [] { return selected->name; }, "The one in use.");
  module.def("select_instruction_set", &select_instruction_set);
  module.def("direct_form", [] { return kDirectForms[static_cast<size_t>(direct_form)]; }, "The one in use.");
  module.def("select_direct_form", &select_direct_form);
  define<float>(module, "_f32");
  define<double>(module, "_f64");
}
