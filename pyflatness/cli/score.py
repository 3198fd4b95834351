"""Run ``pyflatness score``: many checkpoints of one network, measured on one data set, as a table.

A checkpoint that cannot be measured is a row with its error, and the others go on; so is a measure that fails of one.
A checkpoint's rows reach the file as soon as it is done, each of them whole or not at all.
"""

import contextlib
import csv
import io
import os
from collections.abc import Iterable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from .. import losses
from ..errors import InputError
from ..measures import MEASURES, named
from ..messages import printable, to_cell
from ..options import Options
from ..scoring import checkpoints, data_specs, executors, listing, specs
from ..scoring.fit import NO_FIT
from ..scoring.measuring import Outcome
from ..scoring.rows import Row, rows
from ..scoring.run import Run, keep
from ..scoring.scores import table
from ..scoring.store import Store
from ..scoring.units import Request
from ..scoring.worker import Job, Source
from . import spec_options
from .output import show
from .paths import append_whole, is_same_file, prepare_file

_ALL = "all"


@click.command()
@spec_options.option("model", "the model")
@spec_options.option(
    "data",
    "batches: a DataLoader, a list or a tuple of tensors; or .npz, .parquet, a folder of images or of a saved data set",
    data_specs.resolve,
)
@click.option("--loss", metavar="NAME", required=True, help="The loss it was trained with: cross_entropy, mse_loss, …")
@click.option(
    "--layers",
    "selectors",
    metavar="SELECTOR",
    multiple=True,
    help="Layers: name, glob ('*': all), re:… or type:…; may be repeated.  [default: the last Linear that ran]",
)
@click.option(
    "--measures",
    type=click.Choice([*(measure.name for measure in MEASURES), _ALL]),
    multiple=True,
    default=[MEASURES[0].name],
    show_default=True,
    help="May be repeated. Of several layers there is a row for the network too, with no layer.",
)
@click.option("--curvature", type=click.Choice(["auto", "ggn", "hessian"]), default="auto", show_default=True)
@click.option(
    "--probes", metavar="K|adaptive", help="Values from so many random probes a sample, with standard errors.  [exact]"
)
@click.option(
    "--target-stderr", type=float, help="Absolute standard error for every value, by as many probes as needed."
)
@click.option(
    "--rtol",
    type=float,
    help="Relative standard error for --probes adaptive; of heads alone, a guaranteed relative error.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of random numbers.")
@click.option("--out", type=click.Path(path_type=Path), help="CSV file for the rows.")
@click.option(
    "--store", type=click.Path(path_type=Path), help="SQLite file for the values: run again, the command goes on."
)
@click.option("--retry", is_flag=True, help="Compute again what failed.")
@click.option("--workers", type=click.IntRange(1), default=1, show_default=True, help="Processes, for --store.")
@click.option("--allow-pickle-weights-only", is_flag=True, expose_value=False, hidden=True)  # of 0.1.0: always so
@click.argument("paths", metavar="CHECKPOINT...", nargs=-1, required=True, type=click.Path(path_type=Path))
def score(
    model: specs.Function,
    model_args: dict[str, Any],
    data: specs.Function,
    data_args: dict[str, Any],
    loss: str,
    selectors: tuple[str, ...],
    measures: tuple[str, ...],
    curvature: str,
    probes: str | None,
    target_stderr: float | None,
    rtol: float | None,
    seed: int,
    out: Path | None,
    store: Path | None,
    retry: bool,
    workers: int,
    paths: tuple[Path, ...],
) -> None:
    """Measure the network of each CHECKPOINT, with its loss and accuracy from the same pass.

    Exits with status 1 if there is an error in a row.
    """
    _check_loss(loss)
    lost = next((path for path in paths if out is not None and is_same_file(out, path)), None)
    if lost is not None:
        message = f"{out} is one of the checkpoints: it is the same file as {lost}"
        raise click.BadParameter(printable(message), param_hint="--out")
    paths = tuple(listing.find(paths))
    if (out is None) == (store is None):
        raise click.UsageError("pass --out FILE.csv, or --store FILE.sqlite to go on after an interruption")
    spec_options.bind(model, model_args, "model"), spec_options.bind(data, data_args, "data")
    checkpoints.check_readers(paths)
    if out is not None:
        prepare_file(out)
    draws = int(probes) if probes and probes.lstrip("-").isdigit() else probes
    options = Options(curvature, draws, target_stderr, seed=seed, rtol=rtol)
    chosen = tuple(row.name for row in named(_ALL if _ALL in measures else measures))
    run = Run(
        {str(path): path for path in paths},
        Source(spec_options.text("model"), model_args, "--model"),
        Source(spec_options.text("data"), data_args, "--data"),
        Request(loss, selectors, chosen, options),
    )
    if out is not None:
        _to_csv(run, out)
    if store is not None:
        _to_store(run, store, workers, retry=retry)


