"""P21, Figures 5 and 6: the generalisation gap of 110 local minima against relative flatness and other measures."""

from collections.abc import Sequence
from typing import Any

from pyflatness.statistics.correlation import Correlations

from . import claims, correlating, p21_minima, zoo
from .claims import Claim
from .experiment import Bench, Experiment, Finding, Found, Points
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


def measure(bench: Bench) -> tuple[dict[str, list[Any]], dict[str, str]]:
    """Train and measure."""
    networks = p21_minima.zoo(bench)
    found = zoo.networks(bench, networks, asked(bench, networks))
    return found.columns, found.failures


def judge(points: Points) -> Found:
    """Return what a table of networks says of the claim."""
    found, (head, _) = zoo.tabled(points.columns, points.failures), p21_minima.layers(points.scale)
    ours = columns(head)
    others = [f"{name} {head}" for name in BESIDES] + ["relative_flatness network", "trace network"]
    with_gap = correlating.with_gap(found, [*ours, *others])
    paper = {ours[0]: "the highest of all measures", "fisher_rao network": "the lowest of all measures"}
    less = [correlating.difference(found, [*ours, *others], ours[0], name, "above 0") for name in ours[1:]]
    return Found(
        found.columns,
        (*correlating.findings(with_gap, [*ours, *others], paper), *less, *partial(found, ours), *losses(found)),
        verdict(found, with_gap, ours, less),
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


def verdict(found: zoo.Networks, with_gap: Correlations, ours: Sequence[str], less: Sequence[Finding]) -> str:
    """Say whether relative flatness goes along with the gap, and whether more than the other measures."""
    kappa = ours[0]
    pearson, kendall = (correlating.said(with_gap, kappa, how) for how in ("Pearson", "Kendall"))
    higher = [Claim(item, named=f"than {name}") for name, item in zip(ours[1:], less, strict=True)]
    others = ", ".join(f"{name} {correlating.said(with_gap, name)}" for name in ours[1:])
    return (
        f"Over {with_gap.points} networks the correlation of relative flatness with the gap is {pearson} (Pearson) "
        f"and {kendall} (Kendall), with {correlating.intervals(found)}: {correlating.sign(with_gap, kappa)}. Those of "
        f"the paper's other measures (Pearson): {others}. The paper says that it is the highest. By how much it is "
        f"higher, of differences over the same resamples. {claims.grouped(higher)}"
    )


EXPERIMENT = Experiment(
    name="p21-fig6",
    figure="P21, Figures 5 and 6",
    title="relative flatness and other measures against the generalisation gap of local minima",
    claim="The gap of 110 LeNet5 on CIFAR-10 correlates more strongly with relative flatness of the penultimate "
    "layer's features than with the Hessian's trace, the Fisher-Rao norm (the weakest), PAC-Bayes flatness and the "
    "weights' norm.",
    measure=measure,
    judge=judge,
    seconds=31,
    small=p21_minima.SMALL,
    paper=p21_minima.PAPER,
    data=p21_minima.DATA,
)
