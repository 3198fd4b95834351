// Sums over all classes by differences from the mean, in rows that want them: blocks share the classes out, rows in
// groups share each read of the weight. How many rows there are is known on the device alone: a list of them is made
// there, and blocks take parts of the work until there is none.
#include "elements.cuh"
#include "reduce.cuh"

namespace pyflatness::cuda {
namespace {

constexpr int kSpreadThreads = 128, kOwn = 2, kTile = kSpreadThreads * kOwn;  // classes of a thread, of a tile
constexpr int64_t kMostSplits = 512, kMostBlocks = 1024;
constexpr int kInFlight = 8;  // accesses of a thread that are on their way at once

template <typename T>
constexpr int kGroup = sizeof(T) == sizeof(double) ? 4 : 8;  // rows that share a read
template <typename W>
constexpr int kSlice = 128 / sizeof(W);  // features at a time
template <typename W>
constexpr int kPitch = kSlice<W> + kPack<W>;  // an odd number of accesses: lanes read from different banks

template <typename T, typename W>
struct Spread {
  const T* features;    // [n, m]
  const T* maximum;     // [n]
  const T* mean;        // [n, m]
  const W* weight;      // [d, m]
  const T* centre;      // [m] or null: 0
  const T* bias;        // [d]
  const int64_t* rows;  // [n + 1], at its end how many of them count
  int64_t n, d, m;      //
  int64_t splits;       //
  double* partial;      // [n, splits]
};

template <typename T, typename W>
struct Slices {
  W weight[kTile * kPitch<W>];
  T centre[kSlice<W>], features[kGroup<T>][kSlice<W>], mean[kGroup<T>][kSlice<W>];
  int64_t rows[kGroup<T>];
  double totals[kGroup<T>];
};

// Rows of the weight from `first` on, features from `start` on; 0 beyond both ends.
template <int Width, typename T, typename W>
__device__ void fetch_weight(Slices<T, W>& shared, const Spread<T, W>& call, int64_t first, int64_t start) {
  constexpr int kAccesses = kSlice<W> / Width, kStep = kSpreadThreads / kAccesses;  // of a row; rows at once
  const int own = threadIdx.x / kAccesses, v = threadIdx.x % kAccesses * Width;
  const W* source = call.weight + (first + own) * call.m + start + v;
  W* target = shared.weight + own * kPitch<W> + v;
  const int there = static_cast<int>(start + v < call.m ? min(call.d - first - own, int64_t{kTile}) : 0);
#pragma unroll 1
  for (int row = 0; row < kTile; row += kInFlight * kStep) {
    Pack<W, Width> fetched[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      fetched[i] = row + i * kStep < there ? load<Width>(source) : Pack<W, Width>{};
      source += kStep * call.m;
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) store(target + (row + i * kStep) * kPitch<W>, fetched[i]);
  }
}

// What the group has beside the weight; rows and features that are not there are 0, and add nothing.
template <int Width, typename T, typename W>
__device__ void fetch_rows(Slices<T, W>& shared, const Spread<T, W>& call, int64_t start) {
  constexpr int kAccesses = kSlice<W> / Width;
#pragma unroll 1
  for (int access = threadIdx.x; access < kGroup<T> * kAccesses; access += kSpreadThreads) {
    const int r = access / kAccesses, v = access % kAccesses * Width;
    const int64_t place = shared.rows[r] * call.m + start + v;
    const bool there = shared.rows[r] >= 0 && start + v < call.m;
    const auto feature = there ? load<Width>(call.features + place) : Pack<T, Width>{};
    const auto mean = there ? load<Width>(call.mean + place) : Pack<T, Width>{};
    store(shared.features[r] + v, feature), store(shared.mean[r] + v, mean);
  }
#pragma unroll 1
  for (int v = threadIdx.x * Width; v < kSlice<W>; v += kSpreadThreads * Width)
    store(shared.centre + v,
          call.centre && start + v < call.m ? load<Width>(call.centre + start + v) : Pack<T, Width>{});
}

// Adds the exponentials of a thread's own classes, times their distances, for every row of the group. Products are in T
// over a slice; what logits sum up to goes on in double, since exponentials have their error.
template <bool Packed, typename T, typename W>
__device__ void add_tile(Slices<T, W>& shared, const Spread<T, W>& call, int64_t first) {
  double logits[kGroup<T>][kOwn] = {};
  T distances[kGroup<T>][kOwn] = {};
  for (int64_t start = 0; start < call.m; start += kSlice<W>) {
    __syncthreads();  // the slice before has been read
    fetch_rows<Packed ? kPack<T> : 1>(shared, call, start);
    fetch_weight<Packed ? kPack<W> : 1>(shared, call, first, start);
    __syncthreads();
    T product[kGroup<T>][kOwn] = {}, square[kGroup<T>][kOwn] = {};
#pragma unroll 1
    for (int v = 0; v < kSlice<W>; v += kPack<W>) {
      Pack<W, kPack<W>> stored[kOwn];
#pragma unroll
      for (int own = 0; own < kOwn; ++own)
        stored[own] = load<kPack<W>>(shared.weight + (own * kSpreadThreads + threadIdx.x) * kPitch<W> + v);
#pragma unroll
      for (int part = 0; part < kPack<W>; part += kPack<T>) {
        const auto centre = load<kPack<T>>(shared.centre + v + part);
        T w[kOwn][kPack<T>];
#pragma unroll
        for (int own = 0; own < kOwn; ++own)
#pragma unroll
          for (int q = 0; q < kPack<T>; ++q) w[own][q] = widen(stored[own].value[part + q]) - centre.value[q];
#pragma unroll
        for (int r = 0; r < kGroup<T>; ++r) {
          const auto feature = load<kPack<T>>(shared.features[r] + v + part);
          const auto mean = load<kPack<T>>(shared.mean[r] + v + part);
#pragma unroll
          for (int q = 0; q < kPack<T>; ++q)
#pragma unroll
            for (int own = 0; own < kOwn; ++own) {
              const T away = w[own][q] - mean.value[q];
              product[r][own] += feature.value[q] * w[own][q];
              square[r][own] += away * away;
            }
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kGroup<T>; ++r)
#pragma unroll
      for (int own = 0; own < kOwn; ++own) {
        logits[r][own] += product[r][own];
        distances[r][own] += square[r][own];
      }
  }
#pragma unroll
  for (int r = 0; r < kGroup<T>; ++r) {
    if (shared.rows[r] < 0) return;
    const double maximum = call.maximum[shared.rows[r]];
    double sum = 0;
#pragma unroll
    for (int own = 0; own < kOwn; ++own) {
      const int64_t s = first + own * kSpreadThreads + threadIdx.x;
      if (s < call.d) sum += exp(logits[r][own] + call.bias[s] - maximum) * distances[r][own];
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) shared.totals[r] += sum;
  }
}

// Groups in turn take the same classes, so that blocks that run together find these in the cache.
template <bool Packed, typename T, typename W>
__global__ void __launch_bounds__(kSpreadThreads, 3)
    spread_kernel(Spread<T, W> call) {
  auto& shared = *dynamic_shared<Slices<T, W>>();
  const int64_t count = call.rows[call.n], groups = (count + kGroup<T> - 1) / kGroup<T>;
  const int64_t tiles = (call.d + kTile - 1) / kTile, share = (tiles + call.splits - 1) / call.splits * kTile;
  for (int64_t item = blockIdx.x; item < groups * call.splits; item += gridDim.x) {
    const int64_t first = item % groups * kGroup<T>, split = item / groups;
    if (threadIdx.x == 0)
      for (int r = 0; r < kGroup<T>; ++r) {
        shared.rows[r] = first + r < count ? call.rows[first + r] : -1;
        shared.totals[r] = 0;
      }
    __syncthreads();
    for (int64_t s = split * share; s < call.d && s < (split + 1) * share; s += kTile)
      add_tile<Packed>(shared, call, s);
    if (threadIdx.x == 0)
      for (int r = 0; r < kGroup<T> && first + r < count; ++r)
        call.partial[(first + r) * call.splits + split] = shared.totals[r];
    __syncthreads();  // rows have been read
  }
}

// One block lists the chosen rows in their order, and how many there are behind them.
__global__ void list_chosen_kernel(const bool* chosen, int64_t n, int64_t* rows, double* out) {
  __shared__ int of_warp[kMostWarps];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  int64_t count = 0;
  for (int64_t start = 0; start < n; start += blockDim.x) {
    const int64_t i = start + threadIdx.x;
    const bool taken = i < n && chosen[i];
    const unsigned lanes = __ballot_sync(kAllLanes, taken);
    if (lane == 0) of_warp[warp] = __popc(lanes);
    __syncthreads();
    int64_t place = count + __popc(lanes & ((1u << lane) - 1));
    for (int other = 0; other < warps; ++other) {
      place += other < warp ? of_warp[other] : 0;
      count += of_warp[other];
    }
    if (taken) rows[place] = i;
    if (i < n) out[i] = 0;
    __syncthreads();  // of_warp has been read
  }
  if (threadIdx.x == 0) rows[n] = count;
}

__global__ void add_splits_kernel(const double* partial, const int64_t* rows, int64_t n, int64_t splits, double* out) {
  for (int64_t place = blockIdx.x; place < rows[n]; place += gridDim.x) {
    double total = 0;
    for (int64_t split = threadIdx.x; split < splits; split += blockDim.x) total += partial[place * splits + split];
    total = block_sum(total);
    if (threadIdx.x == 0) out[rows[place]] = total;
  }
}

unsigned blocks_for(int64_t items) { return static_cast<unsigned>(items < kMostBlocks ? items : kMostBlocks); }

}  // namespace

int64_t spread_splits(int64_t d) {
  const int64_t tiles = blocks_of(d, kTile);
  return tiles < 1 ? 1 : blocks_of(tiles, blocks_of(tiles, kMostSplits));
}

template <typename T, typename W>
int spread(const T* features, const T* maximum, const T* mean, const W* weight, const T* centre, const T* bias,
           const bool* chosen, int64_t n, int64_t d, int64_t m, int64_t* rows, double* partial, double* out,
           void* stream) {
  if (n == 0) return 0;
  const int64_t splits = spread_splits(d), groups = blocks_of(n, kGroup<T>);
  int status = launch(list_chosen_kernel, dim3(1), threads_for(n, 1), 0, stream, chosen, n, rows, out);
  if (status != 0) return status;
  const bool wide = packed(weight, m) && packed(features, m) && packed(mean, m) && packed(centre, 0);
  const auto kernel = wide ? spread_kernel<true, T, W> : spread_kernel<false, T, W>;
  const Spread<T, W> call{features, maximum, mean, weight, centre, bias, rows, n, d, m, splits, partial};
  status = launch(kernel, dim3(blocks_for(groups * splits)), kSpreadThreads, sizeof(Slices<T, W>), stream, call);
  if (status != 0) return status;
  return launch(add_splits_kernel, dim3(blocks_for(n)), threads_for(splits, 1), 0, stream, partial, rows, n, splits, out);
}

#define PYFLATNESS_SPREAD(T, W)                                                                                  \
  template int spread(const T*, const T*, const T*, const W*, const T*, const T*, const bool*, int64_t, int64_t, \
                      int64_t, int64_t*, double*, double*, void*);
PYFLATNESS_SPREAD(float, float)
PYFLATNESS_SPREAD(double, double)
PYFLATNESS_SPREAD(float, BFloat16)
PYFLATNESS_SPREAD(float, Float16)
#undef PYFLATNESS_SPREAD

}  // namespace pyflatness::cuda
