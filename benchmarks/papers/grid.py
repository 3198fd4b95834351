"""A grid that can tell: all measures against the gap of networks that differ in one setting, at one training loss.

In most studies of flatness networks stop at different training losses, and correlations follow these. Here networks of
every combination of width, depth, batch size, learning rate, weight decay and optimiser are trained to exactly the same
cross-entropy on all training data (:mod:`.training`). Over all of them: Kendall's τ; the granulated Kendall Ψ and the
conditional mutual information of Jiang et al. (2020); the sign error of Dziugaite et al. (2020), mean and worst case.
Targets are the gap, and those under shifts: images turned, with noise, labels that are wrong.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyflatness.errors import InputError
from pyflatness.measures import MEASURES
from pyflatness.messages import shown
from pyflatness.statistics.correlation import correlations
from pyflatness.statistics.grid import conditional_mutual_information, granulated_kendall, sign_error

from . import correlating, grid_networks
from .experiment import Bench, Experiment, Finding, Found, Points, note
from .grid_networks import SETTINGS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_HEAD, _SUM = "relative_flatness head", "relative_flatness"

Row = dict[str, float]
"""Of a measure and a target: ``tau``, ``psi``, ``information``, ``sign_error``, ``worst``."""


def measured(bench: Bench) -> tuple[dict[str, list[Any]], dict[str, str]]:
    """Train and measure."""
    return grid_networks.made(bench)


def judge(points: Points) -> Found:
    """Compare measures with the gaps of all networks that have the gaps, and relative flatness."""
    grid = compared_networks(points)
    settings = [name for name in SETTINGS if len(set(grid.columns[name])) > 1]
    found = {
        (measure, target): compared(grid.columns, measure, target, settings)
        for target in grid.targets
        for measure in grid.measures
    }
    chosen = {name: grid.columns[name] for name in ("name", *settings, _HEAD, _SUM)}
    with_gap = correlations(  # networks that differ in the seed alone are not independent
        chosen | {"gap": grid.columns["test gap"]}, [_HEAD, _SUM], settings=settings
    )
    findings = [
        Finding(f"{name}, Kendall with the gap", *correlating.ends(with_gap, name, "Kendall")) for name in (_HEAD, _SUM)
    ]
    losses = grid.columns["train_loss"]
    findings += [
        Finding("networks", len(losses)),
        Finding("training loss, smallest", min(losses)),
        Finding("training loss, largest", max(losses)),
        *(
            Finding(f"{measure}: {what}", found[measure, "test gap"][key])
            for measure in grid.measures
            for key, what in (
                *(("tau", "τ"), ("psi", "Ψ"), ("information", "conditional mutual information")),
                *(("sign_error", "mean sign error"), ("worst", "worst sign error")),
            )
        ),
    ]
    return Found(
        points.columns,
        tuple(findings),
        verdict(grid, found, findings[0]),
        lambda figure: draw(figure, grid, found),
        grid.failures,
        size=(11.0, 0.22 * len(grid.measures) + 2.0),
    )


@dataclass(frozen=True)
class Grid:
    """Hold the networks that are compared.

    Attributes:
        columns: as :func:`.grid_networks.made` gives them, of these networks.
        targets: columns of gaps.
        measures: columns of measures that every one of the networks has a finite number of, and not one number all.
        failures: networks and measures that are not compared too, and why.
    """

    columns: dict[str, list[Any]]
    targets: tuple[str, ...]
    measures: tuple[str, ...]
    failures: dict[str, str]


def compared_networks(points: Points) -> Grid:
    """Return the networks that have all gaps and relative flatness, of the head and of all layers.

    Raises:
        InputError: fewer than two do.
    """
    table, failures = points.columns, dict(points.failures)
    targets = tuple(name for name in table if name.endswith(" gap"))
    needed = (_HEAD, _SUM, *targets)
    kept = []
    for place, name in enumerate(table["name"]):
        missing = [column for column in needed if not math.isfinite(table.get(column, {place: math.nan})[place])]
        if missing:
            note(failures, name, f"no finite {', '.join(missing)}: not compared")
        else:
            kept.append(place)
    if len(kept) < 2:
        raise InputError(f"grid: {len(kept)} networks can be compared: {shown(failures)}")
    columns = {column: [cells[place] for place in kept] for column, cells in table.items()}
    measures = []
    for column in (name for name in columns if name.split()[0] in {row.name for row in MEASURES}):
        missing_of = sum(not math.isfinite(value) for value in columns[column])
        if missing_of:
            note(failures, column, f"no finite number for {missing_of} of {len(kept)} networks: not compared")
        elif len(set(columns[column])) > 1 or column in (_HEAD, _SUM):
            measures.append(column)
    return Grid(columns, targets, tuple(measures), failures)


def compared(table: Mapping[str, Sequence[Any]], measure: str, target: str, settings: Sequence[str]) -> Row:
    """Return how a measure orders the networks by a target, over all and where one setting differs alone."""
    columns = {name: [*table[name]] for name in ("name", *settings, measure, target)}
    errors = sign_error(columns, measure, target, settings)
    return {
        "tau": kendall(columns[measure], columns[target]),
        "psi": granulated_kendall(columns, measure, target, settings).value,
        "information": conditional_mutual_information(columns, measure, target, settings).value,
        "sign_error": errors.mean,
        "worst": errors.worst,
    }


def kendall(one: Sequence[float], other: Sequence[float]) -> float:
    """Return Kendall's τ_b, which is 0 for a constant."""
    from scipy.stats import kendalltau

    value = float(kendalltau(one, other).statistic)
    return 0.0 if math.isnan(value) else value


