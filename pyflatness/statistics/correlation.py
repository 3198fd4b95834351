"""Correlate measures with the generalisation gap over networks, with intervals and p-values.

Pearson's r, Spearman's ρ and Kendall's τ_b.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from ..options import check_seed
from ..report import Result
from . import intervals, permutation
from .coefficients import STATISTICS, coefficients, whole
from .tables import BY_NAME, Networks, Vector, listed, one_name, read

_PERFECT = 1.99  # the size of the sum of two ends from which both are written as 1.00, or both as -1.00
_EQUAL = 1.5  # training losses within this factor count as equal


@dataclass(frozen=True)
class Correlation(Result):
    """Hold how a measure correlates with another quantity over the networks, and the 95 % interval.

    Attributes:
        measure: its name.
        statistic: "Pearson", "Spearman" or "Kendall".
        value: the correlation; NaN where it is not defined, of a quantity that is constant.
        low: the lower end of the interval; NaN where there is no value, and for fewer than 5 networks, too few for one.
        high: the upper end, likewise.
        p: the permutation p-value; None if it was not asked for, NaN where there is no value.
        p_holm: p adjusted for the number of measures, by Holm.
        p_bh: p adjusted for the number of measures, by Benjamini and Hochberg.
    """

    measure: str
    statistic: str
    value: float
    low: float
    high: float
    p: float | None = None
    p_holm: float | None = None
    p_bh: float | None = None

    def has_interval(self) -> bool:
        """Return whether there is an informative interval; one from 1 to 1 comes from networks in perfect order."""
        return not math.isnan(self.low) and abs(self.low + self.high) < _PERFECT

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes by name, without p-values that were not asked for."""
        return {name: cell for name, cell in asdict(self).items() if cell is not None}

    def __str__(self) -> str:
        ends = f"{self.low:.2f}, {self.high:.2f}" if self.has_interval() else "–"
        p = "" if self.p is None else f", p = {self.p:.2g} (Holm {self.p_holm:.2g}, B–H {self.p_bh:.2g})"
        return f"{self.statistic} {self.value:.2f} [{ends}]{p}"


@dataclass(frozen=True, repr=False)
class Correlations(Result):
    """Hold a table of correlations. ``str()`` shows it, and ``found["kappa", "Kendall"]`` is one of them.

    A data frame has a row for each measure and statistic, with p-values if there are any.

    Attributes:
        rows: for each measure and statistic.
        y: what the measures are correlated with.
        points: the number of networks that count.
        excluded: the names of those that were left out.
        untrained: those of them that were not trained as the others were, each with the reason.
        given: the columns that are held fixed.
        clusters: the number of clusters of networks; None if networks are taken as independent.
        method: how the intervals, and p-values if there are any, are computed.
        note: a warning where training losses differ by more than a factor of 1.5 and are not held fixed, or "".
    """

    rows: tuple[Correlation, ...]
    y: str
    points: int
    excluded: tuple[str, ...]
    untrained: dict[str, str] = field(default_factory=dict)
    given: tuple[str, ...] = ()
    clusters: int | None = None
    method: str = "95 % bootstrap intervals"
    note: str = ""

    def __iter__(self) -> Iterator[Correlation]:
        """Yield the correlations, statistic after statistic of each measure."""
        return iter(self.rows)

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.rows)

    def __getitem__(self, key: tuple[str, str]) -> Correlation:
        for row in self.rows:
            if (row.measure, row.statistic) == key:
                return row
        raise InputError(f"correlations: no {key!r}; there are {[(r.measure, r.statistic) for r in self.rows]}")

    def _rows(self) -> list[dict[str, Any]]:
        return [{**row.to_dict(), "y": self.y, "points": self.points} for row in self.rows]

    def __str__(self) -> str:
        width = max(len(row.measure) for row in self.rows)
        lines = [f"{row.measure:<{width}}  {row}" for row in self.rows]
        given = f" given {', '.join(self.given)}" if self.given else ""
        clusters = "" if self.clusters is None else f" in {self.clusters} clusters"
        out = f", {len(self.excluded)} excluded: {', '.join(self.excluded)}" if self.excluded else ""
        head = f"with {self.y}{given}, {self.points} networks{clusters}{out}; {self.method}"
        return "\n".join([head, *lines, *self.footnotes()])

    def footnotes(self) -> list[str]:
        """Return which networks were left out as untrained, why values or intervals are missing, and the warning."""
        undefined = any(math.isnan(row.value) for row in self.rows)
        missing = any(math.isnan(row.low) and not math.isnan(row.value) for row in self.rows)
        same = ", or in the order of what is held fixed" if self.given else ""
        lines = [f"left out: {name}, {why}; max_loss=math.inf keeps it" for name, why in self.untrained.items()]
        lines += [f"nan: not defined where a column is constant{same}"] if undefined else []
        few = too_few(self)
        count = self.points if self.clusters is None else self.clusters
        lines += [f"[–]: {count} {few} are too few for an interval"] if missing and few else []
        return [*lines, *([self.note] if self.note else [])]


