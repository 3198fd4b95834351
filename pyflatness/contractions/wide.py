"""Compute the curvature of a head of many classes by rows of its weight: the route ``rows`` of :mod:`.softmax`.

Rows of features are processed against tiles of classes. One product gives a tile's logits, a kernel their exponentials
relative to the largest logit so far and all sums over them, and a second product Σ_s e_s w_s; neither n × d numbers nor
a copy of the weight are ever in memory. The most probable class t so far is not in the sums, so that the sum over the
others, however small, has full precision; if a tile has a larger logit, the old t joins the others.

Bfloat16 on CUDA is multiplied as it is, with float32 results. Probabilities are rounded to bfloat16 once, and all sums
and moments are those of the rounded ones, so that E|w|² and |E w|² cancel exactly as for true probabilities.

With ``rtol``, tiles whose probability is too small to matter are left out of the second product. With u = Σ_s p_s w_s
about the centre, var_p(w) = Σ_s p_s |w_s|² - |u|², and the first sum is always over all classes. Without the tiles D,
u' = u - e has |e| ≤ b = Σ_{k in D} (Σ_{s in k} p_s Σ_{s in k} p_s |w_s|²)^½, so that the value' = |φ|² var from u' has

    |value' - value| ≤ |φ|² (2 |u'| b + b²),

which is known once u' is. Tiles are chosen for each chunk of rows by this bound with |u'|² ≤ Σ_s p_s |w_s|². Then the
sum of the bounds is compared with ``rtol`` times the least possible sum of the values, and tiles are put back, heaviest
first, until it is small enough. A threshold on p would not do: the probability left out matters relative to 1 - p_t.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from .precision import CHAIN, product, promoted, promoted_dtype
from .reference import Backend, ClassSums, shifted

_CONDITION = 30.0  # amplification of rounding errors above which a row is computed by differences
_HALF = 2  # bytes of an element in half precision
# The most rows and classes at once in half precision: four rows of logits fit in a GPU's shared memory, and products
# are large enough.
_MOST_ROWS, _MOST_CLASSES = 4096, 12288
_ATTEMPTS = 3  # at choosing tiles, before none is left out
_BLOCK, _ALIGNED = 256, 64  # rows or columns of a block of a matrix product; classes to which rows are padded
_PARTS = 32  # tiles of classes to choose among, if they are not too narrow for a product
_NARROW, _WIDE = 64, 4096  # the fewest and the most classes of a tile to choose among


class Bounded(NamedTuple):
    """Hold values of rows, and bounds on their errors."""

    values: Tensor  # (n,) float64
    bounds: Tensor | None  # (n,) float64, on each error apart from rounding; None if nothing is left out


class AtOnce(NamedTuple):
    """Hold the sizes of chunks and tiles."""

    rows: int  # rows of features
    tile: int  # classes
    bytes: int  # of memory in addition to features and weight


def plan(
    n: int, d: int, m: int, dtype: torch.dtype, memory: int, *, half: bool, keeps: bool, fused: bool = False
) -> AtOnce:
    """Return how many rows (of n, with m features) and classes (of d) fit in the memory, at least sixteen of both.

    In ``half`` precision logits and exponentials are both in memory, without a copy of the weight; if ``fused``, only
    exponentials are. Otherwise, if ``keeps``, the exponentials of all classes stay until tiles are chosen.
    """
    item = dtype.itemsize
    if keeps:
        tile = max(_NARROW, min(_WIDE, -(-d // _PARTS)))
        tile = min(d, tile, max(16, memory // (8 * m * item)))
        weights, row = 2 * tile * m * item, (d + 5 * m) * item
        rows = _down(max(16, (memory - weights) // row))
    elif half:
        rows = _down(min(n, _MOST_ROWS, max(16, memory // (4 * m * item))))
        entry, most = (_HALF, d) if fused else (item + _HALF, _MOST_CLASSES)
        tile = _down(max(16, min(most, (memory - rows * m * item) // (rows * entry))))
        tile = min(d, _up(-(-d // -(-d // tile))))  # all tiles are about as wide
        weights, row = 0, max(entry * tile + m * item, 3 * m * item)  # during a tile; at the end
    else:
        # There are scores, and five matrices of m columns: a tile of the weight, features, the sum Σ e w, its mean, a
        # difference; with more classes than are added in float32, another sum in float64.
        entries, others = memory // item, 4 if d <= CHAIN else 6
        half_sum = (1 + others) / 2 * m
        rows = tile = _down(max(16, int((half_sum**2 + entries) ** 0.5 - half_sum)))
        if d < tile:
            tile, rows = d, max(16, (entries - d * m) // (d + others * m))
        weights, row = tile * m * item, (tile + others * m) * item
    rows = max(1, min(n, rows))
    return AtOnce(rows, tile, weights + rows * row)


def _down(count: int) -> int:
    """Return a count rounded down to whole blocks of a matrix product, if there is one."""
    return count // _BLOCK * _BLOCK or count


def _up(count: int) -> int:
    """Return a count rounded up to a multiple of 64, so that all rows begin at an access of 16 bytes."""
    return -(-count // _ALIGNED) * _ALIGNED


def lightest(bounds: Tensor, reach: Tensor, weights: Tensor, target: Tensor) -> tuple[list[int], int]:
    """Return the tiles, lightest first, and how many can be left out for Σ_i a_i (2 c_i b_i + b_i²) ≤ ``target``.

    ``bounds`` (n, tiles) bounds the change of u by each tile, and b is their sum; ``reach`` c (n,) is a bound on |u'|;
    ``weights`` are a (n,).
    """
    order = (weights * reach) @ bounds
    order = order.argsort()
    left = bounds[:, order].cumsum(dim=1)
    cost = weights @ (2 * reach.unsqueeze(1) * left + left.square())
    # The host waits for the device once for a chunk, here.
    *places, count = torch.cat([order, (cost <= target).sum().unsqueeze(0)]).tolist()
    return places, count


class _Sums(NamedTuple):
    """Hold all sums over the classes except the most probable one, relative to its exp(z)."""

    classes: ClassSums
    summed: Tensor  # Σ e_s w_s, maybe without some tiles
    weight: Tensor  # Σ e_s of the tiles in `summed`
    left_out: Tensor | None  # a bound on |Σ e_s w_s| of the other tiles


class WideHead:
    """Compute ``|φ_i|² var_{p_i}(w)`` of a head (d, m) with many classes; moments are about ``centre`` (m,).

    An error of ``rtol`` relative to the sum over a chunk of rows is allowed to save time, except on CUDA, where it
    would save none.
    """

    def __init__(
        self, weight: Tensor, centre: Tensor, bias: Tensor | None, backend: Backend, memory: int, rtol: float
    ) -> None:
        self._weight, self._centre, self._bias, self._backend = weight, centre, shifted(bias, weight), backend
        self._memory, self._rtol = memory, 0.0 if backend.on_gpu(weight) else rtol
        self._added = None if bias is None else self._bias  # for kernels that add the bias
        self._norms = backend.norms_about(weight, centre)

    def __call__(self, features: Tensor, scale: Tensor | None = None) -> Bounded:
        """Return values of (n, m) features; ``scale`` (n,) weights the rows in the sum that ``rtol`` is about."""
        half = self._takes_half(features)
        (d, m), dtype = self._weight.shape, promoted_dtype(features.dtype)
        memory = self._memory
        if half and not self._backend.in_place:
            memory //= 3  # torch's operations need as much for buffers between them
        keeps, fused = self._rtol > 0, self._backend.fuses(features, self._weight)
        planned = plan(len(features), d, m, dtype, memory, half=half, keeps=keeps, fused=fused)
        chunks: Iterable[Tensor] = features.split(planned.rows)
        if not half:
            chunks = map(promoted, chunks)  # one at a time
        if self._rtol == 0:
            return Bounded(torch.cat([self._finish(x, self._all(x, planned.tile)).values for x in chunks]), None)
        scale = features.new_ones(len(features), dtype=torch.float64) if scale is None else scale
        parts = [self._few(x, planned.tile, part) for x, part in zip(chunks, scale.split(planned.rows), strict=True)]
        return Bounded(
            torch.cat([p.values for p in parts]), torch.cat([p.bounds for p in parts if p.bounds is not None])
        )

    def _takes_half(self, features: Tensor) -> bool:
        both = features.dtype == self._weight.dtype == torch.bfloat16
        backend = self._backend
        return (both and (backend.on_gpu(features) or backend.in_place)) or backend.fuses(features, self._weight)

    def _tiles(self, width: int, before: int = 0) -> list[slice]:
        """Return tiles of ``width`` classes, after a first one of ``before`` classes if that is not 0."""
        starts = sorted({0, *range(before, len(self._weight), width)})
        return [slice(start, stop) for start, stop in zip(starts, [*starts[1:], len(self._weight)], strict=True)]

    def _matrix(self, which: slice, half: bool = False) -> Tensor:
        """Return rows of the weight for products: in half precision as they are, otherwise centred."""
        return self._weight[which] if half else promoted(self._weight[which]) - self._centre

    def _scores(self, features: Tensor, tile: slice, matrix: Tensor) -> Tensor:
        """Return the logits of a tile; in half precision without the bias."""
        scores = self._room(features, tile.stop - tile.start, self._centre.dtype)
        if matrix.dtype == torch.bfloat16:
            return self._backend.multiply(features, matrix.t(), scores)
        return product(features, matrix.t(), self._bias[tile], out=scores)

    def _room(self, features: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """Return a new matrix (n, width); on a GPU its rows begin at multiples of 64 elements."""
        padded = _up(width) if self._backend.on_gpu(features) else width
        return features.new_empty(len(features), padded, dtype=dtype)[:, :width]

    def _start(self, features: Tensor) -> tuple[ClassSums, Tensor]:
        """Return the sums before the first tile, and zeros for Σ e_s w_s."""
        summed = torch.zeros_like(features, dtype=self._centre.dtype)
        maximum = summed.new_full((len(features),), -torch.inf)
        rest, moment = torch.zeros(2, len(features), dtype=torch.float64, device=features.device)
        return ClassSums(maximum, torch.full_like(maximum, -1, dtype=torch.int64), rest, moment), summed

    def _all(self, features: Tensor, width: int) -> _Sums:
        """Return the sums of all tiles; the host does not wait for the device."""
        if self._backend.fuses(features, self._weight):
            return self._all_fused(features, width)
        half = self._takes_half(features)
        sums, summed = self._start(features)
        most = CHAIN if not half and summed.dtype == torch.float32 else len(self._weight)  # classes in `summed`
        whole, shrink, first = None, torch.ones_like(sums.rest), 0  # `whole` is the sum before class `first`
        for tile in self._tiles(min(width, most)):
            if tile.stop - first > most:
                whole, first = _folded(whole, shrink, summed), tile.start
                shrink.fill_(1.0)
            matrix = self._matrix(tile, half)
            scores, bias, rounded = self._scores(features, tile, matrix), None, None
            if half:
                bias, rounded = self._added, self._room(features, scores.shape[1], torch.bfloat16)
            joins = self._backend.exponentiate_tile(scores, bias, self._norms, tile.start, sums, rounded)
            values = scores if rounded is None else rounded
            self._backend.rejoin(summed, self._weight, None if half else self._centre, *joins)
            if most < len(self._weight):
                shrink *= joins[1]
            self._backend.multiply_add(values, matrix, summed)
            del scores, rounded, values, matrix  # their memory is for the next tile
        if whole is not None:
            summed.copy_(_folded(whole, shrink, summed))
        return _Sums(sums, summed, sums.rest, None)

    def _all_fused(self, features: Tensor, width: int) -> _Sums:
        """Return the sums of all tiles by a kernel that computes exponentials without storing logits."""
        backend, weight = self._backend, self._weight
        sums, summed = self._start(features)
        for tile in self._tiles(width, backend.first_tile):
            matrix = weight[tile]
            made = backend.multiply_exponentiate(features, matrix, self._bias, self._norms, tile.start, sums)
            values, early, late, factor = made
            backend.rejoin(summed, weight, None, early, factor)
            self._backend.multiply_add(values, matrix, summed)
            backend.rejoin(summed, weight, None, late, factor)
            del made, values  # their memory is for the next tile
        return _Sums(sums, summed, sums.rest, None)

    def _few(self, features: Tensor, width: int, scale: Tensor) -> Bounded:
        """Compute the exponentials of all tiles, then the second product of the tiles that matter."""
        tiles = self._tiles(width)
        classes, summed = self._start(features)
        maximum, top, values, parts = classes.maximum, classes.top, [], []
        for tile in tiles:
            scores = self._scores(features, tile, self._matrix(tile))
            rest, moment, place = self._backend.exponentiate(scores, self._norms[tile], 0.0, maximum)
            assert moment is not None
            found = torch.where(place >= 0, place + tile.start, -1)
            top = torch.where(found >= 0, found, top)
            values.append(scores)
            parts.append(ClassSums(maximum.clone(), found, rest, moment))
        own = ClassSums(*(torch.stack(rows, dim=1) for rows in zip(*parts, strict=True)))
        classes = classes._replace(top=top)
        rest, moment, shrink = self._settle(values, tiles, classes, own)
        left_out = (rest * moment).sqrt()
        classes = classes._replace(rest=rest.sum(dim=1), moment=moment.sum(dim=1))
        sums = _Sums(classes, summed, torch.zeros_like(scale), None)
        single = promoted(features)
        weights = self._backend.row_dots(single, single) * scale
        order, count = self._choose(sums, left_out, weights, 1.0)
        done, attempts = len(order), 0  # tiles order[done:] are summed
        while True:
            for k in order[count:done]:
                made = self._backend.multiply(values[k], self._matrix(tiles[k]), torch.empty_like(summed))
                summed.addcmul_(made, shrink[:, k, None].to(summed.dtype))
            done, gone, attempts = count, order[:count], attempts + 1
            sums = sums._replace(
                summed=summed.clone() if count else summed,
                weight=rest[:, order[count:]].sum(dim=1),
                left_out=left_out[:, gone].sum(dim=1),
            )
            result = self._finish(features, sums)
            fraction = self._fraction(result, scale) if count else 1.0
            if fraction >= 1:
                return result
            fewer = self._choose(sums, left_out, weights, 0.9 * fraction)[1] if attempts < _ATTEMPTS else 0
            count = min(count - 1, fewer)

    def _settle(
        self, values: list[Tensor], tiles: list[slice], classes: ClassSums, own: ClassSums
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sums of each tile, (n, tiles), relative to the last maximum, and the factors to it.

        Classes that were a maximum earlier join the others.
        """
        old = (own.top >= 0) & (own.top != classes.top.unsqueeze(1))
        for k, (part, tile) in enumerate(zip(values, tiles, strict=True)):
            place = (own.top[:, k] - tile.start).clamp_min(0).unsqueeze(1)
            part.scatter_(1, place, part.gather(1, place).masked_fill(old[:, k, None], 1.0))
        maximum = classes.maximum.unsqueeze(1)
        shrink = torch.where(own.maximum > -torch.inf, (own.maximum - maximum).double().exp(), 0.0)
        moment = own.moment + torch.where(old, self._norms[own.top.clamp_min(0)], 0.0)
        return shrink * (own.rest + old), shrink * moment, shrink

    def _choose(self, sums: _Sums, left_out: Tensor, weights: Tensor, fraction: float) -> tuple[list[int], int]:
        """Return the result of :func:`lightest` for a fraction of ``rtol``, from estimates of |u'| and of the value."""
        _, top, rest, moment = sums.classes
        total, norm = 1 + rest, self._norms[top.clamp_min(0)].double()
        likely = (moment + rest / total * norm) / total  # the variance, if the mean of the others is at the centre
        reach = ((moment + norm) / total).sqrt()
        usable = (weights * (likely + reach)).isfinite() & left_out.isfinite().all(dim=1)
        total, reach, left_out = (
            torch.where(usable if t.ndim == 1 else usable.unsqueeze(1), t, 1.0) for t in (total, reach, left_out)
        )
        weights = torch.where(usable, weights, 0.0)
        target = fraction * self._rtol / (1 + self._rtol) * (weights @ torch.where(usable, likely, 0.0))
        return lightest(left_out / total.unsqueeze(1), reach, weights, target)

    def _fraction(self, result: Bounded, scale: Tensor) -> float:
        """Return ``rtol`` times the least possible sum of the values, over the sum of the bounds."""
        assert result.bounds is not None
        usable = result.values.isfinite() & (scale != 0)
        both = torch.stack([torch.where(usable, rows * scale, 0.0).sum() for rows in (result.values, result.bounds)])
        value, bound = both.tolist()
        return self._rtol * (value - bound) / bound if bound > 0 else 1.0

    def _finish(self, features: Tensor, sums: _Sums) -> Bounded:
        """Return values from the sums; ``summed`` is overwritten."""
        classes, backend, single = sums.classes, self._backend, promoted(features)
        rest, moment, total = classes.rest, classes.moment, 1 + classes.rest
        uncentred = sums.weight if self._takes_half(features) else None
        bounded = sums.left_out is not None
        lengths = backend.mean_row(sums.summed, self._weight, self._centre, classes, uncentred, bounded)
        between = rest / total.square() * lengths.away
        second = rest * lengths.others
        variance = ((moment - second) / total).clamp_min(0) + between
        ill = (moment + second) / total > _CONDITION * variance
        differences = self._by_differences(single, classes.maximum, sums.summed, ill, uncentred is not None)
        variance = torch.where(ill, differences / total, variance)
        squares, lost = backend.row_dots(single, single), classes.maximum.isinf()
        values = (squares * variance).masked_fill_(lost, torch.nan)
        if sums.left_out is None or lengths.reach is None:
            return Bounded(values, None)
        reach, left_out = lengths.reach.sqrt() / total, sums.left_out / total
        return Bounded(values, (squares * (2 * reach * left_out + left_out.square())).masked_fill_(lost, torch.nan))

    def _by_differences(self, features: Tensor, maximum: Tensor, mean: Tensor, ill: Tensor, half: bool) -> Tensor:
        """Return Σ_s e_s |w_s - μ|² of ill rows; its error is quadratic in μ's, so that a rounded μ is good enough."""
        d, m = self._weight.shape
        width = d if self._backend.in_place else max(1, self._memory // (4 * m * features.itemsize))  # if copied
        squares, centre = torch.zeros_like(maximum, dtype=torch.float64), None if half else self._centre
        for tile in self._tiles(width):  # logits and the mean are either both centred or both not
            squares += self._backend.spread(features, maximum, mean, self._weight[tile], centre, self._bias[tile], ill)
        return squares


def _folded(whole: Tensor | None, shrink: Tensor, summed: Tensor) -> Tensor:
    """Return ``whole`` (float64; None is 0) times ``shrink`` by row, plus ``summed``, which is then set to 0."""
    found = summed.double() if whole is None else whole.mul_(shrink.unsqueeze(1)).add_(summed)
    summed.zero_()
    return found
