// Eigenvalues of many small symmetric matrices: the cyclic Jacobi method, one matrix per lane.
// Compiled once per instruction set, so nothing here may have external linkage but the table at the end.
#include "common.h"
#include "kernels.h"
#include "simd.h"

namespace {

using S = Simd<double>;
using Vec = S::Vec;
constexpr int64_t kMax = pyflatness::kMaxEigenSize;
constexpr int kSweeps = 30;             // about eight are enough: the last ones converge quadratically
constexpr double kTolerance = 0x1p-54;  // of the Frobenius norm, what may be left off the diagonal

// 1 / sqrt(x) to about a unit in the last place: halving the exponent gives 3 %, Newton's steps double the digits. Half
// the time of a square root and a division. Finite at zero.
PYFLATNESS_INLINE Vec inverse_root(Vec x) {
  typedef uint64_t Bits __attribute__((vector_size(PYFLATNESS_VECTOR_BYTES)));
  Bits bits;
  std::memcpy(&bits, &x, sizeof bits);
  bits = 0x5FE6EB50C7B537A9 - (bits >> 1);
  Vec y;
  std::memcpy(&y, &bits, sizeof y);
  const Vec half = x * 0.5;
#pragma GCC unroll 4
  for (int step = 0; step < 4; ++step) y += y * (0.5 - half * y * y);
  return y;
}

// A group of matrices, element (i, j) of all of them in one vector, i <= j.
struct Group {
  alignas(64) double elements[kMax * (kMax + 1) / 2 * S::kLanes];
  int64_t size;

