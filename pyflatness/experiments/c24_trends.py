"""C24, Figures 1, 2, H.8 and H.9: sharpness, sensitivity, volume and dimension while networks are trained."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..generalization.coefficients import coefficients, whole
from . import c24
from .c24 import QUANTITIES
from .experiment import Bench, Experiment, Finding, Found
from .trajectories import Descent, steps_kept

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RATES, SIZES = (0.05, 0.1, 0.2), (8, 20, 32)
RATE, SIZE = 0.1, 20
"""What is held where the other varies."""

_FITTED = 0.99  # accuracy on the training data from which on a network counts as having interpolated them


def run(bench: Bench, kind: str) -> Found:
    """Follow networks of three learning rates, and of three batch sizes."""
    pairs = dict.fromkeys([*((rate, SIZE) for rate in RATES), *((RATE, size) for size in SIZES)])
    descents = [Descent(*pair, seed) for pair in pairs for seed in range(bench.settings["seeds"])]
    kept = steps_kept(bench.settings["steps"], bench.settings["snapshots"])
    table = c24.table(bench, kind, descents, kept, c24.compression)
    late = {quantity: _late(table, quantity) for quantity in QUANTITIES}
    unfitted = {
        name.rsplit("_step", 1)[0]: f"accuracy {accuracy:.3g} after {step} steps"
        for name, step, accuracy in zip(table["name"], table["step"], table["accuracy"], strict=True)
        if step == kept[-1] and accuracy < _FITTED
    }
    findings = [
        *_orders(table, kept[-1]),
        c24.average("late change of sharpness, ratio of last to first", late["sharpness"][0], "below 1"),
        *(
            c24.average(f"late rank correlation of sharpness with {label}", late[quantity][1], paper)
            for quantity, label, paper in (
                *(("log_volume", "log volume", "positive"), ("mls", "MLS", "positive"), ("nmls", "NMLS", "positive")),
                ("local_dimension", "local dimension", "unpredictable"),
            )
        ),
    ]
    return Found(
        table, tuple(findings), verdict(findings, len(descents)), lambda figure: draw(figure, table), unfitted, (13, 5)
    )


def _late(table: Mapping[str, Sequence[Any]], quantity: str) -> tuple[list[float], list[float]]:
    """Return by network, from when it has fitted its data, last over first value, and correlation with sharpness."""
    ratios, ranks = [], []
    owners = [name.rsplit("_step", 1)[0] for name in table["name"]]
    for owner in dict.fromkeys(owners):
        places = [place for place, other in enumerate(owners) if other == owner]
        start = next((place for place in places if table["accuracy"][place] >= _FITTED), None)
        late = [] if start is None else [place for place in places if place >= start]
        if len(late) < 3:
            continue
        values, sharpness = ([table[name][place] for place in late] for name in (quantity, "sharpness"))
        ratios.append(values[-1] / values[0])
        ranks.append(rank_correlation(sharpness, values))
    return ratios, ranks


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Return Spearman's correlation; NaN where one of them is constant or not finite."""
    columns = [np.asarray(values, dtype=np.float64) for values in (one, other)]
    if not np.isfinite(columns).all():
        return math.nan
    return float(coefficients("Spearman", columns, whole(len(one)))[0])


def _orders(table: Mapping[str, Sequence[Any]], last: int) -> list[Finding]:
    """Return at the end how sharpness and the others follow the learning rate and the batch size, over networks."""
    ends = [place for place, step in enumerate(table["step"]) if step == last]
    found = []
    for setting, held, at, paper in (
        *(("learning_rate", "batch_size", SIZE, "negative"), ("batch_size", "learning_rate", RATE, "positive")),
    ):
        places = [place for place in ends if table[held][place] == at]
        for quantity in ("sharpness", "mls", "log_volume"):
            values, given = ([float(table[name][place]) for place in places] for name in (quantity, setting))
            what = f"{QUANTITIES[quantity]} at the end, correlation with the {setting.replace('_', ' ')}"
            pearson = float(np.corrcoef(given, values)[0, 1]) if np.isfinite(values).all() else None
            found.append(_with_interval(what, pearson, len(places), paper))
    return found


def _with_interval(what: str, pearson: float | None, count: int, paper: str) -> Finding:
    """Return a correlation with its 95 % interval by Fisher's z; none of fewer than 5 networks."""
    if pearson is None or count < 5 or abs(pearson) >= 1:
        return Finding(what, pearson, paper=paper)
    half = 1.96 / np.sqrt(count - 3)
    low, high = np.tanh(np.arctanh(pearson) + np.array([-half, half]))
    return Finding(what, pearson, float(low), float(high), paper)


def verdict(findings: Sequence[Finding], networks: int) -> str:
    """Say which of the paper's trends are there."""
    held, against, open_ones = [], [], []
    for item in findings:
        said = f"{item.what} {c24.shown(item)}"
        wanted = {"positive": (0, 1), "negative": (0, -1), "below 1": (1, -1)}.get(item.paper)
        if wanted is None:
            continue
        border, sign = wanted
        if item.low is None or item.high is None:
            open_ones.append(said)
        elif sign * (item.low - border) > 0 and sign * (item.high - border) > 0:
            held.append(said)
        elif sign * (item.low - border) < 0 and sign * (item.high - border) < 0:
            against.append(said)
        else:
            open_ones.append(said)
    parts = [("As the paper says", held), ("Against it", against), ("Not decided", open_ones)]
    return f"{networks} networks. " + " ".join(f"{name}: {'; '.join(those)}." for name, those in parts if those)


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
    run=functools.partial(run, kind="convolutional"),
    small=c24.SMALL,
    paper=c24.PAPER,
    data="CIFAR-10",
)
PERCEPTRON = Experiment(
    name="c24-figH8-H9",
    figure="C24, Figures H.8 and H.9",
    title="sharpness, volume and sensitivity over the training of a multilayer perceptron",
    claim=_CLAIM,
    run=functools.partial(run, kind="perceptron"),
    small=c24.SMALL,
    paper=c24.PAPER,
    data="FashionMNIST",
)
