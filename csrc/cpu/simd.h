// Vectors as wide as the instruction set this file is compiled for, by the compilers' vector extensions.
//
// Everything sits in an anonymous namespace: a kernel source is compiled once per instruction set, and a symbol that
// two of the objects shared could be taken from the wrong one at link time.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX512F__)
#define PYFLATNESS_VECTOR_BYTES 64
#elif defined(__AVX2__)
#define PYFLATNESS_VECTOR_BYTES 32
#else
#define PYFLATNESS_VECTOR_BYTES 16
#endif

#if defined(__AVX512F__) || defined(__aarch64__)
#define PYFLATNESS_VECTOR_REGISTERS 32
#else
#define PYFLATNESS_VECTOR_REGISTERS 16
#endif

#define PYFLATNESS_INLINE inline __attribute__((always_inline))

namespace {

template <typename T>
struct Format;
template <>
struct Format<float> {
  using Int = int32_t;
  static constexpr int kMantissaBits = 23, kBias = 127, kTaylorTerms = 7;
  static constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  static constexpr float kUnderflow = -87.33f;  // below, exp is under the smallest normal number
  static constexpr float kLn2High = 0.693145751953125f, kLn2Low = 1.42860682030941723e-6f;
};
template <>
struct Format<double> {
  using Int = int64_t;
  static constexpr int kMantissaBits = 52, kBias = 1023, kTaylorTerms = 13;
  static constexpr double kMagic = 6755399441055744.0;
  static constexpr double kUnderflow = -708.39;
  static constexpr double kLn2High = 6.93147180369123816490e-1, kLn2Low = 1.90821492927058770002e-10;
};

template <typename T>
struct Simd {
  typedef T Vec __attribute__((vector_size(PYFLATNESS_VECTOR_BYTES)));
  typedef typename Format<T>::Int Ints __attribute__((vector_size(PYFLATNESS_VECTOR_BYTES)));
  static constexpr int64_t kLanes = PYFLATNESS_VECTOR_BYTES / static_cast<int64_t>(sizeof(T));

  static PYFLATNESS_INLINE Vec splat(T x) { return x - Vec{}; }

  static PYFLATNESS_INLINE Vec load(const T* p) {
    Vec v;
    std::memcpy(&v, p, sizeof v);
    return v;
  }
  // The first `count` < kLanes elements; `fill` in the others.
  static PYFLATNESS_INLINE Vec load_partial(const T* p, int64_t count, T fill) {
    Vec v = splat(fill);
    std::memcpy(&v, p, static_cast<size_t>(count) * sizeof(T));
    return v;
  }
  static PYFLATNESS_INLINE void store(T* p, Vec v) { std::memcpy(p, &v, sizeof v); }
  static PYFLATNESS_INLINE void store_partial(T* p, Vec v, int64_t count) {
    std::memcpy(p, &v, static_cast<size_t>(count) * sizeof(T));
  }

  // The last `count` < kLanes elements before `end`, zeros in the other lanes. Reads a whole vector where the `before`
  // elements in front of `end` allow it: a copy of variable length costs as much as ten vectors.
  static PYFLATNESS_INLINE Vec load_tail(const T* end, int64_t count, int64_t before) {
    if (before < kLanes) return load_partial(end - count, count, 0);
    return lane() < static_cast<typename Format<T>::Int>(kLanes - count) ? Vec{} : load(end - kLanes);
  }

  static PYFLATNESS_INLINE Ints lane() {
    Ints index;
    for (int64_t l = 0; l < kLanes; ++l) index[l] = static_cast<typename Format<T>::Int>(l);
    return index;
  }

  static PYFLATNESS_INLINE double sum(Vec v) { return halve<kLanes>(v); }

  template <int64_t Lanes, typename V>
  static PYFLATNESS_INLINE double halve(V v) {
    if constexpr (Lanes == 2) {
      return static_cast<double>(v[0]) + static_cast<double>(v[1]);
    } else {
      typedef T Half __attribute__((vector_size(Lanes / 2 * sizeof(T))));
      Half halves[2];
      std::memcpy(halves, &v, sizeof v);
      return halve<Lanes / 2>(halves[0] + halves[1]);
    }
  }

  // The upper or lower halves of two vectors, interleaved: a_0 b_0 a_1 b_1 ...
  template <bool Upper, size_t... Lane>
  static PYFLATNESS_INLINE Vec interleave(Vec a, Vec b, std::index_sequence<Lane...>) {
#if defined(__clang__) || __GNUC__ >= 12
    return __builtin_shufflevector(a, b, (Lane / 2 + Lane % 2 * kLanes + (Upper ? kLanes / 2 : 0))...);
#else
    return __builtin_shuffle(a, b, Ints{(Lane / 2 + Lane % 2 * kLanes + (Upper ? kLanes / 2 : 0))...});
#endif
  }

  // Folds vectors into one whose lane i is the sum over the lanes of v[i]: all kLanes of them, or v[i], v[i + s],
  // v[i + 2 s] ... as the first `Count`, and then the `s` results.
  template <int64_t Count>
  static PYFLATNESS_INLINE Vec fold(const Vec (&v)[Count]) {
    constexpr auto lanes = std::make_index_sequence<static_cast<size_t>(kLanes)>{};
    if constexpr (Count > 1) {
      Vec halves[Count / 2];
      for (int64_t i = 0; i < Count / 2; ++i)
        halves[i] = interleave<false>(v[i], v[i + Count / 2], lanes) + interleave<true>(v[i], v[i + Count / 2], lanes);
      return fold(halves);
    }
    return v[0];
  }

  static constexpr T inverse_factorial(int k) {
    double product = 1;
    for (int factor = 2; factor <= k; ++factor) product *= factor;
    return static_cast<T>(1 / product);
  }

  // exp(x) for x <= 0, to about one unit in the last place; exact 0 below the smallest normal number; NaN stays NaN.
  // x = k ln 2 + r with |r| <= ln 2 / 2, and the Taylor series of exp(r) by Horner's rule.
  static PYFLATNESS_INLINE Vec exp_nonpositive(Vec x) {
    using F = Format<T>;
    const Vec shifted = x * static_cast<T>(1.44269504088896340736) + F::kMagic;
    const Vec k = shifted - F::kMagic;
    const Vec r = (x - k * F::kLn2High) - k * F::kLn2Low;
    Vec series = splat(inverse_factorial(F::kTaylorTerms));
    for (int term = F::kTaylorTerms - 1; term >= 0; --term) series = series * r + inverse_factorial(term);
    Ints exponent;
    std::memcpy(&exponent, &shifted, sizeof exponent);
    exponent = (exponent + F::kBias) << F::kMantissaBits;  // the low bits of `shifted` are k; the rest is shifted out
    Vec power;
    std::memcpy(&power, &exponent, sizeof power);
    return x < F::kUnderflow ? Vec{} : series * power;
  }
};

}  // namespace