def verdict(grid: Grid, found: Mapping[tuple[str, str], Row], kappa: Finding) -> str:
    """Say whether κ goes along with the gap, and which measures do where one setting differs alone."""
    by_psi = sorted(grid.measures, key=lambda name: found[name, "test gap"]["psi"], reverse=True)

    def shown(names: Sequence[str]) -> str:
        return ", ".join(f"{name} {found[name, 'test gap']['psi']:.2f}" for name in names)

    low, high = kappa.low, kappa.high
    if low is None or high is None:
        sign, interval = "of too few recipes for an interval", ""
    else:
        sign = "positive" if low > 0 else "negative" if high < 0 else "not shown to be positive or negative"
        interval = f" [{low:.2f}, {high:.2f}]"
    right = [name for name in grid.measures if found[name, "test gap"]["worst"] < 0.5]
    best = max(grid.measures, key=lambda name: found[name, "test gap"]["information"])
    kept = []
    for target in grid.targets[1:]:
        top = max(grid.measures, key=lambda name, target=target: found[name, target]["psi"])  # type: ignore[misc]
        kept.append(f"{target}: κ of the head {found[_HEAD, target]['psi']:.2f}, the highest {top} "
                    f"{found[top, target]['psi']:.2f}")  # fmt: skip
    losses = grid.columns["train_loss"]
    return (
        f"{len(losses)} networks with training losses between {min(losses):.5f} and {max(losses):.5f}. Kendall's τ of "
        f"relative flatness of the head with the gap is {kappa.value:.2f}"
        f"{interval} (95 % bootstrap interval over recipes), {sign}. Highest Ψ: {shown(by_psi[:5])}; lowest: "
        f"{shown(by_psi[-3:])}; κ of the head "
        f"{found[_HEAD, 'test gap']['psi']:.2f}, summed over layers {found[_SUM, 'test gap']['psi']:.2f}. "
        f"The conditional mutual information is largest for {best}, "
        f"{found[best, 'test gap']['information']:.3f} (κ of the head {found[_HEAD, 'test gap']['information']:.3f}). "
        + (
            f"In every environment better than chance: {', '.join(right)}. "
            if right
            else "No measure is better than chance in every environment: the worst sign error of each is ½ or more. "
        )
        + f"Under shifts, Ψ: {'; '.join(kept)}."
    )


def draw(figure: "Figure", grid: Grid, found: Mapping[tuple[str, str], Row]) -> None:
    """Draw Ψ of every measure by target, and beside it mean and worst sign error with the gap."""
    by_psi = sorted(grid.measures, key=lambda name: found[name, "test gap"]["psi"])
    places = range(len(by_psi))
    left, right = figure.subplots(1, 2, sharey=True)
    for target, marker in zip(grid.targets, "osD^", strict=False):
        left.plot([found[name, target]["psi"] for name in by_psi], places, marker, markersize=4, label=target)
    left.plot([found[name, "test gap"]["tau"] for name in by_psi], places, "k|", label="τ, test gap")
    left.axvline(0, color="grey", linewidth=0.8)
    left.set_yticks([*places], by_psi, fontsize=7)
    left.set_xlabel("granulated Kendall Ψ")
    left.legend(fontsize=7)
    for key, label in (("sign_error", "mean"), ("worst", "worst")):
        right.plot([found[name, "test gap"][key] for name in by_psi], places, "o", markersize=4, label=label)
    right.axvline(0.5, color="grey", linewidth=0.8)
    right.set_xlabel("sign error with the test gap")
    right.legend(fontsize=7)


EXPERIMENT = Experiment(
    name="grid",
    figure="A grid that can tell",
    title="all measures against the gap of networks with one training loss, by Ψ, mutual information and sign errors",
    claim="Flat minima generalise better: measures of flatness order networks by their gap, whichever setting made the "
    "networks differ.",
    measure=measured,
    judge=judge,
    seconds=115,
    small={
        **{"widths": [8, 32], "depths": [1, 2], "batch_sizes": [16, 64], "learning_rates": [0.5, 2.0]},
        **{"weight_decays": [0.0], "optimizers": ["sgd", "adam"], "seeds": 2},
        **{"samples": 600, "loss": 0.05, "steps": 20_000},
    },
    paper={
        **{"widths": [16, 32, 64], "depths": [1, 2, 3], "batch_sizes": [32, 128], "learning_rates": [0.5, 1.0, 2.0]},
        **{"weight_decays": [0.0, 1.0], "optimizers": ["sgd", "momentum", "adam"], "seeds": 2},
        **{"samples": 2000, "loss": 0.05, "steps": 20_000},
    },
    data="MNIST",
)
