// The kernels by themselves, for the address and undefined-behaviour sanitizers: every instruction set, both element
// types, sizes around every tile boundary, arrays of exactly the promised size; values against plain loops.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <random>
#include <vector>

#include "../csrc/kernels.h"

namespace {

std::mt19937 generator(0);
long checks = 0;

template <typename T>
std::vector<T> normal(int64_t count) {
  std::normal_distribution<double> distribution;
  std::vector<T> values(static_cast<size_t>(count));
  for (T& value : values) value = static_cast<T>(distribution(generator));
  return values;
}

template <typename T>
void expect(double value, double truth, const char* what, const char* isa) {
  const double tolerance = sizeof(T) == 4 ? 2e-5 : 1e-11;
  ++checks;
  if (!(std::abs(value - truth) <= tolerance * (std::abs(truth) + 1e-3))) {
    std::printf("%s on %s: %.17g, expected %.17g\n", what, isa, value, truth);
    std::exit(1);
  }
}

template <typename T>
double variance(const std::vector<T>& z, const std::vector<T>& distances, int64_t d) {
  double top = z[0], total = 0, pairs = 0;
  for (T value : z) top = std::fmax(top, value);
  for (T value : z) total += std::exp(value - top);
  for (int64_t s = 0; s < d; ++s)
    for (int64_t t = 0; t < s; ++t)
      pairs += std::exp(z[size_t(s)] - top) * std::exp(z[size_t(t)] - top) * distances[size_t(s * d + t)];
  return pairs / (total * total);
}

template <typename T>
void check(const pyflatness::Kernels& kernels, int64_t n, int64_t d, int64_t m, int threads) {
  const auto& k = pyflatness::head<T>(kernels);
  const int64_t stride = m + 3;
  const auto features = normal<T>((n - 1) * stride + m), weight = normal<T>(d * m), bias = normal<T>(d);
  std::vector<T> distances(static_cast<size_t>(d * d));

  k.pair_distances(weight.data(), d, m, distances.data(), threads);
  for (int64_t s = 0; s < d; ++s)
    for (int64_t t = 0; t < d; ++t) {
      double truth = 0;
      for (int64_t j = 0; j < m; ++j)
        truth += std::pow(double(weight[size_t(s * m + j)]) - weight[size_t(t * m + j)], 2);
      expect<T>(distances[size_t(s * d + t)], truth, "pair_distances", kernels.name);
    }

  std::vector<double> norms(static_cast<size_t>(n)), values(static_cast<size_t>(n));
  k.row_dots(features.data(), stride, features.data(), stride, n, m, norms.data(), threads);
  std::vector<std::vector<T>> logits(static_cast<size_t>(n), std::vector<T>(static_cast<size_t>(d)));
  for (int64_t i = 0; i < n; ++i) {
    double truth = 0;
    for (int64_t j = 0; j < m; ++j) truth += std::pow(double(features[size_t(i * stride + j)]), 2);
    expect<T>(norms[size_t(i)], truth, "row_dots", kernels.name);
    for (int64_t s = 0; s < d; ++s) {
      double z = bias[size_t(s)];
      for (int64_t j = 0; j < m; ++j) z += double(features[size_t(i * stride + j)]) * weight[size_t(s * m + j)];
      logits[size_t(i)][size_t(s)] = static_cast<T>(z);
    }
  }
  if (d <= pyflatness::kMaxFusedOutputs) {
    k.softmax_variance(features.data(), stride, weight.data(), bias.data(), distances.data(), n, m, d, values.data(),
                       threads);
    if (m <= 40)  // with more features the logits' own float32 rounding would need a tolerance of its own
      for (int64_t i = 0; i < n; ++i)
        expect<T>(values[size_t(i)], norms[size_t(i)] * variance(logits[size_t(i)], distances, d), "softmax_variance",
                  kernels.name);
  }

  std::vector<T> flat, coefficients = normal<T>(n * d);
  for (const auto& row : logits) flat.insert(flat.end(), row.begin(), row.end());
  k.sigmoid_curvature(flat.data(), coefficients.data(), bias.data(), n, d, values.data(), threads);
  for (int64_t i = 0; i < n; ++i) {
    double truth = 0, size = 0;
    for (int64_t s = 0; s < d; ++s) {
      const double e = std::exp(-std::abs(double(flat[size_t(i * d + s)])));
      const double term = double(coefficients[size_t(i * d + s)]) * bias[size_t(s)] * e / ((1 + e) * (1 + e));
      truth += term, size += std::abs(term);
    }
    expect<T>(values[size_t(i)] + 2 * size, truth + 2 * size, "sigmoid_curvature", kernels.name);
  }

  std::vector<double> rest(static_cast<size_t>(n)), moment(static_cast<size_t>(n));
  std::vector<int64_t> top(static_cast<size_t>(n));
  std::vector<T> maximum(static_cast<size_t>(n), -std::numeric_limits<T>::infinity());
  k.exponentiate(flat.data(), bias.data(), T(0.5), n, d, maximum.data(), rest.data(), moment.data(), top.data(),
                 threads);
  for (int64_t i = 0; i < n; ++i) {
    const auto& z = logits[size_t(i)];
    int64_t place = 0;
    for (int64_t s = 1; s < d; ++s) place = z[size_t(s)] > z[size_t(place)] ? s : place;
    double truth = 0;
    for (int64_t s = 0; s < d; ++s) truth += s == place ? 0 : std::exp(double(z[size_t(s)]) - z[size_t(place)]);
    expect<T>(double(top[size_t(i)]), double(place), "the place of the maximum", kernels.name);
    expect<T>(rest[size_t(i)], truth, "exponentiate", kernels.name);
    expect<T>(flat[size_t(i * d + place)], 0.5, "the value at the maximum", kernels.name);
  }
}

template <typename T>
void check_not_finite(const pyflatness::Kernels& kernels) {
  for (T bad :
       {std::numeric_limits<T>::quiet_NaN(), std::numeric_limits<T>::infinity(), -std::numeric_limits<T>::infinity()}) {
    std::vector<T> z = normal<T>(3 * 37);
    z[37 + 5] = bad;
    std::vector<double> rest(3);
    std::vector<int64_t> top(3);
    std::vector<T> maximum(3, -std::numeric_limits<T>::infinity());
    pyflatness::head<T>(kernels).exponentiate(z.data(), nullptr, T(1), 3, 37, maximum.data(), rest.data(), nullptr,
                                              top.data(), 1);
    ++checks;
    const bool hidden = std::isfinite(rest[1]) && bad != -std::numeric_limits<T>::infinity();
    if (hidden || !std::isfinite(rest[0]) || !std::isfinite(rest[2]))
      std::printf("exponentiate hides %g\n", double(bad)), std::exit(1);
  }
}

}  // namespace

int main() {
  const pyflatness::Kernels* const* list;
  const int count = pyflatness::available(&list);
  for (int isa = 0; isa < count; ++isa) {
    for (int threads : {1, 2})
      for (int64_t n : {1, 7, 8, 31, 33, 70})
        for (int64_t d : {1, 2, 4, 5, 10, 11, 17, 63, 64, 65, 100})
          for (int64_t m : {1, 2, 7, 16, 17, 40, 129, 300}) {
            check<float>(*list[isa], n, d, m, threads);
            check<double>(*list[isa], n, d, m, threads);
          }
    check_not_finite<float>(*list[isa]);
    check_not_finite<double>(*list[isa]);
    std::printf("%s: ok\n", list[isa]->name);
  }
  std::printf("%ld checks passed\n", checks);
}
