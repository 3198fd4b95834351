// Every access to memory of the emulated threads, looked at by the calls that `-fsanitize=thread` puts in front of it;
// this file stands in for the sanitizer's library, and is compiled without the option. It finds, in whatever order the
// threads run,
//
// - races: two accesses to a byte by two threads, at least one of them a write, that no barrier orders. Threads of two
//   blocks are never ordered, threads of two warps by a barrier of the block alone, and lanes of a warp by a barrier of
//   the warp too. Shuffles and products on tensor cores order nothing;
// - shared memory, static or dynamic, that is read in a block where nothing has written it.
//
// The sanitizer's own library knows of no such barriers (they would be two locks each), forgets the fifth access to
// eight bytes, and speaks at the process's end; here the launch that is wrong throws.
#include <cstdio>
#include <unordered_map>

#include "emulation.h"

// The module's own: where it begins, and where its static shared memory is.
extern "C" __attribute__((visibility("hidden"))) char __ehdr_start, __bss_start, _end;

namespace {

using emulation::block;
using emulation::kWarp;

// Of one byte: the last write, and what matters of the reads since the block's last barrier.
struct Byte {
  uint32_t write_block, write_passed, write_passed_by;
  uint32_t read_block, read_passed, read_passed_by;
  uint16_t writer, reader;
  bool of_lanes, of_warps, of_blocks;  // read by others than the reader: of its warp, of its block, of others
};

struct Place {
  uint32_t of_block, passed, passed_by;
  uint16_t thread;
};

constexpr uintptr_t kPage = 4096;
struct Page {
  Byte bytes[kPage];
};
constexpr size_t kMostPages = 2048;  // that a launch leaves to the next one, which has no use for them
std::unordered_map<uintptr_t, Page> pages;
uintptr_t last = 0;
uint32_t launch = 0;
Page* page = nullptr;  // the last one

Byte& byte_at(uintptr_t address) {
  if (block.first != launch) {
    launch = block.first;
    if (pages.size() > kMostPages) pages.clear(), page = nullptr;
  }
  if (page == nullptr || address / kPage != last) last = address / kPage, page = &pages[last];
  return page->bytes[address % kPage];
}

template <typename T>
bool within(uintptr_t address, const T* first, const T* last) {
  return address >= reinterpret_cast<uintptr_t>(first) && address < reinterpret_cast<uintptr_t>(last);
}

void describe(const char* what, int other, uintptr_t address, bool shared, const void* from) {
  const auto* start = shared && within(address, block.shared, block.shared + block.shared_size)
                          ? reinterpret_cast<char*>(block.shared)
                          : &__bss_start;
  char with[32] = "";
  if (other >= 0) std::snprintf(with, sizeof with, " thread %d", other);
  std::snprintf(
      block.problem, sizeof block.problem,
      "emulated CUDA: thread %d of block (%u, %u, %u) %s%s: %s memory at %#zx, instruction %#zx of the module",
      block.running, block.index.x, block.index.y, block.index.z, what, with, shared ? "shared" : "global",
      static_cast<size_t>(shared ? address - reinterpret_cast<uintptr_t>(start) : address),
      reinterpret_cast<const char*>(from) - &__ehdr_start);
}

// The thread stops: what it would go on with is of no meaning, and might keep it in a loop for ever.
void say(const char* what, int other, uintptr_t address, bool shared, const void* from) {
  if (block.problem[0] == 0) describe(what, other, address, shared, from);
  emulation::wait(emulation::State::done);
}

void look(uintptr_t address, size_t size, bool write, const void* from) {
  if (block.body == nullptr || block.running < 0 || within(address, &block, &block + 1)) return;
  const char* stacks = emulation::stacks.get();
  if (within(address, stacks, stacks + emulation::kMostThreads * emulation::kStack)) return;
  const bool shared =
      within(address, block.shared, block.shared + block.shared_size) || within(address, &__bss_start, &_end);
  const int self = block.running;
  const uint32_t passed_by = block.passed_by[self / kWarp];
  for (; size > 0; --size, ++address) {
    Byte& byte = byte_at(address);
    const uint32_t since = shared ? block.number : block.first;  // another block has shared memory of its own
    const bool written = byte.write_block >= since, read = byte.read_block >= since;
    const auto ordered = [&](uint32_t of_block, uint32_t passed, uint32_t of_warp, int other) {
      return of_block == block.number &&
             (passed < block.passed || other == self || (other / kWarp == self / kWarp && of_warp < passed_by));
    };
    if (written && !ordered(byte.write_block, byte.write_passed, byte.write_passed_by, byte.writer))
      say(write ? "writes what was written by" : "reads what was written by", byte.writer, address, shared, from);
    if (write) {
      const bool same = byte.read_block == block.number && byte.read_passed == block.passed;
      if (read && byte.of_blocks)
        say("writes what another block read", -1, address, shared, from);
      else if (read && same && byte.of_warps)
        say("writes what threads of other warps read", -1, address, shared, from);
      else if (read && same && byte.of_lanes && byte.read_passed_by == passed_by)
        say("writes what other threads of its warp read", -1, address, shared, from);
      else if (read && !ordered(byte.read_block, byte.read_passed, byte.read_passed_by, byte.reader))
        say("writes what was read by", byte.reader, address, shared, from);
      byte.write_block = block.number, byte.write_passed = block.passed, byte.write_passed_by = passed_by;
      byte.writer = static_cast<uint16_t>(self);
      continue;
    }
    if (shared && !written) say("reads what nothing wrote", -1, address, shared, from);
    const bool stretch = read && byte.read_block == block.number && byte.read_passed == block.passed;
    const bool of_warp = stretch && byte.reader / kWarp == self / kWarp;
    byte.of_blocks = read && (byte.of_blocks || byte.read_block != block.number);
    byte.of_warps = stretch && (byte.of_warps || !of_warp);
    byte.of_lanes = of_warp && byte.read_passed_by == passed_by && (byte.of_lanes || byte.reader != self);
    byte.read_block = block.number, byte.read_passed = block.passed, byte.read_passed_by = passed_by;
    byte.reader = static_cast<uint16_t>(self);
  }
}

}  // namespace

extern "C" {

#define EMULATION_LOOK(name, size, write) \
  void name(void* address) { look(reinterpret_cast<uintptr_t>(address), size, write, __builtin_return_address(0)); }
#define EMULATION_LOOKS(size)                              \
  EMULATION_LOOK(__tsan_read##size, size, false)           \
  EMULATION_LOOK(__tsan_write##size, size, true)           \
  EMULATION_LOOK(__tsan_unaligned_read##size, size, false) \
  EMULATION_LOOK(__tsan_unaligned_write##size, size, true)
EMULATION_LOOKS(1)
EMULATION_LOOKS(2)
EMULATION_LOOKS(4)
EMULATION_LOOKS(8)
EMULATION_LOOKS(16)

void __tsan_read_range(void* address, size_t size) {
  look(reinterpret_cast<uintptr_t>(address), size, false, __builtin_return_address(0));
}
void __tsan_write_range(void* address, size_t size) {
  look(reinterpret_cast<uintptr_t>(address), size, true, __builtin_return_address(0));
}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}

}  // extern "C"
