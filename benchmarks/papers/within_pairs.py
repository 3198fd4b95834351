"""Take networks of the study within recipes on at the same loss in three ways: the intervention of docs/studies.md."""

import csv
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pyflatness as pf
from pyflatness import progress

from . import within
from .closed_form import ClosedForm
from .study import Planned
from .training import Data

NETWORKS, STEPS, SIZE = 240, 200, 1e-3
WAYS = ("relative_flatness head", "weight_norm", "random")
COLUMNS = ("name", "way", "train_loss", "relative_flatness head", "weight_norm", "test error", "test loss", "moved")


def continued(network: nn.Sequential, way: str, train: Data, seed: int, steps: int = STEPS) -> float:
    """Move a network along a level of its training loss, and return the loss at the end.

    Args:
        network: at the loss :data:`.within.LOSS`, which is changed.
        way: one of :data:`WAYS`.
        train: inputs and labels.
        seed: of random directions.
        steps: to take.
    """
    flat, gradient = within.flattened(network)
    closed_form, every = ClosedForm(network, *train), torch.arange(len(train[1]))
    generator = torch.Generator().manual_seed(seed)

    def of_loss() -> tuple[float, Tensor]:
        return float(closed_form.backward(every)), gradient.clone()

    def direction() -> Tensor:
        if way == "random":
            return torch.randn(flat.shape, generator=generator)
        if way == "weight_norm":
            return flat.clone()
        gradient.zero_()
        kappa(network, train).backward()
        return gradient.clone()

    _, own = of_loss()
    for _ in range(steps):
        way_down = direction()
        way_down -= (way_down @ own) / (own @ own) * own
        flat.sub_(way_down, alpha=SIZE * float(flat.norm() / way_down.norm()))
        loss, own = of_loss()
        flat.sub_(own, alpha=(loss - within.LOSS) / float(own @ own))
    for _ in range(10):
        loss, own = of_loss()
        if abs(loss - within.LOSS) <= 1e-4 * within.LOSS:
            break
        flat.sub_(own, alpha=(loss - within.LOSS) / float(own @ own))
    return loss


def kappa(network: nn.Sequential, train: Data) -> Tensor:
    """Return κ of the head, differentiable."""
    head = network[-1]
    assert isinstance(head, nn.Linear)
    return pf.flatness_penalty(network[:-1](train[0]), head.weight, head.bias, train[1])


def taken_on(planned: Planned, way: str, weights: Mapping[str, Tensor], train: Data, test: Data) -> dict[str, Any]:
    """Return the row of a network with these weights, moved in a way."""
    network = within.ARCHITECTURES[planned.architecture](train[0].shape[1])
    assert isinstance(network, nn.Sequential)
    network.load_state_dict(weights)
    before = nn.utils.parameters_to_vector(network.parameters()).detach().clone()
    loss = continued(network, way, train, planned.seed)
    after = nn.utils.parameters_to_vector(network.parameters()).detach()
    targets, _ = within.tested(network.eval(), test)
    told = {"name": planned.name, "way": way, "train_loss": loss, "weight_norm": float(after @ after)}
    told |= {"relative_flatness head": float(kappa(network, train).detach())}
    told |= {name: targets[name] for name in within.TARGETS}
    return told | {"moved": float((after - before).norm() / before.norm())}


def run(data_of: Callable[[str], tuple[Data, Data]], folder: Path, networks: int = NETWORKS) -> Path:
    """Go on with the intervention on the first networks of the study's list, and return the table's path."""
    from safetensors.torch import load_file

    path = folder / "pairs.csv"
    if not path.exists():
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerow(COLUMNS)
    with path.open(newline="", encoding="utf-8") as file:
        there = {cells["name"] for cells in csv.DictReader(file)}
    wanted = [one for one in within.plan()[:networks] if one.name not in there]
    for planned in progress.track(wanted, len(wanted), "pairs", None):
        weights = folder / "weights" / f"{planned.name}.safetensors"
        if not weights.exists():
            continue
        train, test = data_of(planned.data)
        rows = [taken_on(planned, way, load_file(weights), train, test) for way in WAYS]
        with path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, COLUMNS).writerows(
                {key: f"{cell:.7g}" if isinstance(cell, float) else cell for key, cell in row.items()} for row in rows
            )
    return path
