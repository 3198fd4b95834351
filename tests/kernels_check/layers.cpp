// The kernels of layers.
#include <initializer_list>

#include "check.h"

namespace {

using pyflatness::Layer;

// An array of these sizes in exactly the elements it reaches; `order` lists its dimensions, the fastest last.
template <typename T>
struct Array5 {
  std::vector<T> elements;
  pyflatness::Strided<T> view;

  Array5(const int64_t (&sizes)[5], const int (&order)[5]) {
    int64_t stride = 1;
    for (int i = 4; i >= 0; --i) view.stride[order[i]] = stride, stride *= sizes[order[i]];
    elements = normal<T>(stride);
    view.data = elements.data(), view.count = stride;
  }
  double at(int64_t i, int64_t j, int64_t x, int64_t y, int64_t z) const {
    const int64_t* s = view.stride;
    return elements[size_t(i * s[0] + j * s[1] + x * s[2] + y * s[3] + z * s[4])];
  }
};

// Element (channel, tap) of the patch at a place.
template <typename T>
double patch(const Layer& l, const Array5<T>& inputs, int64_t sample, int64_t group, int64_t place, int64_t column) {
  int64_t tap = column % l.taps(), x[3];
  for (int i = 2; i >= 0; --i) {
    x[i] = place % l.places[i] * l.stride[i] + tap % l.kernel[i] * l.dilation[i];
    place /= l.places[i], tap /= l.kernel[i];
  }
  return inputs.at(sample, group * l.channels + column / l.taps(), x[0], x[1], x[2]);
}

template <typename T>
void check_layer(const pyflatness::Kernels& kernels, const Layer& l, pyflatness::DirectForm form, const int (&order)[5],
                 int64_t roots, bool weighted, int64_t splits, int threads) {
  const int64_t d = l.rows, m = l.columns(), positions = l.positions(), matrices = l.n * l.groups;
  const Array5<T> inputs({l.n, l.groups * l.channels, l.size[0], l.size[1], l.size[2]}, order);
  const Array5<T> signal({l.n, l.groups * d, l.places[0], l.places[1], l.places[2]}, order);
  const auto root = normal<T>(l.groups * roots * d), weight = normal<T>(l.groups * d * m);
  const auto& k = pyflatness::of<T>(kernels.layer);
  std::vector<double> totals(size_t(matrices * splits * 3)), by_column(size_t(matrices * l.channels));
  std::vector<double> by_row(size_t(matrices * splits * d));
  auto workspace = normal<T>(k.direct_workspace(l, form, roots, weighted, threads));
  k.direct(l, form, inputs.view, signal.view, roots ? root.data() : nullptr, roots, weighted ? weight.data() : nullptr,
           splits, totals.data(), weighted ? by_column.data() : nullptr, weighted ? by_row.data() : nullptr,
           workspace.data(), threads);

  const auto& g = pyflatness::of<T>(kernels.gram);
  std::vector<T> patch_gram(size_t(matrices * positions * positions));
  workspace = normal<T>(g.patch_gram_workspace(l, threads));
  g.patch_gram(l, inputs.view, patch_gram.data(), workspace.data(), threads);
  std::vector<double> contracted(static_cast<size_t>(matrices));
  workspace = normal<T>(g.gram_workspace(positions, d, threads));
  for (int64_t turned : {0, 1}) {  // the signal's rows along the places, or across them
    const int64_t across = turned ? 1 : positions, along = turned ? d : 1;
    pyflatness::Strided<T> rows{
        signal.elements.data(), signal.view.count, {l.groups * d * positions, d * positions, along, across, 0}};
    g.gram(rows, l.n, l.groups, positions, d, patch_gram.data(), contracted.data(), workspace.data(), threads);
    for (int64_t matrix = 0; matrix < matrices; ++matrix) {
      double truth = 0, size = 0;
      for (int64_t p = 0; p < positions; ++p)
        for (int64_t q = 0; q < positions; ++q) {
          double dot = 0;
          for (int64_t s = 0; s < d; ++s)
            dot += double(rows.data[matrix * d * positions + p * along + s * across]) *
                   rows.data[matrix * d * positions + q * along + s * across];
          const double term = dot * patch_gram[size_t((matrix * positions + p) * positions + q)];
          truth += term, size += std::abs(term);
        }
      expect<T>(contracted[size_t(matrix)] + 2 * size, truth + 2 * size, "gram", kernels.name);
    }
    const int64_t rooted = (d + pyflatness::kRootRows - 1) / pyflatness::kRootRows * pyflatness::kRootRows;
    for (bool triangular : {false, true}) {  // the unit matrix times the row's number, and of the other one more column
      std::vector<T> unit(size_t(l.groups * rooted * d), T(0));
      for (int64_t i = 0; i < l.groups * d; ++i) {
        T* row = unit.data() + (i / d * rooted + i % d) * d;
        row[i % d] = T(i % d + 1);
        if (!triangular) row[0] += 1;
      }
      auto scratch = normal<T>(g.gram_rooted_workspace(positions, d, rooted, threads));
      g.gram_rooted(rows, l.n, l.groups, positions, d, unit.data(), rooted, triangular, patch_gram.data(),
                    contracted.data(), scratch.data(), threads);
      for (int64_t matrix = 0; matrix < matrices; ++matrix) {
        const T* a = rows.data + matrix * d * positions;
        double truth = 0, size = 0;
        for (int64_t p = 0; p < positions; ++p)
          for (int64_t q = 0; q < positions; ++q) {
            double dot = 0;
            for (int64_t s = 0; s < d; ++s) {
              const auto turn = [&](int64_t place) {
                return double(s + 1) * a[place * along + s * across] + (triangular ? 0 : a[place * along]);
              };
              dot += turn(p) * turn(q);
            }
            const double term = dot * patch_gram[size_t((matrix * positions + p) * positions + q)];
            truth += term, size += std::abs(term);
          }
        expect<T>(contracted[size_t(matrix)] + 2 * size, truth + 2 * size, "gram_rooted", kernels.name);
      }
    }
  }

  for (int64_t matrix = 0; matrix < matrices; ++matrix) {
    const int64_t sample = matrix / l.groups, group = matrix % l.groups;
    for (int64_t p = 0; p < positions; ++p)
      for (int64_t q = 0; q < positions; ++q) {
        double truth = 0, size = 0;
        for (int64_t j = 0; j < m; ++j) {
          const double term = patch(l, inputs, sample, group, p, j) * patch(l, inputs, sample, group, q, j);
          truth += term, size += std::abs(term);
        }
        expect<T>(patch_gram[size_t((matrix * positions + p) * positions + q)] + 2 * size, truth + 2 * size,
                  "patch_gram", kernels.name);
      }
    std::vector<double> gradient(size_t(d * m));
    double squares = 0, rooted = 0, weighted_squares = 0;
    for (int64_t s = 0; s < d; ++s)
      for (int64_t j = 0; j < m; ++j) {
        double& value = gradient[size_t(s * m + j)];
        for (int64_t p = 0; p < positions; ++p)
          value += signal.at(sample, group * d + s, p / (l.places[1] * l.places[2]), p / l.places[2] % l.places[1],
                             p % l.places[2]) *
                   patch(l, inputs, sample, group, p, j);
        squares += value * value;
        weighted_squares += std::pow(value * weight[size_t((group * d + s) * m + j)], 2);
      }
    for (int64_t s = 0; s < roots; ++s)
      for (int64_t j = 0; j < m; ++j) {
        double value = 0;
        for (int64_t t = 0; t < d; ++t)
          value += root[size_t((group * roots + s) * d + t)] * gradient[size_t(t * m + j)];
        rooted += value * value;
      }
    double sums[3] = {};
    for (int64_t split = 0; split < splits; ++split)
      for (int i = 0; i < 3; ++i) sums[i] += totals[size_t((matrix * splits + split) * 3 + i)];
    expect<T>(sums[0], squares, "direct: squares", kernels.name);
    expect<T>(sums[1], rooted, "direct: rooted", kernels.name);
    expect<T>(sums[2], weighted ? weighted_squares : 0, "direct: weighted", kernels.name);
    for (int64_t s = 0; weighted && s < d; ++s) {
      double truth = 0, size = 0, value = 0;
      for (int64_t j = 0; j < m; ++j) {
        const double term = gradient[size_t(s * m + j)] * weight[size_t((group * d + s) * m + j)];
        truth += term, size += std::abs(term);
      }
      for (int64_t split = 0; split < splits; ++split) value += by_row[size_t((matrix * splits + split) * d + s)];
      expect<T>(value + 4 * size, truth + 4 * size, "direct: by row", kernels.name);
    }
    for (int64_t c = 0; weighted && c < l.channels; ++c) {
      double truth = 0, size = 0;
      for (int64_t s = 0; s < d; ++s)
        for (int64_t j = c * l.taps(); j < (c + 1) * l.taps(); ++j) {
          const double term = gradient[size_t(s * m + j)] * weight[size_t((group * d + s) * m + j)];
          truth += term, size += std::abs(term);
        }
      expect<T>(by_column[size_t(matrix * l.channels + c)] + 4 * size, truth + 4 * size, "direct: by column",
                kernels.name);
    }
  }
}

// Several signals, two of three elements zero, against each of them alone: whole, and as elements from last to first
// with their positions, behind one that has none.
template <typename T>
void check_gathered(const pyflatness::Kernels& kernels, const Layer& l, const int (&order)[5], int64_t count,
                    int64_t roots, int threads) {
  const int64_t matrices = l.n * l.groups;
  const Array5<T> inputs({l.n, l.groups * l.channels, l.size[0], l.size[1], l.size[2]}, order);
  const auto root = normal<T>(l.groups * roots * l.rows);
  const T* given = roots ? root.data() : nullptr;
  std::vector<Array5<T>> signals;
  std::vector<pyflatness::Strided<T>> views;
  for (int64_t k = 0; k < count; ++k) {
    signals.push_back(Array5<T>({l.n, l.groups * l.rows, l.places[0], l.places[1], l.places[2]}, order));
    for (size_t i = 0; i < signals.back().elements.size(); ++i)
      if ((i * 7 + size_t(k) / 4) % 3) signals.back().elements[i] = 0;
  }
  for (const auto& signal : signals) views.push_back(signal.view), views.back().data = signal.elements.data();
  const auto& k = pyflatness::of<T>(kernels.gathered);
  std::vector<double> totals(size_t(count * matrices * 2)), alone(size_t(matrices * 3));
  const int64_t positions = l.positions(), length = positions + 1, rows = l.n * l.groups * l.rows;
  auto workspace = normal<T>(k.workspace(l, positions, roots, count, threads));
  k.direct_gathered(l, inputs.view, views.data(), count, nullptr, positions, given, roots, totals.data(),
                    workspace.data(), threads);
  std::vector<int32_t> sources(size_t(rows * length), -1);
  std::vector<std::vector<T>> backwards(size_t(count), std::vector<T>(size_t(rows * length), 5));
  auto placed = views;
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t p = 0; p < positions; ++p) {
      const int64_t place = (row + 1) * length - 1 - p, i = row / (l.groups * l.rows), r = row % (l.groups * l.rows);
      const int64_t x = p % l.places[2], y = p / l.places[2] % l.places[1], z = p / l.places[2] / l.places[1];
      sources[size_t(place)] = static_cast<int32_t>(p);
      for (int64_t signal = 0; signal < count; ++signal) {
        const auto& view = views[size_t(signal)];
        backwards[size_t(signal)][size_t(place)] =
            view.data[i * view.stride[0] + r * view.stride[1] + z * view.stride[2] + y * view.stride[3] +
                      x * view.stride[4]];
      }
    }
  for (int64_t signal = 0; signal < count; ++signal) {
    const auto& own = backwards[size_t(signal)];
    placed[size_t(signal)] = {own.data(), rows * length, {l.groups * l.rows * length, length, 0, 0, 1}};
  }
  std::vector<double> by_position(totals.size());
  workspace = normal<T>(k.workspace(l, length, roots, count, threads));
  k.direct_gathered(l, inputs.view, placed.data(), count, sources.data(), length, given, roots, by_position.data(),
                    workspace.data(), threads);
  const auto& one = pyflatness::of<T>(kernels.layer);
  const auto form = pyflatness::DirectForm::patches;
  workspace = normal<T>(one.direct_workspace(l, form, roots, false, threads));
  for (int64_t signal = 0; signal < count; ++signal) {
    one.direct(l, form, inputs.view, views[size_t(signal)], given, roots, nullptr, 1, alone.data(), nullptr, nullptr,
               workspace.data(), threads);
    for (int64_t matrix = 0; matrix < matrices; ++matrix)
      for (int64_t i = 0; i < 2; ++i) {
        const auto at = size_t((signal * matrices + matrix) * 2 + i);
        const double truth = alone[size_t(matrix * 3 + i)];
        expect<T>(totals[at], truth, "direct_gathered", kernels.name);
        expect<T>(by_position[at], truth, "direct_gathered by position", kernels.name);
      }
  }
}

