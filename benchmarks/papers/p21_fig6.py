"""P21, Figures 5 and 6: the generalisation gap of 110 local minima against relative flatness and other measures."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from pyflatness.statistics.correlation import Correlations

from . import claims, correlating, p21_minima, zoo
from .claims import Claim
from .experiment import Bench, Experiment, Finding, Found, Points
from .zoo import Asked

OF_ALL = ("sharpness", "fisher_rao", "pac_bayes")
"""Measures that are of all parameters whatever the layers."""

BESIDES = ("relative_flatness_std", "scaled_trace", "adaptive_sharpness", "neuron_flatness", "mls")
"""Measures that are no part of the paper's figure."""


PER_FEATURE, BOUND = "relative_flatness_per_feature network", "PAC-Bayes bound"
TARGET = 0.1
"""The mean loss of an epoch at which training stops; the loss of the network that it ends with is another."""


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
    found = with_readings(found, points.scale)
    ours = columns(head)
    others = [f"{name} {head}" for name in BESIDES] + ["relative_flatness network", "trace network", PER_FEATURE]
    with_gap = correlating.with_gap(found, [*ours, *others])
    paper = {ours[0]: "the highest of all measures", "fisher_rao network": "the lowest of all measures"}
    less = [correlating.difference(found, [*ours, *others], ours[0], name, "above 0") for name in ours[1:]]
    higher = [Claim(item, named=f"than {name}") for name, item in zip(ours[1:], less, strict=True)]
    held, theirs, errors = correlating.baselines(found, ours[0]), authors_reading(found, head), of_error(found, head)
    rows = (*partial(found, ours), *losses(found), *held, *theirs, *errors)
    drawn = [*ours, *(name for name in plotted(head) if name not in ours)]
    return Found(
        points.columns,
        (*correlating.findings(with_gap, [*ours, *others], paper), *less, *rows),
        f"{verdict(found, with_gap, ours, higher)} {correlating.held_against(held)} {besides(found, with_gap)} "
        f"{said_of_authors(theirs)}{said_of_errors(errors)}",
        lambda figure: correlating.scatter(figure, found, drawn),
        found.failures,
        size=(9.0, 9.0),
        claims=[Claim(correlating.pearson(with_gap, ours[0])), *higher],
    )


def with_readings(found: zoo.Networks, scale: str) -> zoo.Networks:
    """Return the table with what follows from its columns: κ/(2m) over the layers, the PAC-Bayes bound, the test error.

    The bound is |θ|²/(4σ²) + log(1/σ) of the weights θ, but for a constant, with 1/σ² the PAC-Bayes flatness.
    """
    table, network = found.columns, p21_minima.network(scale)
    layers = [(name, layer) for name, layer in network.named_children() if isinstance(layer, (nn.Linear, nn.Conv2d))]
    inputs = {name: layer.weight[0].numel() for name, layer in layers}
    made: dict[str, list[Any]] = {
        PER_FEATURE: [
            sum(table[f"relative_flatness {name}"][place] / (2 * m) for name, m in inputs.items())
            for place in range(len(table["name"]))
        ],
        BOUND: [
            norm * flatness / 4 + math.log(flatness) / 2 if flatness > 0 else math.nan
            for norm, flatness in zip(table["weight_norm network"], table["pac_bayes network"], strict=True)
        ],
    }
    if "test_accuracy" in table:
        made["test error"] = [1 - accuracy for accuracy in table["test_accuracy"]]
    return replace(found, columns=table | made)


def plotted(head: str) -> list[str]:
    """Return what the authors' figure plots: κ divided by deviations of features, and the norm of the head alone."""
    return [f"relative_flatness_std {head}", BOUND, f"weight_norm {head}", f"trace {head}", "fisher_rao network"]


def authors_reading(found: zoo.Networks, head: str) -> list[Finding]:
    """Return the correlations of what the authors plot, over all networks but those of the three smallest gaps."""
    table = found.converged()
    smallest = sorted(zip(table["gap"], table["name"], strict=True))[:3]
    if len(table["name"]) - len(smallest) < 2:
        return []
    kept = replace(found, unconverged=(*found.unconverged, *(name for _, name in smallest)))
    with_gap = correlating.with_gap(kept, plotted(head))
    return [replace(row, what=f"{name}, as the authors plot it") for name in plotted(head)
            for row in [correlating.pearson(with_gap, name)]]  # fmt: skip


def said_of_authors(rows: Sequence[Finding]) -> str:
    """Return a sentence of :func:`authors_reading`."""
    if not rows:
        return "Too few networks are left without the three smallest gaps, which the authors leave out."
    values = ", ".join(f"{row.what.split(',')[0]} {claims.shown(row)}" for row in rows)
    return (
        "The authors' code plots κ with features divided by their deviations, the PAC-Bayes bound and the norm of the "
        f"head's weight, and leaves the three smallest gaps out; so read it is (Pearson) {values}."
    )


def of_error(found: zoo.Networks, head: str) -> list[Finding]:
    """Return the correlations with the test error of networks whose accuracy is known, beside those with the gap."""
    if "test error" not in found.columns:
        return []
    names = [f"relative_flatness {head}", "relative_flatness network", "mls network"]
    held = {y: correlating.with_gap(found, names, y=y) for y in ("test error", "gap")}
    return [
        Finding(f"{name} with the {y}, Kendall", *correlating.ends(found, name, "Kendall"))
        for name in names
        for y, found in held.items()
    ]


def said_of_errors(rows: Sequence[Finding]) -> str:
    """Return a sentence of :func:`of_error`; none where there is no accuracy."""
    pairs = [f"{a.what.split(' with')[0]} {claims.shown(a)} and {claims.shown(b)}"
             for a, b in zip(rows[::2], rows[1::2], strict=True)]  # fmt: skip
    return f" With the test error and with the gap (Kendall): {', '.join(pairs)}." if pairs else ""


def besides(found: zoo.Networks, with_gap: Correlations) -> str:
    """Say what the sum of κ/(2m) over the layers correlates with, and how many networks are above the target loss."""
    table = found.converged()
    above = sum(loss > TARGET for loss in table["loss"])
    return (
        f"Of κ/(2m), which the paper's theorem has, summed over the layers it is "
        f"{correlating.said(with_gap, PER_FEATURE)}. Training losses are from {min(table['loss']):.2g} to "
        f"{max(table['loss']):.2g}, above {TARGET} for {above} of the {len(table['loss'])} networks."
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


def verdict(found: zoo.Networks, with_gap: Correlations, ours: Sequence[str], higher: Sequence[Claim]) -> str:
    """Say whether relative flatness goes along with the gap, and whether more than the other measures."""
    kappa = ours[0]
    pearson, kendall = (correlating.said(with_gap, kappa, how) for how in ("Pearson", "Kendall"))
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
    long="hours",
    small=p21_minima.SMALL,
    paper=p21_minima.PAPER,
    data=p21_minima.DATA,
)
