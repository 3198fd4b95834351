// What the kernel sources share: sizes, teams of threads, and the one symbol that each object may export.
#pragma once

#include <cstdint>

#ifdef _OPENMP
#include <omp.h>
#endif

#define PYFLATNESS_JOIN_(a, b) a##_##b
#define PYFLATNESS_JOIN(a, b) PYFLATNESS_JOIN_(a, b)
// The table `name` of this source for the instruction set it is compiled for (PYFLATNESS_ISA).
#define PYFLATNESS_EXPORT(type, name)                      \
  namespace pyflatness {                                   \
  extern const type PYFLATNESS_JOIN(name, PYFLATNESS_ISA); \
  }                                                        \
  const pyflatness::type pyflatness::PYFLATNESS_JOIN(name, PYFLATNESS_ISA)

namespace {

constexpr int64_t kSerialWork = 32768;  // multiply-adds below which threads cost more than they bring

inline int team(int threads, int64_t work) { return work < kSerialWork || threads < 1 ? 1 : threads; }

inline int thread_index() {
#ifdef _OPENMP
  return omp_get_thread_num();
#else
  return 0;
#endif
}

inline int64_t minimum(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t maximum(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t blocks_of(int64_t count, int64_t size) { return (count + size - 1) / size; }
inline int64_t round_up(int64_t count, int64_t size) { return blocks_of(count, size) * size; }

}  // namespace