Layer layer(int64_t n, int64_t groups, int64_t channels, int64_t rows, const int64_t (&size)[3],
            const int64_t (&kernel)[3], int64_t stride, int64_t dilation) {
  Layer l{n, groups, channels, rows, {}, {}, {}, {}, {}};
  for (int i = 0; i < 3; ++i) {
    l.size[i] = size[i], l.kernel[i] = kernel[i];
    l.stride[i] = size[i] > 1 ? stride : 1, l.dilation[i] = kernel[i] > 1 ? dilation : 1;
    l.places[i] = (size[i] - 1 - (kernel[i] - 1) * l.dilation[i]) / l.stride[i] + 1;
  }
  return l;
}

template <typename T>
void check_all(const pyflatness::Kernels& kernels) {
  const Layer layers[] = {
      layer(1, 1, 1, 1, {1, 1, 1}, {1, 1, 1}, 1, 1),    layer(2, 1, 3, 6, {1, 12, 11}, {1, 5, 5}, 1, 1),
      layer(2, 5, 1, 1, {1, 9, 9}, {1, 3, 3}, 1, 1),    layer(3, 2, 5, 7, {4, 9, 8}, {2, 3, 3}, 2, 2),
      layer(1, 1, 40, 70, {5, 1, 1}, {1, 1, 1}, 1, 1),  layer(2, 1, 300, 33, {1, 1, 1}, {1, 1, 1}, 1, 1),
      layer(1, 1, 2, 17, {1, 20, 20}, {1, 3, 3}, 1, 1), layer(1, 1, 20, 3, {1, 1, 30}, {1, 1, 4}, 3, 1),
      layer(1, 2, 1, 9, {1, 5, 70}, {1, 5, 60}, 1, 1),  layer(2, 1, 31, 130, {1, 6, 6}, {1, 3, 3}, 1, 1),
      layer(1, 1, 3, 2, {1, 7, 7}, {1, 2, 2}, 1, 5),    layer(1, 3, 4, 4, {3, 7, 9}, {2, 3, 4}, 1, 1),
  };
  using pyflatness::DirectForm;
  const auto check_forms = [&](const Layer& l, std::initializer_list<DirectForm> forms) {
    for (DirectForm form : forms)
      for (int last : {0, 1})
        for (int64_t roots : {0, 1, 3, 40}) {
          if (last)
            check_layer<T>(kernels, l, form, {0, 2, 3, 4, 1}, roots, roots != 3, 1, 2);
          else
            check_layer<T>(kernels, l, form, {0, 1, 2, 3, 4}, roots, roots != 40, 2, 1);
        }
  };
  for (const Layer& l : layers) check_forms(l, {DirectForm::automatic});
  for (const Layer& l : layers)
    for (int64_t count : {1, 4, 23})
      for (int64_t roots : {0, 5}) {
        check_gathered<T>(kernels, l, {0, 1, 2, 3, 4}, count, roots, 1);
        check_gathered<T>(kernels, l, {0, 2, 3, 4, 1}, count, roots, 2);
        check_gathered<T>(kernels, l, {4, 0, 3, 1, 2}, count, roots, 2);
      }
  const Layer three_by_three[] = {
      layer(2, 2, 5, 7, {1, 3, 3}, {1, 3, 3}, 1, 1),  layer(1, 1, 33, 40, {1, 11, 12}, {1, 3, 3}, 1, 1),
      layer(1, 1, 3, 9, {3, 5, 9}, {1, 3, 3}, 1, 1),  layer(1, 1, 17, 3, {1, 4, 150}, {1, 3, 3}, 1, 1),
      layer(1, 1, 50, 1, {1, 9, 3}, {1, 3, 3}, 1, 1), layer(2, 1, 19, 70, {1, 6, 7}, {1, 3, 3}, 1, 1),
  };
  for (const Layer& l : three_by_three) check_forms(l, {DirectForm::patches, DirectForm::tiles2, DirectForm::tiles4});
}

}  // namespace

void check_layers(const pyflatness::Kernels& kernels) {
  check_all<float>(kernels);
  check_all<double>(kernels);
}
