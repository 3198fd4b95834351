// The kernels by themselves, for the address and undefined-behaviour sanitizers: every instruction set, both element
// types, sizes around every tile boundary, arrays of exactly the promised size; values against plain loops.
#include "kernels_check/check.h"

int main() {
  const pyflatness::Kernels* const* list;
  const int count = pyflatness::available(&list);
  for (int isa = 0; isa < count; ++isa) {
    check_heads(*list[isa]);
    check_layers(*list[isa]);
    check_eigenvalues(*list[isa]);
    std::printf("%s: ok\n", list[isa]->name);
  }
  std::printf("%ld checks passed\n", checks);
}
