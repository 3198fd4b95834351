"""P19, Figure 1: κ and κ_τ of the last hidden layer's features against the generalisation error of LeNet5."""

from . import correlating, p19_minima, p21_minima, zoo
from .experiment import Bench, Experiment, Found


def run(bench: Bench) -> Found:
    """Train, measure, and correlate."""
    networks, (head, _) = p19_minima.minima(bench), p21_minima.layers(bench)
    found = p19_minima.with_error(bench, networks, zoo.networks(bench, networks, p19_minima.asked(bench, networks)))
    return judged(found, head)


def judged(found: zoo.Networks, head: str) -> Found:
    """Return what a table of networks says of the claim."""
    largest, trace = f"scaled_lambda_max {head}", f"scaled_trace {head}"
    with_gap = correlating.with_gap(found, [largest, trace])
    first, second = (correlating.ends(with_gap, name, "Pearson")[0] or 0.0 for name in (largest, trace))
    positive = [name for name in (largest, trace) if correlating.is_positive(with_gap, name)]
    return Found(
        found.columns,
        tuple(correlating.findings(with_gap, [largest, trace], {largest: "significant", trace: "0.91"})),
        f"Over {with_gap.points} networks the correlations with the generalisation error (Pearson, "
        f"{correlating.intervals(found)}) are {correlating.said(with_gap, largest)} for κ = ‖w‖² λ_max and "
        f"{correlating.said(with_gap, trace)} for κ_τ = ‖w‖² Tr(H), beside the paper's 0.91. "
        f"{len(positive)} of 2 are above zero with the whole interval, and that of κ_τ is "
        f"{'higher, as in the paper' if second > first else 'not higher'}. The paper's error, sums of losses with test "
        "samples weighted to as many as training samples, is the gap times their number, so that correlations are the "
        "same.",
        lambda figure: correlating.scatter(figure, found, [largest, trace], columns=2),
        found.failures,
        size=(8.0, 3.6),
    )


EXPERIMENT = Experiment(
    name="p19-fig1",
    figure="P19, Figure 1",
    title="κ and κ_τ of the last hidden layer against the generalisation error of minima",
    claim="Both measures correlate significantly with the generalisation error of LeNet5 on CIFAR-10, κ_τ more "
    "strongly (ρ = 0.91).",
    run=run,
    small=p19_minima.SMALL,
    paper=p19_minima.PAPER,
    data=p19_minima.DATA,
)
