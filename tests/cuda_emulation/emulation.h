// CUDA for one CPU thread, as far as csrc/cuda uses it, so that every kernel's arithmetic, indexing and barriers are
// tested where no GPU is. Each CUDA thread is a fiber that runs until its next barrier. It says nothing of speed or of
// the compiler's own choices; it does find what a GPU may hide:
//
// - a missing barrier: threads run between barriers in an order that can be chosen (`set_order`), with warps far ahead
//   of others or side by side, and results must not change; built with races.cpp, every access is looked at besides;
// - a barrier that not all threads reach, or threads that wait at different ones: an error;
// - dynamic shared memory that nothing wrote: it is filled with NaNs (0xff) before each block. It is a block of the
// heap
//   of exactly the size asked for, so that the address sanitizer sees what lies beyond it.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#define __global__ static
#define __device__
#define __host__
#define __forceinline__ inline
#define __shared__ static  // one block at a time; not filled with NaNs, unlike the dynamic one
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

namespace emulation {

constexpr int kWarp = 32, kMostWarps = 32, kMostThreads = kMostWarps * kWarp;
constexpr size_t kStack = 128 << 10, kMostShared = 227 << 10;  // of a Hopper block

enum class State { ready, at_block_barrier, at_warp_barrier, at_exchange, done };
enum class Effect { whole, of_warp, none };

struct Fiber {
  ucontext_t context;
  State state = State::done;
};

// Of a thread, those that it has not waited for yet.
struct Copies {
  struct {
    void (*make)(void*, const void*);
    void* to;
    const void* from;
  } each[256];
  size_t count = 0;
};

// A barrier in the kernels, which tests weaken or leave out to see whether that is found.
struct Site {
  const char* file;
  int line;
  Effect effect;
  char name[48];
};

// Whatever the threads share that is not the kernels' own memory.
struct Block {
  Fiber fibers[kMostThreads];
  int threads = 0, running = -1;  // -1: none
  Copies copies[kMostThreads];
  void (*body)(void*) = nullptr;
  void* arguments = nullptr;
  ucontext_t scheduler;
  dim3 thread, index, size, grid;
  uint32_t number = 0, first = 0;              // of all blocks, and of the launch's first
  uint32_t passed = 0, passed_by[kMostWarps];  // barriers, of the block and of warps
  unsigned char* shared = nullptr;             // dynamic shared memory
  size_t shared_size = 0;
  Site sites[256];                                         // seen so far
  int seen = 0;                                            //
  std::pair<std::string, Effect> changed;                  // of them, by name
  char problem[256];                                       // the first of the launch
  alignas(16) unsigned char slots[kMostWarps][kWarp][16];  // what lanes hand to each other
};

inline Block block;
inline std::unique_ptr<char[]> stacks{new char[kMostThreads * kStack]};
inline int order = 0;  // 0: warp after warp, 1: from the last, 2: odd threads first, all to the next barrier; from 3 on
                       // random ones, for all or within warps
inline int places[kMostThreads];  // of a random order
inline std::mt19937 generator;

inline void wait(State state) {
  Fiber& fiber = block.fibers[block.running];
  fiber.state = state;
  swapcontext(&fiber.context, &block.scheduler);
}

inline Site& site(const char* file, int line) {
  for (int i = 0; i < block.seen; ++i)
    if (block.sites[i].line == line && block.sites[i].file == file) return block.sites[i];
  if (block.seen == std::size(block.sites)) std::abort();
  Site& site = block.sites[block.seen++];
  const char* name = std::strrchr(file, '/');
  site = {file, line, Effect::whole};
  std::snprintf(site.name, sizeof site.name, "%s:%d", name ? name + 1 : file, line);
  if (block.changed.first == site.name) site.effect = block.changed.second;
  return site;
}

// A barrier of a block or of a warp, where a kernel has it.
inline void barrier(State state, const char* file, int line) {
  const Effect effect = site(file, line).effect;
  if (effect != Effect::none) wait(effect == Effect::of_warp ? State::at_warp_barrier : state);
}

// Changes what a barrier does, all others being as they are written.
inline void change(const std::string& name, Effect effect) {
  block.changed = {name, effect};
  block.seen = 0;
}

inline void enter() {
  block.body(block.arguments);
  block.fibers[block.running].state = State::done;
  swapcontext(&block.fibers[block.running].context, &block.scheduler);
}

inline bool all_together() { return order == 2 || (order > 2 && order % 2); }

inline int place(int turn) {
  if (order == 1) return block.threads - 1 - turn;
  if (order == 2) return turn < block.threads / 2 ? 2 * turn + 1 : 2 * (turn - block.threads / 2);
  return order == 0 ? turn : places[turn];
}

// A random order of the threads, or of the warps and of the lanes of each.
inline void draw_order() {
  std::iota(places, places + block.threads, 0);
  if (all_together()) return std::shuffle(places, places + block.threads, generator);
  int warps[kMostWarps];
  std::iota(warps, warps + block.threads / kWarp, 0);
  std::shuffle(warps, warps + block.threads / kWarp, generator);
  for (int turn = 0; turn < block.threads; turn += kWarp) {
    std::iota(places + turn, places + turn + kWarp, warps[turn / kWarp] * kWarp);
    std::shuffle(places + turn, places + turn + kWarp, generator);
  }
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
  if (any && barrier == State::at_block_barrier) ++block.passed;
  if (any && barrier == State::at_warp_barrier) ++block.passed_by[first / kWarp];
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
    block.thread = dim3(i, 0, 0);
    swapcontext(&block.scheduler, &block.fibers[i].context);
    block.running = -1;
  }
  return any;
}

