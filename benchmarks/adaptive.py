"""Fewer passes than classes: ``probes="adaptive"`` against the exact sweep and a number of plain draws.

Run from the project's root: ``python benchmarks/adaptive.py [zoo] [hundred] [classes]``; all unless one is named.
``zoo``: five LeNet5 of ``../shared/zoo`` (or ``--zoo``) on 2,000 of the images they were trained on, 10 classes, all
five layers; skipped with a reason where the zoo or what reads it is missing. ``classes``: a ReLU network of 3 layers
with 1,000 classes, trained here on 20,000 points of 1,000 clusters, at initialisation, half-way and at a minimum; 2,000
points. ``hundred``: the same of 100 classes and 256 points.

``back`` and ``forward`` are rows that go through the network, in units of the data; a few more are the look at the
first samples, and for plain draws two in each part that see to the order of rows. ``plain`` takes as many draws as the
largest relative standard error of the row above it asks for, at most 16. ``stderr`` is that error as it is reported,
``true`` the root mean square of the true ones over the seeds, both for the layer where they are largest; ``inside`` the
share of layers and seeds where the truth is within 1.96 of the reported standard errors.
"""

import argparse
import importlib.util
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from timing import in_turn
from torch import Tensor, nn
from torch.nn import functional as F

import pyflatness as pf
from pyflatness.passes.recorder import Recorder

LOSS = nn.CrossEntropyLoss()
TOLERANCES = (0.003, 0.01, 0.03)
MOST_DRAWS = 16
NETWORKS = (
    "adam_bs1024_lr0.002_seed0",
    "adam_bs64_lr0.001_seed1",
    "rmsprop_bs64_lr0.0005_seed9",
    "sgd_bs64_lr0.05_seed1",
    "sgd_bs256_lr0.05_seed0",
)
Options = dict[str, Any]


@dataclass
class Work:
    """A network and its data, to be measured in all layers."""

    title: str
    model: nn.Module
    data: tuple[Tensor, Tensor]
    rounds: int
    seeds: int

    def measure(self, options: Options, forward: Any = None) -> Tensor:
        """Return values and standard errors, (2, layers)."""
        report = pf.measure(
            *(self.model, LOSS, self.data),
            layers="*",
            measures="relative_flatness",
            progress=False,
            forward=forward,
            **options,
        )
        found = [report[name, "relative_flatness"] for name in report.layers]
        return torch.tensor([[e.value for e in found], [e.stderr or 0.0 for e in found]], dtype=torch.float64)

    def rows(self, options: Options) -> tuple[float, float]:
        """Return rows that go back and forward, in units of the data."""
        back, ahead, gradients = [], [], Recorder.gradients

        def counted(self: Recorder, outputs: Tensor, signal: Tensor, *args: Any, **more: Any) -> Any:
            back.append(len(signal))
            return gradients(self, outputs, signal, *args, **more)

        def forward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            ahead.append(len(batch[0]))
            return model(batch[0]), batch[1]

        with mock.patch.object(Recorder, "gradients", counted):
            self.measure(options, forward)
        return sum(back) / len(self.data[0]), sum(ahead) / len(self.data[0])

    def lines(self) -> Iterator[list[str]]:
        """Return the lines of the table."""
        exact = self.measure({})[0]
        ways: dict[str, Options] = {"exact": {}}
        for rtol in TOLERANCES:
            ways[f"rtol {rtol:g}"] = {"probes": "adaptive", "rtol": rtol}
            draws = self._as_good(exact, ways[f"rtol {rtol:g}"])
            ways[f"plain for {rtol:g}: {draws}"] = {"probes": min(draws, MOST_DRAWS)}
        shown = {what: options for what, options in ways.items() if self._affordable(what)}
        timings = in_turn({what: self._run(options) for what, options in shown.items()}, self.rounds, repeats=1)
        for what, options in ways.items():
            if what not in shown:
                yield [what, "", "", "", "", "", "", f"more than {MOST_DRAWS} draws"]
                continue
            back, ahead = self.rows(options)
            milliseconds = f"{timings[what].median * 1e3:.0f}"
            of_exact = f"{timings[what].ratio(timings['exact']):.2f}"
            yield [what, f"{back:.2f}", f"{ahead:.2f}", milliseconds, of_exact, *self._errors(options, exact)]

    def _affordable(self, what: str) -> bool:
        return not what.startswith("plain") or int(what.rsplit(" ", 1)[1]) <= MOST_DRAWS

    def _run(self, options: Options) -> Callable[[], Tensor]:
        return lambda: self.measure(options)

    def _as_good(self, exact: Tensor, options: Options) -> int:
        """Return plain draws with the largest relative standard error of some other way."""
        wanted, of_four = (float((self.measure(way)[1] / exact).max()) for way in (options, {"probes": 4}))
        return math.ceil(4 * (of_four / wanted) ** 2) if wanted else 10**6

    def _errors(self, options: Options, exact: Tensor) -> list[str]:
        if not options:
            return ["", "", ""]
        found = torch.stack([self.measure({**options, "seed": seed}) for seed in range(self.seeds)])
        errors, reported = found[:, 0] - exact, found[:, 1]
        inside = float((errors.abs() <= 1.96 * reported + 1e-6 * exact).double().mean())
        both = [100 * float((part.square().mean(dim=0).sqrt() / exact).max()) for part in (reported, errors)]
        return [f"{both[0]:.2f} %", f"{both[1]:.2f} %", f"{100 * inside:.0f} %"]


