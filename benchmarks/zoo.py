"""A zoo of checkpoints: what scoring costs over the bare forward passes, and how κ goes with the generalisation gap.

    python benchmarks/zoo.py time MODEL.py CHECKPOINT...      # MODEL.py with LeNet5 and train_data
    python benchmarks/zoo.py reparameterize MODEL.py FOLDER CHECKPOINT...
    python benchmarks/zoo.py table TRAIN.csv TEST.csv --before FILE.csv --after FILE.csv --out FOLDER
    python benchmarks/zoo.py restate FOLDER                   # the correlations anew, of the tables in FOLDER

Every timing is a ratio within one run; all checkpoints count, whatever the correlation is.
"""

import csv
import tempfile
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import click
import numpy as np
import pandas
import torch
from safetensors.torch import save_file
from timing import in_turn

import pyflatness as pf
from pyflatness.measures import MEASURES
from pyflatness.model import selectors
from pyflatness.scoring import checkpoints, specs
from pyflatness.scoring.run import ScoringRun, keep
from pyflatness.scoring.store import Store
from pyflatness.scoring.worker import Maker, Setup
from pyflatness.statistics import tables
from pyflatness.statistics.coefficients import STATISTICS
from pyflatness.statistics.correlation import Correlations

FACTORS = 5.0, 25.0
BASELINES = "loss", "the gap of another seed", "the recipe's mean gap", "random numbers"
DRAWN = "relative_flatness {}", "trace {}", "pac_bayes", "weight_norm network", "mls network"

Columns = dict[str, list[Any]]
Found = dict[str, Correlations]
_FILE = click.Path(exists=True, path_type=Path)


@click.group()
def main() -> None:
    """See the module's text."""


@main.command()
@click.argument("model", type=click.Path(exists=True))
@click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--rounds", default=9)
@click.option("--processor", is_flag=True, help="Processor time, for a machine that others use.")
def time(model: str, paths: tuple[Path, ...], rounds: int, processor: bool) -> None:
    """Scoring checkpoints into a store (hash, reading, κ, loss, accuracy, commit), against forward passes alone."""
    made = Maker(f"{model}:LeNet5"), Maker(f"{model}:train_data")
    run = ScoringRun({str(p): p for p in paths}, Setup(*made, "cross_entropy", (MEASURES[0].name,), ("fc3",)))
    network, data = run.bench.network, run.bench.data

    def forward() -> None:
        with torch.no_grad():
            for _ in paths:
                for x, _ in data:
                    network(x)

    def score() -> None:
        with tempfile.TemporaryDirectory() as folder, Store(Path(folder, "runs.sqlite"), write=True) as store:
            kept = keep(run, store)
            run.go(kept.units, None, lambda unit, outcome: store.commit(kept.setting, unit.content, outcome))
            for name, error in store.errors(kept.setting, kept.contents.values()):
                raise click.ClickException(f"{name}: {error}")

    timings = in_turn({"score": score, "forward": forward}, rounds, 1, process_time if processor else perf_counter)
    ours, floor = timings["score"], timings["forward"]
    each = [1e3 * timing.median / len(paths) for timing in (ours, floor)]
    print(f"{len(paths)} checkpoints: {each[0]:.0f} ms each to score, {each[1]:.0f} ms the forward passes alone")
    print(f"ratio {ours.ratio(floor):.3f} (to reach: ≤ 1.05)")


@main.command()
@click.argument("model", type=click.Path(exists=True))
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--seed", default=0, show_default=True)
def reparameterize(model: str, folder: Path, paths: tuple[Path, ...], seed: int) -> None:
    """Write each checkpoint at other weights of the same function, every layer but the last by a factor in [5, 25].

    The factors are uniform, drawn anew for each checkpoint; outputs are compared on the first batch of train_data.
    """
    network = specs.resolve(f"{model}:LeNet5")().eval()
    batch = next(iter(specs.resolve(f"{model}:train_data")()))[0]
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(seed)
    for path in paths:
        checkpoints.load(network, checkpoints.read(path).state)
        *hidden, _ = selectors.select(network, None).modules
        factors = dict(zip(hidden, generator.uniform(*FACTORS, len(hidden)), strict=True))
        save_file(pf.reparameterize(network, factors, batch).state_dict(), folder / path.name)
        print(f"{path.name}: {', '.join(f'{layer} × {factor:.4g}' for layer, factor in factors.items())}")


@main.command()
@click.argument("train", type=_FILE)
@click.argument("test", type=_FILE)
@click.option("--before", type=_FILE, multiple=True, required=True, help="Measures of the networks; may be repeated.")
@click.option("--after", type=_FILE, multiple=True, required=True, help="The same of the reparameterised ones.")
@click.option("--head", default="fc3", show_default=True, help="The layer whose inputs are the penultimate features.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for the tables and the figure.")
def table(train: Path, test: Path, before: tuple[Path, ...], after: tuple[Path, ...], head: str, out: Path) -> None:
    """Every measure's correlations with the gap, before and after a reparameterisation; as tables and a figure.

    All are files of `pyflatness score`; TRAIN and TEST are of the networks on all training and test data, for the gap.
    """
    out.mkdir(parents=True, exist_ok=True)
    for weights, paths in (("before", before), ("after", after)):
        _write(out / f"{weights}.csv", _columns(train, test, paths))
    _state(out, head)


@main.command()
@click.argument("folder", type=_FILE)
@click.option("--head", default="fc3", show_default=True, help="The layer whose inputs are the penultimate features.")
def restate(folder: Path, head: str) -> None:
    """The correlations and the figure anew, of the tables that `table` left in FOLDER."""
    _state(folder, head)


