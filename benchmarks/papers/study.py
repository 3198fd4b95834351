"""Make the networks of the study of docs/study.md: at equal training losses, in an order that is fixed beforehand.

:func:`plan` is the list. What is trained and measured is a row of a table for each of the losses, so that a run that
was interrupted goes on behind the table's last training. :mod:`.study_report` says what the table tells.
"""

import csv
import functools
import itertools
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pyflatness as pf
from pyflatness import progress

from . import image_data
from .grid_networks import BASE, shifts
from .networks import fully_connected
from .training import OPTIMIZERS, Data, Weights, crossing, initialized, order, save

LOSSES = (0.1, 0.01)
STEPS, PATIENCE, SAMPLES, TESTED, SIDE = 6000, 1000, 500, 2000, 16
SETTINGS: dict[str, tuple[Any, Any]] = {
    "rate": (0.75, 2.25),
    "batch_size": (32, 128),
    "weight_decay": (0.0, 1.0),
    "optimizer": ("momentum", "adam"),
    "sam": (0.0, 0.05),
    "augmentation": (0.0, 0.1),
    "label_noise": (0.0, 0.1),
}
"""The two levels of each; rates and decays are factors of :data:`.grid_networks.BASE`, augmentation is a deviation."""

MEASURES = (
    *("relative_flatness", "relative_flatness_per_feature", "relative_flatness_std", "neuron_flatness"),
    *("trace", "scaled_trace", "adaptive_sharpness", "adaptive_sharpness_mc", "fisher_rao", "pac_bayes"),
    *("weight_norm", "mls", "nmls", "normalized_mls", "input_invariant_mls"),
)
OF_HEAD = ("relative_flatness", "relative_flatness_per_feature", "relative_flatness_std", "neuron_flatness", "trace")
OWN = ("lambda_max", "adaptive_sharpness_mc, normalised logits", "margin")
MEASURED = (*MEASURES, *(f"{name} head" for name in OF_HEAD), *OWN)
TARGETS = ("test error", "test loss", "noisy error", "blurred error", "rotated error")
COLUMNS = (
    *("name", "training", "data", "architecture", *SETTINGS, "seed", "loss", "train_loss", "steps"),
    *("training_seconds", "measuring_seconds", *TARGETS, *MEASURED),
)


def perceptron(channels: int) -> nn.Module:
    """Return a ReLU network with two hidden layers of 64 units."""
    return fully_connected(channels * SIDE**2, 64, 64, 10)


def convolutional(channels: int, normalisation: Callable[[int], nn.Module] = lambda width: nn.Identity()) -> nn.Module:
    """Return a ReLU network with two convolutions of stride 2 and a hidden layer of 32 units."""
    return nn.Sequential(
        *(nn.Conv2d(channels, 8, 3, 2, 1), normalisation(8), nn.ReLU()),
        *(nn.Conv2d(8, 16, 3, 2, 1), normalisation(16), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(SIDE**2, 32), nn.ReLU(), nn.Linear(32, 10)),
    )


ARCHITECTURES: dict[str, Callable[[int], nn.Module]] = {
    "perceptron": perceptron,
    "convolutional": convolutional,
    "normalised": functools.partial(convolutional, normalisation=nn.BatchNorm2d),
}
DATA = ("mnist", "fashion_mnist", "cifar10")
SHAPES = tuple(itertools.product(DATA, ARCHITECTURES))
BLOCK = 2 * len(SHAPES)  # trainings
SEEDS = 2


@dataclass(frozen=True)
class Planned:
    """Represent one training: the data, the architecture, the settings by name, and a seed of its own."""

    data: str
    architecture: str
    settings: Mapping[str, Any]
    seed: int

    @property
    def name(self) -> str:
        """Return its name in files and tables."""
        return "_".join(map(str, (self.data, self.architecture, *self.settings.values(), f"seed{self.seed}")))


def plan() -> list[Planned]:
    """Return all trainings in the order that docs/studies.md describes."""
    generator = random.Random(2)
    names = [*SETTINGS]
    blocks = []
    for _ in range(4):
        flips = generator.sample(range(len(names)), len(names))
        starts = [[generator.randrange(2) for _ in names] for _ in SHAPES]
        for step in range(len(names) + 1):
            block = []
            for place, (shape, start) in enumerate(zip(SHAPES, starts, strict=True)):
                flipped = {flips[(place + taken) % len(flips)] for taken in range(step)}
                levels = [level ^ (number in flipped) for number, level in enumerate(start)]
                block += [(shape, levels), (shape, [1 - level for level in levels])]
            blocks.append(block)
    return [
        Planned(
            *shape,
            {name: SETTINGS[name][level] for name, level in zip(names, levels, strict=True)},
            seed=10_000 + (number * len(block) + place) * SEEDS + replicate,
        )
        for number, block in enumerate(blocks)
        for replicate in range(SEEDS)
        for place, (shape, levels) in enumerate(block)
    ]


