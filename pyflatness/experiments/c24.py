"""What the experiments of C24 share: its networks and data at both scales, and what is measured of a network.

C24 is "From Loss Flatness to Compressed Representations in Neural Networks". Its section 4.1 trains by plain stochastic
gradient descent on squared error, on two classes, and measures on 100 training samples. The convolutional network is
VGG-11 on CIFAR-10 at paper scale, a small one on scikit-learn's digits at small scale; the multilayer perceptron has
four layers, on FashionMNIST, or digits. The paper does not say how wide it is, nor how many outputs the networks have;
here they have one for each of two classes.
"""

import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import progress
from ..api import measure
from ..report.intervals import student_t
from . import image_data
from .c24_networks import perceptron, small_convolutional, vgg11
from .experiment import Bench, Finding
from .trajectories import Data, Descent, followed, half_squared_error

SMALL = {"classes": [3, 8], "samples": 240, "measured": 100, "steps": 3000, "snapshots": 10, "seeds": 3, "width": 32}
PAPER = {
    **{"classes": [0, 1], "samples": 10_000, "measured": 100, "steps": 50_000, "snapshots": 24, "seeds": 5},
    **{"width": 100, "data": "fashion_mnist", "images": "cifar10"},
}

QUANTITIES = {
    "sharpness": "√S (Eq. 3)",
    "nmls": "NMLS",
    "log_volume": "log volume",
    "mls": "MLS",
    "local_dimension": "local dimension",
}
"""Columns of a network's table, and what the paper calls them."""

_MEASURES = ("interpolation_sharpness", "nmls", "log_volume", "mls", "local_dimension")


def problem(bench: Bench, kind: str) -> tuple[Callable[[], nn.Module], Data, Data]:
    """Return what makes a network of a kind, ``"perceptron"`` or ``"convolutional"``, training data, and test data."""
    settings = bench.settings
    classes, width = settings["classes"], settings["width"]
    if bench.scale == "small":
        train, test = image_data.digits(1000)
    else:
        name = settings["data" if kind == "perceptron" else "images"]
        train, test = (image_data.scaled(part) for part in image_data.read(bench.data_dir, name))
    some, others = chosen(train, classes, settings["samples"]), chosen(test, classes)
    if kind == "perceptron":
        inputs = some[0][0].numel()
        return functools.partial(perceptron, inputs, width, len(classes)), some, others
    made = small_convolutional if bench.scale == "small" else vgg11
    return functools.partial(made, len(classes)), some, others


def chosen(data: Data, classes: Sequence[int], count: int | None = None) -> Data:
    """Return the samples of some classes, the first so many, labelled 0, 1, … in the order of the classes."""
    inputs, labels = data
    numbers = torch.full((int(labels.max()) + 1,), -1)
    numbers[list(classes)] = torch.arange(len(classes))
    kept = numbers[labels] >= 0
    return inputs[kept][:count], numbers[labels[kept]][:count]


def table(
    bench: Bench,
    kind: str,
    descents: Sequence[Descent],
    kept: Sequence[int],
    of: Callable[[nn.Module, Data], Mapping[str, float]],
) -> dict[str, list[Any]]:
    """Return a table with a row for each network and number of steps: loss, accuracy, gap, and what else is measured.

    Args:
        bench: to work with.
        kind: of network.
        descents: how each is trained.
        kept: numbers of steps.
        of: network and the samples that are measured on -> columns.
    """
    made, train, test = problem(bench, kind)
    settings = {name: bench.settings.get(name) for name in ("classes", "samples", "width", "data", "images")}
    folder = bench.kept(f"c24-{kind}-{bench.scale}", [settings, list(kept), [descent.name for descent in descents]])
    weights = followed(made, descents, train, kept, folder, bench.shown)
    network, some = made().eval(), tuple(part[: bench.settings["measured"]] for part in train)
    rows: list[dict[str, Any]] = []
    with progress.bar("measuring", len(descents) * len(kept), bench.shown) as advance:
        for descent, states in weights.items():
            for step, state in zip(kept, states, strict=True):
                network.load_state_dict(state)
                with torch.no_grad():
                    outputs, tested = network(train[0]), network(test[0])
                losses = [float(half_squared_error(f, y)) for f, y in ((outputs, train[1]), (tested, test[1]))]
                rows.append(
                    {"name": f"{descent.name}_step{step}", **vars(descent), "step": step, "loss": losses[0]}
                    | {"accuracy": float((outputs.argmax(dim=1) == train[1]).float().mean())}
                    | {"test_loss": losses[1], "gap": losses[1] - losses[0]}
                    | dict(of(network, some))  # type: ignore[arg-type]
                )
                advance(1, rows[-1]["name"])
    return {column: [row[column] for row in rows] for column in rows[0]}


def compression(network: nn.Module, data: Data) -> dict[str, float]:
    """Return the columns :data:`QUANTITIES`; sharpness is the square root of Eq. 3."""
    report = measure(network, nn.MSELoss(), (data[0], units(data[1])), measures=_MEASURES, progress=False)
    found = {name: float(report[name].value) for name in _MEASURES}
    return {"sharpness": math.sqrt(found.pop("interpolation_sharpness")), **found}


def units(labels: Tensor) -> Tensor:
    """Return classes as unit vectors (n, classes), the two classes of section 4.1."""
    return F.one_hot(labels, 2).float()


def average(what: str, values: Sequence[float], paper: str = "") -> Finding:
    """Return the mean over networks, with the 95 % interval by Student's t."""
    found = [value for value in values if math.isfinite(value)]
    if not found:
        return Finding(what, None, paper=paper)
    mean = statistics.fmean(found)
    if len(found) < 5:
        return Finding(what, mean, paper=paper)
    half = student_t(0.95, len(found) - 1) * statistics.stdev(found) / math.sqrt(len(found))
    return Finding(what, mean, mean - half, mean + half, paper)


def shown(finding: Finding) -> str:
    """Return a number with its interval, for a sentence."""
    if finding.value is None:
        return "not defined"
    ends = "" if finding.low is None or finding.high is None else f" [{finding.low:.2f}, {finding.high:.2f}]"
    return f"{finding.value:.2f}{ends}"
