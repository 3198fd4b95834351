// A layer's patches written out, column by column, so that a matrix library multiplies them: a copy that reads each
// pixel once for every kernel element, mostly from a cache, and writes whole packs of neighbouring positions.
#include "axes.cuh"
#include "elements.cuh"

namespace pyflatness::cuda {
namespace {

constexpr int kPatchThreads = 256;

template <typename T>
struct Patches {
  const T* inputs;
  int64_t of_sample, of_channel, channels;  // of all groups
  Axis places;                              // pixels under the first kernel element
  int kernel[3], step[3];                   // kernel elements, and from one to the next in memory
  int64_t planes, positions, packs;         // samples times channels; positions of a layer, and packs of them
  T* out;
};

// A thread has a pack of positions of one channel, for all kernel elements.
template <typename T, int Width>
__global__ void patches_kernel(Patches<T> call) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kPatchThreads + threadIdx.x, plane = index / call.packs;
  if (plane >= call.planes) return;
  const int64_t sample = plane / call.channels, place = (index - plane * call.packs) * Width;
  const T* __restrict__ in = call.inputs + sample * call.of_sample + (plane - sample * call.channels) * call.of_channel;
  T* __restrict__ out = call.out + plane * call.kernel[0] * call.kernel[1] * call.kernel[2] * call.positions + place;
  int32_t from[Width];
#pragma unroll
  for (int v = 0; v < Width; ++v) from[v] = call.places.offset(static_cast<uint32_t>(place) + v);
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
  const bool wide = packed(out, positions, positions);
  const int64_t packs = positions / (wide ? kPack<T> : 1), planes = layer.n * channels;
  Patches<T> call{inputs.data, inputs.stride[0], inputs.stride[1], channels, patch_places(layer, inputs.stride),
                  {},          {},               planes,           positions, packs, out};
  for (int i = 0; i < 3; ++i) {
    call.kernel[i] = static_cast<int>(layer.kernel[i]);
    call.step[i] = static_cast<int>(layer.dilation[i] * inputs.stride[2 + i]);
  }
  const dim3 grid(static_cast<unsigned>(blocks_of(planes * packs, kPatchThreads)));
  return launch(wide ? patches_kernel<T, kPack<T>> : patches_kernel<T, 1>, grid, kPatchThreads, 0, stream, call);
}

template int patches(const Layer&, const Strided<uint16_t>&, uint16_t*, void*);
template int patches(const Layer&, const Strided<float>&, float*, void*);
template int patches(const Layer&, const Strided<double>&, double*, void*);

}  // namespace pyflatness::cuda
