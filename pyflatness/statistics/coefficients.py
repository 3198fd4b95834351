"""Compute correlation coefficients of resampled networks, also with other quantities held fixed.

Pearson's r, Spearman's ρ and Kendall's τ_b are each the cosine of the angle between two vectors made of x and y:

    Pearson     the values less their mean, (n,)
    Spearman    twice the ranks less their mean, (n,); ties have their mean rank
    Kendall     the order of every pair, sign(x_i - x_j), (n, n); tied pairs are 0, which makes it τ_b

A resample contains a network as often as it was drawn, c_i times. Ranks and pairs depend only on these counts, so that
Kendall's sum over pairs is Σ_ij c_i c_j sign(x_i - x_j) sign(y_i - y_j), a product of matrices for all resamples.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .tables import Vector

Product = Callable[[int, int], Vector]  # numbers of two columns -> their inner products, (resamples,)

_ROUNDING = 1e-12  # a smaller 1 - r² means r = ±1


@dataclass(frozen=True, eq=False)
class Resamples:
    """Hold which networks are in every resample."""

    draws: NDArray[np.intp]  # the networks' numbers, (resamples, drawn), filled up with -1 where a resample is smaller
    counts: Vector  # how often each network is in a resample, (resamples, n)

    def inside(self, chosen: NDArray[np.bool_]) -> "Resamples":
        """Return the resamples restricted to some of the networks, (n,), which are numbered anew."""
        numbers = np.append(np.where(chosen, chosen.cumsum() - 1, -1), -1)  # the last is for -1
        return Resamples(numbers[self.draws], self.counts[:, chosen])


def resamples(draws: NDArray[np.intp], n: int) -> Resamples:
    """Return resamples of n networks from ``draws``, (resamples, drawn), as in :class:`Resamples`."""
    places = draws % (n + 1) + (n + 1) * np.arange(len(draws))[:, None]  # -1 becomes n, a column that is dropped
    counts = np.bincount(places.ravel(), minlength=len(draws) * (n + 1)).reshape(len(draws), n + 1)
    return Resamples(draws, counts[:, :n].astype(np.float64))


def whole(n: int) -> Resamples:
    """Return one sample that contains every network once."""
    return resamples(np.arange(n)[None], n)


def coefficients(
    statistic: str, columns: Sequence[Vector], drawn: Resamples, strata: NDArray[np.intp] | None = None
) -> Vector:
    """Return a correlation in every resample; the columns are x, y, and those held fixed, (n,) finite values each.

    With ``strata`` (n,) it is the mean of the correlations within strata, where defined, weighted by their numbers of
    networks. It is NaN where a column is constant, and where x or y follows from what is held fixed.
    """
    if strata is None:
        return partial(cosines(products(statistic, columns, drawn)))
    total, weight = np.zeros((2, len(drawn.draws)))
    for stratum in range(int(strata.max()) + 1):
        inside = strata == stratum
        within = drawn.inside(inside)
        some = (within.counts > 0).sum(axis=1) > 1
        found = np.full(len(some), np.nan)
        if some.any():
            chosen = Resamples(within.draws[some], within.counts[some])
            found[some] = coefficients(statistic, [column[inside] for column in columns], chosen)
        networks = np.where(np.isfinite(found), within.counts.sum(axis=1), 0)
        total += networks * np.nan_to_num(found)
        weight += networks
    means: Vector = np.divide(total, weight, out=np.full(len(total), np.nan), where=weight > 0)
    return means


def products(statistic: str, columns: Sequence[Vector], drawn: Resamples) -> Vector:
    """Return the inner products of the vectors of k columns in every resample, (resamples, k, k)."""
    product = _PRODUCTS[statistic](columns, drawn)
    k = len(columns)
    found = np.empty((len(drawn.draws), k, k))
    for i in range(k):
        for j in range(i + 1):
            found[:, i, j] = found[:, j, i] = product(i, j)
    return found


def cosines(products: Vector) -> Vector:
    """Return inner products, (…, k, k), divided by both lengths; NaN for a vector of length 0."""
    squares = np.diagonal(products, axis1=-2, axis2=-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        found: Vector = products / np.sqrt(squares[..., :, None] * squares[..., None, :])
    return found


def partial(correlations: Vector) -> Vector:
    """Return the correlation of the first two of k variables with the others held fixed, (…,) from (…, k, k).

    The others are eliminated one by one: r_xy·z = (r_xy - r_xz r_yz) / √((1 - r_xz²) (1 - r_yz²)).
    """
    while correlations.shape[-1] > 2:
        with_last = correlations[..., :-1, -1]
        left = 1 - with_last**2
        left = np.where(left > _ROUNDING, left, np.nan)
        rest = correlations[..., :-1, :-1] - with_last[..., :, None] * with_last[..., None, :]
        correlations = rest / np.sqrt(left[..., :, None] * left[..., None, :])
    value: Vector = correlations[..., 0, 1]
    return value


def permuted_products(statistic: str, columns: Vector, values: Vector, orders: NDArray[np.intp]) -> Vector:
    """Return inner products of columns (k, n) with values by ``orders`` (permutations, n), (k, permutations)."""
    if statistic == "Kendall":
        permuted, total = values[orders], np.zeros((len(columns), len(orders)))
        for i in range(1, len(values)):  # pairs of one network with those before it, to save memory
            total += np.sign(columns[:, i, None] - columns[:, :i]) @ np.sign(permuted[:, i, None] - permuted[:, :i]).T
        return 2 * total
    aspect, sample = {"Pearson": _deviations, "Spearman": _ranks}[statistic], whole(len(values))
    found: Vector = np.concatenate([aspect(column, sample) for column in columns]) @ aspect(values, sample)[0][orders].T
    return found


def _pearson(columns: Sequence[Vector], drawn: Resamples) -> Product:
    aspects = [_deviations(column, drawn) for column in columns]
    return lambda i, j: _rowwise(aspects[i], aspects[j])


def _spearman(columns: Sequence[Vector], drawn: Resamples) -> Product:
    aspects = [_ranks(column, drawn) for column in columns]
    return lambda i, j: _rowwise(aspects[i] * drawn.counts, aspects[j])


def _kendall(columns: Sequence[Vector], drawn: Resamples) -> Product:
    signs = [np.sign(column[:, None] - column) for column in columns]

    def product(i: int, j: int) -> Vector:
        if i == j:  # all pairs but those that are tied
            untied: Vector = drawn.counts.sum(axis=1) ** 2 - (_tallies(columns[i], drawn)[0] ** 2).sum(axis=1)
            return untied
        return _rowwise(drawn.counts @ (signs[i] * signs[j]), drawn.counts)

    return product


_PRODUCTS: dict[str, Callable[[Sequence[Vector], Resamples], Product]] = {
    "Pearson": _pearson,
    "Spearman": _spearman,
    "Kendall": _kendall,
}
STATISTICS = tuple(_PRODUCTS)


def _deviations(values: Vector, drawn: Resamples) -> Vector:
    """Return the values drawn, less their mean, divided by their range, (resamples, drawn)."""
    there = drawn.draws >= 0
    rows = np.where(there, values[drawn.draws], 0)
    high = rows.max(axis=1, where=there, initial=-np.inf)
    low = rows.min(axis=1, where=there, initial=np.inf)
    scale = np.where(high > low, high - low, np.nan)
    means = rows.sum(axis=1) / there.sum(axis=1)
    return np.where(there, (rows - means[:, None]) / scale[:, None], 0)


def _ranks(values: Vector, drawn: Resamples) -> Vector:
    """Return the number of drawn networks below each network less the number above it, (resamples, n)."""
    tallies, place = _tallies(values, drawn)
    below_and_equal = tallies.cumsum(axis=1)
    ranks: Vector = (2 * below_and_equal - tallies - below_and_equal[:, -1:])[:, place]
    return ranks


def _tallies(values: Vector, drawn: Resamples) -> tuple[Vector, NDArray[np.intp]]:
    """Return how often each distinct value is drawn, (resamples, distinct), and the place of each network's, (n,)."""
    _, place = np.unique(values, return_inverse=True)
    order = np.argsort(place, kind="stable")
    starts = np.searchsorted(place[order], np.arange(place.max() + 1))
    return np.add.reduceat(drawn.counts[:, order], starts, axis=1), place


def _rowwise(a: Vector, b: Vector) -> Vector:
    """Return the inner products of the rows, (rows,)."""
    found: Vector = (a[:, None, :] @ b[:, :, None])[:, 0, 0]
    return found
