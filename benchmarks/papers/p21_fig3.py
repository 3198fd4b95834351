"""P21, Figure 3: relative flatness against the gap, by how locally constant the labels are."""

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.nn import functional as F

from pyflatness import progress
from pyflatness.api import head_flatness
from pyflatness.statistics.correlation import correlations
from pyflatness.statistics.tables import Vector

from . import claims, correlating, synthetic
from .claims import Claim
from .experiment import Bench, Experiment, Finding, Found, Points

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CHECKED = 50  # samples that are taken through the network and back


def measure(bench: Bench) -> tuple[dict[str, list[Any]], dict[str, str]]:
    """Measure many data sets of each class separation."""
    settings = bench.settings
    names, table = ("separation", "repetition", "kappa", "gap", "loss", "test_loss", "round_trip"), []
    with progress.bar("data sets", len(settings["separations"]) * settings["repetitions"], bench.shown) as advance:
        for separation in settings["separations"]:
            table += bench.once(
                f"p21-fig3 {separation} {settings['repetitions']} {settings['samples']} {settings['tested']}",
                functools.partial(_measured, bench, separation),
            )
            advance(settings["repetitions"], f"class separation {separation:g}")
    return dict(zip(names, map(list, zip(*table, strict=True)), strict=True)), {}


def judge(points: Points) -> Found:
    """Correlate within each class separation."""
    columns = points.columns
    separations = [*dict.fromkeys(columns["separation"])]
    rows = [
        Finding(f"Pearson at class separation {c:g}", *_correlation(columns, c), "rises with it, from none")
        for c in separations
    ]
    values = [claims.number(row) for row in rows]
    rank = Finding("Spearman of the correlation with the separation", correlating.rank_correlation(separations, values))
    first, last = rows[0], rows[-1]
    rise = correlating.paired_difference(
        f"Pearson at class separation {separations[-1]:g} less that at {separations[0]:g}",
        [_pair(columns, c) for c in (separations[-1], separations[0])],  # of the same seeds
        np.arange(len(columns["kappa"]) // len(separations)),
        paper="above 0",
    )
    return Found(
        columns,
        (*rows, rise, rank),
        f"Over {len(columns['kappa']) // len(rows)} data sets each the correlation (Pearson, 95 % intervals by the "
        f"jackknife) of relative flatness with the gap is {claims.shown(first)} at class separation {separations[0]:g} "
        f"and {claims.shown(last)} at {separations[-1]:g}. The paper says that it rises. "
        f"{claims.grouped([Claim(rise)])} "
        f"Over all separations its rank correlation with the separation is {claims.shown(rank)}. Features that went "
        f"through the network's inverse and back differ by at most a relative {max(columns['round_trip']):.1g}.",
        lambda figure: _draw(figure, separations, rows),
        points.failures,
        size=(6.0, 4.0),
        claims=[Claim(rise)],
    )


def _pair(columns: Mapping[str, Sequence[Any]], separation: float) -> tuple[Vector, Vector]:
    chosen = [place for place, c in enumerate(columns["separation"]) if c == separation]
    kappa, gap = (np.array([columns[name][place] for place in chosen]) for name in ("kappa", "gap"))
    return kappa, gap


def _measured(bench: Bench, separation: float) -> list[list[float]]:
    return [measured(bench, separation, seed) for seed in range(bench.settings["repetitions"])]


def measured(bench: Bench, separation: float, seed: int) -> list[float]:
    """Return relative flatness of the head on the sample, and the losses on sample and test set."""
    samples, tested = bench.settings["samples"], bench.settings["tested"]
    features, labels = bench.on_device(synthetic.dataset(separation, seed, samples + tested))
    x, y = features[:samples], labels[:samples]
    weight, bias = synthetic.ridge(x, y)
    kappa = float(head_flatness(x, weight, bias, y, loss="mse_loss"))
    loss, test = (
        F.mse_loss(part @ weight.t() + bias, aim).item()
        for part, aim in ((x, y), (features[samples:], labels[samples:]))
    )
    return [separation, seed, kappa, test - loss, loss, test, synthetic.round_trip(x[:_CHECKED], seed)]


def _correlation(
    columns: Mapping[str, Sequence[Any]], separation: float
) -> tuple[float | None, float | None, float | None]:
    kappa, gap = _pair(columns, separation)
    table = {"kappa": kappa, "gap": gap, "repetition": np.arange(len(gap))}
    found = correlations(table, "kappa", settings="repetition", interval="fisher")
    return correlating.ends(found, "kappa", "Pearson")


def _draw(figure: "Figure", separations: Sequence[float], rows: Sequence[Finding]) -> None:
    axes = figure.subplots()
    claims.error_bars(axes, separations, rows)
    axes.axhline(0, color="0.6", linewidth=0.8)
    axes.set_xlabel("class separation")
    axes.set_ylabel("Pearson, relative flatness and gap")


EXPERIMENT = Experiment(
    name="p21-fig3",
    figure="P21, Figure 3",
    title="how relative flatness goes along with the gap, by how locally constant labels are",
    claim="The correlation of relative flatness with the gap rises with the class separation; where labels are not "
    "locally constant there is none.",
    measure=measure,
    judge=judge,
    seconds=11,
    long="25 min",
    small={"repetitions": 40, "samples": 500, "tested": 4500, "separations": [0.5, 1, 2, 3, 4, 6]},
    paper={"repetitions": 100, "samples": 500, "tested": 4500, "separations": [0.5, 1, 1.5, 2, 2.5, 3, 4, 5, 6]},
)
