"""C24, Figures G.5 to G.7: how sharpness, compression, bounds and the gap go along over trained networks."""

import functools
import itertools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from pyflatness.api import measure
from pyflatness.statistics.correlation import correlations

from . import beside, c24, claims, correlating
from .c24 import FITTED
from .claims import Claim
from .experiment import Bench, Experiment, Finding, Found, Points, note
from .training import Data, Descent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = {
    "local_dimension": "local dim",
    "sharpness": "sharpness",
    "log_volume": "log volume",
    "mls": "MLS",
    "nmls": "NMLS",
    "gap": "gen gap",
    "D": "D",
    "bound": "bound",
    "relative_flatness": "rel sharpness",
}
RECIPE = ("learning_rate", "batch_size")
PAIRS = (
    *(("mls", "gap", "positive"), ("nmls", "gap", "positive"), ("bound", "gap", "positive")),
    *(("sharpness", "gap", "positive"), ("log_volume", "sharpness", "positive"), ("log_volume", "mls", "positive")),
    *(("bound", "nmls", "positive"), ("D", "mls", "can be negative")),
    ("relative_flatness", "gap", "weak, even negative"),
)
WEAK = 0.3
"""A correlation below it counts as weak, which the paper gives no number for."""


def measured(bench: Bench, kind: str) -> tuple[dict[str, list[Any]], dict[str, str]]:
    """Train networks, and measure all columns."""
    settings = bench.settings
    rows = itertools.product(settings["learning_rates"], settings["batch_sizes"], range(settings["seeds"]))
    descents = [Descent(*row) for row in rows]
    return c24.table(bench, kind, descents, [settings["steps"]], both)


def judge(points: Points) -> Found:
    """Correlate pairs of columns, and say which go along as in the paper."""
    table, failures = points.columns, dict(points.failures)
    for place, name in enumerate(table["name"]):
        if not table["accuracy"][place] >= FITTED:
            note(failures, name, f"accuracy {table['accuracy'][place]:.3g}, not in the correlations")
        for column, label in COLUMNS.items():
            value = table[column][place]
            if not math.isfinite(value):
                note(failures, name, f"{label} is {value}, not in its correlations")
    findings = [correlated(table, one, other, paper) for one, other, paper in PAIRS]
    held, against = beside_gap(table)
    recipes = {*zip(table["learning_rate"], table["batch_size"], strict=True)}
    fitted = sum(accuracy >= FITTED for accuracy in table["accuracy"])
    wanted = [Claim(item) for item in findings if item.paper == "positive"]
    *_, besides, kappa = findings
    decided = [*wanted, Claim(kappa, -1, WEAK), Claim(kappa)]
    verdict = (
        f"{fitted} networks of {len(recipes)} recipes, 95 % intervals over recipes and seeds. The paper says "
        f"that these are positive. {claims.grouped(wanted)} The paper says that relative flatness of the head, "
        f"which it calls relative sharpness, correlates weakly with the gap, or negatively; weak is taken as below "
        f"{WEAK:g}. {claims.grouped(decided[-2:-1])} That it is positive: {decided[-1].decided()}. Besides: "
        f"{besides.what} {claims.shown(besides)}."
    )
    return Found(
        table, (*findings, *held), verdict, lambda figure: draw(figure, table), failures, (6.5, 5.5), {"gap": against},
        decided,
    )  # fmt: skip


def beside_gap(table: Mapping[str, list[Any]]) -> tuple[list[Finding], str]:
    """Return how the measures that the paper holds against the gap go with it, beside baselines."""
    kept = [
        place
        for place, (accuracy, gap) in enumerate(zip(table["accuracy"], table["gap"], strict=True))
        if accuracy >= FITTED and math.isfinite(gap)
    ]
    if len({(table["learning_rate"][place], table["batch_size"][place]) for place in kept}) < 2:
        return [], ""
    networks = {column: [cells[place] for place in kept] for column, cells in table.items()}
    measures = [one for one, other, _ in PAIRS if other == "gap"]
    return beside.table(networks, {name: COLUMNS[name] for name in measures}, "gap", RECIPE)


