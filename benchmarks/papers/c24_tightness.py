"""C24, Figure G.4: the chain A ≤ B ≤ C ≤ D of Eq. 48 while a multilayer perceptron is trained."""

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from torch import nn

from pyflatness.theory.inequalities import bounds

from . import c24, claims
from .claims import Claim, average
from .experiment import Bench, Experiment, Found, Points, note
from .training import Data, Descent, steps_kept

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CHAIN = ("A", "B", "C", "D")
WIDEST = "C ≤ D"
"""Of the steps, as the paper says."""


def measured(bench: Bench) -> tuple[dict[str, list[Any]], dict[str, str]]:
    """Follow some networks, and compute both sides of each inequality at the first layer."""
    descents = [Descent(0.1, 20, seed) for seed in range(bench.settings["seeds"])]
    kept = steps_kept(bench.settings["steps"], bench.settings["snapshots"])
    return c24.table(bench, "perceptron", descents, kept, chain)


def judge(points: Points) -> Found:
    """Say how wide each inequality is: a mean over trainings of the mean over their points, which go along."""
    table, failures = points.columns, dict(points.failures)
    rows = {}
    for name, seed, *ends in zip(table["name"], table["seed"], *(table[name] for name in CHAIN), strict=True):
        if all(math.isfinite(end) and end > 0 for end in ends):
            rows[name] = seed, ends
        else:
            note(failures, name, "a side of the chain is not finite or not positive")
    broken = sum(not all(left <= right * (1 + 1e-5) for left, right in pairwise(ends)) for _, ends in rows.values())
    steps = {f"{one} ≤ {other}": (CHAIN.index(one), CHAIN.index(other)) for one, other in pairwise(CHAIN)}
    means = {
        step: _by_training([(seed, math.log10(ends[right] / ends[left])) for seed, ends in rows.values()])
        for step, (left, right) in steps.items()
    }
    findings = [
        average(f"{step}, log10 of the ratio", values, "large" if step == WIDEST else "small")
        for step, values in means.items()
    ]
    wider = [
        average(f"{WIDEST} less {step}, log10 of the ratio", [a - b for a, b in zip(means[WIDEST], own, strict=True)],
                "above 0")
        for step, own in means.items() if step != WIDEST
    ]  # fmt: skip
    said = ", ".join(f"{step} {claims.shown(item)}" for step, item in zip(steps, findings, strict=True))
    made = [Claim(item) for item in wider]
    verdict = (
        f"At {len(rows)} points of {len(set(table['seed']))} trainings {broken} break an inequality. In decades, in "
        f"the mean over the trainings, the steps are {said}. "
        f"The paper says that {WIDEST} is the widest. {claims.grouped(made)}"
    )
    return Found(
        table, (*findings, *wider), verdict, lambda figure: draw(figure, table), failures, size=(6.0, 4.0), claims=made
    )


def _by_training(points: Sequence[tuple[int, float]]) -> list[float]:
    """Return the mean of each training's points."""
    return [statistics.fmean(v for own, v in points if own == seed) for seed in dict.fromkeys(s for s, _ in points)]


def chain(network: nn.Module, data: Data) -> dict[str, float]:
    """Return A, B, C and D of Eq. 48, of the first layer's weight and all parameters."""
    found = bounds(network, nn.MSELoss(), (data[0], c24.units(data[1])), sharpness="all", progress=False)
    first = next(row.layer for row in found.rows)
    A, B = found[first, "5"].left, found[first, "5"].right
    return {"A": A, "B": B, "C": found[first, "48, C"].right, "D": found[first, "11"].right}


def draw(figure: "Figure", table: Mapping[str, Sequence[Any]]) -> None:
    """Draw the chain over the steps, a line for each network."""
    panel = figure.subplots()
    for number, name in enumerate(CHAIN):
        for seed in sorted(set(table["seed"])):
            places = [place for place, own in enumerate(table["seed"]) if own == seed]
            steps, values = ([table[column][place] for place in places] for column in ("step", name))
            panel.plot(steps, values, color=f"C{number}", linewidth=1, label=name if seed == 0 else None)
    panel.set_yscale("log")
    panel.set_xlabel("steps")
    panel.set_ylabel("sides of the chain A ≤ B ≤ C ≤ D")
    panel.legend()


EXPERIMENT = Experiment(
    name="c24-figG4",
    figure="C24, Figure G.4",
    title="how tight the bounds of MLS are: A ≤ B ≤ C ≤ D of Eq. 48",
    claim="The inequalities hold, and the gap between C and D is large against those between A and B and B and C.",
    measure=measured,
    judge=judge,
    seconds=12,
    long="13 min",
    small=c24.SMALL | {"seeds": 5},  # trainings, which intervals are over
    paper=c24.PAPER,
    data="FashionMNIST",
)
