"""Make the networks of the study within recipes: many seeds of each recipe, trained to one loss, seeds outermost.

:func:`plan` is the list, which docs/studies.md describes. A row of the table is written for each network that was
trained, so that a run that was interrupted goes on behind it. :mod:`.within_report` says what the table tells.
"""

import csv
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pyflatness as pf
from pyflatness import progress

from . import image_data
from .closed_form import ClosedForm
from .networks import fully_connected
from .study import Planned
from .training import Data, Weights, crossing, initialized, order, save

LOSS, EPOCHS, SAMPLES, MEASURED, KEPT, SEEDS, SIDE = 0.05, 300, 5000, 2000, 1000, 40, 16
"""Training loss, most epochs, training images, those that are measured on, test images whose logits are kept, …"""

SETTINGS: dict[str, tuple[Any, Any]] = {"rate": (1.0, 2.0), "batch_size": (64, 128), "optimizer": ("momentum", "adam")}
"""The two levels of each; the rate is a factor of :data:`RATES`."""

RATES = {"momentum": 0.05, "adam": 0.002}
MEASURES = (
    *("relative_flatness", "relative_flatness_columns", "relative_flatness_std", "trace", "scaled_trace"),
    *("adaptive_sharpness", "weight_norm", "mls"),
)
DATA = ("mnist", "fashion_mnist", "cifar10")


def perceptron(channels: int) -> nn.Sequential:
    """Return a ReLU network with two hidden layers."""
    return fully_connected(channels * SIDE**2, 128, 64, 10)


