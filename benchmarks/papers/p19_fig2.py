"""P19, Figure 2: the measures of Figure 1, and those of the Hessian alone, at other weights of the same functions."""

from typing import Any

from . import claims, correlating, p19_minima, p21_fig7, p21_minima, zoo
from .experiment import Bench, Experiment, Finding, Found, Points
from .zoo import BEFORE, BY_LAYERS


def measure(bench: Bench) -> tuple[dict[str, list[Any]], dict[str, str]]:
    """Measure before and after the reparameterisation."""
    networks = p19_minima.minima(bench)
    asked = p19_minima.asked(bench, networks)
    before = zoo.networks(bench, networks, asked)
    after = zoo.networks(bench, networks, asked, change=BY_LAYERS)
    found = zoo.joined(before, after, _columns(bench.scale))
    return found.columns, found.failures


def judge(points: Points) -> Found:
    """Return what a table of networks at both weights says of the claim."""
    found, shown = zoo.tabled(points.columns, points.failures), _columns(points.scale)
    both = [*shown, *(f"{name}{BEFORE}" for name in shown)]
    with_gap = correlating.with_gap(found, both)
    moves = {name: p21_fig7.moved(found, name) for name in shown}
    ours, alone = ([name for name in shown if name.startswith("scaled") == scaled] for scaled in (True, False))
    kept = [name for name in ours if moves[name] <= p21_fig7.ROUNDING]
    paper = {name: "as before" if name in ours else "very weak" for name in shown}
    declines = [correlating.difference(found, both, f"{name}{BEFORE}", name, "above 0") for name in alone]
    made = p21_fig7.declined(alone, declines)
    return Found(
        found.columns,
        (
            *correlating.findings(with_gap, both, paper),
            *(Finding(f"{name}, largest relative change", moves[name]) for name in shown),
            *declines,
        ),
        f"Of {with_gap.points} networks {', '.join(kept) or 'none of the proposed measures'} kept the value, to a "
        f"relative {p21_fig7.ROUNDING:g}, {'as claimed' if kept == ours else 'which is claimed of all proposed'}. "
        f"Correlations with the gap (Pearson, {correlating.intervals(found)}): {p21_fig7.changes(with_gap, shown)}. "
        "By how much those of the Hessian alone decline, of differences over the same resamples. "
        f"{claims.grouped(made)}",
        lambda figure: correlating.scatter(figure, found, shown, columns=2),
        found.failures,
        size=(8.0, 7.0),
        claims=made,
    )


def _columns(scale: str) -> list[str]:
    return [f"{name} {p21_minima.layers(scale)[0]}" for name in p19_minima.MEASURES]


EXPERIMENT = Experiment(
    name="p19-fig2",
    figure="P19, Figure 2",
    title="the measures of Figure 1 and those of the Hessian alone after random reparameterisations",
    claim="After layer-wise reparameterisations by factors in [5, 25] the proposed measures are not affected, and "
    "those of the Hessian alone have a very weak correlation with the generalisation error.",
    measure=measure,
    judge=judge,
    seconds=48,
    long="hours",
    small=p19_minima.SMALL,
    paper=p19_minima.PAPER,
    data=p19_minima.DATA,
)
