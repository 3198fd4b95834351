// Tensor cores for the emulation: fragments laid out as csrc/cuda/mma.cuh has it, products in float.
#pragma once

#include "emulation.h"

namespace emulation {

inline float as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline float dot(pyflatness::cuda::Tf32, uint32_t a, uint32_t b) {
  return as_float(a & ~0x1fffu) * as_float(b & ~0x1fffu);  // the digits that count
}
inline float dot(pyflatness::cuda::Bf16, uint32_t a, uint32_t b) {
  return as_float(a << 16) * as_float(b << 16) + as_float(a & 0xffff0000u) * as_float(b & 0xffff0000u);
}
inline float half(uint32_t bits) {
  const int exponent = bits >> 10 & 31;
  const float fraction = static_cast<float>(bits & 1023), sign = bits & 0x8000 ? -1.0f : 1.0f;
  if (exponent == 31) return fraction == 0 ? sign * INFINITY : NAN;
  return sign * (exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24));
}
inline float dot(pyflatness::cuda::F16, uint32_t a, uint32_t b) {
  return half(a & 0xffff) * half(b & 0xffff) + half(a >> 16) * half(b >> 16);
}

}  // namespace emulation

namespace pyflatness::cuda {

inline uint32_t nearest(Tf32, float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return std::isfinite(value) ? (bits + 0x1000) & ~0x1fffu : bits;
}

inline float widened(F16, uint16_t value) { return emulation::half(value); }

template <class Kind, int M, int N>
void multiply_fragments(float (&c)[M][N][4], const uint32_t (&a)[M][4], const uint32_t (&b)[N][2]) {
  static_assert(4 * M + 2 * N <= 32);
  const int warp = emulation::block.running / kWarp, lane = emulation::block.running % kWarp;
  auto& lanes = emulation::block.fragments[emulation::block.turns[warp][lane]++ % 2][warp];
  std::memcpy(lanes[lane], a, sizeof a);
  std::memcpy(lanes[lane] + 4 * M, b, sizeof b);
  emulation::wait(emulation::State::at_exchange);
  for (int i = 0; i < M; ++i)
    for (int j = 0; j < N; ++j)
      for (int e = 0; e < 4; ++e) {
        const int row = lane / 4 + e / 2 * 8, column = lane % 4 * 2 + e % 2;
        for (int word = 0; word < 8; ++word) {
          const uint32_t left = lanes[row % 8 * 4 + word % 4][4 * i + row / 8 + word / 4 * 2];
          const uint32_t right = lanes[column * 4 + word % 4][4 * M + 2 * j + word / 4];
          c[i][j][e] += emulation::dot(Kind{}, left, right);
        }
      }
}

}  // namespace pyflatness::cuda
