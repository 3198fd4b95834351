"""Make a table of trained networks: a row for each, with its recipe, losses, gap, and values of measures."""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from pyflatness import progress
from pyflatness.errors import InputError
from pyflatness.messages import shown
from pyflatness.model import selectors
from pyflatness.reparameterization.reparameterize import reparameterize
from pyflatness.scoring.score import score

from . import training
from .experiment import Bench, note
from .networks import placed
from .training import Data, Recipe, Until

_COMPARED = 256  # samples on which a network with other weights is held against the first
_PARTS = 40  # of the networks that are scored between two steps of the bar
_FACTS = (
    *("name", "recipe", *(field.name for field in fields(Recipe))),
    *("epochs", "training_loss", "converged", "trained_on"),
)


@dataclass(frozen=True)
class Zoo:
    """Describe networks of one architecture, and the data that they learn and are tested on.

    Attributes:
        name: of the folder that keeps them.
        network: makes one.
        recipes: by name.
        train: inputs and labels.
        test: the same, of samples that they do not learn.
        until: when training ends.
    """

    name: str
    network: Callable[[], nn.Module]
    recipes: Mapping[str, Recipe]
    train: Data
    test: Data
    until: Until

    def first(self, count: int) -> Data:
        """Return the first training samples."""
        inputs, labels = self.train
        return inputs[:count], labels[:count]


@dataclass(frozen=True)
class Asked:
    """Ask for some measures of every network.

    Attributes:
        measures: their names.
        layers: as :func:`pyflatness.score` takes them.
        data: that they are taken on.
    """

    measures: Sequence[str]
    layers: str | Sequence[str] | None
    data: Data


@dataclass(frozen=True)
class Networks:
    """Hold a table of networks.

    Attributes:
        columns: with a row for every network that could be scored: ``name``, the recipe, ``converged``, ``loss`` and
            ``test_loss``, ``accuracy`` and ``test_accuracy``, ``gap``, and ``MEASURE LAYER`` of all that was asked.
        unconverged: names of rows whose training ended above the target.
        failures: networks and values that there are none of, and why; and those that did not converge.
    """

    columns: dict[str, list[Any]]
    unconverged: tuple[str, ...]
    failures: dict[str, str]

    def converged(self) -> dict[str, list[Any]]:
        """Return the rows of networks that did converge."""
        kept = [name not in self.unconverged for name in self.columns["name"]]
        return {
            column: [cell for cell, stays in zip(cells, kept, strict=True) if stays]
            for column, cells in self.columns.items()
        }


@dataclass(frozen=True)
class Change:
    """Describe other weights of every network, by which it computes the same function.

    Attributes:
        name: of the folder that keeps them, within the zoo's.
        of: makes the other network of one that is loaded, of the data's first samples, and of the network's number.
    """

    name: str
    of: Callable[[nn.Module, Tensor, int], nn.Module]

    def made(self, bench: Bench, zoo: Zoo, paths: Mapping[str, Path], failures: dict[str, str]) -> dict[str, Path]:
        """Write the checkpoints that are not there yet, or are of other weights, and return all that can be made."""
        from safetensors.torch import load_file, save_file

        folder = bench.folder / zoo.name / self.name
        folder.mkdir(parents=True, exist_ok=True)
        places = {name: number for number, name in enumerate(zoo.recipes)}
        changed = {name: folder / path.name for name, path in paths.items()}
        network, (inputs, _) = zoo.network().eval(), zoo.first(_COMPARED)
        for name, path in [*changed.items()]:
            of = hashlib.sha256(paths[name].read_bytes()).hexdigest()
            if path.exists() and training.metadata(path).get("of") == of:
                continue
            network.load_state_dict(load_file(paths[name]))
            try:
                other = self.of(network, inputs, places[name])
            except InputError as error:  # its outputs are not finite, as of a network that diverged
                note(failures, name, f"{self.name}: {error}")
                del changed[name]
                continue
            part = path.with_name(f".{path.name}.part")
            save_file(other.state_dict(), part, {"of": of})
            part.replace(path)
        return changed


FACTORS = 5.0, 25.0


def _by_layers(network: nn.Module, inputs: Tensor, number: int) -> nn.Module:
    """Return the network with every layer but the last multiplied by a factor of its own, uniform in [5, 25]."""
    *hidden, _ = selectors.select(network, None).modules
    drawn = np.random.default_rng(number).uniform(*FACTORS, len(hidden))
    return reparameterize(network, dict(zip(hidden, drawn.tolist(), strict=True)), inputs)


BY_LAYERS = Change("layers-by-5-to-25", _by_layers)
"""Other weights of the same function, layer by layer, as both papers of Petzka et al. make them."""


