"""Say how measures go along with the generalisation gap over networks: findings, a figure, and sentences."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pyflatness.errors import InputError
from pyflatness.messages import shown
from pyflatness.statistics import intervals as resampling
from pyflatness.statistics.coefficients import coefficients, whole
from pyflatness.statistics.correlation import Correlations, correlations
from pyflatness.statistics.figures import plot_correlation
from pyflatness.statistics.intervals import Jackknife, Statistic
from pyflatness.statistics.tables import Vector

from . import claims
from .claims import Claim
from .experiment import Finding
from .zoo import Networks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FAR = 5  # a measure whose largest value is more than so many times the smallest is drawn logarithmically

BASELINES = ("the recipe's mean gap", "the gap of another seed", "random numbers")


def with_gap(
    networks: Networks, measures: Sequence[str], given: Sequence[str] = (), y: str = "gap", strata: Sequence[str] = ()
) -> Correlations:
    """Return the correlations of measures with the gap over the networks that converged and have values of all of them.

    Intervals are by Fisher's z and the jackknife over recipes and seeds: networks of one recipe are not independent,
    and those of one seed began at the same weights. Fewer than five recipes have no interval.

    Args:
        networks: their table.
        measures: columns.
        given: columns that are held fixed, for partial correlations.
        y: what the measures are held against.
        strata: columns; networks that are equal in them are compared.
    """
    columns = (y, *measures, *given)
    chosen = {name: networks.columns[name] for name in dict.fromkeys(("name", "recipe", "seed", *columns))}
    out = _without(networks, columns)
    if len(out) == len(chosen["name"]):
        raise InputError(f"no network converged and has values of all measures: {shown(dict(networks.failures))}")
    options: Any = {"exclude": out, "max_loss": math.inf, "interval": "fisher", "given": given, "strata": strata}
    return correlations(chosen, measures, y, settings="recipe", seeds="seed", **options)


def _without(networks: Networks, columns: Sequence[str]) -> list[str]:
    """Return the networks that did not converge, or have no value in one of the columns."""
    return [
        name
        for place, name in enumerate(networks.columns["name"])
        if name in networks.unconverged or not all(np.isfinite(networks.columns[column][place]) for column in columns)
    ]


def intervals(networks: Networks) -> str:
    """Return what the intervals are, for a sentence."""
    count = len({*networks.converged()["recipe"]})
    if count < resampling.FEWEST:
        return f"without intervals, for which {count} recipes are too few"
    return "95 % intervals over recipes and seeds"


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
    """Return Pearson's correlation of a measure."""
    return Finding(f"{measure} with the {found.y}, Pearson", *ends(found, measure, "Pearson"))


def said(found: Correlations, measure: str, how: str = "Pearson") -> str:
    """Return a correlation with its interval, for a sentence."""
    return claims.shown(Finding(measure, *ends(found, measure, how)))


def sign(found: Correlations, measure: str) -> str:
    """Return whether Pearson's correlation is positive or negative with its whole interval."""
    decided = Claim(pearson(found, measure)).decided()
    return {claims.SEEN: "positive", claims.AGAINST: "negative"}.get(decided, "not shown to be positive or negative")


