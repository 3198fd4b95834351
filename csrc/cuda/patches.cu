// A layer's patches written out, column by column, so that a matrix library multiplies them: a copy that reads each
// pixel once for every kernel element, mostly from a cache, and writes whole packs of neighbouring positions.
#include "elements.cuh"

namespace pyflatness::cuda {
namespace {

constexpr int kPatchThreads = 256;

template <typename T>
struct Patches {
  const T* inputs;
  int64_t of_sample, of_channel, channels;  // of all groups
  int32_t places[3], stride[3];             // positions, and from the pixels of one to those of the next in memory
  int32_t kernel[3], step[3];               // kernel elements, the same
  int64_t planes, positions, packs;         // samples times channels; positions of a layer, and packs of them
  T* out;
};

// Where the first pixels of the positions that follow `place` are.
template <typename T, int Width>
__device__ void find_pixels(const Patches<T>& call, int32_t place, int32_t* from) {
  int32_t k = place % call.places[2], j = place / call.places[2], i = j / call.places[1];
  j -= i * call.places[1];
#pragma unroll
  for (int v = 0; v < Width; ++v) {
    from[v] = i * call.stride[0] + j * call.stride[1] + k * call.stride[2];
    if (++k < call.places[2]) continue;
    k = 0;
    if (++j < call.places[1]) continue;
    j = 0, ++i;
  }
}

// A thread has a pack of positions of one channel, for all kernel elements.
template <typename T, int Width>
__global__ void patches_kernel(Patches<T> call) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kPatchThreads + threadIdx.x, plane = index / call.packs;
  if (plane >= call.planes) return;
  const int64_t sample = plane / call.channels, place = (index - plane * call.packs) * Width;
  const T* __restrict__ in = call.inputs + sample * call.of_sample + (plane - sample * call.channels) * call.of_channel;
  T* __restrict__ out = call.out + plane * call.kernel[0] * call.kernel[1] * call.kernel[2] * call.positions + place;
  int32_t from[Width];
  find_pixels<T, Width>(call, static_cast<int32_t>(place), from);
  for (int i = 0; i < call.kernel[0]; ++i)
    for (int j = 0; j < call.kernel[1]; ++j) {
      const T* row = in + (i * call.step[0] + j * call.step[1]);
#pragma unroll 3
      for (int k = 0; k < call.kernel[2]; ++k, row += call.step[2], out += call.positions) {
        Pack<T, Width> pack;
#pragma unroll
        for (int v = 0; v < Width; ++v) pack.value[v] = row[from[v]];
        store(out, pack);
      }
    }
}

}  // namespace

template <typename T>
int patches(const Layer& layer, const Strided<T>& inputs, T* out, void* stream) {
  const int64_t channels = layer.groups * layer.channels, positions = layer.positions();
  const bool wide = packed(out, positions);
  const int64_t packs = positions / (wide ? kPack<T> : 1), planes = layer.n * channels;
  Patches<T> call{inputs.data, inputs.stride[0], inputs.stride[1], channels, {}, {}, {},
                  {},          planes,           positions,        packs,    out};
  for (int i = 0; i < 3; ++i) {
    const int64_t pixel = layer.size[i] > 1 ? inputs.stride[2 + i] : 0;
    call.places[i] = static_cast<int32_t>(layer.places[i]), call.kernel[i] = static_cast<int32_t>(layer.kernel[i]);
    call.stride[i] = static_cast<int32_t>(layer.places[i] > 1 ? layer.stride[i] * pixel : 0);
    call.step[i] = static_cast<int32_t>(layer.kernel[i] > 1 ? layer.dilation[i] * pixel : 0);
  }
  const dim3 grid(static_cast<unsigned>(blocks_of(planes * packs, kPatchThreads)));
  return launch(wide ? patches_kernel<T, kPack<T>> : patches_kernel<T, 1>, grid, kPatchThreads, 0, stream, call);
}

template int patches(const Layer&, const Strided<uint16_t>&, uint16_t*, void*);
template int patches(const Layer&, const Strided<float>&, float*, void*);
template int patches(const Layer&, const Strided<double>&, double*, void*);

}  // namespace pyflatness::cuda
