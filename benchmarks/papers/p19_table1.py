"""P19, Table 1: which measures stay where the weights change and the function does not."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pyflatness.errors import InputError
from pyflatness.scoring import checkpoints
from pyflatness.theory.invariance import WAYS, invariances

from . import p21_minima
from .experiment import Bench, Experiment, Finding, Found, Points
from .zoo import trained

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BY_LAYERS = ("scaled_lambda_max", "scaled_trace", "largest_scaled_lambda_max", "largest_scaled_trace")
"""κ^l and κ^Σ, κ_τ^l and κ_τ^Σ, κ^max, κ_τ^max: kept by layer-wise factors, and in general not by neuron-wise ones."""

ALWAYS = ("neuron_flatness", "neuron_flatness_max")
"""ρ^l(j), ρ_σ^l and ρ^Σ; ρ^l and ρ^max."""

COLUMNS = ("measure", "way", "change", "kept", "claimed")
BESIDES = ("trace", "lambda_max", "relative_flatness", "relative_flatness_std")


def measure(bench: Bench) -> tuple[dict[str, list[Any]], dict[str, str]]:
    """Train one network, and multiply its layers and neurons by factors in [5, 25]."""
    zoo = p21_minima.zoo(bench)
    name = next(iter(zoo.recipes))
    paths = trained(bench, zoo, [name])
    if name not in paths:
        raise InputError(f"{name} is not trained, and epochs=0 trains none")
    network = zoo.network().to(bench.device).eval()
    checkpoints.load(network, checkpoints.read(paths[name]).state)
    data = bench.on_device(zoo.first(bench.settings["measured"]))
    asked = [*BY_LAYERS, *ALWAYS, *BESIDES]
    found = invariances(network.double(), "cross_entropy", (data[0].double(), data[1]), measures=asked, layers="*")
    columns = {key: [getattr(row, key) for row in found.rows] for key in COLUMNS}
    skipped = {name: why.removeprefix(f"layer {name!r}: ") for name, why in found.skipped.items()}
    return columns, {name: f"left as it is: {why}" for name, why in skipped.items()}


def judge(points: Points) -> Found:
    """Return which of the invariances hold."""
    paper = {(name, way): "kept" for name in BY_LAYERS for way in WAYS[:1]}
    paper |= {(name, way): "kept" for name in ALWAYS for way in WAYS}
    paper |= {(name, WAYS[1]): "in general not" for name in BY_LAYERS}
    rows = [
        dict(zip(COLUMNS, cells, strict=True))
        for cells in zip(*(points.columns[name] for name in COLUMNS), strict=True)
    ]
    keys = [(row["measure"], row["way"]) for row in rows]
    said = [row for key, row in zip(keys, rows, strict=True) if paper.get(key) == "kept"]
    broken = [f"{row['measure']} ({row['way']})" for row in said if not row["kept"]]
    other = [key for key, row in zip(keys, rows, strict=True) if paper.get(key) == "in general not" and not row["kept"]]
    return Found(
        points.columns,
        tuple(
            Finding(f"{', '.join(key)}: largest relative change", row["change"], paper=paper.get(key, ""))
            for key, row in zip(keys, rows, strict=True)
        ),
        f"Of {len(said)} invariances that the table claims {len(said) - len(broken)} hold to rounding"
        f"{': all but ' + ', '.join(broken) if broken else ''}. Neuron-wise factors move {len(other)} of the "
        f"{len(BY_LAYERS)} measures that are said to be invariant to layer-wise ones only.",
        lambda figure: _draw(figure, dict(zip(keys, [row["change"] for row in rows], strict=True))),
        points.failures,
        size=(8.0, 4.5),
    )


def _draw(figure: "Figure", found: Mapping[tuple[str, str], float]) -> None:
    axes = figure.subplots()
    names = [*dict.fromkeys(measure for measure, _ in found)]
    for place, way in enumerate(WAYS):
        changes = [max(found[name, way], 1e-17) for name in names]
        axes.barh([number + 0.4 * place for number in range(len(names))], changes, height=0.4, label=way, left=1e-17)
    axes.set_xscale("log")
    axes.set_yticks([number + 0.2 for number in range(len(names))], names)
    axes.set_xlabel("largest relative change")
    axes.legend()


EXPERIMENT = Experiment(
    name="p19-table1",
    figure="P19, Table 1",
    title="which measures stay where the weights change and the function does not",
    claim="κ, κ_τ and their maxima and sums are invariant to layer-wise factors, ρ of neurons, layers and networks to "
    "all linear reparameterisations.",
    measure=measure,
    judge=judge,
    seconds=10,
    small=p21_minima.SMALL | {"measured": 200},
    paper=p21_minima.PAPER | {"measured": 200},
    data=p21_minima.DATA,
)
