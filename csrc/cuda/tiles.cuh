// Tiles of products C[i, j] = Σ_k A[k, i] B[k, j], A and B read through axes of their own. A block of threads
// makes a tile: some depths of both operands at a time go to shared memory while those before are multiplied, so that
// one barrier is enough for each step. The elements stay in registers, for the caller to use and forget.
#pragma once

#include <type_traits>

#include "axes.cuh"
#include "mma.cuh"
#include "reduce.cuh"

namespace pyflatness::cuda {

template <typename T>
struct alignas(16) Quad {
  static constexpr int kCount = 16 / sizeof(T);
  T values[kCount];
};

// Tiles of 64 x 64 on CUDA cores. A step is 8 deep; in shared memory the places of one depth are neighbours.
template <class Kind>
struct Plain {
  using Element = typename Kind::Element;
  using Sum = typename Kind::Sum;
  using Word = Sum;
  static constexpr int kTileRows = 64, kTileColumns = 64, kThreads = sizeof(Sum) == 4 ? 64 : 128;
  static constexpr int kWords = 8, kPerWord = 1, kDepth = kWords;
  static constexpr int kBlocks = sizeof(Sum) == 4 ? 6 : 3;  // of a multiprocessor, that registers are to suffice for
  static constexpr int kLanes = Quad<Sum>::kCount;          // elements of a 16-byte access
  static constexpr int kLd = kTileRows + kLanes;
  static constexpr int kRows = 8, kColumns = kTileRows * kTileColumns / kThreads / kRows;  // of a thread
  static constexpr int kAcross = kTileColumns / kColumns;  // threads along a row of the tile
  static constexpr bool kWordsTogether = false;

  Sum sums[kRows][kColumns];

  __device__ static int index(int place, int word) { return word * kLd + place; }
  __host__ __device__ static constexpr int stage(int) { return kWords * kLd; }  // words of a step of so many places
  __device__ static Word word(const Element* element) { return *element; }
  __device__ static Word fetch(const Element* data, const int32_t* depths, int32_t place) {
    return depths[0] < 0 || place < 0 ? Word{0} : data[depths[0] + place];
  }

  // Where the tiles of a matrix of M lie that is the second operand: an element, the leading dimension, a step.
  __device__ static int element(int row, int column, int ld) { return row * ld + column; }
  __host__ __device__ static int leading(int) { return kLd; }
  __host__ __device__ static int64_t elements(int rows) { return int64_t{rows} * kLd; }
  __device__ static int step(int number, int ld) { return number * kWords * ld; }

  __device__ static int row(int i) {
    return i / kLanes * (kTileRows / kRows * kLanes) + threadIdx.x / kAcross * kLanes + i % kLanes;
  }
  __device__ static int column(int j) {
    return j / kLanes * (kAcross * kLanes) + threadIdx.x % kAcross * kLanes + j % kLanes;
  }

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int j = 0; j < kColumns; ++j) sums[i][j] = 0;
  }

  __device__ void multiply(const Word* a, const Word* b, int ld) {
#pragma unroll
    for (int k = 0; k < kWords; ++k) {
      Quad<Sum> left[kRows / kLanes], right[kColumns / kLanes];
#pragma unroll
      for (int i = 0; i < kRows; i += kLanes)
        left[i / kLanes] = *reinterpret_cast<const Quad<Sum>*>(a + k * kLd + row(i));
#pragma unroll
      for (int j = 0; j < kColumns; j += kLanes)
        right[j / kLanes] = *reinterpret_cast<const Quad<Sum>*>(b + k * ld + column(j));
#pragma unroll
      for (int i = 0; i < kRows; ++i)
#pragma unroll
        for (int j = 0; j < kColumns; ++j)
          sums[i][j] += left[i / kLanes].values[i % kLanes] * right[j / kLanes].values[j % kLanes];
    }
  }

  template <typename Use>
  __device__ void each(const Use& use) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int j = 0; j < kColumns; ++j) use(row(i), column(j), sums[i][j]);
  }
};

// Tiles of 64 x 64, 64 x 128 or 128 x 128 on tensor cores, of which a warp has 32 x 32, 64 x 32 and 64 x 32. A step is
// 16 words deep, for the larger tiles 8, so that their registers suffice. The words of a place are neighbours in shared
// memory, and the places as many and 4 words apart: the words of a fragment then lie in different banks.
template <class Kind, int Rows, int Columns>
struct Tensor {
  using Element = typename Kind::Element;
  using Sum = float;
  using Word = uint32_t;
  static constexpr int kTileRows = Rows, kTileColumns = Columns, kThreads = Rows == 64 ? 128 : 256;
  static constexpr int kWords = Columns == 128 ? 8 : 16, kPerWord = 4 / sizeof(Element), kDepth = kWords * kPerWord;
  static constexpr int kLd = kWords + 4;
  static constexpr int kBlocks = Rows == 128 ? 2 : 3;
  static constexpr int kWarpsAcross = Columns / 32, kWarpsDown = kThreads / kWarp / kWarpsAcross;
  static constexpr int kRows = Rows / kWarpsDown / 16, kColumns = Columns / kWarpsAcross / 8;  // fragments of a warp
  static constexpr bool kWordsTogether = true;

