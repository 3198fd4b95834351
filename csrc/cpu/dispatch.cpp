// Which of the compiled instruction sets this processor can run.
#include "../kernels.h"

namespace pyflatness {

extern const Kernels kernels_base;
#if defined(__x86_64__)
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
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
      list[count++] = &kernels_avx512;
    if (avx2) list[count++] = &kernels_avx2;
#endif
    list[count++] = &kernels_base;
  }
};

}  // namespace

int available(const Kernels* const** list) {
  static const Available sets;
  *list = sets.list;
  return sets.count;
}

}  // namespace pyflatness
