"""A zoo of checkpoints: what scoring costs over the bare forward passes, and how κ goes with the generalisation gap.

    python benchmarks/zoo.py time MODEL.py CHECKPOINT...      # MODEL.py with LeNet5 and train_data
    python benchmarks/zoo.py gap TRAIN.csv TEST.csv           # two files that `pyflatness score` wrote

Every figure is a ratio within one run; all checkpoints count, whatever the correlation is.
"""

import csv
from pathlib import Path

import click
import numpy as np
import torch
from timing import in_turn

from pyflatness.cli import specs
from pyflatness.cli.scoring import Scoring
from pyflatness.generalization.correlation import STATISTICS, Correlation, correlation
from pyflatness.measures import MEASURES


@click.group()
def main() -> None:
    """See the module's text."""


@main.command()
@click.argument("model", type=click.Path(exists=True))
@click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--rounds", default=9)
def time(model: str, paths: tuple[Path, ...], rounds: int) -> None:
    """Scoring one checkpoint after the other (reading, κ, loss, accuracy), against forward passes alone."""
    network = specs.resolve(f"{model}:LeNet5")().eval()
    data = specs.resolve(f"{model}:train_data")()
    scoring = Scoring(network, data, "cross_entropy", (None,), (MEASURES[0],), False)

    def forward() -> None:
        with torch.no_grad():
            for _ in paths:
                for x, _ in data:
                    network(x)

    def score() -> None:
        for path in paths:
            for row in scoring.rows(path, lambda measure: None):
                if row.error:
                    raise click.ClickException(row.error)

    timings = in_turn({"score": score, "forward": forward}, rounds, repeats=1)
    ours, floor = timings["score"], timings["forward"]
    each = [1e3 * timing.median / len(paths) for timing in (ours, floor)]
    print(f"{len(paths)} checkpoints: {each[0]:.0f} ms each to score, {each[1]:.0f} ms the forward passes alone")
    print(f"ratio {ours.ratio(floor):.3f} (to reach: ≤ 1.15)")


@main.command()
@click.argument("train", type=click.Path(exists=True, path_type=Path))
@click.argument("test", type=click.Path(exists=True, path_type=Path))
def gap(train: Path, test: Path) -> None:
    """Correlations with the gap (test loss minus training loss), and with the training loss, 95 % intervals."""
    tests = {row["checkpoint"]: float(row["loss"]) for row in _read(test)}
    rows = _read(train)
    for measure in dict.fromkeys(row["measure"] for row in rows):
        own = [row for row in rows if row["measure"] == measure]
        kappa = np.array([float(row["value"]) for row in own])
        loss = np.array([float(row["loss"]) for row in own])
        gaps = np.array([tests[row["checkpoint"]] for row in own]) - loss
        for name, other in (("gap", gaps), ("training loss", loss)):
            shown = [str(Correlation(measure, how, *correlation(kappa, other, how, 0))) for how in STATISTICS]
            print(f"{measure}, {len(own)} checkpoints, with the {name}: {'; '.join(shown)}")


def _read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if not row["error"]]


if __name__ == "__main__":
    main()