  double* at(int64_t i, int64_t j) {
    const int64_t low = minimum(i, j), high = maximum(i, j);
    return elements + (high * (high + 1) / 2 + low) * S::kLanes;
  }
};

struct Rotation {
  Vec c, s;
};

// The rotation that makes element (p, q) zero, applied to the three elements it is made from.
PYFLATNESS_INLINE Rotation rotation(Group& a, int64_t p, int64_t q) {
  double *pp = a.at(p, p), *qq = a.at(q, q), *pq = a.at(p, q);
  const Vec off = S::load(pq), difference = S::load(qq) - S::load(pp);
  const Vec square = difference * difference + 4 * off * off;
  const Vec root = square * inverse_root(square);
  const Vec sum = difference < 0 ? difference - root : difference + root;
  const Vec t = sum == 0 ? Vec{} : 2 * off / (sum == 0 ? sum + 1 : sum);  // the tangent, at most one in size
  S::store(pp, S::load(pp) - t * off);
  S::store(qq, S::load(qq) + t * off);
  S::store(pq, Vec{});
  const Vec c = inverse_root(1 + t * t);
  return {c, t * c};
}

// Columns (p, q) and (u, v) of two rotations meet in four elements.
PYFLATNESS_INLINE void rotate(Group& a, int64_t p, int64_t q, Rotation first, int64_t u, int64_t v, Rotation second) {
  double *pu = a.at(p, u), *pv = a.at(p, v), *qu = a.at(q, u), *qv = a.at(q, v);
  const Vec left_u = first.c * S::load(pu) - first.s * S::load(qu),
            right_u = first.s * S::load(pu) + first.c * S::load(qu);
  const Vec left_v = first.c * S::load(pv) - first.s * S::load(qv),
            right_v = first.s * S::load(pv) + first.c * S::load(qv);
  S::store(pu, second.c * left_u - second.s * left_v);
  S::store(pv, second.s * left_u + second.c * left_v);
  S::store(qu, second.c * right_u - second.s * right_v);
  S::store(qv, second.s * right_u + second.c * right_v);
}

bool converged(Group& a) {
  Vec off = {}, all = {};
  for (int64_t i = 0; i < a.size; ++i) {
    all += S::load(a.at(i, i)) * S::load(a.at(i, i));
    for (int64_t j = i + 1; j < a.size; ++j) off += S::load(a.at(i, j)) * S::load(a.at(i, j));
  }
  all += 2 * off;
  for (int64_t l = 0; l < S::kLanes; ++l)
    if (off[l] > kTolerance * kTolerance * all[l]) return false;
  return true;
}

// All pairs once, in rounds of disjoint ones as in a tournament: the rotations of a round do not wait for one another.
void sweep(Group& a) {
  const int64_t players = a.size + a.size % 2, pairs = players / 2;
  for (int64_t round = 0; round < players - 1; ++round) {
    int64_t p[kMax / 2], q[kMax / 2], count = 0;
    Rotation rotations[kMax / 2];
    for (int64_t pair = 0; pair < pairs; ++pair) {
      const int64_t one = pair == 0 ? players - 1 : (round + pair) % (players - 1);
      const int64_t other = (round + players - 1 - pair) % (players - 1);
      if (one >= a.size || other >= a.size) continue;  // an odd one out rests
      p[count] = minimum(one, other), q[count] = maximum(one, other);
      rotations[count] = rotation(a, p[count], q[count]);
      ++count;
    }
    for (int64_t first = 0; first < count; ++first) {
      for (int64_t second = first + 1; second < count; ++second)
        rotate(a, p[first], q[first], rotations[first], p[second], q[second], rotations[second]);
    }
    if (a.size % 2) {
      const int64_t rest = round;  // who would have met the player that is not there
      for (int64_t first = 0; first < count; ++first) {
        double *x = a.at(p[first], rest), *y = a.at(q[first], rest);
        const Vec old = S::load(x);
        S::store(x, rotations[first].c * old - rotations[first].s * S::load(y));
        S::store(y, rotations[first].s * old + rotations[first].c * S::load(y));
      }
    }
  }
}

// Fills lane l with a matrix over its largest element, which is returned: 0 for zeros, NaN (and zeros in the lane) for
// one that is not finite.
double load_matrix(Group& a, int64_t l, const double* matrix) {
  double largest = 0;
  bool finite = true;
  for (int64_t i = 0; i < a.size; ++i)
    for (int64_t j = i; j < a.size; ++j) {
      const double size = __builtin_fabs(matrix[i * a.size + j]);
      finite = finite && size <= __DBL_MAX__;
      largest = size > largest ? size : largest;
    }
  const bool zeros = !finite || largest == 0;
  for (int64_t i = 0; i < a.size; ++i)
    for (int64_t j = i; j < a.size; ++j) a.at(i, j)[l] = zeros ? 0 : matrix[i * a.size + j] / largest;
  return finite ? largest : __builtin_nan("");
}

void small_eigenvalues(const double* matrices, int64_t n, int64_t size, double* out, int threads) {
  const int64_t groups = blocks_of(n, S::kLanes);
#pragma omp parallel for num_threads(team(threads, n * size * size * size * 3)) schedule(dynamic)
  for (int64_t group = 0; group < groups; ++group) {
    Group a;
    a.size = size;
    const int64_t first = group * S::kLanes, count = minimum(S::kLanes, n - first);
    double scale[S::kLanes];
    for (int64_t l = 0; l < S::kLanes; ++l)  // beyond the last matrix: that one again, not written
      scale[l] = load_matrix(a, l, matrices + (first + minimum(l, count - 1)) * size * size);
    for (int pass = 0; pass < kSweeps && !converged(a); ++pass) sweep(a);
    for (int64_t l = 0; l < count; ++l) {
      double* values = out + (first + l) * size;
      for (int64_t i = 0; i < size; ++i) {
        const double value = a.at(i, i)[l] * scale[l];
        int64_t place = i;
        for (; place > 0 && values[place - 1] > value; --place) values[place] = values[place - 1];
        values[place] = value;
      }
    }
  }
}

}  // namespace

PYFLATNESS_EXPORT(EigenKernels, eigen) = {small_eigenvalues};
