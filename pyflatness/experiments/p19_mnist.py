"""Define the networks of Petzka et al. 2019, appendix C: fully connected, on MNIST, by batch sizes.

Four hidden layers of 50, 50, 50 and 30 neurons, Xavier-normal weights, SGD, batches of 1000, 2000, 4000 and 8000. "With
learning rate changed from 0.02 to 1.6 correspondingly to keep the ratio constant" cannot be, as 8000 / 1000 is not
1.6 / 0.02; the rates here go from 0.2 to 1.6. Networks above a training loss of 0.07 were left out; here training ends
when the mean loss of an epoch is below 0.07.

At small scale narrower networks learn 600 of scikit-learn's digits, in batches of 25 to 200, at rates from 0.05 to 0.4.
"""

from collections.abc import Mapping, Sequence

from . import correlating, image_data, networks, zoo
from .experiment import Bench, Found
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
    recipes = {f"sgd_bs{size}": Recipe("sgd", size, (0.05 if small else 0.2) * size / sizes[0], 0) for size in sizes}
    seeded, until = several(recipes, settings["seeds"]), Until(settings["loss"], settings["epochs"])
    if small:
        return Zoo("p19-digits", networks.small_mnist_network, seeded, *image_data.digits(settings["images"]), until)
    train, test = image_data.read(bench.data_dir, settings["data"])
    data = image_data.scaled(train, settings["images"]), image_data.scaled(test)
    return Zoo(f"p19-{settings['data']}-{settings['images']}", networks.mnist_network, seeded, *data, until)


def figure(bench: Bench, shown: Sequence[str], paper: Mapping[str, str]) -> Found:
    """Train, measure, and hold some measures against the gap.

    Args:
        bench: to work with.
        shown: columns, a panel each.
        paper: what the paper says, by column.
    """
    networks = mnist_zoo(bench)
    found = zoo.networks(bench, networks, [Asked(MEASURES, "*", networks.first(bench.settings["measured"]))])
    with_gap = correlating.with_gap(found, shown)
    positive = [name for name in shown if correlating.is_positive(with_gap, name)]
    strong = [name for name in shown if (correlating.ends(with_gap, name, "Pearson")[0] or 0) >= 0.7]
    every = ", ".join(f"{name} {correlating.said(with_gap, name)}" for name in shown)
    return Found(
        found.columns,
        tuple(correlating.findings(with_gap, shown, paper)),
        f"Over {with_gap.points} networks the correlations with the gap (Pearson, {correlating.intervals(found)}) are: "
        f"{every}. {len(positive)} of {len(shown)} are above zero with their whole interval, and {len(strong)} are at "
        "least 0.7.",
        lambda figure: correlating.scatter(figure, found, shown, columns=2),
        found.failures,
        size=(7.0, 6.0),
    )
