// The head in one kernel, for up to kMaxFusedOutputs outputs: one pass over the features, a slice at a time in shared
// memory, the next slice on its way in registers. `Group` threads share a row and have `Outputs` outputs each, whose
// logits and sums of pairs stay in registers.
#include "elements.cuh"

namespace pyflatness::cuda {
namespace {

constexpr int kHeadThreads = 128;
template <typename T, int Outputs>
constexpr int kBlocks = (sizeof(T) == 4 ? 3 : 2) + (Outputs <= 10);  // on a processor: as many as need no spilling
constexpr size_t kMostResident = 40 << 10;  // bytes of weight that stay in shared memory; a larger one comes by slices

template <typename T, int Outputs, int Group>
struct HeadShape {
  static constexpr int kRows = kHeadThreads / Group;
  static constexpr int kWidth = Outputs * Group;     // outputs, with those that only fill up
  static constexpr int kHeld = 128 / sizeof(T);      // elements of a slice that a thread brings: eight accesses
  static constexpr int kDepth = kHeld * Group;       // features of a slice
  static constexpr int kStride = kDepth + kPack<T>;  // of a row in shared memory: an odd number of accesses
  static constexpr int kSlots = (Outputs + kPack<T> - 1) / kPack<T> * kPack<T>;  // a thread's outputs, in accesses
  static constexpr int kPairs = kWidth * Group * kSlots;  // elements of the distances in shared memory
  static_assert(kWidth < kStride, "a row's exponentials take the place of its features");
};

template <typename T>
struct HeadCall {
  const T* features;   // [n, m], row i at features + i * stride
  int64_t stride;      //
  const T* weight;     // [d, m]
  const T* bias;       // [d]
  const T* distances;  // [d, d]
  int64_t n, m;        //
  int d;               //
  int64_t resident;    // stride of the whole weight in shared memory, 0: it comes by slices
  double* out;         // [n]
};

// How the threads share a slice out, Width elements in one access: each has one column of accesses and every kStep-th
// row.
template <typename Shape, int Width>
struct Share {
  static constexpr int kPerRow = Shape::kDepth / Width, kStep = kHeadThreads / kPerRow, kCount = Shape::kHeld / Width;
  static_assert(kHeadThreads % kPerRow == 0 && kStep * kCount == Shape::kRows);
  int row = threadIdx.x / kPerRow, column = threadIdx.x % kPerRow * Width;
};

// A slice of a block's rows in registers; zeros beyond the last row and feature.
template <typename Shape, int Width, typename T>
__device__ void fetch(const HeadCall<T>& call, int64_t first, int64_t start, T* held) {
  using Mine = Share<Shape, Width>;
  const Mine mine;
  const T* place = call.features + (first + mine.row) * call.stride + start + mine.column;
  const int64_t left = start + mine.column < call.m ? call.n - first - mine.row : 0;
#pragma unroll
  for (int i = 0; i < Mine::kCount; ++i) {
    const Pack<T, Width> pack = i * Mine::kStep < left ? load<Width>(place) : Pack<T, Width>{};
    place += Mine::kStep * call.stride;
#pragma unroll
    for (int v = 0; v < Width; ++v) held[i * Width + v] = pack.value[v];
  }
}

template <typename Shape, int Width, typename T>
__device__ void put(const T* held, T* x) {
  using Mine = Share<Shape, Width>;
  const Mine mine;
#pragma unroll
  for (int i = 0; i < Mine::kCount; ++i) {
    Pack<T, Width> pack;
#pragma unroll
    for (int v = 0; v < Width; ++v) pack.value[v] = held[i * Width + v];
    store(x + (mine.row + i * Mine::kStep) * Shape::kStride + mine.column, pack);
  }
}

// `count` features of the weight from `start` on in shared memory; zeros beyond the last class and feature.
template <typename Shape, int Width, typename T>
__device__ void put_weight(const HeadCall<T>& call, int64_t start, int64_t count, int64_t stride, T* w) {
  const int64_t per_row = count / Width;
  for (int64_t unit = threadIdx.x; unit < Shape::kWidth * per_row; unit += kHeadThreads) {
    const int64_t s = unit / per_row, column = unit % per_row * Width;
    const bool inside = s < call.d && start + column < call.m;
    store(w + s * stride + column, inside ? load<Width>(call.weight + s * call.m + start + column) : Pack<T, Width>{});
  }
}

// pairs[t, member, k] = distances[t, member + Group k]: the order in which a thread reads them.
template <typename Shape, int Outputs, int Group, typename T>
__device__ void put_distances(const HeadCall<T>& call, T* pairs) {
  for (int place = threadIdx.x; place < Shape::kPairs; place += kHeadThreads) {
    const int t = place / (Group * Shape::kSlots), member = place / Shape::kSlots % Group, k = place % Shape::kSlots;
    const int s = member + Group * k;
    pairs[place] = k < Outputs && t < call.d && s < call.d ? call.distances[int64_t{t} * call.d + s] : T(0);
  }
}

// sum[k] += <x, w_k> and square += |x|^2 over the first `depth` features of a slice.
template <int Outputs, typename T>
__device__ void add_products(const T* x, const T* w, int64_t stride, int depth, T* sum, T* square) {
#pragma unroll 1
  for (int j = 0; j < depth; j += kPack<T>) {
    const Pack<T, kPack<T>> a = load<kPack<T>>(x + j);
#pragma unroll
    for (int v = 0; v < kPack<T>; ++v) *square += a.value[v] * a.value[v];
#pragma unroll
    for (int k = 0; k < Outputs; ++k) {
      const Pack<T, kPack<T>> b = load<kPack<T>>(w + k * stride + j);
#pragma unroll
      for (int v = 0; v < kPack<T>; ++v) sum[k] += a.value[v] * b.value[v];
    }
  }
}

template <int Group, typename T>
__device__ T group_sum(T value) {
#pragma unroll
  for (int offset = Group / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(kAllLanes, value, offset);
  return value;
}

// sum_{s<t} p_s p_t |w_s - w_t|^2 of a row from its logits. Every term is >= 0: nothing cancels, however close to one
// the largest probability is. A class of NaN, or all of -infinity, makes it NaN.
template <typename Shape, int Outputs, int Group, typename T>
__device__ double pair_variance(T* z,  // [Outputs] this thread's logits
                                int d, int member,
                                const T* pairs,  // as put_distances has them
                                T* exponentials  // [kWidth] of this row
) {
  T top = -INFINITY;
#pragma unroll
  for (int k = 0; k < Outputs; ++k) top = member + Group * k < d && z[k] > top ? z[k] : top;
#pragma unroll
  for (int offset = Group / 2; offset > 0; offset /= 2) {
    const T other = __shfl_xor_sync(kAllLanes, top, offset);
    top = other > top ? other : top;
  }
  T normaliser = 0;
#pragma unroll
  for (int k = 0; k < Outputs; ++k) {
    const int s = member + Group * k;
    z[k] = s < d ? exp(z[k] - top) : T(0);
    normaliser += z[k];
    exponentials[s] = z[k];
  }
  __syncwarp();
  T inner[Outputs] = {};
  for (int t = 0; t < d; ++t) {
    const T e = exponentials[t];
    const T* row = pairs + (t * Group + member) * Shape::kSlots;
#pragma unroll
    for (int k = 0; k < Shape::kSlots; k += kPack<T>) {
      const Pack<T, kPack<T>> distance = load<kPack<T>>(row + k);
#pragma unroll
      for (int v = 0; v < kPack<T>; ++v)
        if (k + v < Outputs) inner[k + v] += e * distance.value[v];
    }
  }
  T both = 0;
#pragma unroll
  for (int k = 0; k < Outputs; ++k) both += z[k] * inner[k];
  const double total = group_sum<Group>(normaliser);
  return static_cast<double>(group_sum<Group>(both)) / 2 / (total * total);
}

template <typename T, int Outputs, int Group, int Width>
__global__ void __launch_bounds__(kHeadThreads, kBlocks<T, Outputs>) softmax_variance_kernel(HeadCall<T> call) {
  using Shape = HeadShape<T, Outputs, Group>;
  T* x = dynamic_shared<T>();                    // [kRows, kStride]
  T* pairs = x + Shape::kRows * Shape::kStride;  // [kPairs]
  T* w = pairs + Shape::kPairs;                  // [kWidth, resident or kStride]
  const int64_t first = static_cast<int64_t>(blockIdx.x) * Shape::kRows;
  const int row = threadIdx.x / Group, member = threadIdx.x % Group;
  T held[Shape::kHeld];
  fetch<Shape, Width>(call, first, 0, held);
  const int64_t stride = call.resident ? call.resident : Shape::kStride;
  if (call.resident) put_weight<Shape, Width>(call, 0, call.resident - kPack<T>, stride, w);
  put_distances<Shape, Outputs, Group>(call, pairs);
  T logits[Outputs];
#pragma unroll
  for (int k = 0; k < Outputs; ++k) logits[k] = member + Group * k < call.d ? call.bias[member + Group * k] : T(0);
  double norm = 0;
  for (int64_t start = 0; start < call.m; start += Shape::kDepth) {
    if (start > 0) __syncthreads();  // the slice before has been read
    put<Shape, Width>(held, x);
    if (!call.resident) put_weight<Shape, Width>(call, start, Shape::kDepth, stride, w);
    __syncthreads();
    if (start + Shape::kDepth < call.m) fetch<Shape, Width>(call, first, start + Shape::kDepth, held);
    const int64_t left = call.m - start;
    T sum[Outputs] = {}, square = 0;  // of the slice: a chain of additions as short as that
    add_products<Outputs>(x + row * Shape::kStride, w + member * stride + (call.resident ? start : 0), Group * stride,
                          static_cast<int>(left < Shape::kDepth ? left : Shape::kDepth), sum, &square);
#pragma unroll
    for (int k = 0; k < Outputs; ++k) logits[k] += sum[k];
    norm += square;
  }
  __syncthreads();
  const double variance = pair_variance<Shape, Outputs, Group>(logits, call.d, member, pairs, x + row * Shape::kStride);
  if (member == 0 && first + row < call.n) call.out[first + row] = norm * variance;
}

template <typename T, int Outputs, int Group>
int launch_softmax_variance(HeadCall<T> call, void* stream) {
  using Shape = HeadShape<T, Outputs, Group>;
  const int64_t whole = blocks_of(call.m, Shape::kDepth) * Shape::kDepth + kPack<T>;
  call.resident = Shape::kWidth * whole * sizeof(T) <= kMostResident ? whole : 0;
  const int64_t elements =
      Shape::kRows * Shape::kStride + Shape::kPairs + Shape::kWidth * (call.resident ? call.resident : Shape::kStride);
  const bool wide = packed(call.features, call.stride) && packed(call.weight, call.m);
  const auto kernel =
      wide ? softmax_variance_kernel<T, Outputs, Group, kPack<T>> : softmax_variance_kernel<T, Outputs, Group, 1>;
  const dim3 grid(static_cast<unsigned>(blocks_of(call.n, Shape::kRows)));
  return launch(kernel, grid, kHeadThreads, elements * sizeof(T), stream, call);
}

}  // namespace

template <typename T>
int softmax_variance(const T* features, int64_t stride, const T* weight, const T* bias, const T* distances, int64_t n,
                     int64_t m, int64_t d, double* out, void* stream) {
  const HeadCall<T> call{features, stride, weight, bias, distances, n, m, static_cast<int>(d), 0, out};
  if (d <= 4) return launch_softmax_variance<T, 4, 1>(call, stream);
  if (d <= 8) return launch_softmax_variance<T, 8, 1>(call, stream);
  if (d <= 10) return launch_softmax_variance<T, 10, 1>(call, stream);
  if (d <= 16) return launch_softmax_variance<T, 16, 1>(call, stream);
  if (d <= 32) return launch_softmax_variance<T, 16, 2>(call, stream);
  return launch_softmax_variance<T, 16, 4>(call, stream);
}

template int softmax_variance(const float*, int64_t, const float*, const float*, const float*, int64_t, int64_t,
                              int64_t, double*, void*);
template int softmax_variance(const double*, int64_t, const double*, const double*, const double*, int64_t, int64_t,
                              int64_t, double*, void*);

}  // namespace pyflatness::cuda
