// Which of the compiled instruction sets this processor can run.
#include "kernels.h"

namespace pyflatness {

// What the kernel sources, compiled for one instruction set, export; and the set's list of them.
#define PYFLATNESS_SET(isa)                                                                \
  extern const HeadTables head_##isa;                                                      \
  extern const HeadGradientTables head_gradient_##isa;                                     \
  extern const LayerTables layer_##isa;                                                    \
  extern const GatheredTables gathered_##isa;                                              \
  extern const GramTables gram_##isa;                                                      \
  extern const EigenKernels eigen_##isa;                                                   \
  namespace {                                                                              \
  const Kernels set_##isa = {#isa,           head_##isa, head_gradient_##isa, layer_##isa, \
                             gathered_##isa, gram_##isa, eigen_##isa};                     \
  }

PYFLATNESS_SET(base)
#if defined(__x86_64__)
PYFLATNESS_SET(avx2)
PYFLATNESS_SET(avx512)
#endif

namespace {

struct Available {
  const Kernels* list[3] = {};
  int count = 0;

  Available() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
      list[count++] = &set_avx512;
    if (avx2) list[count++] = &set_avx2;
#endif
    list[count++] = &set_base;
  }
};

}  // namespace

int available(const Kernels* const** list) {
  static const Available sets;
  *list = sets.list;
  return sets.count;
}

}  // namespace pyflatness
