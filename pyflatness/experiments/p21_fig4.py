"""P21, Figure 4: the generalisation bound of relative flatness and representativeness, by class separation."""

import functools
import math
import statistics
from typing import TYPE_CHECKING, Any

from .. import progress
from ..api import head_flatness
from ..generalization.authors import authors_representativeness
from ..generalization.representativeness import representativeness
from . import synthetic
from .experiment import Bench, Experiment, Finding, Found

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMES = ("separation", "repetition", "kappa", "flatness", "representativeness", "bound", "gap", "authors", "test_loss")
_FOLDS = 3


def run(bench: Bench) -> Found:
    """Compute bound and gap of many samples of each class separation."""
    settings = bench.settings
    separations, repetitions = settings["separations"], settings["repetitions"]
    table: list[list[float]] = []
    with progress.bar("data sets", len(separations) * repetitions, bench.shown) as advance:
        for separation in separations:
            table += bench.once(
                f"p21-fig4 {separation} {repetitions} {settings['samples']} {settings['tested']}",
                functools.partial(_measured, bench, separation),
            )
            advance(repetitions, f"class separation {separation:g}")
    columns: dict[str, list[Any]] = dict(zip(NAMES, map(list, zip(*table, strict=True)), strict=True))
    means = {name: [_mean(columns, name, c) for c in separations] for name in ("bound", "gap", "authors")}
    held = sum(bound >= gap for bound, gap in zip(columns["bound"], columns["gap"], strict=True)) / len(table)
    paper = {"bound": "just above the gap; falls with the separation", "authors": ""}
    findings = [
        Finding(f"{name} at class separation {c:g}, mean", *row, paper=paper.get(name, ""))
        for name, rows in means.items()
        for c, row in zip(separations, rows, strict=True)
    ]
    first, last = (means["bound"][place][0] for place in (0, -1))
    theirs = [means["authors"][place][0] for place in (0, -1)]
    gaps = [means["gap"][place][0] for place in (0, -1)]
    return Found(
        columns,
        (*findings, Finding("part of the samples whose gap is below the bound", held, paper="all")),
        f"The gap is below the bound in {held:.0%} of {len(table)} samples. The bound is {first:.2g} at class "
        f"separation {separations[0]:g} and {last:.2g} at {separations[-1]:g}, beside gaps of {gaps[0]:.2g} and "
        f"{gaps[1]:.2g} (means over {repetitions} samples): it {'falls' if last < first else 'rises'} as the problem "
        "becomes easier, and the paper says that it falls and is tight. The quantity that the authors' code calls "
        f"representativeness, nearly the loss on the held-out fold, goes from {theirs[0]:.2g} to {theirs[1]:.2g}.",
        lambda figure: _draw(figure, separations, means),
        size=(6.0, 4.0),
    )


def _measured(bench: Bench, separation: float) -> list[list[float]]:
    return [measured(bench, separation, seed) for seed in range(bench.settings["repetitions"])]


def measured(bench: Bench, separation: float, seed: int) -> list[float]:
    """Return the parts of the bound with ½δ²κ/m, δ = n^(-1/(4+m)), and heads refitted on the sample of each fold."""
    samples, tested = bench.settings["samples"], bench.settings["tested"]
    features, labels = synthetic.dataset(separation, seed, samples + tested)
    x, y, test = features[:samples], labels[:samples], (features[samples:], labels[samples:])
    weight, bias = synthetic.ridge(x, y)
    kappa = float(head_flatness(x, weight, bias, y, loss="mse_loss"))
    options: dict[str, Any] = {"loss": "mse_loss", "folds": _FOLDS, "fit": synthetic.ridge, "seed": seed}
    found = representativeness(x, weight, bias, y, test=test, draws=8, **options)
    assert found.test is not None
    flatness = found.delta**2 * kappa / (2 * x.shape[1])
    theirs = authors_representativeness(x, weight, bias, y, **options)
    test_loss = ((test[0] @ weight.t() + bias - test[1]) ** 2).mean().item()
    parts = [flatness, found.magnitude, flatness + found.magnitude, found.test.gap, theirs]
    return [separation, seed, kappa, *parts, test_loss]


def _mean(columns: dict[str, list[Any]], name: str, separation: float) -> tuple[float, float, float]:
    """Return a mean over samples with its 95 % interval."""
    own = [value for value, c in zip(columns[name], columns["separation"], strict=True) if c == separation]
    mean, half = statistics.fmean(own), 1.96 * statistics.stdev(own) / math.sqrt(len(own))
    return mean, mean - half, mean + half


def _draw(figure: "Figure", separations: list[float], means: dict[str, list[tuple[float, float, float]]]) -> None:
    axes = figure.subplots()
    labels = {"bound": "δ²κ/2m + |representativeness|", "gap": "gap", "authors": "the authors' representativeness"}
    for name, rows in means.items():
        values = [row[0] for row in rows]
        axes.errorbar(separations, values, [row[2] - row[0] for row in rows], fmt="o-", capsize=3, label=labels[name])
    axes.set_xlabel("class separation")
    axes.legend()


EXPERIMENT = Experiment(
    name="p21-fig4",
    figure="P21, Figure 4",
    title="the bound of relative flatness and representativeness beside the gap, by class separation",
    claim="Relative flatness and an approximation of representativeness tightly bound the generalisation gap, and the "
    "bound decreases the easier the learning problem becomes.",
    run=run,
    small={"repetitions": 10, "samples": 600, "tested": 2400, "separations": [0.5, 1, 2, 4, 6]},
    paper={"repetitions": 100, "samples": 600, "tested": 4500, "separations": [0.5, 1, 1.5, 2, 2.5, 3, 4, 5, 6]},
)