def _to_csv(run: Run, out: Path) -> None:
    found: list[Row] = []
    interrupted = False
    try:
        _score(run, out, found)
    except KeyboardInterrupt:
        interrupted = True
    except OSError as error:  # all others end up in rows
        raise InputError(f"--out {out}: cannot be written ({error.strerror}); it has {len(found)} rows") from None
    _print(found)
    errors = sum(bool(row.error) for row in found)
    click.echo(printable(f"{'interrupted; ' if interrupted else ''}wrote {out}: {len(found)} rows, {errors} errors"))
    if interrupted or errors:
        raise SystemExit(130 if interrupted else 1)


def _to_store(run: Run, path: Path, workers: int, *, retry: bool) -> None:
    with Store(path, write=True) as store:
        kept = keep(run, store, retry=retry)
        interrupted = False
        done = failed = 0

        def take(job: Job, outcome: Outcome) -> None:
            nonlocal done, failed
            store.commit(kept.setting, job.content, outcome)
            done, failed = done + 1, failed + bool(outcome.errors)
            progress.advance(task)

        with _progress("units") as progress, contextlib.ExitStack() as stack:
            task = progress.add_task("scoring", total=len(kept.jobs))
            executor = executors.named("processes", workers) if kept.jobs else executors.Serial()
            stack.callback(executor.shutdown, cancel_futures=True)
            try:
                run.go(kept.jobs, executor, take)
            except KeyboardInterrupt:
                interrupted = True
        counts = store.counts(kept.setting)
    text = f"{path}: {done} units done now, {len(kept.jobs) - done} to do; values: {counts}"
    click.echo(printable(("interrupted; run the same command to go on; " if interrupted else "") + text))
    if interrupted or counts["failed"]:
        raise SystemExit(130 if interrupted else 1)


def _check_loss(name: str) -> None:
    try:
        losses.resolve(name)
    except InputError as error:
        raise click.BadParameter(str(error), param_hint="--loss") from None


def _score(run: Run, out: Path, found: list[Row]) -> None:
    """Append each checkpoint's rows to the file and, as far as they are in it, to the list."""
    batches = run.bench.batches()

    def step(part: float) -> None:
        if batches:
            progress.advance(task, part * len(job.unit.pairs) / batches)

    done = 0
    each = {name: run.pairs(name) for name in run.models}
    with out.open("wb", buffering=0) as file, _progress("rows") as progress:
        task = progress.add_task("scoring", total=sum(map(len, each.values())))
        append_whole(file, _line(field.name for field in fields(Row)))
        for name, pairs in each.items():
            outcomes: list[Outcome] = []
            for job in run.jobs(name, pairs):
                known = any(outcome.fit != NO_FIT for outcome in outcomes)
                outcomes.append(run.bench.outcome(replace(job, fit=not known), step))
            for row in rows(name, pairs, outcomes):
                append_whole(file, _line(asdict(row).values()))
                found.append(row)
            done += len(pairs)
            progress.update(task, completed=done)


def _line(cells: Iterable[object]) -> bytes:
    """Return a line of the CSV file; only text is changed to be safe in it."""
    text = io.StringIO()
    safe = (to_cell(cell) if isinstance(cell, str) else cell for cell in cells)
    csv.writer(text, lineterminator="\n").writerow(safe)
    return text.getvalue().encode()


class _Rate(ProgressColumn):
    def __init__(self, what: str) -> None:
        super().__init__()
        self._what = what

    def render(self, task: Task) -> Text:
        """Return how many are done in a minute."""
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{60 * speed:.3g} {self._what}/min")


def _progress(what: str) -> Progress:
    console = Console(stderr=True)
    console.quiet = not console.is_terminal  # a log gets nothing, not even the empty line of older releases of rich
    count = TextColumn("{task.completed:.1f} of {task.total} " + what)
    columns = (TextColumn("{task.description}"), BarColumn(), count, _Rate(what), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=console.quiet)


def _print(found: list[Row]) -> None:
    names = _short([row.checkpoint for row in found])
    show(table(found, names))
    errors = (f"{printable(name)}: {row.error}" for name, row in zip(names, found, strict=True) if row.error)
    for line in dict.fromkeys(errors):
        click.echo(printable(line))


def _short(paths: list[str]) -> list[str]:
    """Return paths without the folder that all of them share."""
    try:
        shared = os.path.commonpath([Path(path).parent for path in paths])
    except ValueError:  # nothing in common, or no paths
        return paths
    return [os.path.relpath(path, shared) for path in paths]
