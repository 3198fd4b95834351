// Gram matrices of the places of a layer: made of implicit patches, summed from those of pixels, and contracted with
// one another tile by tile.
#include "tiles.cuh"

namespace pyflatness::cuda {
namespace {

constexpr int64_t kLargeTile = 128, kSmallTile = 64;
constexpr int64_t kManyPlaces = 256;  // from here on large tiles, on tensor cores

template <class Kind>
constexpr bool kOnTensorCores = !std::is_same_v<Kind, F32> && !std::is_same_v<Kind, F64>;

template <class Form>
using Square = Side<Form, Form::kTileRows>;

template <class Form>
constexpr size_t kRoom = 2 * Square<Form>::kBytes;

// A block's matrix and its pair of tiles.
struct Pair {
  int64_t item;
  int row, column;
};

__device__ Pair pair_of_block(int tiles) {
  const int64_t pairs = static_cast<int64_t>(tiles) * tiles, pair = blockIdx.x % pairs;
  return {blockIdx.x / pairs, static_cast<int>(pair / tiles), static_cast<int>(pair % tiles)};
}

// The tile <x_p, x_p'> of a matrix and itself.
template <class Form>
__device__ void make_square(Form& tile, const Operand<typename Form::Element>& x, int64_t groups, const Pair& pair,
                            int positions, int depth, unsigned char* shared) {
  const int64_t sample = pair.item / groups, group = pair.item % groups;
  Square<Form> a(x, sample, group, pair.row * Form::kTileRows, positions, depth, shared);
  Square<Form> b(x, sample, group, pair.column * Form::kTileRows, positions, depth, shared + Square<Form>::kBytes);
  make_tile(tile, a, b);
}

template <class Form>
__global__ void __launch_bounds__(Form::kThreads, Form::kBlocks)
    patch_gram_kernel(Operand<typename Form::Element> patches, int64_t groups, int positions, int depth, int tiles,
                      typename Form::Sum* out) {
  const Pair pair = pair_of_block(tiles);
  if (pair.row > pair.column) return;
  Form tile;
  make_square(tile, patches, groups, pair, positions, depth, dynamic_shared<unsigned char>());
  auto* square = out + pair.item * positions * positions;
  tile.each([&](int row, int column, typename Form::Sum value) {
    const int64_t p = pair.row * Form::kTileRows + row, q = pair.column * Form::kTileRows + column;
    if (p >= positions || q >= positions) return;
    square[p * positions + q] = value;
    if (pair.row < pair.column) square[q * positions + p] = value;
  });
}

template <class Form>
__global__ void __launch_bounds__(Form::kThreads, Form::kBlocks)
    gram_kernel(Operand<typename Form::Element> rows, int64_t groups, int positions, int depth, int tiles,
                const typename Form::Sum* g, double* out) {
  using Sum = typename Form::Sum;
  const Pair pair = pair_of_block(tiles);
  if (pair.row > pair.column) {
    if (threadIdx.x == 0) out[blockIdx.x] = 0;
    return;
  }
  auto* shared = dynamic_shared<unsigned char>();
  Form tile;
  make_square(tile, rows, groups, pair, positions, depth, shared);
  const Sum* square = g + pair.item * positions * positions;
  Sum sum = 0;
  tile.each([&](int row, int column, Sum value) {
    const int64_t p = pair.row * Form::kTileRows + row, q = pair.column * Form::kTileRows + column;
    if (p < positions && q < positions) sum += value * square[p * positions + q];
  });
  const double total = block_sum(static_cast<double>(sum));
  if (threadIdx.x == 0) out[blockIdx.x] = pair.row < pair.column ? 2 * total : total;
}

struct Shifts {
  Axis pixel;  // of a place, at the first tap
  Divisor positions;
  int64_t pixels;
  uint32_t blocks;          // of a matrix
  int64_t taps[3], tap[3];  // of the kernel, and from one to the next
};

// A thread has one pair of places.
template <typename T>
__global__ void __launch_bounds__(kShiftThreads) sum_shifts_kernel(Shifts shifts, const T* pixel_gram, T* out) {
  const int64_t item = blockIdx.x / shifts.blocks;
  const uint32_t pair = blockIdx.x % shifts.blocks * kShiftThreads + threadIdx.x;
  const uint32_t positions = shifts.positions.value, p = quotient(pair, shifts.positions), q = pair - p * positions;
  if (p >= positions) return;
  const T* square = pixel_gram + item * shifts.pixels * shifts.pixels;
  const T* from = square + shifts.pixel.offset(p) * shifts.pixels + shifts.pixel.offset(q);
  T sum = 0;
  for (int64_t i = 0; i < shifts.taps[0]; ++i)
    for (int64_t j = 0; j < shifts.taps[1]; ++j)
      for (int64_t k = 0; k < shifts.taps[2]; ++k)
        sum += from[(i * shifts.tap[0] + j * shifts.tap[1] + k * shifts.tap[2]) * (shifts.pixels + 1)];
  out[item * positions * positions + pair] = sum;
}

template <class Form>
int launch_gram(const Operand<typename Form::Element>& rows, int64_t samples, int64_t groups, int64_t positions,
                int64_t r, const typename Form::Sum* g, double* out, void* stream) {
  const int64_t tiles = blocks_of(positions, Form::kTileRows);
  const dim3 grid(static_cast<unsigned>(samples * groups * tiles * tiles));
  return launch(gram_kernel<Form>, grid, Form::kThreads, kRoom<Form>, stream, rows, groups, static_cast<int>(positions),
                static_cast<int>(r), static_cast<int>(tiles), g, out);
}

}  // namespace

int64_t gram_tile(int64_t positions, bool tensor_cores) {
  return tensor_cores && positions >= kManyPlaces ? kLargeTile : kSmallTile;
}

template <class Kind>
int patch_gram(const Layer& layer, const Strided<typename Kind::Element>& inputs, typename Kind::Sum* out,
               void* stream) {
  using Form = std::conditional_t<kOnTensorCores<Kind>, Tensor<Kind, kSmallTile, kSmallTile>, Plain<Kind>>;
  const int64_t positions = layer.positions(), tiles = blocks_of(positions, Form::kTileRows);
  const auto patches = operand(inputs.data, inputs.stride[0], layer.channels * inputs.stride[1], layer.columns(),
                               patch_columns(layer, inputs.stride), patch_places(layer, inputs.stride));
  const dim3 grid(static_cast<unsigned>(layer.n * layer.groups * tiles * tiles));
  return launch(patch_gram_kernel<Form>, grid, Form::kThreads, kRoom<Form>, stream, patches, layer.groups,
                static_cast<int>(positions), static_cast<int>(layer.columns()), static_cast<int>(tiles), out);
}

template <typename T>
int sum_shifts(const Layer& layer, const T* pixel_gram, T* out, void* stream) {
  const int64_t *size = layer.size, *places = layer.places, *taps = layer.kernel, *by = layer.dilation;
  const Shifts shifts{axis({{places[2], 1}, {places[1], size[2]}, {places[0], size[1] * size[2]}}),
                      divisor(layer.positions()),
                      size[0] * size[1] * size[2],
                      static_cast<uint32_t>(blocks_of(layer.positions() * layer.positions(), kShiftThreads)),
                      {taps[0], taps[1], taps[2]},
                      {by[0] * size[1] * size[2], by[1] * size[2], by[2]}};
  const dim3 grid(static_cast<unsigned>(layer.n * layer.groups * int64_t{shifts.blocks}));
  return launch(sum_shifts_kernel<T>, grid, kShiftThreads, 0, stream, shifts, pixel_gram, out);
}

template <class Kind>
int gram(const Strided<typename Kind::Element>& a, int64_t samples, int64_t groups, int64_t positions, int64_t r,
         const typename Kind::Sum* g, double* out, void* stream) {
  const auto rows =
      operand(a.data, a.stride[0], a.stride[1], r, axis({{r, a.stride[3]}}), axis({{positions, a.stride[2]}}));
  if constexpr (!kOnTensorCores<Kind>)
    return launch_gram<Plain<Kind>>(rows, samples, groups, positions, r, g, out, stream);
  else if (gram_tile(positions, true) == kLargeTile)
    return launch_gram<Tensor<Kind, kLargeTile, kLargeTile>>(rows, samples, groups, positions, r, g, out, stream);
  else
    return launch_gram<Tensor<Kind, kSmallTile, kSmallTile>>(rows, samples, groups, positions, r, g, out, stream);
}

#define PYFLATNESS_GRAM(Kind)                                                                                  \
  template int patch_gram<Kind>(const Layer&, const Strided<Kind::Element>&, Kind::Sum*, void*);               \
  template int gram<Kind>(const Strided<Kind::Element>&, int64_t, int64_t, int64_t, int64_t, const Kind::Sum*, \
                          double*, void*);
PYFLATNESS_GRAM(F32)
PYFLATNESS_GRAM(F64)
PYFLATNESS_GRAM(Tf32)
PYFLATNESS_GRAM(Bf16)
PYFLATNESS_GRAM(F16)
template int sum_shifts<float>(const Layer&, const float*, float*, void*);
template int sum_shifts<double>(const Layer&, const double*, double*, void*);

}  // namespace pyflatness::cuda
