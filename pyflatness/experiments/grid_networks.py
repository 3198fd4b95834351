"""Make the table of the grid: networks of every combination of settings, losses under shifts, and all measures."""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import progress
from ..measures import MEASURES
from ..scoring.score import score
from . import image_data, same_loss
from .experiment import Bench, note
from .same_loss import Recipe, perceptron

Data = tuple[Tensor, Tensor]

SETTINGS = ("width", "depth", "batch_size", "learning_rate", "weight_decay", "optimizer")

LEFT_OUT = ("mls_adversarial", "normalized_mls_adversarial")
"""Measures that are another's, from below."""

HEAD = (
    *("relative_flatness", "relative_flatness_std", "relative_flatness_max", "trace", "scaled_trace"),
    *("adaptive_sharpness", "lambda_max", "weight_norm"),
)
"""Measures whose value at the head, whose inputs are the penultimate features, has a column of its own."""


_NAMES = tuple(row.name for row in MEASURES if row.name not in LEFT_OUT)
_SHAPES = ("widths", "depths", "batch_sizes")  # settings that give a group, which has a file of its own
_TOGETHER = 12  # networks that are scored between two steps of the bar


def made(bench: Bench) -> tuple[dict[str, list[Any]], dict[str, str]]:
    """Train what is not trained, score what is not scored, and return a table with a row for each network.

    Returns:
        Columns: ``name``, the settings, ``seed``, ``steps``, ``train_loss``, for each test set its loss and gap, and
        the values of measures, ``MEASURE`` of the network or ``MEASURE head``, with NaN for those that there are none
        of. And the networks and values that there are none of, and why.
    """
    settings = bench.settings
    train, held_out = data(bench)
    train, tests = bench.on_device(train), {name: bench.on_device(held) for name, held in held_out.items()}
    followed = {name: value for name, value in settings.items() if name not in _SHAPES}
    folder = bench.kept(f"grid-{bench.scale}", followed)
    rows = {row["name"]: row for row in trained(settings, train, folder, bench.shown)}
    failures = {
        name: f"loss {row['train_loss']:.3g} after {row['steps']} steps" for name, row in rows.items() if row["failed"]
    }
    kept = {name: {k: v for k, v in row.items() if k != "failed"} for name, row in rows.items() if not row["failed"]}
    store = folder.with_suffix(".sqlite")
    names = [*kept]
    with progress.bar("scoring", len(names), bench.shown) as advance:
        for start in range(0, len(names), _TOGETHER):
            some = {name: _network(kept[name], train, folder) for name in names[start : start + _TOGETHER]}
            for name, cells in scored(some, train, tests, store, failures).items():
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


def trained(settings: Mapping[str, Any], train: Data, folder: Path, shown: bool | None) -> list[dict[str, Any]]:
    """Train all groups that are not trained yet, and return a row of facts for each network.

    A group is done when its file of facts is there, which is written after its networks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shapes = list(itertools.product(settings["batch_sizes"], settings["depths"], settings["widths"]))
    recipes = [
        Recipe(*row)
        for row in itertools.product(
            settings["optimizers"], settings["learning_rates"], settings["weight_decays"], range(settings["seeds"])
        )
    ]
    rows = []
    with progress.bar("training", len(shapes), shown) as advance:
        for batch_size, depth, width in shapes:
            facts = folder / f"width{width}_depth{depth}_batch{batch_size}.json"
            if not facts.exists():
                found = _group(settings, (width, depth, batch_size), recipes, train, folder)
                part = facts.with_suffix(".part")
                part.write_text(json.dumps(found), encoding="utf-8")
                part.replace(facts)
            rows += json.loads(facts.read_text(encoding="utf-8"))
            advance(1, facts.stem)
    return rows


def _group(
    settings: Mapping[str, Any], shape: tuple[int, int, int], recipes: Sequence[Recipe], train: Data, folder: Path
) -> list[dict[str, Any]]:
    from safetensors.torch import save_file

    width, depth, batch_size = shape
    sizes = train[0].shape[1], width, depth, 10
    ended = same_loss.train(
        sizes, recipes, train, batch_size=batch_size, target=settings["loss"], most_steps=settings["steps"]
    )
    rows = []
    for recipe, result in zip(recipes, ended, strict=True):
        how = f"{recipe.optimizer}_rate{recipe.learning_rate:g}_decay{recipe.weight_decay:g}_seed{recipe.seed}"
        facts = {"width": width, "depth": depth, "batch_size": batch_size, **vars(recipe)}
        facts |= {"steps": result.steps, "train_loss": result.loss}
        name = f"width{width}_depth{depth}_batch{batch_size}_{how}"
        if result.weights is not None:
            told = {key: str(value) for key, value in facts.items()}
            save_file(result.weights, folder / f"{name}.safetensors", metadata=told)
        rows.append({"name": name, "failed": result.weights is None, **facts})
    return rows


def _network(row: Mapping[str, Any], train: Data, folder: Path) -> nn.Module:
    from safetensors.torch import load_file

    network = perceptron(train[0].shape[1], row["width"], row["depth"], 10)
    network.load_state_dict(load_file(folder / f"{row['name']}.safetensors"))
    return network.to(train[0].device).eval()


def scored(
    networks: Mapping[str, nn.Module], train: Data, tests: Mapping[str, Data], store: Path, failures: dict[str, str]
) -> dict[str, dict[str, float]]:
    """Return by network its losses on test sets, and the values of all measures, by column."""
    heads = {name: str(len(list(network.children())) - 1) for name, network in networks.items()}
    found: dict[str, dict[str, float]] = {name: {} for name in networks}
    for row in score(networks, "cross_entropy", train, layers="*", measures=_NAMES, store=store):
        if row.error:
            note(failures, row.checkpoint, f"{row.measure} {row.layer or 'network'}: {row.error}")
        elif row.value is not None and not row.layer:
            found[row.checkpoint][row.measure] = row.value
        elif row.value is not None and row.layer == heads[row.checkpoint] and row.measure in HEAD:
            found[row.checkpoint][f"{row.measure} head"] = row.value
    for shift, held in tests.items():
        for row in score(networks, "cross_entropy", held, measures="relative_flatness", store=store):
            found[row.checkpoint][f"{shift} loss"] = math.nan if row.loss is None else row.loss
    return found