inline void run_block() {
  for (int i = 0; i < block.threads; ++i) {
    Fiber& fiber = block.fibers[i];
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stacks.get() + i * kStack;
    fiber.context.uc_stack.ss_size = kStack;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, enter, 0);
    fiber.state = State::ready;
    block.copies[i].count = 0;
  }
  ++block.number;
  std::memset(block.shared, 0xff, block.shared_size);
  const int together =
      all_together() ? block.threads : kWarp;  // else a warp goes as far as the block's barriers let it
  for (;;) {
    bool moved = false, done = true;
    if (order > 2) draw_order();
    for (int turn = 0; turn < block.threads; turn += together)
      while (run_ready(turn, turn + together)) {
        moved = true;
        for (int first = 0; first < block.threads; first += kWarp)
          for (State barrier : {State::at_warp_barrier, State::at_exchange}) release(first, first + kWarp, barrier);
      }
    moved = release(0, block.threads, State::at_block_barrier) || moved;
    for (const Fiber& fiber : block.fibers) done = done && fiber.state == State::done;
    if (done) return;
    if (!moved && block.problem[0]) return;
    if (!moved) throw std::runtime_error("emulated CUDA: threads of a block wait at different barriers");
  }
}

// The value that another lane of the warp brings. All 32 must call it. It orders no accesses to memory.
template <typename T>
T exchange(T value, int source) {
  static_assert(sizeof(T) <= 16);
  const int warp = block.running / kWarp, lane = block.running % kWarp;
  std::memcpy(block.slots[warp][lane], &value, sizeof value);
  wait(State::at_exchange);
  T other;
  std::memcpy(&other, block.slots[warp][source], sizeof other);
  wait(State::at_exchange);
  return other;
}

}  // namespace emulation

inline dim3 &threadIdx = emulation::block.thread, &blockIdx = emulation::block.index;
inline dim3 &blockDim = emulation::block.size, &gridDim = emulation::block.grid;

inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = emulation::kMostShared;
  return cudaSuccess;
}

inline void __syncthreads(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  emulation::barrier(emulation::State::at_block_barrier, file, line);
}
inline void __syncwarp(unsigned = ~0u, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  emulation::barrier(emulation::State::at_warp_barrier, file, line);
}

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
  block.size = dim3(threads), block.grid = grid;
  block.first = block.number + 1, block.problem[0] = 0;
  const auto freed = [](unsigned char* memory) { ::operator delete[](memory, std::align_val_t{16}); };
  const std::unique_ptr<unsigned char[], decltype(freed)> memory(new (std::align_val_t{16}) unsigned char[shared],
                                                                 freed);
  emulation::block.shared = memory.get(), block.shared_size = shared;
  emulation::generator.seed(emulation::order);
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x; ++x) {
        block.index = dim3(x, y, z);
        emulation::run_block();
        if (block.problem[0]) throw std::runtime_error(block.problem);
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

// A copy may be made at any time until its thread has waited for it: what was there is lost at once, what comes is
// there at the end.
template <int Bytes>
void copy_async(void* shared, const void* global) {
  uint32_t nothing[Bytes / sizeof(uint32_t)];
  std::fill(std::begin(nothing), std::end(nothing), ~0u);
  std::memcpy(shared, nothing, Bytes);
  auto& copies = emulation::block.copies[emulation::block.running];
  if (copies.count == std::size(copies.each)) std::abort();
  copies.each[copies.count++] = {[](void* to, const void* from) { std::memcpy(to, from, Bytes); }, shared, global};
}
inline void wait_for_copies() {
  auto& copies = emulation::block.copies[emulation::block.running];
  for (size_t i = 0; i < copies.count; ++i) copies.each[i].make(copies.each[i].to, copies.each[i].from);
  copies.count = 0;
}

}  // namespace pyflatness::cuda