def _state(folder: Path, head: str) -> None:
    held = {weights: _referenced(folder / f"{weights}.csv") for weights in ("before", "after")}
    found: dict[str, Found] = {}
    for weights, columns in held.items():
        measures = [name for name in columns if name not in ("checkpoint", "recipe", "seed", "gap")]
        known = [name for name in measures if np.isfinite(columns[name]).any()]  # not of a recipe's only seed
        found[weights] = {measure: _correlations(columns, measure) for measure in known}
    _write_correlations(folder / "correlations.csv", found)
    for title, rows in _by_place(found["before"], head).items():
        _print(title, rows, found)
    for measure in (f"{MEASURES[0].name} {head}", f"{MEASURES[0].name} network"):
        print(f"\n{_correlations(held['before'], measure, 'loss')}")
    _draw(folder / "gap.png", held, [name.format(head) for name in DRAWN])


def _referenced(path: Path) -> Columns:
    """Return a table with recipes, seeds, and what measures are to be held against.

    Another seed is the recipe's next one; a recipe's mean has the network's own gap in it.
    """
    frame = pandas.read_csv(path)
    parts = [name.rsplit("_", 1) for name in frame["checkpoint"]]
    recipes, seeds = [part[0] for part in parts], [part[-1] for part in parts]
    gaps = frame["gap"].groupby(recipes)
    twins = gaps.transform(lambda cells: np.roll(cells, -1) if len(cells) > 1 else np.nan)
    drawn = np.random.default_rng(0).normal(size=len(frame))
    columns = {str(name): [*frame[name]] for name in frame} | {"recipe": recipes, "seed": seeds}
    return columns | dict(zip(BASELINES[1:], ([*twins], [*gaps.transform("mean")], [*drawn]), strict=True))


def _columns(train: Path, test: Path, paths: tuple[Path, ...]) -> Columns:
    """Return the gap, the training loss and the measures of each checkpoint."""
    whole = tables.read(train, test)
    stems = [_stem(name) for name in whole.names]
    columns: Columns = {"checkpoint": stems, "gap": [*whole.column("gap")], "loss": [*whole.column("loss")]}
    for path in paths:
        networks = tables.read(path)
        place = {_stem(name): number for number, name in enumerate(networks.names)}
        columns |= {name: [networks.column(name)[place[stem]] for stem in stems] for name in networks.measures}
    return columns


def _stem(path: str) -> str:
    return Path(path).stem


def _correlations(columns: Columns, measure: str, y: str = "gap") -> Correlations:
    """Over the networks that have a value of the measure, by the rule of docs/statistics.md."""
    values = zip(columns["checkpoint"], columns[measure], strict=True)
    without = [name for name, value in values if not np.isfinite(value)]
    how: Any = {"exclude": without, "max_loss": np.inf, "interval": "fisher"}
    return pf.statistics.correlations(columns, measure, y, settings="recipe", seeds="seed", **how)


def _write(path: Path, columns: Columns) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        for row in zip(*columns.values(), strict=True):
            writer.writerow([cell if isinstance(cell, str) else f"{cell:.5g}" for cell in row])


def _write_correlations(path: Path, found: dict[str, Found]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["measure", "weights", "networks", "statistic", "value", "low", "high"])
        for weights, by_measure in found.items():
            for measure, correlations in by_measure.items():
                for row in correlations.rows:
                    numbers = (f"{number:.3f}" for number in (row.value, row.low, row.high))
                    writer.writerow([measure, weights, correlations.points, row.statistic, *numbers])


def _by_place(found: Found, head: str) -> dict[str, list[str]]:
    """Return columns by the table that they are in."""
    places: dict[str, list[str]] = {
        "baselines": [name for name in BASELINES if name in found],
        head: [],
        "network": [],
        "other layers": [],
    }
    for column in [name for name in found if name not in BASELINES]:
        _, _, layer = column.partition(" ")
        places["network" if layer in ("", "network") else head if layer == head else "other layers"].append(column)
    places["other layers"].sort(key=lambda column: [measure.name for measure in MEASURES].index(column.split(" ")[0]))
    return places


def _print(title: str, columns: list[str], found: dict[str, Found]) -> None:
    """Print a table as Markdown; what stays the same to two digits is printed once."""
    statistics = " | ".join(STATISTICS)
    print(f"\n### {title}\n\n| measure | weights | networks | {statistics} |\n|---|---|---|{'---|' * len(STATISTICS)}")
    for column in columns:
        lines: dict[str, list[str]] = {}
        for weights, by_measure in found.items():
            shown = by_measure[column]
            cells = " | ".join(f"{row.value:.2f} [{row.low:.2f}, {row.high:.2f}]" for row in shown.rows)
            lines.setdefault(f"{shown.points} | {cells}".replace("-", "−"), []).append(weights)
        for line, weights in lines.items():
            print(f"| {column} | {' and '.join(weights)} | {line} |")


def _draw(path: Path, held: dict[str, Columns], measures: list[str]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(measures), 7.5), layout="constrained")
    for panels, (weights, columns) in zip(figure.subplots(len(held), len(measures)), held.items(), strict=True):
        for panel, measure in zip(panels, measures, strict=True):
            pf.statistics.plot_correlation(columns, measure, axes=panel, interval="fisher", settings="recipe")
            panel.set_xlabel(f"{measure}, {weights}")
            for line in panel.get_lines():
                line.set_markersize(3)
    figure.savefig(path, dpi=60)


if __name__ == "__main__":
    main()