  Sum sums[kRows][kColumns][4];

  __device__ static int index(int place, int word) { return place * kLd + word; }
  __host__ __device__ static constexpr int stage(int places) { return places * kLd; }
  __device__ static Word bits(uint16_t value) { return value; }
  __device__ static Word bits(float value) { return nearest(Tf32{}, value); }
  __device__ static Word word(const Element* elements) {
    return kPerWord == 1 ? bits(elements[0]) : bits(elements[0]) | bits(elements[kPerWord - 1]) << 16;
  }
  __device__ static Word fetch(const Element* data, const int32_t* depths, int32_t place) {
    Element elements[kPerWord] = {};
#pragma unroll
    for (int i = 0; i < kPerWord; ++i)
      if (depths[i] >= 0 && place >= 0) elements[i] = data[depths[i] + place];
    return word(elements);
  }

  __device__ static int element(int row, int column, int ld) { return column * ld + row; }
  __host__ __device__ static int leading(int rows) { return rows + 4; }
  __host__ __device__ static int64_t elements(int rows) { return int64_t{Columns} * leading(rows); }
  __device__ static int step(int number, int) { return number * kWords; }

  __device__ static int lane() { return threadIdx.x % kWarp; }
  __device__ static int row(int i) { return threadIdx.x / kWarp / kWarpsAcross * (16 * kRows) + 16 * i + lane() / 4; }
  __device__ static int column(int j) { return threadIdx.x / kWarp % kWarpsAcross * (8 * kColumns) + 8 * j; }

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int j = 0; j < kColumns; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[i][j][e] = 0;
  }

  // B as words that `fetch` made, or as float32 that is still to be rounded.
  template <typename B>
  __device__ void multiply(const Word* a, const B* b, int ld) {
#pragma unroll
    for (int word = lane() % 4; word < kWords; word += 8) {
      uint32_t left[kRows][4], right[kColumns][2];
#pragma unroll
      for (int i = 0; i < kRows; ++i)
#pragma unroll
        for (int part = 0; part < 4; ++part) left[i][part] = a[(row(i) + part % 2 * 8) * kLd + word + part / 2 * 4];
#pragma unroll
      for (int j = 0; j < kColumns; ++j)
#pragma unroll
        for (int part = 0; part < 2; ++part) right[j][part] = ready(b[(column(j) + lane() / 4) * ld + word + part * 4]);
      multiply_fragments<Kind>(sums, left, right);
    }
  }
  __device__ static uint32_t ready(uint32_t word) { return word; }
  __device__ static uint32_t ready(float value) { return nearest(Tf32{}, value); }

  template <typename Use>
  __device__ void each(const Use& use) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int j = 0; j < kColumns; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) use(row(i) + e / 2 * 8, column(j) + lane() % 4 * 2 + e % 2, sums[i][j][e]);
  }
};

// An operand on its way to shared memory, so many places of it: the offsets of its places and depths, two steps of its
// elements. A thread takes the same places at each step, and keeps their offsets.
template <class Form, int Places>
struct Side {
  using Word = typename Form::Word;
  using Element = typename Form::Element;
  static constexpr int kThreads = Form::kThreads, kHeld = Places * Form::kWords / kThreads;
  static constexpr int kQuad = Quad<Word>::kCount, kQuads = Form::kWords / kQuad;  // of 16 bytes at one place
  static constexpr int kStage = Form::stage(Places);
  static constexpr size_t kBytes = sizeof(Word) * 2 * kStage + sizeof(int32_t) * (Places + 2 * kThreads);

  const Operand<Element>& operand;
  const Element* data;      // of the sample and group
  int first, count, depth;  // of all `count` places those from `first`
  Word* buffers;            // [2][kStage]
  int32_t *of_place, *of_depth;
  int32_t own[kHeld];
  Word held[kHeld];

  __device__ Side(const Operand<Element>& operand, int64_t sample, int64_t group, int first, int count, int depth,
                  unsigned char* shared)
      : operand(operand),
        data(operand.data + sample * operand.of_sample + group * operand.of_group),
        first(first),
        count(count),
        depth(depth),
        buffers(reinterpret_cast<Word*>(shared)),
        of_place(reinterpret_cast<int32_t*>(buffers + 2 * kStage)),
        of_depth(of_place + Places) {}

  // Offsets of the tile's places; -1 behind the last.
  __device__ void begin() {
    for (int i = threadIdx.x; i < Places; i += kThreads)
      of_place[i] = first + i < count ? operand.place.offset(first + i) : -1;
    look_up(0);
  }

