// CUDA for one CPU thread, as far as csrc/cuda uses it, so that every kernel's arithmetic, indexing and barriers are
// tested where no GPU is. Each CUDA thread is a fiber that runs until its next barrier. It says nothing of speed, of
// memory order or of the compiler's own choices; it does find what a GPU may hide:
//
// - a missing barrier: the order in which threads run between barriers can be turned round (`set_order`), with warps
//   far ahead of others or side by side, and results must not change;
// - a barrier that not all threads reach, or threads that wait at different ones: an error;
// - shared memory that nothing wrote: it is filled with NaNs (0xff) before each block.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#define __global__ static
#define __device__
#define __host__
#define __forceinline__ inline
#define __shared__ static  // one block at a time; not filled with NaNs, unlike the dynamic pool
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __restrict__ __restrict

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

using cudaError_t = int;
constexpr cudaError_t cudaSuccess = 0, cudaErrorInvalidConfiguration = 9;
inline const char* cudaGetErrorName(cudaError_t) { return "cudaErrorInvalidConfiguration"; }
inline const char* cudaGetErrorString(cudaError_t) { return "invalid configuration argument"; }

enum cudaDeviceAttr { cudaDevAttrMaxSharedMemoryPerBlockOptin };
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int device);
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulation {

constexpr int kWarp = 32;
constexpr size_t kStack = 128 << 10, kMostShared = 227 << 10;  // of a Hopper block

enum class State { ready, at_block_barrier, at_warp_barrier, done };

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[kStack]};
  State state = State::done;
};

struct Block {
  std::vector<Fiber> fibers;
  int threads = 0, running = 0;
  void (*body)(void*) = nullptr;
  void* arguments = nullptr;
  ucontext_t scheduler;
  alignas(16) unsigned char slots[32][kWarp][16];  // what lanes hand to each other
  alignas(16) unsigned char shared[kMostShared];
};

inline Block block;
inline int order = 0;  // 0: warp after warp, 1: from the last, 2: odd threads first, all to the next barrier

inline void wait(State state) {
  Fiber& fiber = block.fibers[block.running];
  fiber.state = state;
  swapcontext(&fiber.context, &block.scheduler);
}

inline void enter() {
  block.body(block.arguments);
  block.fibers[block.running].state = State::done;
  swapcontext(&block.fibers[block.running].context, &block.scheduler);
}

inline int place(int turn) {
  if (order == 1) return block.threads - 1 - turn;
  if (order == 2) return turn < block.threads / 2 ? 2 * turn + 1 : 2 * (turn - block.threads / 2);
  return turn;
}

// Lets the threads [first, last) go on if all that are not done wait at a barrier of this kind.
inline bool release(int first, int last, State barrier) {
  bool any = false;
  for (int i = first; i < last; ++i) {
    const State state = block.fibers[i].state;
    if (state != barrier && state != State::done) return false;
    any = any || state == barrier;
  }
  for (int i = first; i < last && any; ++i)
    if (block.fibers[i].state == barrier) block.fibers[i].state = State::ready;
  return any;
}

// Runs the threads of these turns that are ready, each to its next barrier; whether there were any.
inline bool run_ready(int first, int last) {
  bool any = false;
  for (int turn = first; turn < last; ++turn) {
    const int i = place(turn);
    if (block.fibers[i].state != State::ready) continue;
    any = true;
    block.running = i;
    threadIdx = dim3(i, 0, 0);
    swapcontext(&block.scheduler, &block.fibers[i].context);
  }
  return any;
}