def too_few(found: Correlations) -> str:
    """Return "networks" or "clusters" if there are too few of them for an interval; empty if there are enough."""
    count, what = (found.points, "networks") if found.clusters is None else (found.clusters, "clusters")
    return what if count < intervals.FEWEST else ""


def correlations(
    table: Any,
    x: str | Sequence[str] | None = None,
    y: str = "gap",
    *,
    exclude: Collection[str] = (),
    max_loss: float | None = None,
    test: Any = None,
    seed: int = 0,
    interval: str = "bootstrap",
    settings: str | Sequence[str] | None = None,
    given: str | Sequence[str] = (),
    permutations: int = 0,
    within: bool = False,
    strata: str | Sequence[str] = (),
    seeds: str | None = None,
) -> Correlations:
    """Return the correlations of measures with the generalisation gap (or another column) over networks.

    Pearson, Spearman and Kendall (τ_b), each with a 95 % interval. Fewer than 5 networks or 5 clusters have none, since
    they say next to nothing about others. ``docs/statistics.md`` says how often intervals contain the truth.
    A note warns where training losses, the column ``loss``, differ by more than a factor of 1.5 and are not held fixed.

    Args:
        table: a pandas data frame or dict of lists with a column for each measure, or the path of a CSV file, also of
            one that ``pyflatness score`` wrote, or what ``pf.score`` returned. Rows are named by a column
            ``checkpoint`` or ``name``, or the index.
        x: columns; None: all measures.
        y: a column.
        exclude: names of rows to leave out.
        max_loss: networks with a larger ``loss`` are left out and named; None: those at chance, or with a loss of more
            than five times the median and no accuracy above half way from chance to 1. ``math.inf`` keeps all.
        test: such a table of the same networks on test data: ``gap`` is its ``loss`` less that of ``table``.
        seed: of the resampling and the permutations.
        interval: ``"bootstrap"``: the percentiles of 2,000 resamples. ``"fisher"``: atanh r is taken as normal.
        settings: columns. Networks that are equal in all of them, such as those of one recipe, are a cluster and not
            independent. The bootstrap draws whole clusters, the variance of Fisher's z is their jackknife's.
        given: columns that are held fixed, such as the training loss, in partial correlations: with one column z,
            (r_xy - r_xz r_yz) / √((1 - r_xz²) (1 - r_yz²)), with all three r by the same statistic. Text, such as the
            name of an optimiser, is held fixed by a column for each of its values but one.
        permutations: how many orders of ``y`` the p-values are made with, such as 9,999; 0: none. Whole clusters are
            permuted where there are some. Each statistic's p-values are adjusted for the number of measures.
        within: permute ``y`` inside of the clusters alone, which asks about differences between networks of a cluster.
        strata: columns. Only networks that are equal in all of them are compared, such as those of one architecture:
            each correlation is the mean of those inside of the strata, weighted by their networks.
        seeds: the column of training seeds, if networks of one seed share initial weights or the order of samples
            whatever their recipe. The jackknife of Fisher's z then leaves out seeds as well as clusters.
            It needs ``settings=`` and ``interval="fisher"``.

    Returns:
        Every measure and statistic; NaN for a column that is constant, and for the interval of fewer than 5 networks.

    Raises:
        InputError: no such columns or rows, an unknown option, a number that is not finite in a row that counts, or a
            column held fixed that is constant.

    Example:
        >>> import pyflatness as pf
        >>> found = pf.statistics.correlations({"kappa": [1, 2, 3, 4, 5], "gap": [1, 3, 2, 5, 4]})
        >>> round(found["kappa", "Kendall"].value, 6), found.points
        (0.6, 5)
        >>> table = {"kappa": [3, 4, 1, 2, 7, 8, 5, 6, 9, 12], "gap": [1, 2, 3, 5, 4, 6, 8, 7, 10, 9]}
        >>> table |= {"recipe": ["a", "a", "b", "b", "c", "c", "d", "d", "e", "e"]}
        >>> print(pf.statistics.correlations(table, interval="fisher", settings="recipe"))
        with gap, 10 networks in 5 clusters; 95 % intervals by Fisher's z and the jackknife over clusters
        kappa  Pearson 0.72 [-0.19, 0.96]
        kappa  Spearman 0.72 [-0.08, 0.96]
        kappa  Kendall 0.51 [-0.20, 0.87]
    """
    networks = read(table, test)
    reasons = networks.left_out(exclude, max_loss)
    kept = np.array([not why for why in reasons])
    untrained = {name: why for name, why in zip(networks.names, reasons, strict=True) if why not in ("", BY_NAME)}
    inside = listed("strata", strata)
    held, grouping = listed("given", given), () if settings is None else listed("settings", settings)
    y, seed = one_name("y", y), check_seed("seed", seed) % 2**64  # NumPy's are not negative
    others = tuple(name for name in networks.measures if name not in {y, seeds, *held, *grouping, *inside})
    wanted = others if x is None else listed("x", x)
    if not wanted:
        raise InputError(f"table: there is no column of numbers but {y!r}")
    target, fixed = networks.finite(y, kept), [column for name in held for column in _held(networks, name, kept)]
    clusters, stratum, seed_groups = (
        networks.groups(names, kept)[0] if names else None
        for names in (grouping, inside, () if seeds is None else (one_name("seeds", seeds),))
    )
    if stratum is not None and permutations:
        raise InputError("permutations: there are no p-values inside of strata; leave one of the two out")
    measures = {name: networks.finite(name, kept) for name in wanted}
    find = intervals.finder(interval, len(target), len(fixed), clusters, seed, seeds=seed_groups, strata=stratum)
    tests = _tests([*measures.values()], target, fixed, clusters, permutations, within, seed)
    rows = []
    for number, (name, values) in enumerate(measures.items()):
        columns = [values, target, *fixed]
        for how in STATISTICS:
            value = float(coefficients(how, columns, whole(len(target)), stratum)[0])
            ends = (value, value) if math.isnan(value) else find(value, how, columns)
            rows.append(Correlation(name, how, value, *ends, *(float(p[number]) for p in tests.get(how, ()))))
    count = None if clusters is None else int(clusters.max()) + 1
    method = intervals.method(interval, clusters is not None, seed_groups is not None)
    method += permutation.method(permutations, clusters, within)
    if inside:
        method += f"; compared within the same {', '.join(inside)}"
    losses = networks.columns["loss"][kept] if "loss" in {*networks.columns} - {y, *held} else None
    unequal = "" if losses is None else unequal_losses(losses)
    note = unequal and f'{unequal}; given="loss" holds them fixed'
    return Correlations(tuple(rows), y, len(target), networks.named(~kept), untrained, held, count, method, note)