def patches(channels: int) -> nn.Sequential:
    """Return a ReLU network with two convolutions of windows that do not overlap, and a hidden layer."""
    return nn.Sequential(
        *(nn.Conv2d(channels, 16, 4, 4), nn.ReLU(), nn.Conv2d(16, 32, 2, 2), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def convolutional(channels: int) -> nn.Sequential:
    """Return a ReLU network with two convolutions of windows that overlap, and the head."""
    return nn.Sequential(
        *(nn.Conv2d(channels, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 16, 3, 2, 1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(SIDE**2, 10)),
    )


ARCHITECTURES: dict[str, Callable[[int], nn.Sequential]] = {
    "perceptron": perceptron,
    "patches": patches,
    "convolutional": convolutional,
}
LAYERS = max(
    sum(isinstance(layer, nn.Linear | nn.Conv2d) for layer in make(1).modules()) for make in ARCHITECTURES.values()
)
TARGETS = ("test error", "test loss")
HALVES = tuple(f"{target}, {half} images" for half in ("even", "odd") for target in TARGETS)
COLUMNS = (
    *("name", "data", "architecture", *SETTINGS, "seed", "train_loss", "steps", "training_seconds"),
    *("measuring_seconds", *TARGETS, *HALVES),
    *(f"{name}{layer}" for name in MEASURES for layer in ("", *(f" {place + 1}" for place in range(LAYERS)))),
)


def plan() -> list[Planned]:
    """Return all trainings, every recipe once before any recipe a second time; no two share a seed."""
    recipes = [*itertools.product(DATA, ARCHITECTURES, *SETTINGS.values())]
    return [
        Planned(data, architecture, dict(zip(SETTINGS, levels, strict=True)), 100_000 + number)
        for number, (data, architecture, *levels) in enumerate(SEEDS * recipes)
    ]


BLOCK = len(plan()) // SEEDS  # networks with one seed of every recipe


def data(folder: Path | None, name: str) -> tuple[Data, Data]:
    """Return training and test data by name: 16×16 pixels from 0 to 1, less the mean over the training images."""
    (x, y), (tx, ty) = image_data.read(folder, name)
    return prepared((x[:SAMPLES], y[:SAMPLES]), (tx, ty))


def prepared(train: Data, test: Data) -> tuple[Data, Data]:
    """Return the same of images (n, channels, height, width) with pixels from 0 to 255."""
    x, tx = (F.avg_pool2d(F.pad(images / 255, [(32 - images.shape[3]) // 2] * 4), 2) for images in (train[0], test[0]))
    return (x - x.mean(), train[1]), (tx - x.mean(), test[1])


def trained(network: nn.Sequential, planned: Planned, train: Data, epochs: int = EPOCHS) -> tuple[float, int] | None:
    """Train a network to the loss, and return the loss and the steps; None if it is not reached in so many epochs."""
    (x, y), settings = train, planned.settings
    rate = RATES[settings["optimizer"]] * settings["rate"]
    flat, gradient = flattened(network)
    first, second, steps = torch.zeros_like(flat), torch.zeros_like(flat), 0
    gradients = ClosedForm(network, x, y)

    @torch.no_grad()
    def loss_of(weights: Weights) -> float:
        """Return the mean loss on all samples, or what some of them have of it once that is above the loss by 1 %."""
        flat.copy_(weights["flat"])
        total = 0.0
        for some, labels in zip(x.split(500), y.split(500), strict=True):
            total += float(F.cross_entropy(network(some), labels, reduction="sum")) / len(y)
            if total > 1.01 * LOSS:
                break
        return total

    for epoch in range(epochs):
        path = [{"flat": flat.clone()}]
        for places in order(planned.seed, epoch, len(y)).split(settings["batch_size"]):
            gradients.backward(places)
            steps += 1
            if settings["optimizer"] == "momentum":
                flat.sub_(first.mul_(0.9).add_(gradient), alpha=rate)
            else:
                first.lerp_(gradient, 0.1)
                second.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
                scale = (second / (1 - 0.999**steps)).sqrt_().add_(1e-8)
                flat.addcdiv_(first, scale, value=-rate / (1 - 0.9**steps))
            path.append({"flat": flat.clone()})
        if loss_of(path[-1]) <= LOSS:
            weights, loss, within = crossing(LOSS, path, loss_of)
            loss_of(weights)
            return loss, steps - len(path) + 1 + within
    return None


def flattened(network: nn.Module) -> tuple[Tensor, Tensor]:
    """Make parameters and their gradients views of two vectors, so that a step is a few operations; return both."""
    parameters = [*network.parameters()]
    flat = torch.cat([parameter.detach().flatten() for parameter in parameters])
    gradient = torch.zeros_like(flat)
    sizes = [parameter.numel() for parameter in parameters]
    for parameter, values, slot in zip(parameters, flat.split(sizes), gradient.split(sizes), strict=True):
        parameter.data, parameter.grad = values.view_as(parameter), slot.view_as(parameter)
    return flat, gradient


def measured(network: nn.Module, train: Data) -> Iterator[tuple[str, float]]:
    """Yield the measures of a network, and those of its layers, numbered from the first one."""
    some = (train[0][:MEASURED], train[1][:MEASURED])
    report = pf.measure(network, "cross_entropy", some, measures=MEASURES, curvature="ggn")
    layers = [name for name, module in network.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    for cells in report.to_frame().itertuples():
        yield f"{cells.measure} {layers.index(cells.layer) + 1}" if cells.layer else cells.measure, cells.value


@torch.no_grad()
def tested(network: nn.Module, test: Data) -> tuple[dict[str, float], dict[str, Any]]:
    """Return errors and losses on all test images and on each half of them, and what is kept of the outputs."""
    outputs, labels = network(test[0]), test[1]
    wrong, losses = (outputs.argmax(dim=1) != labels).double(), F.cross_entropy(outputs, labels, reduction="none")
    found = {}
    for values, target in ((wrong, TARGETS[0]), (losses.double(), TARGETS[1])):
        found[target] = float(values.mean())
        for start, half in enumerate(("even", "odd")):
            found[f"{target}, {half} images"] = float(values[start::2].mean())
    kept = {"classes": outputs.argmax(dim=1).byte().numpy(), "logits": outputs[:KEPT].half().numpy()}
    return found, kept


def is_given_up(planned: Planned, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether two networks of its recipe have been trained, or more, and none has reached the loss."""
    recipe = planned.name.rpartition("_seed")[0]
    losses = [cells.get("train_loss", "") for cells in rows if cells["name"].rpartition("_seed")[0] == recipe]
    return len(losses) > 1 and not any(losses)


def settings_of(planned: Planned) -> dict[str, Any]:
    """Return what the table says of a network that did not reach the loss, besides the time."""
    facts = {"name": planned.name, "data": planned.data, "architecture": planned.architecture, **planned.settings}
    return facts | {"seed": planned.seed}


def row(planned: Planned, read: tuple[Data, Data], folder: Path) -> dict[str, Any]:
    """Train and measure, and return a row; of a network that did not reach the loss its settings alone."""
    train, test = read
    network = initialized(functools.partial(ARCHITECTURES[planned.architecture], train[0].shape[1]), planned.seed)
    assert isinstance(network, nn.Sequential)
    facts = settings_of(planned)
    begun = time.process_time()
    reached = trained(network, planned, train)
    facts["training_seconds"] = time.process_time() - begun
    if reached is None:
        return facts
    network.zero_grad()
    targets, kept = tested(network.eval(), test)
    np.savez_compressed(folder / "outputs" / f"{planned.name}.npz", **kept)
    save(dict(network.state_dict()), {"loss": reached[0]}, folder / "weights" / f"{planned.name}.safetensors")
    begun = time.process_time()
    found = dict(measured(network, train))
    spent = {"measuring_seconds": time.process_time() - begun}
    return facts | {"train_loss": reached[0], "steps": reached[1]} | spent | targets | found


def run(trainings: Sequence[Planned], data_of: Callable[[str], tuple[Data, Data]], folder: Path, networks: int) -> Path:
    """Go on with a list of trainings until so many rows are there, and return the table's path.

    Args:
        trainings: in their order.
        data_of: returns a data set's data by its name.
        folder: for the table, the weights and the outputs.
        networks: rows of the table at which to stop.
    """
    for name in ("outputs", "weights"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    path = folder / "networks.csv"
    if not path.exists():
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerow(COLUMNS)
    with path.open(newline="", encoding="utf-8") as file:
        rows: list[dict[str, Any]] = [*csv.DictReader(file)]
    there = {cells["name"] for cells in rows}
    wanted = [planned for planned in trainings[:networks] if planned.name not in there]
    for planned in progress.track(wanted, len(wanted), "study within recipes", None):
        given_up = is_given_up(planned, rows)
        cells = settings_of(planned) if given_up else row(planned, data_of(planned.data), folder)
        rows.append(cells)
        told = {key: f"{cell:.7g}" if isinstance(cell, float) else cell for key, cell in cells.items()}
        with path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, COLUMNS).writerow(told)
    return path
