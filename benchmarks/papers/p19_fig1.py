"""P19, Figure 1: κ and κ_τ of the last hidden layer's features against the generalisation error of LeNet5."""

from typing import Any

from . import claims, correlating, p19_minima, p21_minima, zoo
from .claims import Claim
from .experiment import Bench, Experiment, Found, Points


def measure(bench: Bench) -> tuple[dict[str, list[Any]], dict[str, str]]:
    """Train and measure."""
    networks = p19_minima.minima(bench)
    found = p19_minima.with_error(bench, networks, zoo.networks(bench, networks, p19_minima.asked(bench, networks)))
    return found.columns, found.failures


def judge(points: Points) -> Found:
    """Return what a table of networks says of the claim."""
    found, (head, _) = zoo.tabled(points.columns, points.failures), p21_minima.layers(points.scale)
    largest, trace = shown = [f"scaled_lambda_max {head}", f"scaled_trace {head}"]
    with_gap = correlating.with_gap(found, shown)
    less = correlating.difference(found, shown, trace, largest, "above 0")
    made = [
        Claim(correlating.pearson(with_gap, largest), named="κ = ‖w‖² λ_max"),
        Claim(correlating.pearson(with_gap, trace), named="κ_τ = ‖w‖² Tr(H)"),
        Claim(less, named="κ_τ higher than κ, by"),
    ]
    held = correlating.baselines(found, trace)
    return Found(
        found.columns,
        (*correlating.findings(with_gap, shown, {largest: "significant", trace: "0.91"}), less, *held),
        f"Correlations with the generalisation error over {with_gap.points} networks (Pearson, "
        f"{correlating.intervals(found)}), which are positive in the paper, 0.91 for κ_τ, and higher for κ_τ than for "
        f"κ. {claims.grouped(made)} {correlating.held_against(held)} The paper's error, sums of losses with test "
        "samples weighted to as many as training samples, is the gap times their number, so that correlations are the "
        "same.",
        lambda figure: correlating.scatter(figure, found, shown, columns=2),
        found.failures,
        size=(8.0, 3.6),
        claims=made,
    )


EXPERIMENT = Experiment(
    name="p19-fig1",
    figure="P19, Figure 1",
    title="κ and κ_τ of the last hidden layer against the generalisation error of minima",
    claim="Both measures correlate significantly with the generalisation error of LeNet5 on CIFAR-10, κ_τ more "
    "strongly (ρ = 0.91).",
    measure=measure,
    judge=judge,
    seconds=47,
    long="hours",
    small=p19_minima.SMALL,
    paper=p19_minima.PAPER,
    data=p19_minima.DATA,
)
