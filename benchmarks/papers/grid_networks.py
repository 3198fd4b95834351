"""Make the table of the grid: networks of every combination of settings, losses under shifts, and all measures."""

import functools
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pyflatness import progress
from pyflatness.measures import MEASURES
from pyflatness.scoring.score import score

from . import image_data, training
from .experiment import Bench, note
from .networks import fully_connected
from .training import Data, Recipe, Until

SETTINGS = ("width", "depth", "batch_size", "learning_rate", "weight_decay", "optimizer")

LEFT_OUT = ("mls_adversarial", "normalized_mls_adversarial")
"""Measures that are another's, from below."""

HEAD = (
    *("relative_flatness", "relative_flatness_std", "relative_flatness_max", "relative_flatness_per_feature"),
    *("trace", "scaled_trace", "adaptive_sharpness", "lambda_max", "weight_norm"),
)
"""Measures whose value at the head, whose inputs are the penultimate features, has a column of its own."""


BASE = {"sgd": (0.2, 5e-4), "momentum": (0.02, 5e-3), "adam": (0.002, 5e-2)}
"""Learning rate and decoupled weight decay of each optimiser that a factor of 1 stands for."""

_NAMES = tuple(row.name for row in MEASURES if row.name not in LEFT_OUT)
_TOGETHER = 12  # networks that are scored between two steps of the bar


def made(bench: Bench) -> tuple[dict[str, list[Any]], dict[str, str]]:
    """Train what is not trained, score what is not scored, and return a table with a row for each network.

    Returns:
        Columns: ``name``, the settings, ``seed``, ``steps``, ``train_loss``, for each test set its loss and gap, for
        the first one ``test error`` too, the part of images that are not classified right, and the values of measures,
        ``MEASURE`` of the network or ``MEASURE head``, with NaN for those that there are none of. And the networks and
        values that there are none of, and why.
    """
    settings = bench.settings
    train, held_out = data(bench)
    train, tests = bench.on_device(train), {name: bench.on_device(held) for name, held in held_out.items()}
    folder = bench.kept(f"grid-{bench.scale}", {name: settings[name] for name in ("samples", "loss", "steps")})
    kept, failures = trained(settings, train, folder, bench.shown)
    store = folder.with_suffix(".sqlite")
    measures = _NAMES if settings["measures"] == "all" else settings["measures"].split(",")
    names = [*kept]
    with progress.bar("scoring", len(names), bench.shown) as advance:
        for start in range(0, len(names), _TOGETHER):
            some = {name: _read(kept[name], train, folder) for name in names[start : start + _TOGETHER]}
            for name, cells in scored(some, train, tests, store, failures, measures).items():
                kept[name] |= cells
            advance(len(some), names[start])
    columns = {
        column: [row.get(column, math.nan) for row in kept.values()]
        for column in dict.fromkeys(column for row in kept.values() for column in row)
    }
    for shift in tests:
        losses = zip(columns[f"{shift} loss"], columns["train_loss"], strict=True)
        columns[f"{shift} gap"] = [test - train_loss for test, train_loss in losses]
    return columns, failures


def data(bench: Bench) -> tuple[Data, dict[str, Data]]:
    """Return the training data, flat pixels from 0 to 1, and test sets by name: as they are, and shifted.

    At paper scale MNIST with 2×2 pixels averaged, 14×14; at small scale scikit-learn's digits of 8×8.
    """
    samples = bench.settings["samples"]
    if bench.scale == "small":
        (x, y), (tx, ty) = image_data.digits(samples)
    else:
        (x, y), (tx, ty) = image_data.read(bench.data_dir, "mnist")
        x, y = F.avg_pool2d(x[:samples].float() / 255, 2), y[:samples]
        tx = F.avg_pool2d(tx.float() / 255, 2)
    shifted = shifts(tx, ty)
    return (x.flatten(1), y), {name: (images.flatten(1), labels) for name, (images, labels) in shifted.items()}


def shifts(images: Tensor, labels: Tensor) -> dict[str, Data]:
    """Return test data as they are, turned by 20 degrees, with noise of deviation 0.2, with a tenth of labels wrong."""
    generator = torch.Generator().manual_seed(0)
    angle = math.radians(20)
    turn = torch.tensor([[math.cos(angle), -math.sin(angle), 0.0], [math.sin(angle), math.cos(angle), 0.0]])
    where = F.affine_grid(turn.expand(len(images), 2, 3), list(images.shape), align_corners=False)
    wrong = (labels + torch.randint(1, 10, labels.shape, generator=generator)) % 10
    swapped = torch.rand(len(labels), generator=generator) < 0.1
    return {
        "test": (images, labels),
        "rotated": (F.grid_sample(images, where, align_corners=False), labels),
        "noisy": (images + 0.2 * torch.randn(images.shape, generator=generator), labels),
        "wrong labels": (images, torch.where(swapped, wrong, labels)),
    }


