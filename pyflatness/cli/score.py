"""Run ``pyflatness score``: many checkpoints of one network, measured on one data set, as a table.

A checkpoint that cannot be measured is a row with its error, and the others go on; so is a measure that fails of one.
A checkpoint's rows reach the file as soon as it is done, each of them whole or not at all.
"""

import csv
import io
import os
from collections.abc import Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from .. import losses
from ..errors import InputError
from ..measures import MEASURES, named
from ..messages import printable, to_cell
from ..model import state
from ..model.data import Batches
from ..options import Options
from ..report import intervals
from ..scoring import checkpoints, data_specs, listing, specs
from . import spec_options
from .output import show
from .paths import append_whole, is_same_file, prepare_file
from .scoring import Row, Scoring

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
    "--probes", metavar="K|adaptive", help="Values from so many random draws a sample, with standard errors.  [exact]"
)
@click.option(
    "--target-stderr", type=float, help="Absolute standard error for every value, by as many draws as needed."
)
@click.option(
    "--rtol",
    type=float,
    help="Relative standard error for --probes adaptive; of heads alone, a guaranteed relative error.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of random draws.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="CSV file for the rows.")
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
    out: Path,
    paths: tuple[Path, ...],
) -> None:
    """Measure the network of each CHECKPOINT, with its loss and accuracy from the same pass.

    Exits with status 1 if there is an error in a row.
    """
    build, load = spec_options.bind(model, model_args, "model"), spec_options.bind(data, data_args, "data")
    _check_loss(loss)
    lost = next((path for path in paths if is_same_file(out, path)), None)
    if lost is not None:
        message = f"{out} is one of the checkpoints: it is the same file as {lost}"
        raise click.BadParameter(printable(message), param_hint="--out")
    paths = tuple(listing.find(paths))
    checkpoints.check_readers(paths)
    prepare_file(out)
    network = specs.build_model(build)
    draws = int(probes) if probes and probes.lstrip("-").isdigit() else probes
    options = Options(curvature, draws, target_stderr, seed=seed, rtol=rtol)
    chosen = named(_ALL if _ALL in measures else measures)
    scoring = Scoring(network, load(), loss, selectors, chosen, options)
    rows: list[Row] = []
    interrupted = False
    try:
        _score(scoring, paths, out, rows)
    except KeyboardInterrupt:
        interrupted = True
    except OSError as error:  # all others end up in rows
        raise InputError(f"--out {out}: cannot be written ({error.strerror}); it has {len(rows)} rows") from None
    _print(rows)
    errors = sum(bool(row.error) for row in rows)
    click.echo(printable(f"{'interrupted; ' if interrupted else ''}wrote {out}: {len(rows)} rows, {errors} errors"))
    if interrupted or errors:
        raise SystemExit(130 if interrupted else 1)


def _check_loss(name: str) -> None:
    try:
        losses.resolve(name)
    except InputError as error:
        raise click.BadParameter(str(error), param_hint="--loss") from None


def _score(scoring: Scoring, paths: tuple[Path, ...], out: Path, rows: list[Row]) -> None:
    """Append each checkpoint's rows to the file and, as far as they are in it, to the list."""
    if hasattr(scoring.data, "__next__"):
        raise InputError("--data: an iterator can be read once; have the callable return a list or a DataLoader")
    batches = len(Batches(scoring.data, state.device(scoring.model)))

    def step(share: float) -> None:
        if batches:
            progress.advance(task, share / batches)

    each = len(scoring.pairs())
    with out.open("wb", buffering=0) as file, _progress() as progress:
        task = progress.add_task("scoring", total=len(paths) * each)
        append_whole(file, _line(field.name for field in fields(Row)))
        for done, path in enumerate(paths, 1):
            for row in scoring.rows(path, step):
                append_whole(file, _line(asdict(row).values()))
                rows.append(row)
            progress.update(task, completed=done * each)


def _line(cells: Iterable[object]) -> bytes:
    """Return a line of the CSV file; only text is changed to be safe in it."""
    text = io.StringIO()
    safe = (to_cell(cell) if isinstance(cell, str) else cell for cell in cells)
    csv.writer(text, lineterminator="\n").writerow(safe)
    return text.getvalue().encode()


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        """Return the rows per minute."""
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{60 * speed:.3g} rows/min")


def _progress() -> Progress:
    console = Console(stderr=True)
    console.quiet = not console.is_terminal  # a log gets nothing, not even the empty line of older releases of rich
    count = TextColumn("{task.completed:.1f} of {task.total} rows")
    columns = (TextColumn("{task.description}"), BarColumn(), count, _Rate(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=console.quiet)


def _print(rows: list[Row]) -> None:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for header in ("checkpoint", "layer", "measure"):
        table.add_column(header)
    for header in ("value", "loss", "accuracy", "seconds"):
        table.add_column(header, justify="right")
    names = [printable(name) for name in _short([row.checkpoint for row in rows])]
    for name, row in zip(names, rows, strict=True):
        numbers = ("" if x is None else f"{x:.5g}" for x in (row.loss, row.accuracy, row.seconds))
        table.add_row(name, printable(row.layer), row.measure, _value(row), *numbers)
    show(table)
    for line in dict.fromkeys(f"{name}: {row.error}" for name, row in zip(names, rows, strict=True) if row.error):
        click.echo(printable(line))


def _value(row: Row) -> str:
    if row.value is None:
        return "error"
    if row.stderr is None:
        return f"{row.value:.5g}"
    return intervals.shown(row.value, None if row.low is None or row.high is None else (row.low, row.high))


def _short(paths: list[str]) -> list[str]:
    """Return paths without the folder that all of them share."""
    try:
        shared = os.path.commonpath([Path(path).parent for path in paths])
    except ValueError:  # nothing in common, or no paths
        return paths
    return [os.path.relpath(path, shared) for path in paths]
