"""P21, Figure 4: the generalisation bound of relative flatness and representativeness, by class separation."""

import functools
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pyflatness import progress
from pyflatness.api import head_flatness
from pyflatness.theory.sampling import authors_representativeness, representativeness

from . import claims, synthetic
from .claims import Claim, average
from .experiment import Bench, Experiment, Finding, Found, Points

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMES = ("separation", "repetition", "kappa", "flatness", "representativeness", "bound", "gap", "authors", "test_loss")
LABELS = {"bound": "δ²κ/2m + |representativeness|", "gap": "gap", "authors": "the authors' representativeness"}
_FOLDS = 3


def measure(bench: Bench) -> tuple[dict[str, list[Any]], dict[str, str]]:
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
    return dict(zip(NAMES, map(list, zip(*table, strict=True)), strict=True)), {}


def judge(points: Points) -> Found:
    """Hold bounds and gaps against each other, and their means over the class separations."""
    columns = points.columns
    separations = [*dict.fromkeys(columns["separation"])]
    pairs = [*zip(columns["bound"], columns["gap"], strict=True)]
    held = sum(bound >= gap for bound, gap in pairs)
    paper = {"bound": "just above the gap; falls with the separation"}
    means = {
        name: [
            average(f"{name} at class separation {c:g}, mean", at(columns, name, c), paper.get(name, ""))
            for c in separations
        ]
        for name in ("bound", "gap", "authors")
    }
    first, last = separations[0], separations[-1]
    ends = zip(at(columns, "bound", last), at(columns, "bound", first), strict=True)  # of the same seeds
    fall = average(f"bound at {last:g} less that at {first:g}", [one - other for one, other in ends], "below 0")
    bounds, gaps, theirs = ([claims.number(item) for item in rows] for rows in means.values())
    drawn = [
        [a + b for a, b in zip(at(columns, "flatness", c), at(columns, "authors", c), strict=True)]
        for c in (first, last)
    ]
    parts = [statistics.fmean(at(columns, "flatness", c)) for c in (first, last)]
    sizes = [f"{bound / gap:.3g}" if gap > 0 else "–" for bound, gap in zip(bounds, gaps, strict=True)]
    made = [Claim(fall, -1)]
    return Found(
        columns,
        (
            *(item for rows in means.values() for item in rows),
            fall,
            Finding("part of the samples whose gap is below the bound", held / len(pairs), paper="all"),
        ),
        f"The gap is below the bound in {held} of {len(pairs)} samples. The bound is {bounds[0]:.2g} at class "
        f"separation {first:g} and {bounds[-1]:.2g} at {last:g}, beside gaps of {gaps[0]:.2g} and {gaps[-1]:.2g} "
        f"(means over {len(pairs) // len(separations)} samples). The paper says that it falls as the problem becomes "
        f"easier. {claims.grouped(made)} The paper says that it is tight; here it is {', '.join(sizes)} "
        "times the gap, by class separation. The quantity that the authors' code calls representativeness, nearly the "
        f"loss on the held-out fold, goes from {theirs[0]:.2g} to {theirs[-1]:.2g}. The authors' notebook draws it "
        "in the place of representativeness, with other data and another factor, so that its numbers are not these. "
        f"The sum then falls here too, from {statistics.fmean(drawn[0]):.2g} to {statistics.fmean(drawn[1]):.2g}, "
        f"while the term of relative flatness in it rises from {parts[0]:.2g} to {parts[1]:.2g}. What falls is not "
        "flatness.",
        lambda figure: draw(figure, separations, means, LABELS, "mean squared error"),
        points.failures,
        size=(6.0, 4.0),
        claims=made,
    )


def _measured(bench: Bench, separation: float) -> list[list[float]]:
    return [measured(bench, separation, seed) for seed in range(bench.settings["repetitions"])]


def measured(bench: Bench, separation: float, seed: int) -> list[float]:
    """Return the parts of the bound with ½δ²κ/m, δ = n^(-1/(4+m)), and heads refitted on the sample of each fold."""
    samples, tested = bench.settings["samples"], bench.settings["tested"]
    features, labels = bench.on_device(synthetic.dataset(separation, seed, samples + tested))
    x, y, test = features[:samples], labels[:samples], (features[samples:], labels[samples:])
    weight, bias = synthetic.ridge(x, y)
    kappa = float(head_flatness(x, weight, bias, y, loss="mse_loss"))
    options: dict[str, Any] = {"loss": "mse_loss", "folds": _FOLDS, "fit": synthetic.ridge, "seed": seed}
    found = representativeness(x, weight, bias, y, test=test, probes=8, **options)
    assert found.test is not None
    flatness = found.rho**2 * kappa / (2 * x.shape[1])
    theirs = authors_representativeness(x, weight, bias, y, **options)
    test_loss = ((test[0] @ weight.t() + bias - test[1]) ** 2).mean().item()
    parts = [flatness, found.magnitude, flatness + found.magnitude, found.test.gap, theirs]
    return [separation, seed, kappa, *parts, test_loss]


def at(columns: Mapping[str, Sequence[float]], name: str, separation: float) -> list[float]:
    """Return the values of a column at a class separation."""
    return [value for value, c in zip(columns[name], columns["separation"], strict=True) if c == separation]


def draw(
    figure: "Figure",
    separations: Sequence[float],
    means: Mapping[str, Sequence[Finding]],
    labels: Mapping[str, str],
    unit: str = "",
) -> None:
    """Draw the means of some columns, each with its label, over the class separations."""
    axes = figure.subplots()
    for name, label in labels.items():
        claims.error_bars(axes, separations, means[name], label)
    axes.set_xlabel("class separation")
    axes.set_ylabel(unit)
    axes.legend()


EXPERIMENT = Experiment(
    name="p21-fig4",
    figure="P21, Figure 4",
    title="the bound of relative flatness and representativeness beside the gap, by class separation",
    claim="Relative flatness and an approximation of representativeness tightly bound the generalisation gap, and the "
    "bound decreases the easier the learning problem becomes.",
    measure=measure,
    judge=judge,
    seconds=5,
    long="10 min",
    small={"repetitions": 10, "samples": 600, "tested": 2400, "separations": [0.5, 1, 2, 4, 6]},
    paper={"repetitions": 100, "samples": 600, "tested": 4500, "separations": [0.5, 1, 1.5, 2, 2.5, 3, 4, 5, 6]},
)
