// What the checks of the kernels share: random numbers, and values held to those of plain loops.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <random>
#include <vector>

#include "../../csrc/cpu/kernels.h"

inline std::mt19937 generator(0);
inline long checks = 0;

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

void check_heads(const pyflatness::Kernels& kernels);
void check_layers(const pyflatness::Kernels& kernels);
void check_eigenvalues(const pyflatness::Kernels& kernels);
