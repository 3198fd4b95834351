"""Compute 95 % intervals of correlations: by the bootstrap, of networks or of clusters, and by Fisher's z.

**Bootstrap.** The 2.5 % and 97.5 % quantiles of the correlation over resamples of the networks with replacement.
Networks of one cluster, such as those trained by one recipe, are more like each other than like others. Then whole
clusters are drawn, as many as there are (Davison and Hinkley 1997, section 3.8).

**Fisher's z.** atanh r is nearly normal, with a variance that depends little on the truth:

    Pearson     1 / (n - 3)                 Fisher 1921
    Spearman    (1 + ρ²/2) / (n - 3)        Bonett and Wright 2000
    Kendall     0.437 / (n - 4)             Fieller, Hartley and Pearson 1957

for independent networks; the number of columns held fixed is subtracted from n. With G clusters the variance is that of
the jackknife which leaves one cluster out at a time, V = (G - 1)/G Σ_g (z_g - mean z)², and the quantile is Student's t
with G - 1 degrees of freedom (Cameron and Miller 2015, section VI).

**Seeds.** Networks of one seed may share their initial weights and the order of their samples across recipes, so that
leaving out recipes alone misses the variance between seeds. With H seeds the variance is V_recipes + max(0, V_seeds -
V_both), where V_both is that of leaving out one recipe's networks of one seed, which is in both other terms (Cameron,
Gelbach and Miller 2011). The degrees of freedom of the sum are Satterthwaite's, of G - 1 and H - 1, so that two seeds
that differ make long intervals. If one of the two quantities varies mostly between recipes and the other mostly between
seeds, V_both is about as large as V_seeds although nothing is counted twice, and the intervals would be too short. Then
the variance is V_recipes + V_seeds.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from ..messages import check_choice
from ..report.intervals import student_t
from .coefficients import coefficients
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

Statistic = Callable[[Vector], Vector]  # counts of resamples, (resamples, n) -> its value in each, (resamples,)
Finder = Callable[[float, str, Sequence[Vector]], tuple[float, float]]  # (value, statistic, columns) -> the ends


def finder(
    interval: str,
    n: int,
    held: int,
    clusters: NDArray[np.intp] | None,
    seed: int,
    *,
    seeds: NDArray[np.intp] | None = None,
    strata: NDArray[np.intp] | None = None,
) -> Finder:
    """Return a function that finds the interval of a correlation over n networks; NaN if these or clusters are too few.

    ``held`` is the number of columns held fixed. Without ``clusters`` (n,) networks are independent. ``seeds`` (n,) are
    the seeds of training, for Fisher's z over clusters. Networks are compared within ``strata`` (n,).
    """
    check_choice("interval", interval, _NAMES)
    if seeds is not None and (clusters is None or interval != "fisher"):
        raise InputError("seeds: they are resampled beside recipes; pass settings= and interval='fisher' too")
    if n - held < FEWEST or (clusters is not None and clusters.max() + 1 < FEWEST):
        return lambda value, statistic, columns: _NONE
    if interval == "bootstrap":
        drawn = bootstrap_resamples(n, clusters, seed)
        return lambda value, statistic, columns: percentiles(coefficients(statistic, columns, drawn, strata))
    jackknife = None if clusters is None else Jackknife.over(clusters, seeds)
    return lambda value, statistic, columns: fisher(value, statistic, columns, jackknife, strata)


def method(interval: str, clustered: bool, seeded: bool) -> str:
    """Return how the intervals are computed, as the beginning of a sentence."""
    return "95 % " + _NAMES[interval][clustered] + (" and seeds" if seeded else "")


def bootstrap_resamples(n: int, clusters: NDArray[np.intp] | None, seed: int) -> Vector:
    """Return the counts of resamples of n networks, or of their clusters, (n,), with replacement, (resamples, n)."""
    clusters = np.arange(n) if clusters is None else clusters
    count = int(clusters.max()) + 1
    drawn = np.random.default_rng(seed).integers(count, size=(RESAMPLES, count))
    return np.stack([np.bincount(some, minlength=count) for some in drawn])[:, clusters].astype(np.float64)


@dataclass(frozen=True, eq=False)
class Jackknife:
    """Hold the samples that each lack one recipe, one seed, or one recipe's networks of one seed."""

    recipes: Vector  # counts, (recipes, n), of samples that each lack one recipe
    seeds: Vector | None = None  # that each lack one seed; None: seeds share nothing
    both: Vector | None = None  # that each lack the networks of one recipe and seed
    codes: tuple[NDArray[np.intp], ...] = ()  # the recipe and the seed of each network, (n,)

    @classmethod
    def over(cls, recipes: NDArray[np.intp], seeds: NDArray[np.intp] | None = None) -> "Jackknife":
        """Return the samples of recipes (n,), and of seeds (n,) if there are at least two."""
        if seeds is None or not seeds.any():
            return cls(_without_each(recipes))
        cells = np.unique(recipes * (seeds.max() + 1) + seeds, return_inverse=True)[1]
        return cls(_without_each(recipes), _without_each(seeds), _without_each(cells), (recipes, seeds))

    def crossed(self, x: Vector, y: Vector) -> bool:
        """Return whether one of two columns, (n,), varies mostly between recipes and the other between seeds."""
        if not self.codes:
            return False
        (x_recipes, x_seeds), (y_recipes, y_seeds) = (
            [_between(c, codes) > 0.5 for codes in self.codes] for c in (x, y)
        )
        return (x_recipes and y_seeds) or (x_seeds and y_recipes)

    def half(self, of: Statistic, *, crossed: bool = False) -> float:
        """Return half the length of a statistic's 95 % interval; NaN where a sample has no value.

        It is ``crossed`` where one quantity varies mostly between recipes and the other mostly between seeds.
        """
        variance, count = _variance(of(self.recipes))
        dof = count - 1.0
        if self.seeds is not None and self.both is not None:
            of_seeds, seeds = _variance(of(self.seeds))
            more = of_seeds if crossed else max(0.0, of_seeds - _variance(of(self.both))[0])
            if more > 0:
                dof = (variance + more) ** 2 / (variance**2 / dof + more**2 / (seeds - 1))
                variance += more
        return student_t(_LEVEL, dof) * math.sqrt(variance) if math.isfinite(variance) else math.nan


