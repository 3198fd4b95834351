"""Scoring many checkpoints: what the driver costs a unit, what a second worker brings, and what scoring costs at all.

    python benchmarks/scoring.py driver [--units 10000]
    python benchmarks/scoring.py workers [--units 24]
    python benchmarks/scoring.py zoo MODEL.py CHECKPOINT...      # MODEL.py with LeNet5 and train_data

Every timing is a ratio within one run, or processor time of one process.
"""

import contextlib
import os
import tempfile
import time
from pathlib import Path

import click
import torch
from safetensors.torch import save_file
from timing import in_turn
from torch import nn

from pyflatness.scoring import executors
from pyflatness.scoring.run import ScoringRun, keep
from pyflatness.scoring.store import Store
from pyflatness.scoring.worker import Maker, Setup


def tiny() -> nn.Module:
    """Return a network that takes no time."""
    return nn.Sequential(nn.Linear(2, 2))


def small() -> nn.Module:
    """Return a network that takes some time."""
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def few() -> tuple[torch.Tensor, torch.Tensor]:
    """Return data of four samples."""
    return torch.ones(4, 2), torch.arange(4) % 2


def many() -> tuple[torch.Tensor, torch.Tensor]:
    """Return data of some thousand samples."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(6000, 64, generator=generator), torch.arange(6000) % 10


def saved(make, count: int, folder: Path) -> dict[str, Path]:
    """Return checkpoints of a network with random weights."""
    paths = {}
    for seed in range(count):
        torch.manual_seed(seed)
        path = folder / f"{seed}.safetensors"
        save_file(make().state_dict(), path)
        paths[path.name] = path
    return paths


@click.group()
def main() -> None:
    """See the module's text."""


@main.command()
@click.option("--units", default=10_000)
def driver(units: int) -> None:
    """Processor time of the driver for a unit, from an empty store to the last commit, and to find that all is done."""
    with tempfile.TemporaryDirectory() as folder:
        models = saved(tiny, units, Path(folder))
        for what in ("all to do", "0 to do"):
            begin, wall = time.process_time(), time.perf_counter()
            seconds = done = 0
            with Store(Path(folder, "runs.sqlite"), write=True) as store, contextlib.ExitStack() as stack:
                run = ScoringRun(models, Setup(Maker(tiny), Maker(few), "cross_entropy", ("weight_norm",)))
                kept = keep(run, store)
                planned = time.process_time() - begin
                executor = executors.Processes(1)
                stack.callback(executor.shutdown)

                def take(unit, outcome, store=store, setting=kept.setting) -> None:
                    nonlocal seconds, done
                    seconds, done = seconds + outcome.seconds, done + 1
                    store.commit(setting, unit.content, outcome)

                run.go(kept.units, executor, take)
                used = time.process_time() - begin
            each = [1e3 * part / units for part in (used, planned, time.perf_counter() - wall, seconds)]
            click.echo(
                f"{what}: {done} units; the driver takes {each[0]:.2f} ms of processor time a unit, {each[1]:.2f} ms "
                f"of it before the first; {each[2]:.2f} ms pass a unit, {each[3]:.2f} ms of them measuring"
            )


@main.command()
@click.option("--units", default=24)
@click.option("--rounds", default=3)
def workers(units: int, rounds: int) -> None:
    """How many times as fast two workers are as one, each with one thread; the start of the processes is left out."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        models = saved(small, units, Path(folder))
        run = ScoringRun(models, Setup(Maker(small), Maker(many), "cross_entropy", ("trace",)))
        work = [unit for name in models for unit in run.units(name, run.pairs(name))]
        pools = {}
        for count in (1, 2):
            pools[count] = stack.enter_context(contextlib.closing(_Warm(count, run, work)))
        timings = in_turn({f"{count} workers": pool for count, pool in pools.items()}, rounds, repeats=1)
        one, two = timings["1 workers"], timings["2 workers"]
        click.echo(
            f"{units} units on {os.cpu_count()} cores: {1e3 * one.median / units:.0f} ms each by one worker; two are "
            f"{one.ratio(two):.2f} times as fast (to reach: ≥ 1.8)"
        )


class _Warm:
    """Hold an executor whose processes have made their model and data."""

    def __init__(self, count: int, run: ScoringRun, jobs: list) -> None:
        self._executor, self._run, self._jobs = executors.Processes(count), run, jobs
        run.go(jobs[: 2 * count], self._executor, lambda job, outcome: None)

    def __call__(self) -> None:
        self._run.go(self._jobs, self._executor, lambda job, outcome: None)

    def close(self) -> None:
        self._executor.shutdown()


if __name__ == "__main__":
    main()
