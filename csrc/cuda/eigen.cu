// Eigenvalues of many small symmetric matrices: the cyclic Jacobi method, one warp per matrix, the matrix in shared
// memory. A sweep takes all pairs once in rounds of disjoint ones, as in a tournament, so that the rotations of a round
// do not wait for one another.
#include "launch.cuh"

namespace pyflatness::cuda {
namespace {

constexpr int kSize = kMaxEigenSize;
constexpr int kStride = kSize + 1;      // doubles of a row: columns must not meet in one bank
constexpr int kWarps = 4;               // matrices of a block
constexpr int kSweeps = 30;             // about eight are enough: the last ones converge quadratically
constexpr double kTolerance = 0x1p-54;  // of the Frobenius norm, what may be left off the diagonal

struct Rotation {
  double c, s;
  int p, q;  // p = q: no rotation
};

__device__ bool converged(const double (*a)[kStride], int size, int lane) {
  double off = 0, all = 0;
  for (int j = 0; j < size && lane < size; ++j) {
    const double square = a[lane][j] * a[lane][j];
    all += square;
    off += j == lane ? 0 : square;
  }
  return warp_sum(off) <= 2 * kTolerance * kTolerance * warp_sum(all);
}

// The rotation that makes element (p, q) of a pair of players zero.
__device__ Rotation rotation(const double (*a)[kStride], int size, int round, int pair) {
  const int players = size + size % 2;
  const int one = pair == 0 ? players - 1 : (round + pair) % (players - 1);
  const int other = (round + players - 1 - pair) % (players - 1);
  if (one >= size || other >= size) return {1, 0, 0, 0};  // an odd one out rests
  const int p = one < other ? one : other, q = one < other ? other : one;
  const double off = a[p][q], difference = a[q][q] - a[p][p];
  const double root = sqrt(difference * difference + 4 * off * off);
  const double sum = difference < 0 ? difference - root : difference + root;
  const double t = sum == 0 ? 0 : 2 * off / sum;  // the tangent, at most one in size
  const double c = rsqrt(1 + t * t);
  return {c, t * c, p, q};
}

__device__ void sweep(double (*a)[kStride], Rotation* rotations, int size, int lane) {
  const int players = size + size % 2, pairs = players / 2;
  for (int round = 0; round < players - 1; ++round) {
    if (lane < pairs) rotations[lane] = rotation(a, size, round, lane);
    __syncwarp();
    for (int pair = 0; pair < pairs && lane < size; ++pair) {  // the rows of each pair, a column in each lane
      const Rotation r = rotations[pair];
      if (r.p == r.q) continue;
      const double x = a[r.p][lane], y = a[r.q][lane];
      a[r.p][lane] = r.c * x - r.s * y;
      a[r.q][lane] = r.s * x + r.c * y;
    }
    __syncwarp();
    for (int pair = 0; pair < pairs && lane < size; ++pair) {  // the columns, a row in each lane
      const Rotation r = rotations[pair];
      if (r.p == r.q) continue;
      const double x = a[lane][r.p], y = a[lane][r.q];
      a[lane][r.p] = r.c * x - r.s * y;
      a[lane][r.q] = r.s * x + r.c * y;
    }
    __syncwarp();
  }
}

__global__ void small_eigenvalues_kernel(const double* matrices, int64_t n, int size, double* out) {
  __shared__ double elements[kWarps][kSize][kStride];
  __shared__ Rotation rotations[kWarps][kSize / 2];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int64_t which = static_cast<int64_t>(blockIdx.x) * kWarps + warp;
  if (which >= n) return;
  double (*a)[kStride] = elements[warp];
  const double* matrix = matrices + which * size * size;
  double largest = 0;
  bool finite = true;
  for (int i = 0; i < size && lane < size; ++i) {
    const double value = i <= lane ? matrix[i * size + lane] : matrix[lane * size + i];
    finite = finite && isfinite(value);
    largest = fabs(value) > largest ? fabs(value) : largest;
    a[i][lane] = value;
  }
  largest = warp_max(largest);
  if (!__all_sync(kAllLanes, finite)) {
    if (lane < size) out[which * size + lane] = nan("");
    return;
  }
  for (int i = 0; i < size && lane < size && largest > 0; ++i) a[i][lane] /= largest;  // squares must not overflow
  __syncwarp();
  for (int pass = 0; pass < kSweeps && !converged(a, size, lane); ++pass) sweep(a, rotations[warp], size, lane);
  if (lane >= size) return;
  const double value = a[lane][lane];
  int place = 0;  // how many are smaller
  for (int i = 0; i < size; ++i) place += a[i][i] < value || (a[i][i] == value && i < lane);
  out[which * size + place] = value * largest;
}

}  // namespace

int small_eigenvalues(const double* matrices, int64_t n, int64_t size, double* out, void* stream) {
  const dim3 grid(static_cast<unsigned>(blocks_of(n, kWarps)));
  return launch(small_eigenvalues_kernel, grid, kWarps * kWarp, 0, stream, matrices, n, static_cast<int>(size), out);
}

}  // namespace pyflatness::cuda
