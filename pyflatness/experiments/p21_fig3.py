"""P21, Figure 3: relative flatness against the gap, by how locally constant the labels are."""

import functools
from typing import TYPE_CHECKING, Any

from torch.nn import functional as F

from .. import progress
from ..api import head_flatness
from ..generalization.correlation import correlations
from . import synthetic
from .experiment import Bench, Experiment, Finding, Found

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CHECKED = 50  # samples that are taken through the network and back


def run(bench: Bench) -> Found:
    """Measure many data sets of each class separation, and correlate within each."""
    settings = bench.settings
    names, table = ("separation", "repetition", "kappa", "gap", "loss", "test_loss", "round_trip"), []
    with progress.bar("data sets", len(settings["separations"]) * settings["repetitions"], bench.shown) as advance:
        for separation in settings["separations"]:
            table += bench.once(
                f"p21-fig3 {separation} {settings['repetitions']} {settings['samples']} {settings['tested']}",
                functools.partial(_measured, bench, separation),
            )
            advance(settings["repetitions"], f"class separation {separation:g}")
    columns: dict[str, list[Any]] = dict(zip(names, map(list, zip(*table, strict=True)), strict=True))
    rows = [(c, _correlation(columns, c)) for c in settings["separations"]]
    findings = [
        Finding(f"Pearson at class separation {c:g}", *row, paper="rises with it, from none") for c, row in rows
    ]
    trend = correlations({"separation": [c for c, _ in rows], "pearson": [row[0] for _, row in rows]}, y="pearson")
    rank = trend["separation", "Spearman"]
    (first, low), (last, high) = rows[0], rows[-1]
    return Found(
        columns,
        (*findings, Finding("Spearman of the correlation with the separation", rank.value, rank.low, rank.high)),
        f"Over {settings['repetitions']} data sets each the correlation (Pearson, 95 % bootstrap intervals) of "
        f"relative flatness with the gap is {_said(low)} at class separation {first:g} and {_said(high)} at {last:g}. "
        f"That it rises with the separation is {'seen' if low[2] < high[1] else 'not seen'} between these two, and "
        f"over all separations its rank correlation with the separation is {rank.value:.2f}. Features that went "
        f"through the network's inverse and back differ by at most a relative {max(columns['round_trip']):.1g}.",
        lambda figure: _draw(figure, rows),
        size=(6.0, 4.0),
    )


def _measured(bench: Bench, separation: float) -> list[list[float]]:
    return [measured(bench, separation, seed) for seed in range(bench.settings["repetitions"])]


def measured(bench: Bench, separation: float, seed: int) -> list[float]:
    """Return relative flatness of the head on the sample, and the losses on sample and test set."""
    samples, tested = bench.settings["samples"], bench.settings["tested"]
    features, labels = synthetic.dataset(separation, seed, samples + tested)
    x, y = features[:samples], labels[:samples]
    weight, bias = synthetic.ridge(x, y)
    kappa = float(head_flatness(x, weight, bias, y, loss="mse_loss"))
    loss, test = (
        F.mse_loss(part @ weight.t() + bias, aim).item()
        for part, aim in ((x, y), (features[samples:], labels[samples:]))
    )
    return [separation, seed, kappa, test - loss, loss, test, synthetic.round_trip(x[:_CHECKED], seed)]


def _correlation(columns: dict[str, list[Any]], separation: float) -> tuple[float, float, float]:
    chosen = [place for place, c in enumerate(columns["separation"]) if c == separation]
    row = correlations({name: [columns[name][place] for place in chosen] for name in ("kappa", "gap")})
    found = row["kappa", "Pearson"]
    return found.value, found.low, found.high


def _said(row: tuple[float, float, float]) -> str:
    return f"{row[0]:.2f} [{row[1]:.2f}, {row[2]:.2f}]"


def _draw(figure: "Figure", rows: list[tuple[float, tuple[float, float, float]]]) -> None:
    axes = figure.subplots()
    values = [row[0] for _, row in rows]
    below, above = [row[0] - row[1] for _, row in rows], [row[2] - row[0] for _, row in rows]
    axes.errorbar([c for c, _ in rows], values, [below, above], fmt="o-", capsize=3)
    axes.axhline(0, color="0.6", linewidth=0.8)
    axes.set_xlabel("class separation")
    axes.set_ylabel("Pearson, relative flatness and gap")


EXPERIMENT = Experiment(
    name="p21-fig3",
    figure="P21, Figure 3",
    title="how relative flatness goes along with the gap, by how locally constant labels are",
    claim="The correlation of relative flatness with the gap rises with the class separation; where labels are not "
    "locally constant there is none.",
    run=run,
    small={"repetitions": 40, "samples": 500, "tested": 4500, "separations": [0.5, 1, 2, 3, 4, 6]},
    paper={"repetitions": 100, "samples": 500, "tested": 4500, "separations": [0.5, 1, 1.5, 2, 2.5, 3, 4, 5, 6]},
)
