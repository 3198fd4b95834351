"""C24, Figures 1, 2, H.8 and H.9: sharpness, sensitivity, volume and dimension while networks are trained."""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pyflatness.statistics.correlation import correlations
from pyflatness.statistics.tables import Vector

from . import c24, claims, correlating
from .c24 import FITTED, QUANTITIES
from .claims import Claim
from .experiment import Bench, Experiment, Finding, Found, Points, note
from .training import Descent, steps_kept

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RATES, SIZES = (0.05, 0.1, 0.2), (8, 20, 32)
RATE, SIZE = 0.1, 20
"""What is held where the other varies."""


def measured(bench: Bench, kind: str) -> tuple[dict[str, list[Any]], dict[str, str]]:
    """Follow networks of three learning rates, and of three batch sizes."""
    pairs = dict.fromkeys([*((rate, SIZE) for rate in RATES), *((RATE, size) for size in SIZES)])
    descents = [Descent(*pair, seed) for pair in pairs for seed in range(bench.settings["seeds"])]
    kept = steps_kept(bench.settings["steps"], bench.settings["snapshots"])
    return c24.table(bench, kind, descents, kept, c24.compression)


def judge(points: Points) -> Found:
    """Say which of the paper's trends are there."""
    table, failures = points.columns, dict(points.failures)
    last = max(table["step"])
    for name, step, accuracy in zip(table["name"], table["step"], table["accuracy"], strict=True):
        if step == last and not accuracy >= FITTED:
            note(failures, _owner(name), f"accuracy {accuracy:.3g} after {step} steps")
    claims_made = _orders(table, last, failures) + _late(table, failures)
    networks = {*map(_owner, table["name"])}
    recipes = {*zip(table["learning_rate"], table["batch_size"], strict=True)}
    verdict = (
        f"{len(networks)} networks of {len(recipes)} recipes. What is late is a mean over recipes, each the mean of "
        "its networks, with intervals over recipes and seeds. What is at the end is of "
        f"{len(RATES)} settings, so that its intervals are over seeds alone, of which there have to be five, and say "
        f"nothing of other settings. {claims.grouped(claims_made)}"
    )
    free = _late_correlation(table, "local_dimension", "unpredictable", failures)
    volume, sharpness = _second_half(table, failures)
    verdict += (
        f" The paper says that volume goes on to decrease where sharpness does no more. {claims.grouped([volume])} "
        f"Beside it: {sharpness.what} {claims.shown(sharpness)}. Local dimension is not explained by sharpness in the "
        f"paper; here: {free.what} {claims.shown(free)}."
    )
    return Found(
        table,
        (*(claim.finding for claim in claims_made), free, volume.finding, sharpness),
        verdict,
        lambda figure: draw(figure, table),
        failures,
        (13, 5),
        claims=(*claims_made, volume),
    )


def _owner(name: str) -> str:
    return name.rsplit("_step", 1)[0]


def _late(table: Mapping[str, Sequence[Any]], failures: dict[str, str]) -> list[Claim]:
    """Return what becomes of sharpness once the data are fitted, and what goes along with it."""
    ratios = {}
    for owner, places in late_places(table, failures).items():
        ratio = table["sharpness"][places[-1]] / table["sharpness"][places[0]]
        if math.isfinite(ratio):
            ratios[owner] = ratio
        else:
            note(failures, owner, "the late change of sharpness is not finite")
    change = _over_recipes("late change of sharpness, ratio of last to first", ratios, "below 1")
    along = [_late_correlation(table, quantity, "positive", failures) for quantity in ("log_volume", "mls", "nmls")]
    return [Claim(change, -1, 1.0), *map(Claim, along)]


