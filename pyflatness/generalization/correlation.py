"""Correlate measures with the generalisation gap over networks, with bootstrap intervals.

Pearson's r, Spearman's ρ and Kendall's τ_b, each with the 95 % percentile interval of the paired bootstrap. All
networks of a table count; one is left out only by its name, and then drawn hollow and counted.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ..errors import InputError
from ..report import views
from .tables import Networks, Vector, read

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_RESAMPLES = 2000
_FEWEST = 5  # networks that an interval takes
_WIDE = 100  # a measure whose largest value is so many times the smallest is drawn logarithmically


@dataclass(frozen=True)
class Correlation:
    """Hold how two quantities go together over the networks, and the 95 % bootstrap interval.

    Attributes:
        measure: the one quantity.
        statistic: "Pearson", "Spearman" or "Kendall".
        value: the correlation; NaN where it is not defined, of a quantity that is constant.
        low: the lower end of the interval; NaN where there is no value, and for fewer than 5 networks, too few for one.
        high: the upper end, likewise.
    """

    measure: str
    statistic: str
    value: float
    low: float
    high: float

    def __str__(self) -> str:
        ends = "–" if math.isnan(self.low) else f"{self.low:.2f}, {self.high:.2f}"
        return f"{self.statistic} {self.value:.2f} [{ends}]"


@dataclass(frozen=True, repr=False)
class Correlations:
    """Hold a table of correlations. ``str()`` shows it.

    Attributes:
        rows: for each measure and statistic.
        y: what the measures are held against.
        points: networks that count.
        excluded: names of those that do not.
    """

    rows: tuple[Correlation, ...]
    y: str
    points: int
    excluded: tuple[str, ...]

    def __getitem__(self, key: tuple[str, str]) -> Correlation:
        for row in self.rows:
            if (row.measure, row.statistic) == key:
                return row
        raise InputError(f"correlations: no {key!r}; there are {[(r.measure, r.statistic) for r in self.rows]}")

    def to_frame(self) -> "pandas.DataFrame":
        """Return a data frame with a row for each measure and statistic.

        Raises:
            MissingExtraError: without pandas.
        """
        return views.rows_frame([{**asdict(row), "y": self.y, "points": self.points} for row in self.rows])

    def __str__(self) -> str:
        width = max(len(row.measure) for row in self.rows)
        lines = [f"{row.measure:<{width}}  {row}" for row in self.rows]
        out = f", {len(self.excluded)} excluded: {', '.join(self.excluded)}" if self.excluded else ""
        return "\n".join([f"with {self.y}, {self.points} networks{out}; 95 % bootstrap intervals", *lines])

    __repr__ = __str__


def correlations(
    table: Any,
    x: str | Sequence[str] | None = None,
    y: str = "gap",
    *,
    exclude: Collection[str] = (),
    test: Any = None,
    seed: int = 0,
) -> Correlations:
    """Return the correlations of measures with the generalisation gap (or another column) over networks.

    Pearson, Spearman and Kendall (τ_b), each with the 95 % percentile interval of 2,000 paired bootstrap resamples. For
    fewer than 5 networks there is no interval: resamples of so few say next to nothing of other networks.

    Args:
        table: a pandas data frame or dict of lists with a column for each measure, or the path of a CSV file, also of
            one that ``pyflatness score`` wrote. Rows are named by a column ``checkpoint`` or ``name``, or the index.
        x: columns; None: all measures.
        y: a column.
        exclude: names of rows to leave out; nothing else is left out.
        test: a table of the same networks on test data: ``gap`` is its ``loss`` less that of ``table``.
        seed: of the resampling.

    Returns:
        Every measure and statistic; NaN for a column that is constant, and for the interval of fewer than 5 networks.

    Raises:
        InputError: no such columns or rows, or a number that is not finite in a row that counts.

    Example:
        >>> import pyflatness as pf
        >>> found = pf.correlations({"kappa": [1, 2, 3, 4, 5], "gap": [1, 3, 2, 5, 4]})
        >>> round(found["kappa", "Kendall"].value, 6), found.points
        (0.6, 5)
    """
    networks = read(table, test)
    kept = networks.kept(exclude)
    others = tuple(name for name in networks.measures if name != y)
    wanted = others if x is None else (x,) if isinstance(x, str) else tuple(x)
    if not wanted:
        raise InputError(f"table: there is no column of numbers but {y!r}")
    against = _finite(networks, y, kept)
    rows = []
    for name in wanted:
        values = _finite(networks, name, kept)
        rows += [Correlation(name, how, *correlation(values, against, how, seed)) for how in STATISTICS]
    return Correlations(tuple(rows), y, int(kept.sum()), _names(networks, ~kept))


def plot_correlation(
    table: Any,
    x: str,
    y: str = "gap",
    *,
    exclude: Collection[str] = (),
    test: Any = None,
    seed: int = 0,
    path: str | Path | None = None,
    axes: "Axes | None" = None,
) -> "tuple[Figure, Axes]":
    """Draw a measure against the generalisation gap as a scatter plot, with the correlations above it.

    Every network is drawn; those in ``exclude`` hollow, counted in the legend and left out of the correlations.

    Args:
        table: as for :func:`pyflatness.correlations`, like all that follow but the last two.
        x: a column.
        y: a column.
        exclude: names of rows.
        test: a table of the same networks on test data.
        seed: of the resampling.
        path: where the figure is written too; its ending is its format.
        axes: matplotlib's, to draw into; None: those of a new figure.

    Returns:
        Figure and axes of matplotlib, outside of pyplot.

    Raises:
        InputError: as :func:`pyflatness.correlations`.
        MissingExtraError: without matplotlib.

    Example:
        >>> import pyflatness as pf
        >>> figure, axes = pf.plot_correlation({"kappa": [1, 2, 3, 4, 5], "gap": [1, 3, 2, 5, 4]}, x="kappa")
        >>> axes.get_title().splitlines()[0].startswith("Pearson 0.80")
        True
    """
    found = correlations(table, x, y, exclude=exclude, test=test, seed=seed)
    networks = read(table, test)
    kept, values, against = networks.kept(exclude), networks.column(x), networks.column(y)
    figure, axes = views.figure() if axes is None else (cast("Figure", axes.get_figure()), axes)
    axes.plot(values[kept], against[kept], "o", color="C0", label=f"{found.points} networks")
    if found.excluded:
        label = f"{len(found.excluded)} excluded by name, not in the correlations"
        axes.plot(values[~kept], against[~kept], "o", color="C0", fillstyle="none", label=label)
    drawn = values[np.isfinite(values)]
    if drawn.min() > 0 and drawn.max() > _WIDE * drawn.min():
        axes.set_xscale("log")
    axes.set_title("\n".join(map(str, found.rows)), fontsize=10)
    axes.set_xlabel(x)
    axes.set_ylabel("generalisation gap" if y == "gap" else y)
    axes.grid(alpha=0.3)
    axes.legend()
    if path is not None:
        figure.savefig(path)
    return figure, axes


def correlation(x: Vector, y: Vector, statistic: str, seed: int) -> tuple[float, float, float]:
    """Return the correlation of two samples, and the 95 % percentile interval of the paired bootstrap.

    Args:
        x: (n,) values.
        y: (n,) values.
        statistic: ``"Pearson"``, ``"Spearman"`` or ``"Kendall"`` (τ_b).
        seed: of the resampling.

    Returns:
        The value and the ends of its interval, which are NaN for n < 5; all NaN if x or y is constant or has an entry
        that is not finite.
    """
    aspect = STATISTICS[statistic]
    value = _cosine(x, y, aspect)
    if np.isnan(value) or len(x) < _FEWEST:
        return value, math.nan, math.nan
    draws = np.random.default_rng(seed).integers(len(x), size=(_RESAMPLES, len(x)))
    resampled = np.array([_cosine(x[draw], y[draw], aspect) for draw in draws])
    low, high = np.percentile(resampled[np.isfinite(resampled)], [2.5, 97.5])
    return value, float(low), float(high)


def _signs(values: Vector) -> Vector:
    """Return the order of every pair, (n, n)."""
    return np.sign(values[:, None] - values)


# Each statistic is the cosine of the angle between one aspect of x and the same of y.
STATISTICS: dict[str, Callable[[Vector], Vector]] = {
    "Pearson": lambda values: (values - values.mean()) / np.ptp(values),
    "Spearman": lambda values: _signs(values).sum(axis=1),  # ranks (of ties, the mean rank), centred and doubled
    "Kendall": lambda values: _signs(values).ravel(),  # τ_b
}


def _cosine(x: Vector, y: Vector, aspect: Callable[[Vector], Vector]) -> float:
    for values in (x, y):
        if not np.isfinite(values).all() or np.ptp(values) == 0:
            return math.nan
    a, b = aspect(x), aspect(y)
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


def _finite(networks: Networks, column: str, kept: Any) -> Vector:
    """Return the numbers of a column that count, all finite."""
    values = networks.column(column)
    bad = _names(networks, kept & ~np.isfinite(values))
    if bad:
        raise InputError(
            f"table: {column!r} is empty, NaN or infinite for {', '.join(bad[:5])}{' …' if len(bad) > 5 else ''}; "
            "to leave them out, name them in exclude="
        )
    if not kept.any():
        raise InputError("exclude: every row is excluded")
    counting: Vector = values[kept]
    return counting


def _names(networks: Networks, chosen: Any) -> tuple[str, ...]:
    return tuple(name for name, wanted in zip(networks.names, chosen, strict=True) if wanted)
