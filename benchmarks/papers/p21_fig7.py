"""P21, Figure 7: the same minima after a reparameterisation of every layer but the last."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from pyflatness.statistics.correlation import Correlations

from . import claims, correlating, p21_fig6, p21_minima, zoo
from .claims import Claim
from .experiment import Bench, Experiment, Finding, Found, Points
from .zoo import BEFORE, BY_LAYERS

INVARIANT = ("relative_flatness", "fisher_rao")
ROUNDING = 1e-3  # relative: of values in single precision


def measure(bench: Bench) -> tuple[dict[str, list[Any]], dict[str, str]]:
    """Measure before and after."""
    networks, (head, _) = p21_minima.zoo(bench), p21_minima.layers(bench.scale)
    asked = p21_fig6.asked(bench, networks)
    before = zoo.networks(bench, networks, asked)
    after = zoo.networks(bench, networks, asked, change=BY_LAYERS)
    found = zoo.joined(before, after, p21_fig6.columns(head))
    return found.columns, found.failures


def judge(points: Points) -> Found:
    """Return what a table of networks at both weights says of the claim."""
    found, (head, _) = zoo.tabled(points.columns, points.failures), p21_minima.layers(points.scale)
    shown = p21_fig6.columns(head)
    both = [*shown, *(f"{name}{BEFORE}" for name in shown)]
    with_gap = correlating.with_gap(found, both)
    moves = {name: moved(found, name) for name in shown}
    still = [name for name in shown if moves[name] <= ROUNDING]
    claimed = [name for name in shown if name.startswith(INVARIANT)]
    paper = {name: "unchanged" if name in claimed else "much lower than before" for name in shown}
    rest = [name for name in shown if name not in still]
    declines = [correlating.difference(found, both, f"{name}{BEFORE}", name, "above 0") for name in rest]
    made = declined(rest, declines)
    return Found(
        found.columns,
        (
            *correlating.findings(with_gap, both, paper),
            *(Finding(f"{name}, largest relative change", moves[name]) for name in shown),
            *declines,
        ),
        f"Of {with_gap.points} networks {', '.join(still) or 'no measure'} kept the value, to a relative {ROUNDING:g}, "
        f"{'as' if {*still} == {*claimed} else 'other ones than'} claimed. Correlations of the others with the "
        f"gap (Pearson, {correlating.intervals(found)}): {changes(with_gap, rest)}. By how much they decline, of "
        f"differences over the same resamples. {claims.grouped(made)}",
        lambda figure: correlating.scatter(figure, found, shown),
        found.failures,
        claims=made,
    )


def changes(with_gap: Correlations, measures: Sequence[str]) -> str:
    """Return the correlations of measures at both weights, for a sentence."""
    said = correlating.said
    pairs = [f"{name} {said(with_gap, f'{name}{BEFORE}')} before and {said(with_gap, name)} after" for name in measures]
    return ", ".join(pairs)


def declined(measures: Sequence[str], differences: Sequence[Finding]) -> list[Claim]:
    """Return the claims that measures' correlations decline."""
    return [Claim(item, named=name) for name, item in zip(measures, differences, strict=True)]


def moved(networks: zoo.Networks, column: str) -> float:
    """Return by how much a measure changed at most, as a part of its value, of networks with both values."""
    then, now = (np.array(networks.columns[name], dtype=np.float64) for name in (f"{column}{BEFORE}", column))
    both = np.isfinite(then) & np.isfinite(now) & (then != 0)
    return float(np.max(np.abs(now - then)[both] / np.abs(then)[both], initial=0.0))


EXPERIMENT = Experiment(
    name="p21-fig7",
    figure="P21, Figure 7",
    title="the minima of Figure 6 at other weights of the same functions",
    claim="After layer-wise reparameterisations by factors in [5, 25] relative flatness and the Fisher-Rao norm are "
    "the same; for all other measures the correlation with the gap declines substantially.",
    measure=measure,
    judge=judge,
    seconds=38,
    long="hours",
    small=p21_minima.SMALL,
    paper=p21_minima.PAPER,
    data=p21_minima.DATA,
)