def trained(
    settings: Mapping[str, Any], train: Data, folder: Path, shown: bool | None
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Train what is not trained yet, and return the settings of networks that reached the loss, and the failures."""
    shapes = [*itertools.product(settings["batch_sizes"], settings["depths"], settings["widths"])]
    ways = [
        *itertools.product(
            settings["optimizers"], settings["learning_rates"], settings["weight_decays"], range(settings["seeds"])
        )
    ]
    rows: dict[str, dict[str, Any]] = {}
    failures: dict[str, str] = {}
    with progress.bar("training", len(shapes), shown) as advance:
        for batch_size, depth, width in shapes:
            shape = {"width": width, "depth": depth, "batch_size": batch_size}
            facts: dict[str, dict[str, Any]] = {}
            recipes = {}
            for optimizer, rate, decay, seed in ways:
                way = {"optimizer": optimizer, "learning_rate": rate, "weight_decay": decay, "seed": seed}
                name = f"width{width}_depth{depth}_batch{batch_size}_{optimizer}_rate{rate:g}_decay{decay:g}_seed{seed}"
                facts[name] = {"name": name} | shape | way
                own_rate, own_decay = BASE[optimizer]
                recipes[name] = Recipe(optimizer, batch_size, own_rate * rate, seed, "", own_decay * decay)
            epochs = -(-settings["steps"] * batch_size // len(train[1]))
            until = Until(settings["loss"], epochs, together=len(ways), exact=True)
            made = functools.partial(network, train, width, depth)
            for name, path in training.train(made, recipes, train, until, folder, shown=False).items():
                told = training.metadata(path)
                steps, loss = json.loads(told["steps"]), float(told["loss"])
                if told["converged"] == "true":
                    rows[name] = facts[name] | {"steps": steps, "train_loss": loss}
                else:
                    failures[name] = f"loss {loss:.3g} after {steps} steps"
            advance(1, f"width {width}, depth {depth}, batches of {batch_size}")
    return rows, failures


def network(train: Data, width: int, depth: int) -> nn.Module:
    """Return a ReLU network with ``depth`` hidden layers of ``width`` units."""
    return fully_connected(train[0].shape[1], *[width] * depth, 10)


def _read(row: Mapping[str, Any], train: Data, folder: Path) -> nn.Module:
    from safetensors.torch import load_file

    made = network(train, row["width"], row["depth"])
    made.load_state_dict(load_file(folder / f"{row['name']}.safetensors"))
    return made.to(train[0].device).eval()


def scored(
    networks: Mapping[str, nn.Module],
    train: Data,
    tests: Mapping[str, Data],
    store: Path,
    failures: dict[str, str],
    measures: Sequence[str],
) -> dict[str, dict[str, float]]:
    """Return by network its losses on test sets, its test error, and the values of measures, by column."""
    heads = {name: [*dict(network.named_children())][-1] for name, network in networks.items()}
    found: dict[str, dict[str, float]] = {name: {} for name in networks}
    for row in score(networks, "cross_entropy", train, measures=measures, store=store):
        if row.error:
            note(failures, row.checkpoint, f"{row.measure} {row.layer or 'network'}: {row.error}")
        elif row.value is not None and not row.layer:
            found[row.checkpoint][row.measure] = row.value
        elif row.value is not None and row.layer == heads[row.checkpoint] and row.measure in HEAD:
            found[row.checkpoint][f"{row.measure} head"] = row.value
    for shift, held in tests.items():
        for head in dict.fromkeys(heads.values()):  # the cheapest layer, for the loss alone
            some = {name: network for name, network in networks.items() if heads[name] == head}
            for row in score(some, "cross_entropy", held, layers=head, measures="relative_flatness", store=store):
                found[row.checkpoint][f"{shift} loss"] = math.nan if row.loss is None else row.loss
                if shift == "test":
                    found[row.checkpoint]["test error"] = math.nan if row.accuracy is None else 1 - row.accuracy
    return found
