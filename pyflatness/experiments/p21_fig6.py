"""P21, Figures 5 and 6: the generalisation gap of 110 local minima against relative flatness and other measures."""

from ..generalization.correlation import Correlations
from . import correlating, p21_minima, zoo
from .experiment import Bench, Experiment, Finding, Found
from .zoo import Asked

OF_ALL = ("sharpness", "fisher_rao", "pac_bayes")
"""Measures that are of all parameters whatever the layers."""

BESIDES = ("relative_flatness_std", "scaled_trace", "adaptive_sharpness", "neuron_flatness", "mls")
"""Measures that are no part of the paper's figure."""


def asked(bench: Bench, networks: zoo.Zoo) -> list[Asked]:
    """Return what is measured of all layers, besides relative flatness of the head."""
    some = networks.first(bench.settings["measured"])
    return [Asked(["relative_flatness", "trace", "weight_norm", *BESIDES], "*", some), Asked(OF_ALL, None, some)]


def columns(head: str) -> list[str]:
    """Return the columns of the paper's measures, relative flatness first."""
    return [f"relative_flatness {head}", f"trace {head}", *(f"{name} network" for name in (*OF_ALL, "weight_norm"))]


def run(bench: Bench) -> Found:
    """Train, measure, and correlate."""
    networks, (head, _) = p21_minima.zoo(bench), p21_minima.layers(bench)
    return judged(zoo.networks(bench, networks, asked(bench, networks)), head)


def judged(found: zoo.Networks, head: str) -> Found:
    """Return what a table of networks says of the claim."""
    ours = columns(head)
    others = [f"{name} {head}" for name in BESIDES] + ["relative_flatness network", "trace network"]
    with_gap = correlating.with_gap(found, [*ours, *others])
    paper = {ours[0]: "the highest of all measures", "fisher_rao network": "the lowest of all measures"}
    return Found(
        found.columns,
        tuple(correlating.findings(with_gap, [*ours, *others], paper) + partial(found, ours) + losses(found)),
        verdict(found, with_gap, ours, others),
        lambda figure: correlating.scatter(figure, found, ours),
        found.failures,
    )


def partial(found: zoo.Networks, ours: list[str]) -> list[Finding]:
    """Return the correlations at equal training loss, which the networks do not have though training stops by it."""
    held = correlating.with_gap(found, ours, given=["loss"])
    return [
        Finding(f"{name} given the training loss, Pearson", *correlating.ends(held, name, "Pearson")) for name in ours
    ]


def losses(found: zoo.Networks) -> list[Finding]:
    """Return between which training losses and gaps the networks are."""
    table = found.converged()
    return [
        Finding(f"{what}, {end.__name__} over the networks", float(end(table[column])))
        for what, column in (("training loss", "loss"), ("gap", "gap"))
        for end in (min, max)
    ]


def verdict(found: zoo.Networks, with_gap: Correlations, ours: list[str], others: list[str]) -> str:
    """Say whether relative flatness goes along with the gap, and whether more than the other measures."""

    def highest(names: list[str]) -> str:
        return max(names, key=lambda name: correlating.ends(with_gap, name, "Pearson")[0] or -1)

    kappa, among, best = ours[0], highest(ours), highest([*ours, *others])
    pearson, kendall = (correlating.said(with_gap, kappa, how) for how in ("Pearson", "Kendall"))
    seen = "it goes along with the gap" if correlating.is_positive(with_gap, kappa) else "a positive one is not shown"
    kept = "as claimed" if among == kappa else "so that the claim does not hold here"
    beyond = f" Of all that were measured it is {best}, {correlating.said(with_gap, best)}." if best != among else ""
    return (
        f"Over {with_gap.points} networks the correlation of relative flatness with the gap is {pearson} (Pearson) "
        f"and {kendall} (Kendall), with {correlating.intervals(found)}: {seen}. Of the paper's measures the "
        f"highest correlation (Pearson) is that of {among}, {correlating.said(with_gap, among)}, {kept}.{beyond}"
    )


EXPERIMENT = Experiment(
    name="p21-fig6",
    figure="P21, Figures 5 and 6",
    title="relative flatness and other measures against the generalisation gap of local minima",
    claim="The gap of 110 LeNet5 on CIFAR-10 correlates more strongly with relative flatness of the penultimate "
    "layer's features than with the Hessian's trace, the Fisher-Rao norm (the weakest), PAC-Bayes flatness and the "
    "weights' norm.",
    run=run,
    small=p21_minima.SMALL,
    paper=p21_minima.PAPER,
    data=p21_minima.DATA,
)
