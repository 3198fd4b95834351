// Sums over all classes by differences from the mean, in rows that want them: blocks share the classes out, rows in
// groups share each read of the weight. How many rows there are is known on the device alone: a list of them is made
// there, and blocks take parts of the work until there is none.
#include "elements.cuh"
#include "reduce.cuh"

namespace pyflatness::cuda {
namespace {

constexpr int kSpreadThreads = 128, kSides = 2;            // the two halves of a warp have the same classes
constexpr int kApart = kSpreadThreads / kSides, kOwn = 4;  // classes of a thread: how far apart, how many
constexpr int kTile = kApart * kOwn;
constexpr int64_t kMostSplits = 512, kMostBlocks = 1024;

template <typename T>
constexpr int kRows = sizeof(T) == sizeof(double) ? 2 : 4;  // of a thread
template <typename T>
constexpr int kGroup = kRows<T> * kSides;  // rows that share a read
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
struct Slice {
  W weight[kTile * kPitch<W>];
  T centre[kSlice<W>], features[kGroup<T>][kSlice<W>], mean[kGroup<T>][kSlice<W>];
};

template <typename T, typename W>
struct Shared {
  Slice<T, W> slices[2];  // one is read while the other comes
  int64_t rows[kGroup<T>];
  double totals[kGroup<T>];
};

// Brings an access to shared memory, whole ones without waiting for them; 0 where there is nothing.
template <int Width, typename E>
__device__ void bring(E* shared, const E* global, bool there) {
  if (!there)
    store(shared, Pack<E, Width>{});
  else if constexpr (Width == kPack<E>)
    copy_async<sizeof(Pack<E, Width>)>(shared, global);
  else
    store(shared, load<Width>(global));
}

// Features from `start` on of the weight's rows from `first` on, and of the group's.
template <bool Packed, typename T, typename W>
__device__ void fetch(Slice<T, W>& slice, const int64_t* rows, const Spread<T, W>& call, int64_t first, int64_t start) {
  constexpr int kWide = Packed ? kPack<W> : 1, kAccesses = kSlice<W> / kWide, kStep = kSpreadThreads / kAccesses;
  const int own = threadIdx.x / kAccesses, place = threadIdx.x % kAccesses * kWide;
  const W* source = call.weight + (first + own) * call.m + start + place;
  const int there = static_cast<int>(start + place < call.m ? min(call.d - first, int64_t{kTile}) : 0);
#pragma unroll 4
  for (int s = 0; s < kTile; s += kStep) {
    bring<kWide>(slice.weight + (own + s) * kPitch<W> + place, source, own + s < there);
    source += kStep * call.m;
  }
  constexpr int kCount = Packed ? kPack<T> : 1;
#pragma unroll 1
  for (int access = threadIdx.x; access < kGroup<T> * kSlice<W> / kCount; access += kSpreadThreads) {
    const int r = access * kCount / kSlice<W>, v = access * kCount % kSlice<W>;
    const int64_t from = rows[r] * call.m + start + v;
    const bool inside = rows[r] >= 0 && start + v < call.m;
    bring<kCount>(slice.features[r] + v, call.features + from, inside);
    bring<kCount>(slice.mean[r] + v, call.mean + from, inside);
  }
#pragma unroll 1
  for (int v = threadIdx.x * kCount; v < kSlice<W>; v += kSpreadThreads * kCount)
    bring<kCount>(slice.centre + v, call.centre + start + v, call.centre && start + v < call.m);
}

// Adds up the exponentials of a tile's classes, times their distances, for every row of the group. Products are in T
// over a slice; what logits sum up to goes on in double, since exponentials have their error.
template <bool Packed, typename T, typename W>
__device__ void add_tile(Shared<T, W>& shared, const Spread<T, W>& call, int64_t first) {
  const int side = threadIdx.x / (kWarp / kSides) % kSides, row = side * kRows<T>;
  const int lane = threadIdx.x / kWarp * (kWarp / kSides) + threadIdx.x % (kWarp / kSides);
  double logits[kRows<T>][kOwn] = {};
  T distances[kRows<T>][kOwn] = {};
  fetch<Packed>(shared.slices[0], shared.rows, call, first, 0);
  for (int64_t start = 0, stage = 0; start < call.m; start += kSlice<W>, stage = 1 - stage) {
    wait_for_copies();
    __syncthreads();  // this slice is there, and the one before has been read
    if (start + kSlice<W> < call.m)
      fetch<Packed>(shared.slices[1 - stage], shared.rows, call, first, start + kSlice<W>);
    const Slice<T, W>& slice = shared.slices[stage];
    T product[kRows<T>][kOwn] = {}, square[kRows<T>][kOwn] = {};
#pragma unroll 1
    for (int v = 0; v < kSlice<W>; v += kPack<W>) {
      Pack<W, kPack<W>> stored[kOwn];
#pragma unroll
      for (int own = 0; own < kOwn; ++own)
        stored[own] = load<kPack<W>>(slice.weight + (own * kApart + lane) * kPitch<W> + v);
#pragma unroll
      for (int part = 0; part < kPack<W>; part += kPack<T>) {
        T w[kOwn][kPack<T>];
#pragma unroll
        for (int own = 0; own < kOwn; ++own)
#pragma unroll
          for (int q = 0; q < kPack<T>; ++q) w[own][q] = widen(stored[own].value[part + q]);
        if (call.centre) {
          const auto centre = load<kPack<T>>(slice.centre + v + part);
#pragma unroll
          for (int own = 0; own < kOwn; ++own)
#pragma unroll
            for (int q = 0; q < kPack<T>; ++q) w[own][q] -= centre.value[q];
        }
#pragma unroll
        for (int r = 0; r < kRows<T>; ++r) {
          const auto feature = load<kPack<T>>(slice.features[row + r] + v + part);
          const auto mean = load<kPack<T>>(slice.mean[row + r] + v + part);
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
    for (int r = 0; r < kRows<T>; ++r)
#pragma unroll
      for (int own = 0; own < kOwn; ++own) {
        logits[r][own] += product[r][own];
        distances[r][own] += square[r][own];
      }
  }
#pragma unroll
  for (int r = 0; r < kRows<T>; ++r) {
    const int64_t place = shared.rows[row + r];
    const double maximum = place < 0 ? 0.0 : call.maximum[place];
    double sum = 0;
#pragma unroll
    for (int own = 0; own < kOwn; ++own) {
      const int64_t s = first + own * kApart + lane;
      if (s < call.d) sum += exp(logits[r][own] + call.bias[s] - maximum) * distances[r][own];
    }
#pragma unroll
    for (int other = 0; other < kSides; ++other) {
      const double total = block_sum(side == other ? sum : 0.0);  // behind its barriers the last slice has been read
      if (threadIdx.x == 0) shared.totals[other * kRows<T> + r] += total;
    }
  }
}

// Groups in turn take the same classes, so that blocks that run together find these in the cache.
template <bool Packed, typename T, typename W>
__global__ void __launch_bounds__(kSpreadThreads, 2) spread_kernel(Spread<T, W> call) {
  auto& shared = *dynamic_shared<Shared<T, W>>();
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
  status = launch(kernel, dim3(blocks_for(groups * splits)), kSpreadThreads, sizeof(Shared<T, W>), stream, call);
  if (status != 0) return status;
  return launch(add_splits_kernel, dim3(blocks_for(n)), threads_for(splits, 1), 0, stream, partial, rows, n, splits,
                out);
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
