"""Say how measures go along with the generalisation gap over networks: findings, a figure, and sentences."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pyflatness.errors import InputError
from pyflatness.messages import shown
from pyflatness.statistics import intervals as resampling
from pyflatness.statistics.coefficients import Resamples, coefficients, whole
from pyflatness.statistics.correlation import Correlations, correlations
from pyflatness.statistics.figures import plot_correlation
from pyflatness.statistics.tables import Vector

from . import claims
from .claims import Claim
from .experiment import Finding
from .zoo import Networks

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def with_gap(networks: Networks, measures: Sequence[str], given: Sequence[str] = ()) -> Correlations:
    """Return the correlations of measures with the gap over the networks that converged and have values of all of them.

    Intervals resample recipes, since networks of one recipe are not independent, or networks where there are fewer than
    five recipes.

    Args:
        networks: their table.
        measures: columns.
        given: columns that are held fixed, for partial correlations.
    """
    columns = ("gap", *measures, *given)
    chosen = {name: networks.columns[name] for name in ("name", "recipe", *columns)}
    out = _without(networks, columns)
    if len(out) == len(chosen["name"]):
        raise InputError(f"no network converged and has values of all measures: {shown(dict(networks.failures))}")
    settings = "recipe" if by_recipes(networks) else None
    return correlations(chosen, measures, exclude=out, settings=settings, given=given)


def _without(networks: Networks, columns: Sequence[str]) -> list[str]:
    """Return the networks that did not converge, or have no value in one of the columns."""
    return [
        name
        for place, name in enumerate(networks.columns["name"])
        if name in networks.unconverged or not all(np.isfinite(networks.columns[column][place]) for column in columns)
    ]


def by_recipes(networks: Networks) -> bool:
    """Return whether there are enough recipes for intervals that resample recipes."""
    return len({*networks.converged()["recipe"]}) >= resampling.FEWEST


def intervals(networks: Networks) -> str:
    """Return what the intervals are, for a sentence."""
    if by_recipes(networks):
        return "95 % bootstrap intervals over recipes"
    recipes = networks.converged()["recipe"]
    if len(recipes) < resampling.FEWEST:
        return f"no intervals, of fewer than {resampling.FEWEST} networks"
    count = len({*recipes})
    return (
        f"95 % bootstrap intervals over networks as if they were independent, which are too short: {count} recipes are "
        "too few to resample"
    )


def findings(found: Correlations, measures: Sequence[str], paper: Mapping[str, str]) -> list[Finding]:
    """Return Pearson's and Kendall's correlation of each measure.

    Args:
        found: of :func:`with_gap`.
        measures: columns.
        paper: what the paper says, by column.
    """
    return [
        Finding(f"{measure}, {how}", *ends(found, measure, how), paper=paper.get(measure, ""))
        for measure in measures
        for how in ("Pearson", "Kendall")
    ]


def ends(found: Correlations, measure: str, how: str) -> tuple[float | None, float | None, float | None]:
    """Return a correlation and the ends of its interval; None where there is none."""
    row = found[measure, how]
    value, low, high = (None if np.isnan(number) else float(number) for number in (row.value, row.low, row.high))
    return value, low, high


def pearson(found: Correlations, measure: str) -> Finding:
    """Return Pearson's correlation of a measure, called by the measure's name."""
    return Finding(measure, *ends(found, measure, "Pearson"))


def said(found: Correlations, measure: str, how: str = "Pearson") -> str:
    """Return a correlation with its interval, for a sentence."""
    return claims.shown(Finding(measure, *ends(found, measure, how)))


def sign(found: Correlations, measure: str) -> str:
    """Return whether Pearson's correlation is positive or negative with its whole interval."""
    decided = Claim(pearson(found, measure)).decided()
    return {claims.SEEN: "positive", claims.AGAINST: "negative"}.get(decided, "not shown to be positive or negative")


def difference(networks: Networks, measures: Sequence[str], one: str, other: str, paper: str = "") -> Finding:
    """Return by how much Pearson's correlation with the gap is higher for one measure than for another.

    The interval is that of the difference over resamples, the same for both measures, as of :func:`with_gap`.

    Args:
        networks: their table.
        measures: columns; the networks that count have values of all of them.
        one: of them.
        other: of them.
        paper: what the paper says.
    """
    out = {*_without(networks, ("gap", *measures))}
    kept = [place for place, name in enumerate(networks.columns["name"]) if name not in out]
    columns = {name: np.array([networks.columns[name][place] for place in kept]) for name in (one, other, "gap")}
    recipes = [networks.columns["recipe"][place] for place in kept]
    clusters = np.unique(recipes, return_inverse=True)[1] if by_recipes(networks) else None
    pairs = [(columns[name], columns["gap"]) for name in (one, other)]
    return paired_difference(f"{one} less {other}, Pearson", pairs, clusters, paper)


def paired_difference(
    what: str,
    pairs: Sequence[tuple[Vector, Vector]],
    clusters: NDArray[np.intp] | None = None,
    paper: str = "",
) -> Finding:
    """Return Pearson's correlation of one pair of columns less that of another, of the same points.

    Args:
        what: it is.
        pairs: two pairs of (n,) values.
        clusters: of each point, (n,), which are resampled whole; None: points are.
        paper: what the paper says.
    """
    n = len(pairs[0][0])

    def less(drawn: Resamples) -> Vector:
        first, second = (coefficients("Pearson", pair, drawn) for pair in pairs)
        return first - second

    value = float(less(whole(n))[0]) if n else math.nan
    if math.isnan(value):
        return Finding(what, None, paper=paper)
    if (n if clusters is None else clusters.max() + 1) < resampling.FEWEST:
        return Finding(what, value, paper=paper)
    values = less(resampling.bootstrap_resamples(n, clusters, seed=0))
    low, high = np.percentile(values[np.isfinite(values)], [2.5, 97.5])
    return Finding(what, value, float(low), float(high), paper)


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Return Spearman's correlation; None where one of them is constant or not finite."""
    columns = [np.asarray(values, dtype=np.float64) for values in (one, other)]
    if not np.isfinite(columns).all():
        return None
    value = float(coefficients("Spearman", columns, whole(len(one)))[0])
    return None if math.isnan(value) else value


def scatter(figure: "Figure", networks: Networks, measures: Sequence[str], columns: int = 3) -> None:
    """Draw measures against the gap, a panel each; recipes by colours, networks that did not converge hollow."""
    rows = -(-len(measures) // columns)
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    table: dict[str, list[Any]] = {key: networks.columns[key] for key in ("name", "gap", "recipe", *measures)}
    settings = "recipe" if by_recipes(networks) else None
    for panel, measure in zip(panels, measures, strict=False):
        plot_correlation(table, measure, exclude=_without(networks, ("gap", measure)), axes=panel, settings=settings)
        for line in panel.get_lines():
            line.set_markersize(3)
        panel.title.set_fontsize(8)
        panel.get_legend().remove()
    for panel in panels[len(measures) :]:
        panel.remove()
