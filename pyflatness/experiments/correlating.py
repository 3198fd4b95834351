"""Say how measures go along with the generalisation gap over networks: findings, a figure, and sentences."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import InputError
from ..generalization.correlation import Correlations, correlations
from ..generalization.correlation_figures import plot_correlation
from ..messages import shown
from .experiment import Finding
from .zoo import Networks

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_CLUSTERS = 5  # recipes that intervals over recipes take


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
    clusters = "recipe" if by_recipes(networks) else None
    return correlations(chosen, measures, exclude=out, clusters=clusters, given=given)


def _without(networks: Networks, columns: Sequence[str]) -> list[str]:
    """Return the networks that did not converge, or have no value in one of the columns."""
    return [
        name
        for place, name in enumerate(networks.columns["name"])
        if name in networks.unconverged or not all(np.isfinite(networks.columns[column][place]) for column in columns)
    ]


def by_recipes(networks: Networks) -> bool:
    """Return whether there are enough recipes for intervals that resample recipes."""
    return len({*networks.converged()["recipe"]}) >= _CLUSTERS


def intervals(networks: Networks) -> str:
    """Return what the intervals are, for a sentence."""
    return f"95 % bootstrap intervals over {'recipes' if by_recipes(networks) else 'networks'}"


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


def said(found: Correlations, measure: str, how: str = "Pearson") -> str:
    """Return a correlation with its interval, for a sentence."""
    value, low, high = ends(found, measure, how)
    if value is None:
        return "not defined"
    return f"{value:.2f}" if low is None else f"{value:.2f} [{low:.2f}, {high:.2f}]"


def is_positive(found: Correlations, measure: str, how: str = "Pearson") -> bool:
    """Return whether the whole interval is above zero."""
    low = ends(found, measure, how)[1]
    return low is not None and low > 0


def scatter(figure: "Figure", networks: Networks, measures: Sequence[str], columns: int = 3) -> None:
    """Draw measures against the gap, a panel each; recipes by colours, networks that did not converge hollow."""
    rows = -(-len(measures) // columns)
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    table: dict[str, list[Any]] = {key: networks.columns[key] for key in ("name", "gap", "recipe", *measures)}
    clusters = "recipe" if by_recipes(networks) else None
    for panel, measure in zip(panels, measures, strict=False):
        plot_correlation(table, measure, exclude=_without(networks, ("gap", measure)), axes=panel, clusters=clusters)
        for line in panel.get_lines():
            line.set_markersize(3)
        panel.title.set_fontsize(8)
        panel.get_legend().remove()
    for panel in panels[len(measures) :]:
        panel.remove()
