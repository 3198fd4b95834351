"""P21, Figure 8: relative flatness of a layer other than the head against the gap."""

from . import claims, correlating, p21_fig6, p21_minima, zoo
from .claims import Claim
from .experiment import Experiment, Found, Points


def judge(points: Points) -> Found:
    """Return what a table of networks says of the claim."""
    found, (head, other) = zoo.tabled(points.columns, points.failures), p21_minima.layers(points.scale)
    rest = [name for name in found.columns if name.startswith("relative_flatness ")]
    shown = [f"relative_flatness {other}", f"relative_flatness {head}"]
    shown += [name for name in rest if name not in shown]
    with_gap = correlating.with_gap(found, shown)
    less = correlating.difference(found, shown, shown[1], shown[0], "above 0")
    made = [
        Claim(correlating.pearson(with_gap, shown[0]), named=f"it is positive at {other},"),
        Claim(less, named="it is higher at the head, by"),
    ]
    return Found(
        found.columns,
        (*correlating.findings(with_gap, shown, {shown[0]: "high, below the head's"}), less),
        f"Over {with_gap.points} networks the correlation of relative flatness of {other} with the gap is "
        f"{correlating.said(with_gap, shown[0])} (Pearson, {correlating.intervals(found)}), and that of {head}, "
        f"the head, {correlating.said(with_gap, shown[1])}. {claims.grouped(made)}",
        lambda figure: correlating.scatter(figure, found, shown),
        found.failures,
        claims=made,
    )


EXPERIMENT = Experiment(
    name="p21-fig8",
    figure="P21, Figure 8",
    title="relative flatness of another layer than the head against the gap",
    claim="Relative flatness of another fully connected layer keeps a high correlation with the gap, smaller than that "
    "of the penultimate layer's features.",
    measure=p21_fig6.measure,
    judge=judge,
    seconds=31,
    long="hours",
    small=p21_minima.SMALL,
    paper=p21_minima.PAPER,
    data=p21_minima.DATA,
)
