"""What the experiments of C24 share: its networks and data at both scales, and what is measured of a network.

C24 is "From Loss Flatness to Compressed Representations in Neural Networks". Its section 4.1 trains by plain stochastic
gradient descent on squared error, on two classes, and measures on 100 training samples. The convolutional network is
VGG-11 or LeNet5 on CIFAR-10 at paper scale, a small one on scikit-learn's digits at small scale; the multilayer
perceptron has four layers, on FashionMNIST, or digits. The paper does not say how wide it is, nor how many outputs the
networks have; here they have one for each of two classes.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pyflatness import progress
from pyflatness.api import measure
from pyflatness.errors import InputError

from . import image_data
from .experiment import Bench, note
from .networks import fully_connected, lenet5, small_convolutional, small_lenet, vgg11
from .training import Data, Descent, followed, half_squared_error

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

FITTED = 0.99
"""Accuracy on the training data from which on a network counts as having interpolated them."""

_CONVOLUTIONAL: dict[str, dict[str, Callable[[int], nn.Module]]] = {
    "convolutional": {"small": small_convolutional, "paper": vgg11},
    "LeNet": {"small": small_lenet, "paper": lenet5},
}

_MEASURES = ("interpolation_sharpness", "nmls", "log_volume", "mls", "local_dimension")


def problem(bench: Bench, kind: str) -> tuple[Callable[[], nn.Module], Data, Data]:
    """Return what makes a network of a kind, ``"perceptron"`` or of the table above, training data, and test data."""
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
        return functools.partial(fully_connected, inputs, width, width, width, len(classes)), some, others
    made = _CONVOLUTIONAL[kind][bench.scale]
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
) -> tuple[dict[str, list[Any]], dict[str, str]]:
    """Return columns with a row for each network and number of steps: loss, accuracy, gap, and what else is measured.

    Args:
        bench: to work with.
        kind: of network.
        descents: how each is trained.
        kept: numbers of steps.
        of: network and the samples that are measured on -> columns.

    Returns:
        The columns, with NaN for what could not be measured, as of a network that diverged; and these rows by name,
        with the reasons.
    """
    made, *data = problem(bench, kind)
    train, test = map(bench.on_device, data)
    settings = {name: bench.settings.get(name) for name in ("classes", "samples", "width", "data", "images")}
    folder = bench.kept(f"c24-{kind}-{bench.scale}", [settings, list(kept), [descent.name for descent in descents]])
    weights = followed(made, descents, train, kept, folder, bench.shown)
    network, some = made().to(bench.device).eval(), tuple(part[: bench.settings["measured"]] for part in train)
    rows: list[dict[str, Any]] = []
    failures: dict[str, str] = {}
    with progress.bar("measuring", len(descents) * len(kept), bench.shown) as advance:
        for descent, states in weights.items():
            for step, state in zip(kept, states, strict=True):
                network.load_state_dict(state)
                with torch.no_grad():
                    outputs, tested = network(train[0]), network(test[0])
                losses = [float(half_squared_error(f, y)) for f, y in ((outputs, train[1]), (tested, test[1]))]
                row = {"name": f"{descent.name}_step{step}", **vars(descent), "step": step, "loss": losses[0]}
                row["accuracy"] = float((outputs.argmax(dim=1) == train[1]).float().mean())
                row |= {"test_loss": losses[1], "gap": losses[1] - losses[0]}
                try:
                    row |= of(network, some)  # type: ignore[arg-type]
                except InputError as error:  # its outputs are not finite
                    note(failures, row["name"], str(error))
                rows.append(row)
                advance(1, row["name"])
    names = dict.fromkeys(column for row in rows for column in row)
    return {column: [row.get(column, math.nan) for row in rows] for column in names}, failures


def compression(network: nn.Module, data: Data) -> dict[str, float]:
    """Return the columns :data:`QUANTITIES`; sharpness is the square root of Eq. 3."""
    report = measure(network, nn.MSELoss(), (data[0], units(data[1])), measures=_MEASURES, progress=False)
    found = {name: float(report[name].value) for name in _MEASURES}
    return {"sharpness": math.sqrt(found.pop("interpolation_sharpness")), **found}


def units(labels: Tensor) -> Tensor:
    """Return classes as unit vectors (n, classes), the two classes of section 4.1."""
    return F.one_hot(labels, 2).float()
