// What direct.cu leaves to small.cu: M of few elements.
#pragma once

#include "tiles.cuh"

namespace pyflatness::cuda {

constexpr int64_t kSmall = 512;  // elements of M: of a tile of 4,096 an eighth

inline bool is_small(int64_t rows, int64_t columns) { return rows * columns <= kSmall; }

// `direct` with one split; operands as for the tiles.
template <class Kind>
int small_direct(const Layer& layer, const Operand<typename Kind::Element>& signal,
                 const Operand<typename Kind::Element>& inputs, const typename Kind::Sum* root, int64_t roots,
                 const typename Kind::Sum* weight, double* totals, double* by_column, double* by_row, void* stream);

}  // namespace pyflatness::cuda
