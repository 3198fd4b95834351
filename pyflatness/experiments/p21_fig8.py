"""P21, Figure 8: relative flatness of a layer other than the head against the gap."""

from . import correlating, p21_fig6, p21_minima, zoo
from .experiment import Bench, Experiment, Found


def run(bench: Bench) -> Found:
    """Measure all layers, and correlate."""
    networks, (head, other) = p21_minima.zoo(bench), p21_minima.layers(bench)
    return judged(zoo.networks(bench, networks, p21_fig6.asked(bench, networks)), head, other)


def judged(found: zoo.Networks, head: str, other: str) -> Found:
    """Return what a table of networks says of the claim."""
    rest = [name for name in found.columns if name.startswith("relative_flatness ")]
    shown = [f"relative_flatness {other}", f"relative_flatness {head}"]
    shown += [name for name in rest if name not in shown]
    with_gap = correlating.with_gap(found, shown)
    first, second = (correlating.ends(with_gap, name, "Pearson")[0] or 0.0 for name in shown[:2])
    paper = {shown[0]: "high, below the head's"}
    return Found(
        found.columns,
        tuple(correlating.findings(with_gap, shown, paper)),
        f"Over {with_gap.points} networks the correlation of relative flatness of {other} with the gap is "
        f"{correlating.said(with_gap, shown[0])} (Pearson, {correlating.intervals(found)}), and that of {head}, "
        f"the head, {correlating.said(with_gap, shown[1])}. It is {'lower' if first < second else 'not lower'} at the "
        f"other layer, and {'' if correlating.is_positive(with_gap, shown[0]) else 'not shown to be '}above zero.",
        lambda figure: correlating.scatter(figure, found, shown),
        found.failures,
    )


EXPERIMENT = Experiment(
    name="p21-fig8",
    figure="P21, Figure 8",
    title="relative flatness of another layer than the head against the gap",
    claim="Relative flatness of another fully connected layer keeps a high correlation with the gap, smaller than that "
    "of the penultimate layer's features.",
    run=run,
    small=p21_minima.SMALL,
    paper=p21_minima.PAPER,
    data=p21_minima.DATA,
)
