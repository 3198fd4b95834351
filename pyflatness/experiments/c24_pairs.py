"""C24, Figures G.5 to G.7: how sharpness, compression, bounds and the gap go along over trained networks."""

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from ..api import measure
from ..generalization.correlation import correlations
from . import c24, correlating
from .experiment import Bench, Experiment, Finding, Found
from .trajectories import Data, Descent

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
PAIRS = (
    *(("mls", "gap", "positive"), ("nmls", "gap", "positive"), ("bound", "gap", "positive")),
    *(("sharpness", "gap", "positive"), ("log_volume", "sharpness", "positive"), ("log_volume", "mls", "positive")),
    *(("bound", "nmls", "positive"), ("D", "mls", "can be negative")),
    ("relative_flatness", "gap", "weak, even negative"),
)


def run(bench: Bench, kind: str) -> Found:
    """Train networks, and correlate all columns."""
    settings = bench.settings
    rows = itertools.product(settings["learning_rates"], settings["batch_sizes"], range(settings["seeds"]))
    descents = [Descent(*row) for row in rows]
    table = c24.table(bench, kind, descents, [settings["steps"]], both)
    fitted = [place for place, accuracy in enumerate(table["accuracy"]) if accuracy >= 0.99]
    failures = {
        name: f"accuracy {accuracy:.3g}, not in the correlations"
        for name, accuracy in zip(table["name"], table["accuracy"], strict=True)
        if accuracy < 0.99
    }
    kept = {column: [values[place] for place in fitted] for column, values in table.items()}
    for column in COLUMNS:
        for name, value in zip(kept["name"], kept[column], strict=True):
            if not math.isfinite(value):
                failures.setdefault(name, f"{COLUMNS[column]} is {value}, not in its correlations")
    findings = []
    for one, other, paper in PAIRS:
        pairs = zip(kept["name"], kept[one], kept[other], strict=True)
        out = [name for name, *ends in pairs if not all(map(math.isfinite, ends))]
        found = correlations({"name": kept["name"], one: kept[one], other: kept[other]}, [one], other, exclude=out)
        ends = correlating.ends(found, one, "Pearson")
        findings.append(Finding(f"{COLUMNS[one]} with {COLUMNS[other]}, Pearson", *ends, paper))
    return Found(
        table, tuple(findings), verdict(findings, len(fitted)), lambda figure: draw(figure, kept), failures, (6.5, 5.5)
    )


def both(network: nn.Module, data: Data) -> dict[str, float]:
    """Return compression, and D of Eq. 48, the right-hand side of Eq. 12, and relative flatness of the head."""
    names = ["mls_sharpness_bound", "relative_flatness"]
    report = measure(network, nn.MSELoss(), (data[0], c24.units(data[1])), measures=names, progress=False)
    first, *_, last = report.by_measure()["relative_flatness"]
    layers = [layer for layer in (first, last) if layer]
    head = [layer for layer in report.by_measure()["relative_flatness"] if layer][-1]
    found = {"D": report[layers[0], names[0]], "bound": report[names[0]], "relative_flatness": report[head, names[1]]}
    return c24.compression(network, data) | {name: float(estimate.value) for name, estimate in found.items()}


def verdict(findings: Sequence[Finding], networks: int) -> str:
    """Say which pairs go along as the paper says."""
    wanted = [item for item in findings if item.paper == "positive"]
    right = [item for item in wanted if item.low is not None and item.low > 0]
    wrong = [item for item in wanted if item.high is not None and item.high < 0]
    rest = [item for item in wanted if item not in right and item not in wrong]
    parts = [("Positive with their whole interval, as claimed", right), ("Negative, against the claim", wrong)]
    parts += [("Not decided", rest), ("Besides", [item for item in findings if item.paper != "positive"])]
    sentences = [
        f"{name}: {'; '.join(f'{item.what} {c24.shown(item)}' for item in those)}." for name, those in parts if those
    ]
    return f"{networks} networks, 95 % bootstrap intervals over networks. " + " ".join(sentences)


def draw(figure: "Figure", table: Mapping[str, Sequence[Any]]) -> None:
    """Draw the matrix of Pearson's correlations."""
    values = np.array([[float(value) for value in table[column]] for column in COLUMNS])
    fine = np.isfinite(values).all(axis=0)
    matrix = np.corrcoef(values[:, fine])
    panel = figure.subplots()
    image = panel.imshow(matrix, cmap="RdBu_r", vmin=-1, vmax=1)
    for row, column in itertools.product(range(len(matrix)), repeat=2):
        panel.text(column, row, f"{matrix[row, column]:.2f}", ha="center", va="center", fontsize=6)
    panel.set_xticks(range(len(COLUMNS)), [*COLUMNS.values()], rotation=60, fontsize=7)
    panel.set_yticks(range(len(COLUMNS)), [*COLUMNS.values()], fontsize=7)
    figure.colorbar(image, ax=panel)


_VARIED = {"learning_rates": [0.05, 0.1, 0.2], "batch_sizes": [8, 20, 32]}


def _experiment(kind: str, name: str, figure: str, data: str) -> Experiment:
    return Experiment(
        name=name,
        figure=figure,
        title=f"sharpness, compression, bounds and gap over {kind} networks, pair by pair",
        claim="MLS, NMLS and the bound of Eq. 12 go along with the gap, the bound with NMLS, log volume with sharpness "
        "and MLS, sharpness with the gap; relative flatness of the head hardly does, or with the other sign.",
        run=functools.partial(run, kind=kind),
        small={**c24.SMALL, **_VARIED, "seeds": 4},
        paper={**c24.PAPER, **_VARIED, "seeds": 11},
        data=data,
    )


CONVOLUTIONAL = _experiment("convolutional", "c24-figG5", "C24, Figures G.5 and G.7", "CIFAR-10")
PERCEPTRON = _experiment("perceptron", "c24-figG6", "C24, Figure G.6", "FashionMNIST")
