"""Compute 95 % intervals of correlations: by the bootstrap, of networks or of clusters, and by Fisher's z.

**Bootstrap.** The 2.5 % and 97.5 % quantiles of the correlation over resamples of the networks with replacement.
Networks of one cluster, such as those trained by one recipe, are more like each other than like others. Then whole
clusters are drawn, as many as there are (Davison and Hinkley 1997, section 3.8).

**Fisher's z.** atanh r is nearly normal, with a variance that depends little on the truth:

    Pearson     1 / (n - 3)                 Fisher 1921
    Spearman    (1 + ρ²/2) / (n - 3)        Bonett and Wright 2000
    Kendall     0.437 / (n - 4)             Fieller, Hartley and Pearson 1957

for independent networks; columns held fixed are taken off n. With G clusters the variance is that of the jackknife
which leaves one cluster out at a time, (G - 1)/G Σ_g (z_g - mean z)², and the quantile Student's t with G - 1 degrees
of freedom (Cameron and Miller 2015, section VI).
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ..messages import check_choice
from ..report.intervals import student_t
from .coefficients import Resamples, coefficients, resamples
from .tables import Vector

RESAMPLES = 2000
FEWEST = 5  # networks, and clusters, that an interval takes

_LEVEL = 0.95
_VARIANCES: dict[str, Callable[[float, int], float]] = {
    "Pearson": lambda value, n: 1 / (n - 3),
    "Spearman": lambda value, n: (1 + value**2 / 2) / (n - 3),
    "Kendall": lambda value, n: 0.437 / (n - 4),
}
_NAMES = {
    "bootstrap": ("bootstrap intervals", "bootstrap intervals over clusters"),
    "fisher": ("intervals by Fisher's z", "intervals by Fisher's z and the jackknife over clusters"),
}
_NONE = math.nan, math.nan

Finder = Callable[[float, str, Sequence[Vector]], tuple[float, float]]  # value, statistic, columns: the ends


def finder(interval: str, n: int, held: int, clusters: NDArray[np.intp] | None, seed: int) -> Finder:
    """Return a function for the interval of a correlation over n networks; NaN of too few networks or clusters.

    Args:
        interval: ``"bootstrap"`` or ``"fisher"``.
        n: networks.
        held: columns held fixed.
        clusters: the cluster of each network, (n,); None: they are independent.
        seed: of the bootstrap.

    Raises:
        InputError: another interval.
    """
    check_choice("interval", interval, _NAMES)
    if n - held < FEWEST or (clusters is not None and clusters.max() + 1 < FEWEST):
        return lambda value, statistic, columns: _NONE
    if interval == "bootstrap":
        drawn = bootstrap_resamples(n, clusters, seed)
        return lambda value, statistic, columns: percentiles(statistic, columns, drawn)
    jackknife = None if clusters is None else jackknife_resamples(clusters)
    return lambda value, statistic, columns: fisher(value, statistic, columns, jackknife)


def described(interval: str, clustered: bool) -> str:
    """Return what the intervals are, for a heading."""
    return "95 % " + _NAMES[interval][clustered]


def bootstrap_resamples(n: int, clusters: NDArray[np.intp] | None, seed: int) -> Resamples:
    """Return resamples of n networks, or of their clusters, (n,), with replacement."""
    generator = np.random.default_rng(seed)
    if clusters is None:
        return resamples(generator.integers(n, size=(RESAMPLES, n)), n)
    members = _members(clusters)
    drawn = generator.integers(len(members), size=(RESAMPLES, len(members)))
    return resamples(members[drawn].reshape(RESAMPLES, -1), n)


def jackknife_resamples(clusters: NDArray[np.intp]) -> Resamples:
    """Return the samples that each lack one cluster."""
    members = _members(clusters)
    left = np.repeat(members[None], len(members), axis=0)
    left[np.arange(len(members)), np.arange(len(members))] = -1
    return resamples(left.reshape(len(members), -1), len(clusters))


def percentiles(statistic: str, columns: Sequence[Vector], drawn: Resamples) -> tuple[float, float]:
    """Return the interval by the bootstrap; resamples in which the correlation is not defined are left out."""
    values = coefficients(statistic, columns, drawn)
    values = values[np.isfinite(values)]
    if not len(values):
        return _NONE
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


def fisher(value: float, statistic: str, columns: Sequence[Vector], jackknife: Resamples | None) -> tuple[float, float]:
    """Return the interval by Fisher's z of a correlation.

    Args:
        value: the correlation; ±1 has no interval.
        statistic: one of ``STATISTICS``.
        columns: as for :func:`.coefficients`.
        jackknife: samples that each lack a cluster; None: networks are independent.
    """
    if not abs(value) < 1:
        return _NONE
    if jackknife is None:
        n = len(columns[0]) - len(columns) + 2
        half = student_t(_LEVEL, math.inf) * math.sqrt(_VARIANCES[statistic](value, n))
    else:
        left_out = coefficients(statistic, columns, jackknife)
        if not (np.abs(left_out) < 1).all():
            return _NONE
        z, count = np.arctanh(left_out), len(left_out)
        half = student_t(_LEVEL, count - 1) * math.sqrt((count - 1) / count * ((z - z.mean()) ** 2).sum())
    return math.tanh(math.atanh(value) - half), math.tanh(math.atanh(value) + half)


def _members(clusters: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return the networks of every cluster, (clusters, most in one), with -1 behind those of a smaller one."""
    counts = np.bincount(clusters)
    members = np.full((len(counts), counts.max()), -1)
    for cluster, count in enumerate(counts):
        members[cluster, :count] = np.flatnonzero(clusters == cluster)
    return members
