"""Compute correlation coefficients over resampled networks, also with other quantities held fixed.

Pearson's r, Spearman's ρ and Kendall's τ_b are each the cosine of the angle between two vectors made of x and y:

    Pearson     the values less their mean, (n,)
    Spearman    twice the ranks less their mean, (n,); ties have their mean rank
    Kendall     the order of every pair, sign(x_i - x_j), (n, n); tied pairs are 0, which makes it τ_b

A resample contains network i c_i times. Means, ranks and pairs depend on these counts alone, so that resamples are a
matrix of counts, (resamples, n), and the inner products of all of them are products of matrices: those of Pearson and
Spearman are Σ_i c_i x_i y_i, and Kendall's is Σ_ij c_i c_j sign(x_i - x_j) sign(y_i - y_j).
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .tables import Vector

STATISTICS = ("Pearson", "Spearman", "Kendall")
_ROUNDING = 1e-12  # a smaller 1 - r² means r = ±1


def whole(n: int) -> Vector:
    """Return the counts of one sample that contains every network once, (1, n)."""
    return np.ones((1, n))


def coefficients(
    statistic: str, columns: Sequence[Vector], counts: Vector, strata: NDArray[np.intp] | None = None
) -> Vector:
    """Return a correlation in every resample; the columns are x, y, and those held fixed, (n,) finite values each.

    With ``strata`` (n,) it is the mean of the correlations within strata, where defined, weighted by their numbers of
    networks. It is NaN where a column is constant, and where x or y follows from what is held fixed.
    """
    if strata is None:
        return partial(cosines(products(statistic, columns, counts)))
    total, weight = np.zeros((2, len(counts)))
    for stratum in range(int(strata.max()) + 1):
        inside = strata == stratum
        found = coefficients(statistic, [column[inside] for column in columns], counts[:, inside])
        networks = np.where(np.isfinite(found), counts[:, inside].sum(axis=1), 0)
        total += networks * np.nan_to_num(found)
        weight += networks
    means: Vector = np.divide(total, weight, out=np.full(len(total), np.nan), where=weight > 0)
    return means


def products(statistic: str, columns: Sequence[Vector], counts: Vector) -> Vector:
    """Return the inner products of the vectors of k columns in every resample, (resamples, k, k)."""
    if statistic != "Kendall":
        vectors = np.stack([_centred(statistic, column, counts) for column in columns], axis=1)
        of_vectors: Vector = (vectors * counts[:, None]) @ vectors.transpose(0, 2, 1)
        return of_vectors
    signs = [np.sign(column[:, None] - column) for column in columns]
    found = np.empty((len(counts), len(columns), len(columns)))
    for i, column in enumerate(columns):  # all pairs but those that are tied
        found[:, i, i] = counts.sum(axis=1) ** 2 - (_tallies(column, counts)[0] ** 2).sum(axis=1)
        for j in range(i):
            found[:, i, j] = found[:, j, i] = ((counts @ (signs[i] * signs[j])) * counts).sum(axis=1)
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
    sample = whole(len(values))
    vectors = np.concatenate([_centred(statistic, column, sample) for column in columns])
    found: Vector = vectors @ _centred(statistic, values, sample)[0][orders].T
    return found


def _centred(statistic: str, values: Vector, counts: Vector) -> Vector:
    """Return the vector of Pearson's or Spearman's correlation in every resample, (resamples, n).

    Pearson's is divided by the range of the values, so that squares neither overflow nor vanish; NaN of a range of 0.
    """
    if statistic == "Spearman":  # the number of drawn networks below less the number above
        tallies, place = _tallies(values, counts)
        below_and_equal = tallies.cumsum(axis=1)
        ranks: Vector = (2 * below_and_equal - tallies - below_and_equal[:, -1:])[:, place]
        return ranks
    drawn = counts > 0
    high, low = np.where(drawn, values, -np.inf).max(axis=1), np.where(drawn, values, np.inf).min(axis=1)
    scale = np.where(high > low, high - low, np.nan)
    means = (counts * values).sum(axis=1) / np.maximum(counts.sum(axis=1), 1)
    return np.where(drawn, (values - means[:, None]) / scale[:, None], 0)


def _tallies(values: Vector, counts: Vector) -> tuple[Vector, NDArray[np.intp]]:
    """Return how often each distinct value is drawn, (resamples, distinct), and the place of each network's, (n,)."""
    _, place = np.unique(values, return_inverse=True)
    order = np.argsort(place, kind="stable")
    starts = np.searchsorted(place[order], np.arange(place.max() + 1))
    return np.add.reduceat(counts[:, order], starts, axis=1), place