def networks(bench: Bench, zoo: Zoo, asked: Sequence[Asked], *, change: Change | None = None) -> Networks:
    """Train what is not trained yet, score it, and return the table.

    Args:
        bench: to work with.
        zoo: of networks.
        asked: measures of each, besides relative flatness of the head, which is taken on all training data, as are
            losses and accuracies.
        change: makes other weights of each checkpoint, which are then scored; None: those that were trained.
    """
    paths = trained(bench, zoo)
    facts = {name: _facts(zoo, name, path) for name, path in paths.items()}
    failures = {name: "not trained" for name in zoo.recipes if name not in paths}
    if change is not None:
        paths = change.made(bench, zoo, paths, failures)
    cells = {name: dict(own) for name, own in facts.items()}
    head = [*dict(zoo.network().named_children())][-1]  # the cheapest layer, for the loss alone
    tested = Asked(["relative_flatness"], head, zoo.test)
    for wanted in (replace(tested, data=zoo.train), tested, *asked):
        for name, (loss, accuracy, values) in _scored(bench, zoo, paths, wanted, failures).items():
            if wanted is tested:
                cells[name] |= {"test_loss": loss, "test_accuracy": accuracy}
            else:  # the first are those on all training data
                cells[name] = {"loss": loss, "accuracy": accuracy} | values | cells[name]
    rows = [own for own in cells.values() if {"loss", "test_loss"} <= own.keys()]
    if not rows:
        raise InputError(f"{zoo.name}: there are no networks: {shown(failures)}")
    names = dict.fromkeys(column for row in rows for column in row)
    columns = {column: [row.get(column, math.nan) for row in rows] for column in names}
    columns["gap"] = [test - train for test, train in zip(columns["test_loss"], columns["loss"], strict=True)]
    for row in rows:
        told = failures.get(row["name"], "")  # what has an error is named there
        missing = [name for name in columns if " " in name and not math.isfinite(row.get(name, math.nan))]
        missing = [name for name in missing if name not in told]
        if missing:
            note(failures, row["name"], f"no finite number: {', '.join(missing)}")
    for name, own in facts.items():
        if not own["converged"]:
            note(failures, name, f"did not converge: loss {own['training_loss']:.3g} in epoch {own['epochs']}")
    return tabled(columns, failures)


def trained(bench: Bench, zoo: Zoo, names: Sequence[str] | None = None) -> dict[str, Path]:
    """Train what is not trained yet, and return the checkpoints that there are by name; ``names``: of these alone."""
    recipes = zoo.recipes if names is None else {name: zoo.recipes[name] for name in names}
    data = bench.on_device(zoo.train)
    return training.train(zoo.network, recipes, data, zoo.until, bench.folder / zoo.name, bench.shown)


def tabled(columns: Mapping[str, list[Any]], failures: Mapping[str, str]) -> Networks:
    """Return networks of their columns, as they are in :class:`.experiment.Points`."""
    pairs = zip(columns["name"], columns["converged"], strict=True)
    return Networks(dict(columns), tuple(name for name, converged in pairs if not converged), dict(failures))


BEFORE = ", before"
"""Behind a column of values at the first weights, where a table has both."""


def joined(before: Networks, after: Networks, measures: Sequence[str]) -> Networks:
    """Return one table, by name, of networks at other weights and of some measures at the first ones.

    Args:
        before: at the first weights.
        after: at the others; a network that is missing has NaN.
        measures: columns, of which there is ``MEASURE, before`` too.
    """
    one, two = (
        {name: {key: cells[place] for key, cells in held.columns.items()} for place, name in enumerate(names)}
        for held, names in ((before, before.columns["name"]), (after, after.columns["name"]))
    )
    rows = []
    for name in dict.fromkeys([*one, *two]):
        told = {key: cell for key, cell in one.get(name, {}).items() if key in _FACTS}
        first = {f"{measure}{BEFORE}": one.get(name, {}).get(measure, math.nan) for measure in measures}
        rows.append(told | two.get(name, {}) | first)
    failures = dict(before.failures)
    for name, why in after.failures.items():
        note(failures, name, why)
    names = dict.fromkeys(column for row in rows for column in row)
    return tabled({column: [row.get(column, math.nan) for row in rows] for column in names}, failures)


def several(recipes: Mapping[str, Recipe], seeds: int) -> dict[str, Recipe]:
    """Return all recipes with seed 0, then with 1, and so on; the seed is at the end of a name."""
    return {
        f"{name}_seed{seed}": replace(recipe, seed=seed) for seed in range(seeds) for name, recipe in recipes.items()
    }


def _facts(zoo: Zoo, name: str, path: Path) -> dict[str, Any]:
    """Return what is known of a network's training; of one from elsewhere that it did converge."""
    told = training.metadata(path)
    return {
        "name": name,
        "recipe": name.rsplit("_seed", 1)[0],
        **asdict(zoo.recipes[name]),
        "epochs": json.loads(told.get("epochs", "null")),
        "training_loss": float(told.get("loss", "nan")),
        "converged": json.loads(told.get("converged", "true")),
        "trained_on": told.get("trained_on", ""),
    }


def _scored(
    bench: Bench, zoo: Zoo, paths: Mapping[str, Path], asked: Asked, failures: dict[str, str]
) -> dict[str, tuple[float | None, float | None, dict[str, float]]]:
    """Return by network its loss and accuracy on the data, and its values by column."""
    found: dict[str, tuple[float | None, float | None, dict[str, float]]] = {}
    names = [*paths]
    size = max(1, len(names) // _PARTS)
    layers, data, made = asked.layers, bench.on_device(asked.data), placed(zoo.network, bench.device)
    with progress.bar(f"scoring {', '.join(asked.measures)[:40]}", len(names), bench.shown) as advance:
        for start in range(0, len(names), size):
            some = {name: paths[name] for name in names[start : start + size]}
            store = bench.folder / f"{zoo.name}.sqlite"
            scores = score(
                some,
                "cross_entropy",
                data,
                model=made,
                layers=layers,
                measures=asked.measures,
                store=store,
            )
            errors: dict[tuple[str, str], list[str]] = {}
            for row in scores:
                column = f"{row.measure} {row.layer or 'network'}"
                if row.error:
                    errors.setdefault((row.checkpoint, row.error), []).append(column)
                elif row.value is not None:
                    *_, values = found.setdefault(row.checkpoint, (row.loss, row.accuracy, {}))
                    values[column] = row.value
            for (name, error), those in errors.items():
                note(failures, name, f"{', '.join(those)}: {error}")
            advance(len(some), "")
    return found
