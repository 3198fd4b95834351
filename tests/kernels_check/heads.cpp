// The kernels of heads.
#include "check.h"

namespace {

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

// Against softmax_variance with the raw weight: shifting weight and bias changes nothing but the rounding.
template <typename T>
void check_sum(const pyflatness::Kernels& kernels, const std::vector<T>& features, int64_t stride,
               const std::vector<T>& weight, const std::vector<T>& bias, int64_t n, int64_t d, int64_t m, int threads) {
  const auto& k = pyflatness::of<T>(kernels.head);
  std::vector<T> prepared(size_t(d * (pyflatness::packed_columns(m) + 1 + d))), distances(size_t(d * d));
  std::vector<int64_t> labels(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) labels[size_t(i)] = i % 3 == 1 ? -100 : i % d;
  std::vector<double> values(static_cast<size_t>(n)), truth(static_cast<size_t>(n));
  k.prepare_softmax_variance(weight.data(), bias.data(), d, m, prepared.data(), threads);
  k.pair_distances(weight.data(), d, m, distances.data(), threads);
  k.softmax_variance(features.data(), stride, weight.data(), bias.data(), distances.data(), n, m, d, truth.data(),
                     threads);
  double total, kept = 0;
  int64_t counted;
  k.softmax_variance_sum(features.data(), stride, prepared.data(), labels.data(), -100, n, m, d, values.data(), &total,
                         &counted, threads);
  for (int64_t i = 0; i < n; ++i) {
    const double value = i % 3 == 1 ? 0 : truth[size_t(i)];
    expect<T>(values[size_t(i)], value, "softmax_variance_sum: values", kernels.name);
    kept += value;
  }
  expect<T>(total, kept, "softmax_variance_sum", kernels.name);
  expect<T>(double(counted), double(n - (n + 1) / 3), "softmax_variance_sum: rows that count", kernels.name);
  labels[size_t(n - 1)] = d;
  k.softmax_variance_sum(features.data(), stride, prepared.data(), labels.data(), -100, n, m, d, nullptr, &total,
                         &counted, threads);
  expect<T>(double(counted), -1, "softmax_variance_sum: a label that is no class", kernels.name);
}

// Slopes are differences: they are held to the size of what is subtracted.
template <typename T>
void check_gradient(const pyflatness::Kernels& kernels, const std::vector<T>& features, int64_t stride,
                    const std::vector<T>& weight, const std::vector<T>& bias, const std::vector<std::vector<T>>& logits,
                    const std::vector<T>& distances, int64_t n, int64_t d, int64_t m, int threads) {
  const auto& k = pyflatness::of<T>(kernels.head);
  std::vector<T> prepared(size_t(d * (pyflatness::packed_columns(m) + 1 + d)));
  std::vector<T> slopes(size_t(d * n)), probabilities(size_t(d * n)), factors(size_t(2 * n));
  std::vector<double> shares(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) shares[size_t(i)] = double(i % 4);
  k.prepare_softmax_variance(weight.data(), bias.data(), d, m, prepared.data(), threads);
  double total, truth = 0;
  pyflatness::of<T>(kernels.head_gradient)
      .softmax_variance_gradient(features.data(), stride, prepared.data(), shares.data(), n, m, d, slopes.data(),
                                 probabilities.data(), factors.data(), &total, threads);
  for (int64_t i = 0; i < n; ++i) {
    double norm = 0, normaliser = 0, v = 0;
    for (int64_t j = 0; j < m; ++j) norm += std::pow(double(features[size_t(i * stride + j)]), 2);
    std::vector<double> p(static_cast<size_t>(d)), q(static_cast<size_t>(d));
    for (int64_t s = 0; s < d; ++s) normaliser += p[size_t(s)] = std::exp(double(logits[size_t(i)][size_t(s)]));
    for (double& one : p) one /= normaliser;
    for (int64_t s = 0; s < d; ++s) {
      for (int64_t t = 0; t < d; ++t) q[size_t(s)] += p[size_t(t)] * distances[size_t(s * d + t)];
      v += p[size_t(s)] * q[size_t(s)] / 2;
    }
    const double scale = shares[size_t(i)] * norm;
    truth += scale * v;
    expect<T>(factors[size_t(i)], 2 * shares[size_t(i)] * v, "softmax_variance_gradient: 2 v", kernels.name);
    expect<T>(factors[size_t(n + i)], scale, "softmax_variance_gradient: norms", kernels.name);
    for (int64_t s = 0; s < d; ++s) {
      const double slope = p[size_t(s)] * (q[size_t(s)] - 2 * v), size = p[size_t(s)] * (q[size_t(s)] + 2 * v);
      expect<T>(probabilities[size_t(s * n + i)], p[size_t(s)], "softmax_variance_gradient: p", kernels.name);
      expect<T>(slopes[size_t(s * n + i)] + 10 * scale * size, scale * (slope + 10 * size),
                "softmax_variance_gradient: slopes", kernels.name);
    }
  }
  expect<T>(total, truth, "softmax_variance_gradient", kernels.name);
}

template <typename T>
void check(const pyflatness::Kernels& kernels, int64_t n, int64_t d, int64_t m, int threads) {
  const auto& k = pyflatness::of<T>(kernels.head);
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

  if (d <= pyflatness::kMaxFusedOutputs && m <= 40) {
    check_sum(kernels, features, stride, weight, bias, n, d, m, threads);
    check_gradient(kernels, features, stride, weight, bias, logits, distances, n, d, m, threads);
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
    pyflatness::of<T>(kernels.head)
        .exponentiate(z.data(), nullptr, T(1), 3, 37, maximum.data(), rest.data(), nullptr, top.data(), 1);
    ++checks;
    const bool hidden = std::isfinite(rest[1]) && bad != -std::numeric_limits<T>::infinity();
    if (hidden || !std::isfinite(rest[0]) || !std::isfinite(rest[2]))
      std::printf("exponentiate hides %g\n", double(bad)), std::exit(1);
  }
}

}  // namespace

void check_heads(const pyflatness::Kernels& kernels) {
  for (int threads : {1, 2})
    for (int64_t n : {1, 7, 8, 31, 33, 70})
      for (int64_t d : {1, 2, 4, 5, 10, 11, 17, 63, 64, 65, 100})
        for (int64_t m : {1, 2, 7, 16, 17, 40, 129, 300}) {
          check<float>(kernels, n, d, m, threads);
          check<double>(kernels, n, d, m, threads);
        }
  check_not_finite<float>(kernels);
  check_not_finite<double>(kernels);
}