def correlated(table: Mapping[str, list[Any]], one: str, other: str, paper: str) -> Finding:
    """Return Pearson's correlation over the networks that fitted their data and have both values.

    Networks that differ in the seed alone are not independent, and those of one seed began at the same weights.
    """
    what = f"{COLUMNS[one]} with {COLUMNS[other]}, Pearson"
    rows = zip(table["accuracy"], table[one], table[other], strict=True)
    kept = [
        place for place, (accuracy, *pair) in enumerate(rows) if accuracy >= FITTED and all(map(math.isfinite, pair))
    ]
    if len(kept) < 2:
        return Finding(what, None, paper=paper)
    chosen = {name: [table[name][place] for place in kept] for name in ("name", "seed", *RECIPE, one, other)}
    found = correlations(chosen, [one], other, settings=RECIPE, seeds="seed", interval="fisher")
    return Finding(what, *correlating.ends(found, one, "Pearson"), paper)


def both(network: nn.Module, data: Data) -> dict[str, float]:
    """Return compression, and D of Eq. 48, the right-hand side of Eq. 12, and relative flatness of the head."""
    names = ["mls_sharpness_bound", "relative_flatness"]
    report = measure(network, nn.MSELoss(), (data[0], c24.units(data[1])), measures=names, progress=False)
    first, *_, last = report.by_measure()["relative_flatness"]
    layers = [layer for layer in (first, last) if layer]
    head = [layer for layer in report.by_measure()["relative_flatness"] if layer][-1]
    found = {"D": report[layers[0], names[0]], "bound": report[names[0]], "relative_flatness": report[head, names[1]]}
    return c24.compression(network, data) | {name: float(estimate.value) for name, estimate in found.items()}


def draw(figure: "Figure", table: Mapping[str, list[Any]]) -> None:
    """Draw the matrix of Pearson's correlations."""
    values = np.array([[float(value) for value in table[column]] for column in COLUMNS])
    fine = np.isfinite(values).all(axis=0) & (np.array(table["accuracy"]) >= FITTED)
    with np.errstate(invalid="ignore", divide="ignore"):  # of one network, or a column that is constant
        matrix = np.corrcoef(values[:, fine]) if fine.any() else np.full(2 * (len(COLUMNS),), np.nan)
    panel = figure.subplots()
    image = panel.imshow(matrix, cmap="RdBu_r", vmin=-1, vmax=1)
    for row, column in itertools.product(range(len(matrix)), repeat=2):
        panel.text(column, row, f"{matrix[row, column]:.2f}", ha="center", va="center", fontsize=6)
    panel.set_xticks(range(len(COLUMNS)), [*COLUMNS.values()], rotation=60, fontsize=7)
    panel.set_yticks(range(len(COLUMNS)), [*COLUMNS.values()], fontsize=7)
    figure.colorbar(image, ax=panel)


_VARIED = {"learning_rates": [0.05, 0.1, 0.2], "batch_sizes": [8, 20, 32]}


def _experiment(kind: str, name: str, figure: str, data: str, seconds: int, long: str = "not run") -> Experiment:
    return Experiment(
        name=name,
        figure=figure,
        title=f"sharpness, compression, bounds and gap over {kind} networks, pair by pair",
        claim="MLS, NMLS and the bound of Eq. 12 go along with the gap, the bound with NMLS, log volume with sharpness "
        "and MLS, sharpness with the gap; relative flatness of the head hardly does, or with the other sign.",
        measure=functools.partial(measured, kind=kind),
        judge=judge,
        seconds=seconds,
        long=long,
        small={**c24.SMALL, **_VARIED, "seeds": 11},
        paper={**c24.PAPER, **_VARIED, "seeds": 11},
        data=data,
    )


CONVOLUTIONAL = _experiment("convolutional", "c24-figG5", "C24, Figure G.5", "CIFAR-10", 173)
LENET = _experiment("LeNet", "c24-figG7", "C24, Figure G.7", "CIFAR-10", 267)
PERCEPTRON = _experiment("perceptron", "c24-figG6", "C24, Figure G.6", "FashionMNIST", 54, "50 min")