def unequal_losses(losses: Vector) -> str:
    """Return a warning where training losses, (n,), differ by more than a factor of 1.5, or ""."""
    losses = losses[np.isfinite(losses) & (losses > 0)]
    if not len(losses) or losses.max() <= _EQUAL * losses.min():
        return ""
    low, high = losses.min(), losses.max()
    factor = f"training losses are from {low:.3g} to {high:.3g}, a factor of {high / low:.3g}"
    return f"{factor}: most measures follow them, and so do gaps"


def _held(networks: Networks, name: str, kept: NDArray[np.bool_]) -> list[Vector]:
    """Return the columns that hold a column fixed: itself, or for text an indicator of each value but the first."""
    if name in networks.text_columns:
        codes = networks.groups([name], kept)[0]
        found = [(codes == code).astype(np.float64) for code in range(1, int(codes.max()) + 1)]
    else:
        found = [column for column in [networks.finite(name, kept)] if np.ptp(column) > 0]
    if not found:
        raise InputError(f"given: {name!r} is constant, so that there is nothing to hold fixed")
    return found


def _tests(
    measures: list[Vector],
    target: Vector,
    fixed: list[Vector],
    clusters: NDArray[np.intp] | None,
    permutations: int,
    within: bool,
    seed: int,
) -> dict[str, tuple[Vector, Vector, Vector]]:
    """Return the p-values of every measure by statistic: plain, by Holm, and by Benjamini and Hochberg."""
    permutation.check(permutations, clusters, within)
    if not permutations:
        return {}
    orders = permutation.orders(len(target), clusters, within, permutations, seed)
    plain = {how: permutation.p_values(how, measures, target, fixed, orders) for how in STATISTICS}
    return {how: (p, permutation.holm(p), permutation.benjamini_hochberg(p)) for how, p in plain.items()}