inline void run_block() {
  for (int i = 0; i < block.threads; ++i) {
    Fiber& fiber = block.fibers[i];
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStack;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, enter, 0);
    fiber.state = State::ready;
  }
  std::memset(block.shared, 0xff, sizeof block.shared);
  const int together = order == 2 ? block.threads : kWarp;  // else a warp goes as far as the block's barriers let it
  for (;;) {
    bool moved = false, done = true;
    for (int turn = 0; turn < block.threads; turn += together)
      while (run_ready(turn, turn + together)) {
        moved = true;
        for (int first = 0; first < block.threads; first += kWarp)
          release(first, first + kWarp, State::at_warp_barrier);
      }
    moved = release(0, block.threads, State::at_block_barrier) || moved;
    for (const Fiber& fiber : block.fibers) done = done && fiber.state == State::done;
    if (done) return;
    if (!moved) throw std::runtime_error("emulated CUDA: threads of a block wait at different barriers");
  }
}

// The value that another lane of the warp brings. All 32 must call it.
template <typename T>
T exchange(T value, int source) {
  static_assert(sizeof(T) <= 16);
  const int warp = block.running / kWarp, lane = block.running % kWarp;
  std::memcpy(block.slots[warp][lane], &value, sizeof value);
  wait(State::at_warp_barrier);
  T other;
  std::memcpy(&other, block.slots[warp][source], sizeof other);
  wait(State::at_warp_barrier);
  return other;
}

}  // namespace emulation

inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = emulation::kMostShared;
  return cudaSuccess;
}

inline void __syncthreads() { emulation::wait(emulation::State::at_block_barrier); }
inline void __syncwarp(unsigned = ~0u) { emulation::wait(emulation::State::at_warp_barrier); }

template <typename T>
T __shfl_sync(unsigned, T value, int source) {
  return emulation::exchange(value, source % emulation::kWarp);
}

template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return emulation::exchange(value, (emulation::block.running % emulation::kWarp) ^ mask);
}

template <typename T>
T __shfl_down_sync(unsigned, T value, int offset) {
  const int lane = emulation::block.running % emulation::kWarp;
  return emulation::exchange(value, lane + offset < emulation::kWarp ? lane + offset : lane);
}

inline unsigned __ballot_sync(unsigned, int predicate) {
  unsigned bits = 0;
  for (int lane = 0; lane < emulation::kWarp; ++lane)
    bits |= (emulation::exchange(predicate != 0, lane) ? 1u : 0u) << lane;
  return bits;
}
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) == ~0u; }
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }

inline double rsqrt(double x) { return 1 / std::sqrt(x); }
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
using std::exp;
using std::fabs;
using std::fmax;
using std::isfinite;
using std::max;
using std::min;
using std::nan;
using std::sqrt;

namespace pyflatness::cuda {

template <typename T>
T* dynamic_shared() {
  return reinterpret_cast<T*>(emulation::block.shared);
}

template <typename... Parameters, typename... Arguments>
int launch(void (*kernel)(Parameters...), dim3 grid, int threads, size_t shared, void*, Arguments... arguments) {
  using emulation::block;
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return cudaSuccess;
  if (threads % emulation::kWarp || threads > 1024 || shared > emulation::kMostShared || grid.y > 65535 ||
      grid.z > 65535)
    return cudaErrorInvalidConfiguration;
  auto call = std::make_pair(kernel, std::tuple<Parameters...>(static_cast<Parameters>(arguments)...));
  block.body = [](void* given) {
    auto& [function, values] = *static_cast<decltype(call)*>(given);
    std::apply(function, values);
  };
  block.arguments = &call;
  block.threads = threads;
  block.fibers.clear();
  block.fibers.resize(threads);
  blockDim = dim3(threads), gridDim = grid;
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x; ++x) {
        blockIdx = dim3(x, y, z);
        emulation::run_block();
      }
  return cudaSuccess;
}

inline uint32_t nearest_bfloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;  // NaN, which rounding could turn into infinity
  return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}
inline uint32_t narrowed(float first, float second) { return nearest_bfloat16(first) | nearest_bfloat16(second) << 16; }

inline float coarse_exp(float x) { return std::exp(x); }

template <int Bytes>
void copy_async(void* shared, const void* global) {
  std::memcpy(shared, global, Bytes);
}
inline void wait_for_copies() {}

}  // namespace pyflatness::cuda
