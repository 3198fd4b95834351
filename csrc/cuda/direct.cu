// Weight gradients of single samples, never in global memory: a block makes the tiles of columns of one M one after the
// other, looks at them, forgets them. Where |root M|^2 is wanted, all rows of a tile of columns stay in shared memory
// as the second operand of a product.
#include "small.cuh"

namespace pyflatness::cuda {
namespace {

// The product of R and a tile: on the same threads, in float32 or TF32 whatever the inputs are.
template <class Form>
struct SecondForm {
  using Type = Tensor<Tf32, Form::kTileRows, Form::kTileColumns>;
};
template <class Kind>
struct SecondForm<Plain<Kind>> {
  using Type = Plain<Kind>;
};

// On tensor cores wide tiles, which read less of shared memory for each product, where there are the columns for them
// and their rows of M leave room for other blocks.
constexpr int64_t kWideRows = 192;

template <class Kind, typename Use>
auto with_form(int64_t rows, int64_t columns, bool rooted, const Use& use) {
  if constexpr (std::is_same_v<Kind, F32> || std::is_same_v<Kind, F64>)
    return use(Plain<Kind>{});
  else if (columns > 64 && (!rooted || rows <= kWideRows))
    return use(Tensor<Kind, 64, 128>{});
  else
    return use(Tensor<Kind, 64, 64>{});
}

constexpr int round_up(int n, int size) { return (n + size - 1) / size * size; }

// Bytes of a block: two operands, and the rows of the tiles that are kept.
template <class Form>
struct Room {
  using Second = typename SecondForm<Form>::Type;
  static constexpr size_t kLeft = Side<Form, Form::kTileRows>::kBytes;
  static constexpr size_t kRight = Side<Form, Form::kTileColumns>::kBytes;
  static_assert(Side<Second, Form::kTileRows>::kBytes <= kLeft);
  static constexpr size_t kKept = kLeft + kRight;
  static_assert(kLeft % 16 == 0 && kRight % 16 == 0 && kKept % 16 == 0);