  __device__ void keep() {
#pragma unroll
    for (int e = 0; e < kHeld; ++e)
      if (!operand.wide || e < kHeld / kQuad)
        own[e] = of_place[operand.wide ? (threadIdx.x + e * kThreads) / kQuads : place(e)];
  }

  // Offsets of as many depths as there are threads, into one of two places in turn.
  __device__ void look_up(int chunk) {
    const int k = chunk * kThreads + threadIdx.x;
    of_depth[k % (2 * kThreads)] = k < depth ? operand.depth.offset(k) : -1;
  }

  __device__ const int32_t* depths(int step, int word) const {
    return of_depth + step * Form::kDepth % (2 * kThreads) + word * Form::kPerWord;
  }

  // Threads run along what is closer in memory.
  __device__ int place(int e) const {
    const int number = threadIdx.x + e * kThreads;
    return operand.along_depth ? number / Form::kWords : number % Places;
  }
  __device__ int word(int e) const {
    const int number = threadIdx.x + e * kThreads;
    return operand.along_depth ? number % Form::kWords : number / Places;
  }

  __device__ void load(int step) {
    if (operand.wide) return load_whole(step);
#pragma unroll
    for (int e = 0; e < kHeld; ++e) held[e] = Form::fetch(data, depths(step, word(e)), own[e]);
  }

  // The words of 16 bytes by one access.
  __device__ void load_whole(int step) {
#pragma unroll
    for (int q = 0; q < kHeld / kQuad; ++q) {
      const int number = threadIdx.x + q * kThreads;
      const int32_t from = *depths(step, number % kQuads * kQuad), to = own[q];
      Quad<Element> quad{};
      if (from >= 0 && to >= 0) quad = *reinterpret_cast<const Quad<Element>*>(data + from + to);
#pragma unroll
      for (int i = 0; i < kQuad; ++i) held[kQuad * q + i] = Form::word(quad.values + i * Form::kPerWord);
    }
  }

  __device__ void store(int step) {
    Word* buffer = buffers + step % 2 * kStage;
    if (operand.wide) return store_whole(buffer);
#pragma unroll
    for (int e = 0; e < kHeld; ++e) buffer[Form::index(place(e), word(e))] = held[e];
  }

  __device__ void store_whole(Word* buffer) {
#pragma unroll
    for (int q = 0; q < kHeld / kQuad; ++q) {
      const int number = threadIdx.x + q * kThreads, place = number / kQuads, word = number % kQuads * kQuad;
      Quad<Word> quad;
#pragma unroll
      for (int i = 0; i < kQuad; ++i) quad.values[i] = held[kQuad * q + i];
      if constexpr (Form::kWordsTogether) {
        *reinterpret_cast<Quad<Word>*>(buffer + Form::index(place, word)) = quad;
      } else {
#pragma unroll
        for (int i = 0; i < kQuad; ++i) buffer[Form::index(place, word + i)] = quad.values[i];
      }
    }
  }

  __device__ const Word* at(int step) const { return buffers + step % 2 * kStage; }
  __device__ int ld() const { return Form::kLd; }
};

// A second operand that lies in shared memory as a whole: a tile of so many rows of M.
template <class Form>
struct Resident {
  const typename Form::Sum* elements;
  int rows;

  __device__ void begin() {}
  __device__ void keep() {}
  __device__ void look_up(int) {}
  __device__ void load(int) {}
  __device__ void store(int) {}
  __device__ const typename Form::Sum* at(int step) const { return elements + Form::step(step, ld()); }
  __device__ int ld() const { return Form::leading(rows); }
};

// Makes a tile. What the operands' shared memory held before is not read after the call begins, and it may be used
// again once the next one has.
template <class Form, class Second>
__device__ void make_tile(Form& tile, Side<Form, Form::kTileRows>& a, Second& b) {
  constexpr int kChunk = Form::kThreads / Form::kDepth;  // steps whose depths are looked up at once
  static_assert(kChunk >= 2, "a step is loaded while the one before it is multiplied");
  const int steps = (a.depth + Form::kDepth - 1) / Form::kDepth;
  tile.clear();
  __syncthreads();
  a.begin(), b.begin();
  __syncthreads();
  a.keep(), b.keep();
  a.load(0), b.load(0);
  a.store(0), b.store(0);
  __syncthreads();
  for (int step = 0; step < steps; ++step) {
    if (step % kChunk == 0) a.look_up(step / kChunk + 1), b.look_up(step / kChunk + 1);
    const bool more = step + 1 < steps;
    if (more) a.load(step + 1), b.load(step + 1);
    tile.multiply(a.at(step), b.at(step), b.ld());
    if (more) a.store(step + 1), b.store(step + 1);
    __syncthreads();
  }
}

}  // namespace pyflatness::cuda