def _variance(left_out: Vector) -> tuple[float, int]:
    """Return the jackknife's variance from values that each leave one cluster out, and the number of clusters."""
    count = len(left_out)
    return float((count - 1) / count * ((left_out - left_out.mean()) ** 2).sum()), count


def _between(values: Vector, clusters: NDArray[np.intp]) -> float:
    """Return the fraction of the variance of values, (n,), that is between clusters, (n,); 0 of a constant."""
    means = np.bincount(clusters, values)[clusters] / np.bincount(clusters)[clusters]
    variance = float(values.var())
    return float(means.var()) / variance if variance > 0 else 0.0


def _without_each(clusters: NDArray[np.intp]) -> Vector:
    """Return the counts of the samples that each lack one cluster, (clusters, n)."""
    counts: Vector = (clusters != np.arange(clusters.max() + 1)[:, None]).astype(np.float64)
    return counts


def percentiles(values: Vector) -> tuple[float, float]:
    """Return the bootstrap interval of the values of resamples, but for those in which the correlation is undefined."""
    values = values[np.isfinite(values)]
    if not len(values):
        return _NONE
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


def fisher(
    value: float,
    statistic: str,
    columns: Sequence[Vector],
    jackknife: Jackknife | None,
    strata: NDArray[np.intp] | None = None,
) -> tuple[float, float]:
    """Return a correlation's interval by Fisher's z, NaN for ±1; the jackknife gives the variance over clusters."""
    if not abs(value) < 1:
        return _NONE
    if jackknife is None:
        n = len(columns[0]) - len(columns) + 2
        half = student_t(_LEVEL, math.inf) * math.sqrt(_VARIANCES[statistic](value, n))
    else:
        crossed = jackknife.crossed(columns[0], columns[1])
        half = jackknife.half(lambda drawn: _z(coefficients(statistic, columns, drawn, strata)), crossed=crossed)
        if math.isnan(half):
            return _NONE
    return math.tanh(math.atanh(value) - half), math.tanh(math.atanh(value) + half)


def _z(correlations: Vector) -> Vector:
    """Return atanh; NaN for ±1."""
    found: Vector = np.arctanh(np.where(np.abs(correlations) < 1, correlations, np.nan))
    return found
