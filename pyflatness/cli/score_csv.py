"""Write the rows of many checkpoints to a CSV file, each checkpoint's as soon as it is done, whole or not at all."""

import os
from dataclasses import asdict, fields, replace
from pathlib import Path

import click

from ..errors import InputError
from ..messages import printable
from ..scoring.fit import NO_FIT
from ..scoring.measuring import Outcome
from ..scoring.rows import Row, csv_line, rows
from ..scoring.run import Run
from ..scoring.scores import table
from .bars import bar
from .output import Notes, show, show_json
from .paths import append_whole


def write(run: Run, out: Path, shown: bool | None = None, *, as_json: bool = False) -> None:
    """Measure everything, write it, and print it.

    Args:
        run: what is asked.
        out: the file.
        shown: whether a bar is, see :func:`.bars.bar`.
        as_json: whether the rows are printed as JSON, with the notes and whether this was interrupted.

    Raises:
        InputError: the file cannot be written.
        SystemExit: 1 if there is an error in a row, 130 after Ctrl-C; the rows so far are written.
    """
    found: list[Row] = []
    notes, interrupted = Notes(), None
    try:
        _append(run, out, found, notes, shown)
    except KeyboardInterrupt as error:
        interrupted = error
    except OSError as error:  # all others end up in rows
        raise InputError(f"--out {out}: cannot be written ({error.strerror}); it has {len(found)} rows") from None
    errors = sum(bool(row.error) for row in found)
    if as_json:
        facts = {"rows": [*map(asdict, found)], "notes": [*notes.lines()], "interrupted": interrupted is not None}
        show_json({"file": str(out), "errors": errors, **facts})
    else:
        print_rows(found)
        notes.show()
        said = f"{'interrupted; ' if interrupted else ''}wrote {out}: {len(found)} rows, {errors} errors"
        click.echo(printable(said))
    if interrupted or errors:
        raise SystemExit(130 if interrupted else 1) from interrupted


def _append(run: Run, out: Path, found: list[Row], notes: Notes, shown: bool | None) -> None:
    """Append each checkpoint's rows to the file and, as far as they are in it, to the list; take the notes."""
    batches = run.bench.batches()

    def step(part: float) -> None:
        if batches:
            progress.advance(task, part * len(job.unit.pairs) / batches)

    done = 0
    each = {name: run.pairs(name) for name in run.models}
    with out.open("wb", buffering=0) as file, bar("rows", shown) as progress:
        task = progress.add_task("scoring", total=sum(map(len, each.values())))
        append_whole(file, csv_line(field.name for field in fields(Row)))
        for name, pairs in each.items():
            outcomes: list[Outcome] = []
            for job in run.jobs(name, pairs):
                known = any(outcome.fit != NO_FIT for outcome in outcomes)
                outcomes.append(run.bench.outcome(replace(job, fit=not known), step))
                notes.add(name, outcomes[-1].notes)
            held = {pair: one for outcome in outcomes for pair, one in outcome.held.items()}
            for row in rows(name, pairs, held):
                append_whole(file, csv_line(asdict(row).values()))
                found.append(row)
            done += len(pairs)
            progress.update(task, completed=done)


def print_rows(found: list[Row]) -> None:
    """Print rows as a table, and their errors below it."""
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