  static size_t bytes(int rows) { return kKept + sizeof(typename Form::Sum) * Second::elements(rows); }
};

struct Sizes {
  int64_t groups, splits;
  int rows, columns, positions, roots;  // roots: 0 for none
  int kept;                             // rows of M in shared memory: all, those of one tile, or none
};

// What a block adds up, and where it writes the sums of w o M.
template <typename Sum>
struct Sums {
  double squares, rooted, weighted;
  const Sum* weight;  // [rows, columns] or null
  double* by_column;  // [columns]
  double* by_row;     // [rows]
};

// w o M of a tile from row `top` and column `left`: one thread for each column, and one for each row.
template <class Second, typename Sum>
__device__ void weigh(const Sizes& sizes, const Sum* tile, int top, int left, bool first_column, Sums<Sum>& sums) {
  const int ld = Second::leading(sizes.kept), base = sizes.roots ? top : 0;
  const int rows = min(Second::kTileRows, sizes.rows - top), columns = min(Second::kTileColumns, sizes.columns - left);
  for (int task = threadIdx.x; task < Second::kTileColumns + Second::kTileRows; task += Second::kThreads) {
    Sum sum = 0, squares = 0;
    const int column = task, row = task - Second::kTileColumns;
    if (column < columns) {
      for (int i = 0; i < rows; ++i) {
        const Sum x = tile[Second::element(base + i, column, ld)] *
                      sums.weight[static_cast<int64_t>(top + i) * sizes.columns + left + column];
        sum += x, squares += x * x;
      }
      sums.weighted += static_cast<double>(squares);
      double* place = sums.by_column + left + column;
      *place = (top ? *place : 0) + static_cast<double>(sum);
    } else if (row >= 0 && row < rows) {
      const Sum* weight = sums.weight + static_cast<int64_t>(top + row) * sizes.columns + left;
      for (int j = 0; j < columns; ++j) sum += tile[Second::element(base + row, j, ld)] * weight[j];
      double* place = sums.by_row + top + row;
      *place = (first_column ? 0 : *place) + static_cast<double>(sum);
    }
  }
}

template <class Form>
__global__ void __launch_bounds__(Form::kThreads, Form::kBlocks)
    direct_kernel(Operand<typename Form::Element> signal, Operand<typename Form::Element> inputs,
                  Operand<typename Form::Sum> root, Sizes sizes, const typename Form::Sum* weight, double* totals,
                  double* by_column, double* by_row) {
  using Second = typename SecondForm<Form>::Type;
  using Sum = typename Form::Sum;
  using Left = Side<Form, Form::kTileRows>;
  using Right = Side<Form, Form::kTileColumns>;
  constexpr int kDown = Form::kTileRows, kAcross = Form::kTileColumns;
  auto* shared = dynamic_shared<unsigned char>();
  auto* kept = reinterpret_cast<Sum*>(shared + Room<Form>::kKept);
  const int64_t item = blockIdx.x / sizes.splits, split = blockIdx.x % sizes.splits;
  const int64_t sample = item / sizes.groups, group = item % sizes.groups;
  Sums<Sum> sums{0, 0, 0, nullptr, nullptr, nullptr};
  if (weight) {
    sums.weight = weight + group * sizes.rows * sizes.columns;
    sums.by_column = by_column + item * sizes.columns;
    sums.by_row = by_row + static_cast<int64_t>(blockIdx.x) * sizes.rows;
  }
  const int64_t tiles = (sizes.columns + kAcross - 1) / kAcross;
  const int from = static_cast<int>(tiles * split / sizes.splits) * kAcross;
  const int to = static_cast<int>(tiles * (split + 1) / sizes.splits) * kAcross;
  for (int left = from; left < to; left += kAcross) {
    for (int top = 0; top < sizes.rows; top += kDown) {
      Form tile;
      Left a(signal, sample, group, top, sizes.rows, sizes.positions, shared);
      Right b(inputs, sample, group, left, sizes.columns, sizes.positions, shared + Room<Form>::kLeft);
      make_tile(tile, a, b);
      Sum squares = 0;
      const int ld = Second::leading(sizes.kept), base = sizes.roots ? top : 0;
      tile.each([&](int row, int column, Sum value) {
        squares += value * value;
        if (sizes.kept) kept[Second::element(base + row, column, ld)] = value;
      });
      sums.squares += static_cast<double>(squares);
      if (weight) {
        __syncthreads();
        weigh<Second>(sizes, kept, top, left, left == from, sums);
      }
    }
    for (int top = 0; top < sizes.roots; top += kDown) {
      Second tile;
      Side<Second, kDown> a(root, 0, group, top, sizes.roots, sizes.rows, shared);
      Resident<Second> b{kept, sizes.kept};
      make_tile(tile, a, b);
      Sum squares = 0;
      tile.each([&](int, int, Sum value) { squares += value * value; });
      sums.rooted += static_cast<double>(squares);
    }
  }
  const double found[3] = {sums.squares, sums.rooted, sums.weighted};
  for (int i = 0; i < 3; ++i) {
    const double total = block_sum(found[i]);
    if (threadIdx.x == 0) totals[static_cast<int64_t>(blockIdx.x) * 3 + i] = total;
  }
}

template <class Form>
int kept_rows(int64_t rows, bool rooted, bool weighted) {
  return rooted ? round_up(static_cast<int>(rows), Form::kTileRows) : weighted ? Form::kTileRows : 0;
}

}  // namespace

template <class Kind>
int64_t direct_columns(int64_t rows, int64_t columns, bool rooted) {
  if (is_small(rows, columns)) return columns;
  return with_form<Kind>(rows, columns, rooted, [](auto form) { return int64_t{decltype(form)::kTileColumns}; });
}

template <class Kind>
int64_t direct_shared(int64_t rows, int64_t columns, bool rooted, bool weighted) {
  if (is_small(rows, columns)) return 0;
  return with_form<Kind>(rows, columns, rooted, [&](auto form) {
    using Form = decltype(form);
    const size_t sums = sizeof(double) * kMostWarps;  // block_sum's own, beside what a launch asks for
    return static_cast<int64_t>(Room<Form>::bytes(kept_rows<Form>(rows, rooted, weighted)) + sums);
  });
}

template <class Kind>
int direct(const Layer& layer, const Strided<typename Kind::Element>& inputs,
           const Strided<typename Kind::Element>& signal, const typename Kind::Sum* root, int64_t roots,
           const typename Kind::Sum* weight, int64_t splits, double* totals, double* by_column, double* by_row,
           void* stream) {
  const int64_t *from = signal.stride, *places = layer.places;
  const Axis positions = axis({{places[2], from[4]}, {places[1], from[3]}, {places[0], from[2]}});
  const auto left =
      operand(signal.data, from[0], layer.rows * from[1], layer.positions(), positions, axis({{layer.rows, from[1]}}));
  const auto right = operand(inputs.data, inputs.stride[0], layer.channels * inputs.stride[1], layer.positions(),
                             patch_places(layer, inputs.stride), patch_columns(layer, inputs.stride));
  if (is_small(layer.rows, layer.columns())) {
    using Exact = std::conditional_t<std::is_same_v<Kind, Tf32>, F32, Kind>;
    return small_direct<Exact>(layer, left, right, root, roots, weight, totals, by_column, by_row, stream);
  }
  const auto second =
      operand(root, 0, roots * layer.rows, layer.rows, axis({{layer.rows, 1}}), axis({{roots, layer.rows}}));
  Sizes sizes{layer.groups,
              splits,
              static_cast<int>(layer.rows),
              static_cast<int>(layer.columns()),
              static_cast<int>(layer.positions()),
              static_cast<int>(root ? roots : 0),
              0};
  const dim3 grid(static_cast<unsigned>(layer.n * layer.groups * splits));
  return with_form<Kind>(layer.rows, layer.columns(), sizes.roots, [&](auto form) {
    using Form = decltype(form);
    sizes.kept = kept_rows<Form>(layer.rows, sizes.roots, weight);
    return launch(direct_kernel<Form>, grid, Form::kThreads, Room<Form>::bytes(sizes.kept), stream, left, right, second,
                  sizes, weight, totals, by_column, by_row);
  });
}

int shared_limit(int64_t* bytes) {
  int device = 0, limit = 0;
  const auto found = cudaGetDevice(&device);
  if (found != cudaSuccess) return found;
  const auto status = cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  *bytes = limit;
  return status;
}

#define PYFLATNESS_DIRECT(Kind)                                                                         \
  template int64_t direct_columns<Kind>(int64_t, int64_t, bool);                                        \
  template int64_t direct_shared<Kind>(int64_t, int64_t, bool, bool);                                   \
  template int direct<Kind>(const Layer&, const Strided<Kind::Element>&, const Strided<Kind::Element>&, \
                            const Kind::Sum*, int64_t, const Kind::Sum*, int64_t, double*, double*, double*, void*);
PYFLATNESS_DIRECT(F32)
PYFLATNESS_DIRECT(F64)
PYFLATNESS_DIRECT(Tf32)
PYFLATNESS_DIRECT(Bf16)
PYFLATNESS_DIRECT(F16)

}  // namespace pyflatness::cuda
