"""Compute permutation p-values of correlations, and adjust p-values for the number of measures.

If a measure and the target were independent, the target's values could be assigned to the networks in any order. The
p-value is the fraction of orders, including the one found, whose correlation is at least as far from the mean over the
orders (Phipson and Smyth 2010). Networks of one cluster may depend on each other. Then either whole clusters are
permuted, with a new order inside, or networks are permuted within their clusters. The first tests for a correlation
between clusters, the second for one between networks of the same cluster.

With columns held fixed, the part of the target that these leave unexplained is permuted (Freedman and Lane 1983; for
the pairs of Kendall's τ, Dekker, Krackhardt and Snijders 2007).
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from ..options import check_count, check_flag
from .coefficients import cosines, partial, permuted_products, products, whole
from .tables import Vector

_ROUNDING = 1e-12  # difference within which correlations are equal


def check(permutations: int, clusters: NDArray[np.intp] | None, within: bool) -> None:
    """Raise for options that do not fit together."""
    check_count("permutations", permutations, 0, "a number of permutations, such as 9999 or 0,")
    if check_flag("within", within) and (clusters is None or not permutations):
        raise InputError("within=True permutes inside of clusters: pass settings= and permutations= too")


def method(permutations: int, clusters: NDArray[np.intp] | None, within: bool) -> str:
    """Return how the p-values are computed, as the end of a sentence."""
    if not permutations:
        return ""
    what = "networks" if clusters is None else "networks inside of clusters" if within else "clusters"
    return f", p by {permutations} permutations of {what}"


def orders(n: int, clusters: NDArray[np.intp] | None, within: bool, count: int, seed: int) -> NDArray[np.intp]:
    """Return the order found and ``count`` random ones, (1 + count, n): the network whose value each network gets.

    With clusters a random order exchanges the values of whole clusters. A cluster that gets those of a smaller one has
    some of them several times, and one that gets those of a larger one has only some of them, so that the order is no
    permutation of networks unless clusters are of one size. With ``within`` values stay in their clusters.
    """
    generator = np.random.default_rng(seed)
    shuffled = generator.permuted(np.tile(np.arange(n), (count, 1)), axis=1)
    if clusters is None:
        return np.concatenate([np.arange(n)[None], shuffled])
    sizes = np.bincount(clusters)
    starts = sizes.cumsum() - sizes
    by_cluster = np.argsort(clusters, kind="stable")
    places = np.empty(n, dtype=np.intp)  # of each network in its cluster
    places[by_cluster] = np.arange(n) - np.repeat(starts, sizes)
    sources = np.tile(np.arange(len(sizes)), (count, 1))
    if not within:
        sources = generator.permuted(sources, axis=1)
    source = sources[:, clusters]
    inside = np.argsort(clusters[shuffled], axis=1, kind="stable")
    mixed = np.take_along_axis(shuffled, inside, axis=1)  # the networks of one cluster after the other, in random order
    found = np.take_along_axis(mixed, starts[source] + places % sizes[source], axis=1)
    return np.concatenate([np.arange(n)[None], found])


def p_values(
    statistic: str, measures: Sequence[Vector], target: Vector, given: Sequence[Vector], permuted: NDArray[np.intp]
) -> Vector:
    """Return the p-value of each measure's correlation with a target, given columns; NaN where that is not defined."""
    sample = whole(len(target))
    fixed = products(statistic, [target, *given], sample)[0]
    slopes = np.linalg.pinv(fixed[1:, 1:]) @ fixed[1:, 0]
    columns = np.stack([*measures, *given])
    found = permuted_products(statistic, columns, target, permuted)
    for slope, column in zip(slopes, given, strict=True):
        found -= slope * permuted_products(statistic, columns, column, permuted)
    p = np.empty(len(measures))
    for number, measure in enumerate(measures):
        each = np.repeat(products(statistic, [measure, target, *given], sample), len(permuted), axis=0)
        each[:, 0, 1] = each[:, 1, 0] = found[number]
        each[:, 1, 1] = fixed[0, 0] - fixed[0, 1:] @ slopes  # as in the order found, also where values are repeated
        each[:, 1, 2:] = each[:, 2:, 1] = found[len(measures) :].T
        p[number] = _beyond(partial(cosines(each)))
    return p


def _beyond(values: Vector) -> float:
    """Return the fraction of values at least as far from their mean as the first; NaN if the first is."""
    if not np.isfinite(values[0]):
        return math.nan
    distances = np.abs(values - np.nanmean(values))
    return float((~(distances < distances[0] - _ROUNDING)).mean())  # orders without a correlation count too


def holm(p: Vector) -> Vector:
    """Return p-values adjusted to hold the probability of any false discovery (Holm 1979), (measures,).

    The smallest of m is multiplied by m, the next by m - 1, and so on, and made no smaller than those before it. NaN
    are left out.
    """
    return _adjusted(p, lambda rising: np.maximum.accumulate(rising * np.arange(len(rising), 0, -1)))


def benjamini_hochberg(p: Vector) -> Vector:
    """Return p-values adjusted to hold the expected fraction of false discoveries (1995), (measures,).

    The k-th smallest of m is multiplied by m / k, and made no larger than those after it. NaN are left out.
    """

    def adjust(rising: Vector) -> Vector:
        scaled = rising * len(rising) / np.arange(1, len(rising) + 1)
        return np.minimum.accumulate(scaled[::-1])[::-1]

    return _adjusted(p, adjust)


def _adjusted(p: Vector, adjust: Callable[[Vector], Vector]) -> Vector:
    order = np.argsort(p)[: np.isfinite(p).sum()]  # NaN are last
    found = np.full(len(p), math.nan)
    found[order] = np.minimum(adjust(p[order]), 1)
    return found
