"""P21, Figure 7: the same minima after a reparameterisation of every layer but the last."""

from . import correlating, p21_fig6, p21_minima, zoo
from .experiment import Bench, Experiment, Finding, Found
from .reparameterized import BY_LAYERS

INVARIANT = ("relative_flatness", "fisher_rao")
_ROUNDING = 1e-3  # relative: of values in single precision


def run(bench: Bench) -> Found:
    """Measure before and after, and correlate."""
    networks, (head, _) = p21_minima.zoo(bench), p21_minima.layers(bench)
    asked = p21_fig6.asked(bench, networks)
    before = zoo.networks(bench, networks, asked)
    after = zoo.networks(bench, networks, asked, change=BY_LAYERS)
    return judged(before, after, head)


def judged(before: zoo.Networks, after: zoo.Networks, head: str) -> Found:
    """Return what tables of networks at both weights say of the claim."""
    shown = p21_fig6.columns(head)
    one, two = correlating.with_gap(before, shown), correlating.with_gap(after, shown)
    moved = {name: _moved(before, after, name) for name in shown}
    still = [name for name in shown if moved[name] <= _ROUNDING]
    claimed = [name for name in shown if name.startswith(INVARIANT)]
    paper = {name: "unchanged" if name in claimed else "much lower than before" for name in shown}
    others = ", ".join(
        f"{name} {correlating.said(one, name)} before and {correlating.said(two, name)} after"
        for name in shown
        if name not in still
    )
    return Found(
        after.columns | {f"{name}, before": before.columns[name] for name in shown},
        (
            *correlating.findings(two, shown, paper),
            *(Finding(f"{name}, largest relative change", moved[name]) for name in shown),
        ),
        f"Of {two.points} networks {', '.join(still) or 'no measure'} kept the value, to a relative {_ROUNDING:g}, "
        f"{'as' if {*still} == {*claimed} else 'other ones than'} claimed. Correlations of the others with the "
        f"gap (Pearson, {correlating.intervals(after)}): {others}.",
        lambda figure: correlating.scatter(figure, after, shown),
        after.failures,
    )


def _moved(before: zoo.Networks, after: zoo.Networks, column: str) -> float:
    """Return by how much a measure changed at most, as a part of its value."""
    pairs = zip(before.columns[column], after.columns[column], strict=True)
    return max(float(abs(now - then) / abs(then)) for then, now in pairs if then)


EXPERIMENT = Experiment(
    name="p21-fig7",
    figure="P21, Figure 7",
    title="the minima of Figure 6 at other weights of the same functions",
    claim="After layer-wise reparameterisations by factors in [5, 25] relative flatness and the Fisher-Rao norm are "
    "the same; for all other measures the correlation with the gap declines substantially.",
    run=run,
    small=p21_minima.SMALL,
    paper=p21_minima.PAPER,
    data=p21_minima.DATA,
)
