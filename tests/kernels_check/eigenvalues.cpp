// The eigenvalues of small matrices.
#include <algorithm>

#include "check.h"

namespace {

// Matrices Q diag(values) Q^T with Q a reflection: the eigenvalues are known.
void check(const pyflatness::Kernels& kernels, int64_t n, int64_t size) {
  std::vector<double> matrices(size_t(n * size * size)), truth, values(size_t(n * size));
  const int64_t broken = n > 2 ? 1 : -1;
  for (int64_t i = 0; i < n; ++i) {
    const auto axis = normal<double>(size);
    auto diagonal = normal<double>(size);
    if (size > 2) diagonal[1] = diagonal[0];
    double length = 0;
    for (double x : axis) length += x * x;
    const auto reflection = [&](int64_t a, int64_t b) {
      return (a == b ? 1.0 : 0.0) - 2 * axis[size_t(a)] * axis[size_t(b)] / length;
    };
    for (int64_t a = 0; a < size; ++a)
      for (int64_t b = 0; b < size; ++b)
        for (int64_t c = 0; c < size; ++c)
          matrices[size_t((i * size + a) * size + b)] += reflection(a, c) * diagonal[size_t(c)] * reflection(b, c);
    std::sort(diagonal.begin(), diagonal.end());
    truth.insert(truth.end(), diagonal.begin(), diagonal.end());
  }
  if (broken >= 0) matrices[size_t((broken + 1) * size * size - 1)] = std::numeric_limits<double>::infinity();
  kernels.eigen.small_eigenvalues(matrices.data(), n, size, values.data(), 2);
  for (int64_t i = 0; i < n * size; ++i) {
    if (i / size == broken) {
      if (std::isfinite(values[size_t(i)])) std::printf("an infinite matrix has eigenvalues\n"), std::exit(1);
    } else {
      expect<double>(values[size_t(i)] + 9, truth[size_t(i)] + 9, "small_eigenvalues", kernels.name);
    }
  }
}

}  // namespace

void check_eigenvalues(const pyflatness::Kernels& kernels) {
  for (int64_t n : {1, 5, 19})
    for (int64_t size : {1, 2, 3, 4, 9, 31, 32}) check(kernels, n, size);
}