def difference(networks: Networks, measures: Sequence[str], one: str, other: str, paper: str = "") -> Finding:
    """Return by how much Pearson's correlation with the gap is higher for one measure than for another.

    The interval is that of the jackknife of the difference over recipes and seeds, as of :func:`with_gap`.

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
    recipes, seeds = (
        np.unique([networks.columns[name][place] for place in kept], return_inverse=True)[1]
        for name in ("recipe", "seed")
    )
    pairs = [(columns[name], columns["gap"]) for name in (one, other)]
    return paired_difference(f"{one} less {other}, Pearson", pairs, recipes, seeds, paper)


def paired_difference(
    what: str,
    pairs: Sequence[tuple[Vector, Vector]],
    recipes: NDArray[np.intp],
    seeds: NDArray[np.intp] | None = None,
    paper: str = "",
) -> Finding:
    """Return Pearson's correlation of one pair of columns less that of another, of the same points.

    Args:
        what: it is.
        pairs: two pairs of (n,) values.
        recipes: of each point, (n,), which are left out one by one.
        seeds: of each point, (n,), likewise.
        paper: what the paper says.
    """

    def less(drawn: Vector) -> Vector:
        first, second = (coefficients("Pearson", pair, drawn) for pair in pairs)
        return first - second

    return jackknifed(what, less, recipes, seeds, paper, pairs)


def jackknifed(
    what: str,
    of: Statistic,
    recipes: NDArray[np.intp],
    seeds: NDArray[np.intp] | None = None,
    paper: str = "",
    pairs: Sequence[tuple[Vector, Vector]] = (),
) -> Finding:
    """Return a statistic of n points, of pairs of columns, with its interval over recipes and seeds (jackknife)."""
    value = float(of(whole(len(recipes)))[0]) if len(recipes) else math.nan
    if math.isnan(value):
        return Finding(what, None, paper=paper)
    if recipes.max() + 1 < resampling.FEWEST:
        return Finding(what, value, paper=paper)
    jackknife = Jackknife.over(recipes, seeds)
    half = jackknife.half(of, crossed=any(jackknife.crossed(*pair) for pair in pairs))
    return (
        Finding(what, value, paper=paper)
        if math.isnan(half)
        else Finding(what, value, value - half, value + half, paper)
    )


def baselines(networks: Networks, measure: str) -> list[Finding]:
    """Return Pearson's correlation with the gap of what a measure is to be held against, and of it inside of recipes.

    The recipe alone is the mean gap of its networks, itself among them; another seed is the network of the recipe with
    the next one, which no measure of a recipe can surpass by much; random numbers are what nothing looks like.
    """
    columns, out = networks.columns, {*_without(networks, ("gap", measure))}
    members: dict[str, list[int]] = {}
    for place in sorted(range(len(columns["name"])), key=lambda place: columns["seed"][place]):
        if columns["name"][place] not in out:
            members.setdefault(columns["recipe"][place], []).append(place)
    gap = columns["gap"]
    made = {name: [math.nan] * len(gap) for name in BASELINES}
    drawn = np.random.default_rng(0).normal(size=len(gap))
    for places in members.values():
        for place, twin in zip(places, [*places[1:], places[0]], strict=True):
            cells = float(np.mean([gap[other] for other in places])), gap[twin] if len(places) > 1 else math.nan
            for name, cell in zip(BASELINES, (*cells, float(drawn[place])), strict=True):
                made[name][place] = cell
    found = []
    for name, numbers in made.items():
        if any(map(math.isfinite, numbers)):
            row = pearson(with_gap(replace(networks, columns=columns | {name: numbers}), [name]), name)
            found.append(replace(row, what=name))
    inside = pearson(with_gap(networks, [measure], strata=["recipe"]), measure)
    return [*found, replace(inside, what=f"{measure}, networks of one recipe compared")]


def held_against(rows: Sequence[Finding]) -> str:
    """Return a sentence of :func:`baselines`."""
    return f"Beside it, Pearson: {'; '.join(f'{row.what} {claims.shown(row)}' for row in rows)}."


def most_influential(networks: Networks, measures: Sequence[str]) -> list[Finding]:
    """Return between which values each correlation with the gap is when one network is left out."""
    out, rows = {*_without(networks, ("gap", *measures))}, []
    kept = [place for place, name in enumerate(networks.columns["name"]) if name not in out]
    alone = Jackknife.over(np.arange(len(kept))).recipes
    gap, *columns = (np.array([networks.columns[name][place] for place in kept]) for name in ("gap", *measures))
    for name, column in zip(measures, columns, strict=True):
        values = coefficients("Pearson", [column, gap], alone)
        rows += [Finding(f"{name} without one network, {end.__name__}", float(end(values))) for end in (min, max)]
    return rows


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Return Spearman's correlation; None where one of them is constant or not finite."""
    columns = [np.asarray(values, dtype=np.float64) for values in (one, other)]
    if not np.isfinite(columns).all():
        return None
    value = float(coefficients("Spearman", columns, whole(len(one)))[0])
    return None if math.isnan(value) else value


def scatter(figure: "Figure", networks: Networks, measures: Sequence[str], columns: int = 3) -> None:
    """Draw measures against the gap, a panel each; recipes by colours, networks that did not converge hollow.

    The recipes have one legend below the panels. A measure that reaches far is drawn logarithmically.
    """
    from matplotlib.ticker import LogLocator, NullFormatter

    rows = -(-len(measures) // columns)
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    table: dict[str, list[Any]] = {key: networks.columns[key] for key in ("name", "gap", "recipe", *measures)}
    named: Any = ((), ())
    for panel, measure in zip(panels, measures, strict=False):
        options: Any = {"exclude": _without(networks, ("gap", measure)), "settings": "recipe", "interval": "fisher"}
        plot_correlation(table, measure, axes=panel, **options)
        panel.set_title("\n".join(map(str, with_gap(networks, [measure]).rows)))
        for line in panel.get_lines():
            line.set_markersize(3)
        panel.title.set_fontsize(8)
        panel.set_ylabel("gap (test less training loss)", fontsize=8)
        values = [value for value in table[measure] if math.isfinite(value)]
        if min(values) > 0 and max(values) > _FAR * min(values):
            panel.set_xscale("log")
            panel.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
            panel.xaxis.set_major_formatter("{x:g}")
            panel.xaxis.set_minor_formatter(NullFormatter())
        panel.get_legend().remove()
        named = panel.get_legend_handles_labels()
    for panel in panels[len(measures) :]:
        panel.remove()
    below: dict[str, Any] = {"loc": "outside lower center", "ncols": 4, "fontsize": 7, "title": "recipe"}
    figure.legend(*named, **below)
