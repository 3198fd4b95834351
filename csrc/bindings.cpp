// Python's door to the CPU kernels: checks every size against the element count that came with its pointer, releases
// the GIL, calls. An array comes as (address, element count); `_f32` and `_f64` name the element type.
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>
#include <utility>

#include "kernels.h"

namespace py = pybind11;
using pyflatness::Kernels;

namespace {

using Array = std::pair<uintptr_t, int64_t>;

const Kernels* selected = [] {
  const Kernels* const* list;
  pyflatness::available(&list);
  return list[0];
}();

py::list instruction_sets() {
  const Kernels* const* list;
  const int count = pyflatness::available(&list);
  py::list names;
  for (int i = 0; i < count; ++i) names.append(list[i]->name);
  return names;
}

void select_instruction_set(const std::string& name) {
  const Kernels* const* list;
  const int count = pyflatness::available(&list);
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

int64_t product(int64_t a, int64_t b) {
  int64_t result;
  if (a < 0 || b < 0 || __builtin_mul_overflow(a, b, &result))
    throw std::invalid_argument("sizes " + std::to_string(a) + " x " + std::to_string(b) +
                                " are not those of an array");
  return result;
}

// The elements of n rows of m, `stride` apart.
int64_t strided(int64_t n, int64_t m, int64_t stride) {
  if (stride < m)
    throw std::invalid_argument("row stride " + std::to_string(stride) + " < row length " + std::to_string(m));
  return n == 0 || m == 0 ? 0 : product(n - 1, stride) + m;
}

template <typename T>
T* pointer(const char* name, Array array, int64_t needed) {
  if (array.second != needed)
    throw std::invalid_argument(std::string("`") + name + "` has " + std::to_string(array.second) +
                                " elements, its sizes ask for " + std::to_string(needed));
  if (array.first == 0 && needed > 0) throw std::invalid_argument(std::string("`") + name + "` is a null pointer");
  return reinterpret_cast<T*>(array.first);
}

template <typename T>
void pair_distances(Array weight, int64_t d, int64_t m, Array out, int threads) {
  const T* w = pointer<const T>("weight", weight, product(d, m));
  T* o = pointer<T>("out", out, product(d, d));
  const auto& kernels = pyflatness::head<T>(*selected);  // while the GIL is held
  py::gil_scoped_release release;
  kernels.pair_distances(w, d, m, o, threads);
}

template <typename T>
void softmax_variance(Array features, int64_t stride, Array weight, Array bias, Array distances, int64_t n, int64_t m,
                      int64_t d, Array out, int threads) {
  if (d < 1 || d > pyflatness::kMaxFusedOutputs)
    throw std::invalid_argument("softmax_variance: takes 1 to " + std::to_string(pyflatness::kMaxFusedOutputs) +
                                " outputs, got " + std::to_string(d));
  const T* x = pointer<const T>("features", features, strided(n, m, stride));
  const T* w = pointer<const T>("weight", weight, product(d, m));
  const T* b = pointer<const T>("bias", bias, d);
  const T* g = pointer<const T>("distances", distances, product(d, d));
  double* o = pointer<double>("out", out, n);
  const auto& kernels = pyflatness::head<T>(*selected);  // while the GIL is held
  py::gil_scoped_release release;
  kernels.softmax_variance(x, stride, w, b, g, n, m, d, o, threads);
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
  const auto& kernels = pyflatness::head<T>(*selected);  // while the GIL is held
  py::gil_scoped_release release;
  kernels.exponentiate(z, weighted ? norms : nullptr, top_value, n, d, largest, r, mo, t, threads);
}

template <typename T>
void row_dots(Array a, int64_t stride_a, Array b, int64_t stride_b, int64_t n, int64_t k, Array out, int threads) {
  const T* x = pointer<const T>("a", a, strided(n, k, stride_a));
  const T* y = pointer<const T>("b", b, strided(n, k, stride_b));
  double* o = pointer<double>("out", out, n);
  const auto& kernels = pyflatness::head<T>(*selected);  // while the GIL is held
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
  const auto& kernels = pyflatness::head<T>(*selected);  // while the GIL is held
  py::gil_scoped_release release;
  kernels.sigmoid_curvature(z, c, w, n, d, o, threads);
}

template <typename T>
void define(py::module_& module, const std::string& suffix) {
  module.def(("pair_distances" + suffix).c_str(), &pair_distances<T>);
  module.def(("softmax_variance" + suffix).c_str(), &softmax_variance<T>);
  module.def(("exponentiate" + suffix).c_str(), &exponentiate<T>);
  module.def(("row_dots" + suffix).c_str(), &row_dots<T>);
  module.def(("sigmoid_curvature" + suffix).c_str(), &sigmoid_curvature<T>);
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.doc() = "CPU kernels of pyflatness; see csrc/kernels.h for what each computes.";
  module.attr("MAX_FUSED_OUTPUTS") = pyflatness::kMaxFusedOutputs;
  module.def("instruction_sets", &instruction_sets, "Those this build and processor have, widest first.");
  module.def("instruction_set", [] { return selected->name; }, "The one in use.");
  module.def("select_instruction_set", &select_instruction_set);
  define<float>(module, "_f32");
  define<double>(module, "_f64");
}