def _second_half(table: Mapping[str, Sequence[Any]], failures: dict[str, str]) -> tuple[Claim, Finding]:
    """Return what becomes of volume in the second half of the snapshots since the data are fitted, and of sharpness."""
    volumes, ratios = {}, {}
    for owner, places in late_places(table, failures).items():
        first, last = places[len(places) // 2], places[-1]
        change = table["log_volume"][last] - table["log_volume"][first]
        if math.isfinite(change) and last != first:
            volumes[owner] = change
            ratios[owner] = table["sharpness"][last] / table["sharpness"][first]
    volume = _over_recipes("change of log volume in the second half of what is late", volumes, "below 0")
    return Claim(volume, -1), _over_recipes("change of sharpness in that half, ratio of last to first", ratios, "1")


def _late_correlation(
    table: Mapping[str, Sequence[Any]], quantity: str, paper: str, failures: dict[str, str]
) -> Finding:
    """Return the mean rank correlation of sharpness with a quantity over the snapshots since the data are fitted."""
    ranks = {}
    for owner, places in late_places(table, failures).items():
        sharpness, values = ([table[name][place] for place in places] for name in ("sharpness", quantity))
        rank = correlating.rank_correlation(sharpness, values)
        if rank is None:
            note(failures, owner, f"no late rank correlation of sharpness with {QUANTITIES[quantity]}")
        else:
            ranks[owner] = rank
    found = _over_recipes(f"late rank correlation of sharpness with {QUANTITIES[quantity]}", ranks, paper)
    if found.low is None or found.high is None:
        return found
    return replace(found, low=max(found.low, -1.0), high=min(found.high, 1.0))  # Student's t may go beyond


def late_places(table: Mapping[str, Sequence[Any]], failures: dict[str, str]) -> dict[str, list[int]]:
    """Return the rows of each network from when it has fitted its data, where there are at least three."""
    found: dict[str, list[int]] = {}
    owners = [_owner(name) for name in table["name"]]
    for owner in dict.fromkeys(owners):
        places = [place for place, other in enumerate(owners) if other == owner]
        start = next((place for place in places if table["accuracy"][place] >= FITTED), None)
        late = [] if start is None else [place for place in places if place >= start]
        if len(late) < 3:
            note(failures, owner, f"{len(late)} snapshots since it has fitted its data: not in what is late")
        else:
            found[owner] = late
    return found


def _over_recipes(what: str, values: Mapping[str, float], paper: str) -> Finding:
    """Return the mean over recipes of the mean over each one's networks, with its interval over recipes and seeds."""
    named = [owner.rsplit("_seed", 1) for owner in values]
    recipes, seeds = (np.unique([name[part] for name in named], return_inverse=True)[1] for part in (0, 1))
    cells, member = np.array([*values.values()]), np.eye(len({*recipes.tolist()}))[recipes]  # (networks, recipes)

    def mean(drawn: Vector) -> Vector:
        counts = drawn @ member
        means = drawn @ (cells[:, None] * member) / np.maximum(counts, 1)
        found: Vector = means.sum(axis=1) / (counts > 0).sum(axis=1)
        return found

    told = f"{what}, over {len(values)} networks of {member.shape[1]} recipes"
    return correlating.jackknifed(told, mean, recipes, seeds, paper)


def _orders(table: Mapping[str, Sequence[Any]], last: int, failures: dict[str, str]) -> list[Claim]:
    """Return at the end how sharpness and the others follow the learning rate and the batch size, over networks."""
    ends = [place for place, step in enumerate(table["step"]) if step == last]
    found = []
    for setting, held, at, sign in (
        *(("learning_rate", "batch_size", SIZE, -1), ("batch_size", "learning_rate", RATE, 1)),
    ):
        for quantity in ("sharpness", "mls", "log_volume"):
            fine = []
            for place in ends:
                if table[held][place] == at and math.isfinite(table[quantity][place]):
                    fine.append(place)
                elif table[held][place] == at:
                    note(failures, _owner(table["name"][place]), f"{QUANTITIES[quantity]} at the end is not finite")
            given, values, seeds = (
                np.array([float(table[name][place]) for place in fine]) for name in (setting, quantity, "seed")
            )
            what = f"{QUANTITIES[quantity]} at the end, correlation with the {setting.replace('_', ' ')}"
            told = f"{what} over {len(fine)} networks"
            found.append(
                Claim(_with_interval(told, given, values, seeds, "negative" if sign < 0 else "positive"), sign)
            )
    return found


def _with_interval(what: str, given: Vector, values: Vector, seeds: Vector, paper: str) -> Finding:
    """Return Pearson's correlation with what was set, and its interval over seeds, if there are at least five."""
    if len(values) < 2:
        return Finding(what, None, paper=paper)
    table = {"given": given, "value": values, "seed": seeds}
    found = correlations(table, "given", "value", settings="seed", interval="fisher")
    return Finding(what, *correlating.ends(found, "given", "Pearson"), paper)


def draw(figure: "Figure", table: Mapping[str, Sequence[Any]]) -> None:
    """Draw each quantity over the steps: above by learning rate, below by batch size; a line is a mean over seeds."""
    panels = figure.subplots(2, 6, sharex=True)
    columns = {"loss": "training loss", **QUANTITIES}
    for row, (setting, held, at) in zip(
        panels, (("learning_rate", "batch_size", SIZE), ("batch_size", "learning_rate", RATE)), strict=True
    ):
        for panel, (column, label) in zip(row, columns.items(), strict=True):
            for value in sorted({v for v, h in zip(table[setting], table[held], strict=True) if h == at}):
                places = [p for p, v in enumerate(table[setting]) if v == value and table[held][p] == at]
                steps = sorted({table["step"][p] for p in places})
                means = [np.mean([table[column][p] for p in places if table["step"][p] == step]) for step in steps]
                panel.plot(steps, means, label=f"{setting.replace('_', ' ')} {value:g}", linewidth=1)
            if column in ("loss", "sharpness", "mls", "nmls"):
                panel.set_yscale("log")
            panel.set_title(label, fontsize=8)
            panel.tick_params(labelsize=6)
        row[0].legend(fontsize=6)
    for panel in panels[1]:
        panel.set_xlabel("steps", fontsize=7)


_CLAIM = (
    "Once the loss is minimised sharpness and volume decrease together, and MLS follows sharpness; higher learning "
    "rates and smaller batches lead to lower sharpness and stronger compression; local dimension is not explained by "
    "sharpness."
)
CONVOLUTIONAL = Experiment(
    name="c24-fig1-2",
    figure="C24, Figures 1 and 2",
    title="sharpness, volume and sensitivity over the training of a convolutional network",
    claim=_CLAIM,
    measure=functools.partial(measured, kind="convolutional"),
    judge=judge,
    seconds=102,
    small=c24.SMALL | {"seeds": 5},
    paper=c24.PAPER,
    data="CIFAR-10",
)
PERCEPTRON = Experiment(
    name="c24-figH8-H9",
    figure="C24, Figures H.8 and H.9",
    title="sharpness, volume and sensitivity over the training of a multilayer perceptron",
    claim=_CLAIM,
    measure=functools.partial(measured, kind="perceptron"),
    judge=judge,
    seconds=55,
    long="16 min on MNIST",
    small=c24.SMALL | {"seeds": 5},
    paper=c24.PAPER,
    data="FashionMNIST",
)
