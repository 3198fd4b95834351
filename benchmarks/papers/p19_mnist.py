"""P19, Figures 3 to 6: flatness of layers, neurons and networks against the gap, fully connected, on MNIST.

The networks are those of Petzka et al. 2019, appendix C, by batch sizes.

Four hidden layers of 50, 50, 50 and 30 neurons, Xavier-normal weights, SGD, batches of 1000, 2000, 4000 and 8000. "With
learning rate changed from 0.02 to 1.6 correspondingly to keep the ratio constant" cannot be, as 8000 / 1000 is not
1.6 / 0.02; the rates here go from 0.02 to 0.16. From 0.2 to 1.6 most networks diverged, or stayed where they began.
Networks above a training loss of 0.07 were left out; here training ends when the mean loss of an epoch is below 0.07.

At small scale narrower networks learn 600 of scikit-learn's digits, in batches of 25 to 200, at rates from 0.05 to 0.4.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from . import claims, correlating, image_data, networks, zoo
from .claims import Claim
from .experiment import Bench, Experiment, Found, Points
from .training import Recipe, Until
from .zoo import Asked, Zoo, several

SMALL = {"images": 600, "seeds": 8, "loss": 0.07, "epochs": 400, "measured": 600}
PAPER = {"images": 60_000, "seeds": 10, "loss": 0.07, "epochs": 1000, "measured": 2000, "data": "mnist"}
DATA = "MNIST"

HIDDEN = ("fc1", "fc2", "fc3", "fc4")
MEASURES = (
    *("scaled_trace", "largest_scaled_trace", "neuron_flatness", "neuron_flatness_max"),
    *("relative_flatness", "trace"),
)


def mnist_zoo(bench: Bench) -> Zoo:
    """Return the networks at the scale of a run."""
    settings, small = bench.settings, bench.scale == "small"
    sizes = (25, 50, 100, 200) if small else (1000, 2000, 4000, 8000)
    recipes = {f"sgd_bs{size}": Recipe("sgd", size, (0.05 if small else 0.02) * size / sizes[0], 0) for size in sizes}
    seeded, until = several(recipes, settings["seeds"]), Until(settings["loss"], settings["epochs"])
    if small:
        return Zoo("p19-digits", networks.small_mnist_network, seeded, *image_data.digits(settings["images"]), until)
    train, test = image_data.read(bench.data_dir, settings["data"])
    data = image_data.scaled(train, settings["images"]), image_data.scaled(test)
    return Zoo(f"p19-{settings['data']}-{settings['images']}", networks.mnist_network, seeded, *data, until)


def measure(bench: Bench) -> tuple[dict[str, list[Any]], dict[str, str]]:
    """Train and measure."""
    networks = mnist_zoo(bench)
    found = zoo.networks(bench, networks, [Asked(MEASURES, "*", networks.first(bench.settings["measured"]))])
    return found.columns, found.failures


def judge(
    points: Points,
    shown: Sequence[str],
    paper: str,
    *,
    least: float | None = None,
    than: Mapping[str, Sequence[str]] | None = None,
) -> Found:
    """Return what a table of networks says of some measures and the gap.

    Args:
        points: of the networks.
        shown: columns, a panel each, which are positive in the paper.
        paper: what it says of each.
        least: what the paper says that each is at least.
        than: columns that each is higher than in the paper, by column.
    """
    found = zoo.tabled(points.columns, points.failures)
    others = [name for names in (than or {}).values() for name in names]
    columns = [*dict.fromkeys([*shown, *others])]
    with_gap = correlating.with_gap(found, columns)
    rows = [correlating.pearson(with_gap, name) for name in shown]
    less = [
        correlating.difference(found, columns, one, other, "above 0")
        for one, names in (than or {}).items()
        for other in names
    ]
    made = [Claim(row, named=name) for name, row in zip(shown, rows, strict=True)]
    parts = [claims.grouped(made)]
    alone = correlating.most_influential(found, shown)
    ranges = zip(shown, alone[::2], alone[1::2], strict=True)
    parts.append(
        "With one network left out they are between: "
        + "; ".join(f"{name} {claims.shown(low)} and {claims.shown(high)}" for name, low, high in ranges)
        + "."
    )
    if least is not None:
        made += [claim._replace(border=least) for claim in made]
        each = [f"{claim.named} {claim.decided()}" for claim in made[len(rows) :]]
        parts.append(f"That they are at least {least:g}: {', '.join(each)}.")
    if less:
        higher = [Claim(row, named=row.what.removesuffix(", Pearson")) for row in less]
        made += higher
        parts.append(f"By how much they are higher than those of layers. {claims.grouped(higher)}")
    held = correlating.baselines(found, shown[0])
    parts.append(correlating.held_against(held))
    return Found(
        found.columns,
        (*correlating.findings(with_gap, shown, dict.fromkeys(shown, paper)), *less, *alone, *held),
        f"Correlations with the gap over {with_gap.points} networks (Pearson, {correlating.intervals(found)}), which "
        "are positive in the paper. " + " ".join(parts),
        lambda figure: correlating.scatter(figure, found, shown, columns=2),
        found.failures,
        size=(7.0, 6.0),
        claims=made,
    )


OF = {
    "largest_scaled_trace": "scaled_trace",
    "scaled_trace": "scaled_trace",
    "neuron_flatness_max": "neuron_flatness_max",
    "neuron_flatness": "neuron_flatness",
}
"""Measures of whole networks, and the measure of layers that each is made of."""


def _figure(number: int, title: str, claim: str, **judged: Any) -> Experiment:
    return Experiment(
        name=f"p19-fig{number}",
        figure=f"P19, Figure {number}",
        title=title,
        claim=claim,
        measure=measure,
        judge=functools.partial(judge, **judged),
        seconds=34,
        long="2 min a network",
        small=SMALL,
        paper=PAPER,
        data=DATA,
    )


def _of_layers(name: str) -> list[str]:
    return [f"{name} {layer}" for layer in HIDDEN]


_THAN = {f"{name} network": _of_layers(part) for name, part in OF.items()}
_DIFFERS = "The correlation is again significant, but differs considerably between layers."
FIGURES = (
    _figure(
        3,
        "κ_τ of each hidden layer, ‖w‖² Tr(H), against the gap",
        "Each of the four hidden layers' κ_τ correlates strongly with the generalisation error (ρ ≥ 0.7), and it is "
        "hard to say which layer matters most.",
        shown=_of_layers("scaled_trace"),
        paper="≥ 0.7",
        least=0.7,
    ),
    _figure(
        4,
        "ρ_σ of each hidden layer, the sum of its neurons' flatness, against the gap",
        _DIFFERS,
        shown=_of_layers("neuron_flatness"),
        paper="significant",
    ),
    _figure(
        5,
        "ρ of each hidden layer, its largest neuron's flatness, against the gap",
        _DIFFERS,
        shown=_of_layers("neuron_flatness_max"),
        paper="significant",
    ),
    _figure(
        6,
        "κ_τ^max, κ_τ^Σ, ρ^max and ρ^Σ of whole networks against the gap",
        "Each of the network-wise measures has a larger correlation with the generalisation error than those of layers "
        "and neurons.",
        shown=[*_THAN],
        paper="larger than the layers'",
        than=_THAN,
    ),
)