def data(folder: Path | None, name: str) -> tuple[Data, dict[str, Data]]:
    """Return training data and test data by name, as they are and shifted, of images of 16×16 pixels.

    Pixels are from 0 to 1, less the mean over the training images.
    """
    (x, y), (tx, ty) = image_data.read(folder, name)
    return prepared((x[:SAMPLES], y[:SAMPLES]), (tx[:TESTED], ty[:TESTED]))


def prepared(train: Data, test: Data) -> tuple[Data, dict[str, Data]]:
    """Return the same of images (n, channels, height, width) with pixels from 0 to 255."""
    x, tx = (F.avg_pool2d(F.pad(images / 255, [(32 - images.shape[3]) // 2] * 4), 2) for images in (train[0], test[0]))
    shifted, mean = shifts(tx, test[1]), x.mean()
    held = {name: shifted[name][0] for name in ("test", "noisy", "rotated")} | {"blurred": F.avg_pool2d(tx, 3, 1, 1)}
    return (x - mean, train[1]), {name: (images - mean, test[1]) for name, images in held.items()}


def with_noise(labels: Tensor, share: float) -> Tensor:
    """Return labels of which a share is wrong, the same ones for all networks."""
    generator = torch.Generator().manual_seed(0)
    wrong = (labels + torch.randint(1, 10, labels.shape, generator=generator)) % 10
    return torch.where(torch.rand(len(labels), generator=generator) < share, wrong, labels)


def descended(
    network: nn.Module, planned: Planned, train: Data, steps: int = STEPS
) -> Iterator[tuple[float, Weights, float, int]]:
    """Train, and yield each target that is reached, the weights and statistics there, the loss, the steps."""
    x, y = train
    settings, size = planned.settings, planned.settings["batch_size"]
    own_rate, own_decay = BASE[settings["optimizer"]]
    rate, decay = own_rate * settings["rate"], own_decay * settings["weight_decay"]
    optimizer = OPTIMIZERS[settings["optimizer"]](network.parameters(), lr=rate)
    generator = torch.Generator().manual_seed(planned.seed)
    targets, taken, least, since = [*LOSSES], 0, math.inf, 0
    for epoch in range(steps * size // len(y)):
        path = [_state(network)]
        for places in order(planned.seed, epoch, len(y)).split(size):
            images = x[places]
            if settings["augmentation"]:
                images = images + settings["augmentation"] * torch.randn(images.shape, generator=generator)
            _step(network.train(), optimizer, images, y[places], settings, rate * decay)
            path.append(_state(network))
        last, loss = path[-1], _loss_of(network, path[-1], train)
        while targets and loss <= targets[0]:
            weights, reached, within = crossing(targets[0], path, lambda held: _loss_of(network, held, train))
            yield targets.pop(0), weights, reached, taken + within
        taken += len(path) - 1
        if loss < least:
            least, since = loss, taken
        if not targets or not math.isfinite(loss) or taken - since >= PATIENCE:
            return
        network.load_state_dict(last, strict=False)


def _step(
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    images: Tensor,
    labels: Tensor,
    settings: Mapping[str, Any],
    decay: float,
) -> None:
    """Take a step, of sharpness-aware minimisation where its radius is above 0, and shrink the weights."""
    parameters: list[Tensor] = [*network.parameters()]
    radius = settings["sam"]

    def gradients() -> tuple[Tensor, ...]:
        loss = F.cross_entropy(network(images), labels)
        return torch.autograd.grad(loss, parameters)

    found = gradients()
    before = [parameter.detach().clone() for parameter in parameters]
    if radius:
        norm = torch.cat([gradient.flatten() for gradient in found]).norm()
        with torch.no_grad():
            torch._foreach_add_(parameters, found, alpha=radius / max(float(norm), 1e-12))
        found = gradients()
    with torch.no_grad():
        for parameter, start, gradient in zip(parameters, before, found, strict=True):
            parameter.copy_(start * (1 - decay))
            parameter.grad = gradient
        optimizer.step()


def _state(network: nn.Module) -> Weights:
    held = network.state_dict().items()
    return {name: value.detach().clone() for name, value in held if value.is_floating_point()}


@torch.no_grad()
def _loss_of(network: nn.Module, weights: Weights, train: Data) -> float:
    network.load_state_dict(weights, strict=False)
    return float(F.cross_entropy(network.eval()(train[0]), train[1]))


class Normalised(nn.Module):
    """A network whose logits are divided by the root of their mean square over classes."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (n, classes)."""
        logits: Tensor = self.network(images)
        return logits / logits.square().mean(dim=1, keepdim=True).sqrt()


def measured(networks: Mapping[str, nn.Module], train: Data, tests: Mapping[str, Data], store: Path) -> dict[str, Any]:
    """Return by name the targets and measures of networks of one architecture."""
    head = [*dict(next(iter(networks.values())).named_children())][-1]
    found: dict[str, dict[str, Any]] = {name: {} for name in networks}
    for row in pf.score(networks, "cross_entropy", train, measures=MEASURES, store=store, curvature="ggn"):
        if row.value is not None and (not row.layer or (row.layer == head and row.measure in OF_HEAD)):
            found[row.checkpoint][f"{row.measure} head" if row.layer else row.measure] = row.value
    normalised = {name: Normalised(network).eval() for name, network in networks.items()}
    for row in pf.score(normalised, "cross_entropy", train, measures="adaptive_sharpness_mc", store=store):
        found[row.checkpoint]["adaptive_sharpness_mc, normalised logits"] = row.value
    for name, network in networks.items():
        cells = found[name]
        cells["lambda_max"] = float(pf.spectrum(network, "cross_entropy", train, k=1).eigenvalues[0])
        with torch.no_grad():
            logits, given = normalised[name](train[0]), train[1][:, None]
            others = logits.scatter(1, given, -math.inf).amax(dim=1)
            cells["margin"] = -float((logits.gather(1, given)[:, 0] - others).quantile(0.1))
            for shift, (images, labels) in tests.items():
                outputs = network(images)
                cells[f"{shift} error"] = float((outputs.argmax(dim=1) != labels).float().mean())
                cells[f"{shift} loss"] = float(F.cross_entropy(outputs, labels))
    return found


def rows(planned: Planned, read: tuple[Data, dict[str, Data]], folder: Path) -> list[dict[str, Any]]:
    """Train and measure, and return a row for each of the losses; of one that was not reached its settings alone."""
    (x, y), tests = read
    train = (x, with_noise(y, planned.settings["label_noise"]))
    make = functools.partial(ARCHITECTURES[planned.architecture], x.shape[1])
    facts = {"training": planned.name, "data": planned.data, "architecture": planned.architecture, **planned.settings}
    made = {f"{planned.name}_loss{loss}": facts | {"seed": planned.seed, "loss": loss} for loss in LOSSES}
    networks, begun = {}, time.process_time()
    for target, weights, loss, steps in descended(initialized(make, planned.seed), planned, train):
        name = f"{planned.name}_loss{target}"
        networks[name] = make().eval()
        networks[name].load_state_dict(weights, strict=False)
        save(weights, {"loss": loss, "steps": steps}, folder / f"{name}.safetensors")
        made[name] |= {"train_loss": loss, "steps": steps}
    trained, per = time.process_time() - begun, max(len(networks), 1)
    begun = time.process_time()
    found = measured(networks, train, tests, folder / "study.sqlite") if networks else {}
    spent = {"training_seconds": trained / per, "measuring_seconds": (time.process_time() - begun) / per}
    return [{"name": name} | row | (spent | found[name] if name in found else {}) for name, row in made.items()]


def read(folder: Path, row: Mapping[str, Any]) -> nn.Module:
    """Return the network of a row of the table, from the weights that :func:`run` left in its folder."""
    from safetensors.torch import load_file

    network = ARCHITECTURES[row["architecture"]](3 if row["data"] == "cifar10" else 1).eval()
    network.load_state_dict(load_file(folder / f"{row['name']}.safetensors"), strict=False)
    return network


def run(
    trainings: Sequence[Planned], data_of: Callable[[str], tuple[Data, dict[str, Data]]], folder: Path, networks: int
) -> Path:
    """Go on with a list of trainings until so many rows are there, and return the table's path.

    Args:
        trainings: in their order.
        data_of: returns a data set's data by its name.
        folder: for the table, the weights and the store.
        networks: rows of the table at which to stop, one for each loss of each training.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "networks.csv"
    if not path.exists():
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerow(COLUMNS)
    with path.open(newline="", encoding="utf-8") as file:
        there = {row["training"] for row in csv.DictReader(file)}
    wanted = [planned for planned in trainings[: -(-networks // len(LOSSES))] if planned.name not in there]
    with torch.random.fork_rng(devices=[]):
        for planned in progress.track(wanted, len(wanted), "study", None):
            found = rows(planned, data_of(planned.data), folder)
            with path.open("a", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
                writer.writerows(
                    {key: f"{cell:.8g}" if isinstance(cell, float) else cell for key, cell in row.items()}
                    for row in found
                )
    return path