def zoo(folder: Path, rounds: int, seeds: int) -> Iterator[Work]:
    """Networks of ten classes at their minima."""
    if not (folder / "lenet5.py").exists():
        print(f"zoo: skipped, {folder} is not there", file=sys.stderr)
        return
    try:
        from safetensors.torch import load_file

        spec = importlib.util.spec_from_file_location("zoo", folder / "lenet5.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        data = module.images("train", 2000)
    except (ImportError, OSError) as error:
        print(f"zoo: skipped, {error}", file=sys.stderr)
        return
    for name in NETWORKS:
        model = module.LeNet5().eval()
        model.load_state_dict(load_file(folder / f"lenet5_cifar10k_{name}.safetensors"))
        yield Work(f"LeNet5 {name}", model, data, rounds, seeds)


def classes(count: int, samples: int, rounds: int, seeds: int) -> Iterator[Work]:
    """A network of many classes, at three stages of its training."""
    torch.manual_seed(0)
    centres, y = torch.randn(count, 64), torch.randint(count, (20_000,))
    x = centres[y] + 0.8 * torch.randn(20_000, 64)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, count)).eval()
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    for stage, doubt in (("initialisation", 1.0), ("half-way", 0.5), ("minimum", 0.01)):
        while (left := _doubt(model, x[:2000])) > doubt:
            for index in torch.randperm(len(x)).split(256)[:10]:
                optimizer.zero_grad()
                F.cross_entropy(model(x[index]), y[index]).backward()
                optimizer.step()
        title = f"{count:,} classes, {stage}, median 1 - p_max {left:.2g}"
        yield Work(title, model, (x[:samples], y[:samples]), rounds, seeds)


@torch.no_grad()
def _doubt(model: nn.Module, x: Tensor) -> float:
    return float((1 - model(x).softmax(dim=1).amax(dim=1)).median())


def shown(works: Iterator[Work], console: Console) -> None:
    """Print a table for each."""
    for work in works:
        table = Table(
            *("way", "back", "forward", "median ms", "it / exact", "stderr", "true", "inside"),
            title=f"{work.title}, n = {len(work.data[0]):,}, {work.seeds} seeds",
        )
        for line in work.lines():
            table.add_row(*line)
        console.print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", help="of zoo, hundred, classes")
    parser.add_argument("--zoo", type=Path, default=Path("../shared/zoo"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=20)
    options = parser.parse_args(arguments)
    if set(options.rows) - {"zoo", "hundred", "classes"}:
        parser.error("there are zoo, hundred and classes")
    console = Console(width=120)
    if "zoo" in (options.rows or ["zoo"]):
        shown(zoo(options.zoo, options.rounds, options.seeds), console)
    if "hundred" in (options.rows or ["hundred"]):
        shown(classes(100, 256, options.rounds, options.seeds), console)
    if "classes" in (options.rows or ["classes"]):
        shown(classes(1000, 2000, min(options.rounds, 1), min(options.seeds, 5)), console)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")


if __name__ == "__main__":
    main()
