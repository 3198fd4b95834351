"""C24, Figure G.4: the chain A ≤ B ≤ C ≤ D of Eq. 48 while a multilayer perceptron is trained."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from torch import nn

from ..generalization.inequalities import bounds
from . import c24
from .experiment import Bench, Experiment, Found
from .trajectories import Data, Descent, steps_kept

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CHAIN = ("A", "B", "C", "D")


def run(bench: Bench) -> Found:
    """Follow some networks, and compute both sides of each inequality at the first layer."""
    descents = [Descent(0.1, 20, seed) for seed in range(bench.settings["seeds"])]
    kept = steps_kept(bench.settings["steps"], bench.settings["snapshots"])
    table = c24.table(bench, "perceptron", descents, kept, chain)
    rows = list(zip(*(table[name] for name in CHAIN), strict=True))
    broken = sum(not all(left <= right * (1 + 1e-5) for left, right in pairwise(row)) for row in rows)
    steps = {
        f"{one} ≤ {other}": [math.log10(row[CHAIN.index(other)] / row[CHAIN.index(one)]) for row in rows]
        for one, other in pairwise(CHAIN)
    }
    findings = [
        c24.average(f"{name}, log10 of the ratio", values, "large" if name == "C ≤ D" else "small")
        for name, values in steps.items()
    ]
    widest = max(steps, key=lambda name: sum(steps[name]))
    verdict = (
        f"At {len(rows)} points of {len(descents)} trainings {broken} break an inequality. In decades the steps are "
        + ", ".join(f"{item.what.split(',')[0]} {c24.shown(item)}" for item in findings)
        + f" (intervals over points, which are not independent). The widest is {widest}"
        + (", as in the paper." if widest == "C ≤ D" else "; in the paper it is C ≤ D.")
    )
    return Found(table, tuple(findings), verdict, lambda figure: draw(figure, table), size=(6.0, 4.0))


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
    panel.legend()


EXPERIMENT = Experiment(
    name="c24-figG4",
    figure="C24, Figure G.4",
    title="how tight the bounds of MLS are: A ≤ B ≤ C ≤ D of Eq. 48",
    claim="The inequalities hold, and the gap between C and D is large against those between A and B and B and C.",
    run=run,
    small=c24.SMALL,
    paper=c24.PAPER,
    data="FashionMNIST",
)
