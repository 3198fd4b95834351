"""Measure what ``pyflatness score`` asks for, and write it: to a CSV file, or to a store.

A CSV file has each checkpoint's rows as soon as it is done, whole or not at all. In a store what is there stays, what
is new is computed, and an interruption loses nothing.
"""

import math
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import click

from ..errors import InputError
from ..messages import duration, printable
from ..scoring import executors
from ..scoring.measuring import Outcome
from ..scoring.rows import NO_FIT, Row, csv_line, rows
from ..scoring.run import Kept, ScoringRun, keep
from ..scoring.store import Store
from ..scoring.worker import Job
from .group import command_line
from .output import Notes, append_whole, bar, echo, show_json, show_rows

_SHOWN = 5  # errors that are printed
_SHORT = 10  # seconds


def to_csv(run: ScoringRun, out: Path | None, shown: bool | None = None, *, as_json: bool = False) -> None:
    """Measure everything, print it, and write it.

    Args:
        run: what is asked.
        out: the file; None: nothing is written.
        shown: whether a bar is, see :func:`.output.bar`.
        as_json: whether the rows are printed as JSON, with the notes and whether this was interrupted.

    Raises:
        InputError: the file cannot be written.
        SystemExit: 1 if there is an error in a row, 130 after Ctrl-C; the rows so far are written.
    """
    found: list[Row] = []
    notes, interrupted = Notes(), None
    try:
        _append(run, Path(os.devnull) if out is None else out, found, notes, shown)
    except KeyboardInterrupt as error:
        interrupted = error
    except OSError as error:  # all others end up in rows
        raise InputError(f"--out {out}: cannot be written ({error.strerror}); it has {len(found)} rows") from None
    errors = sum(bool(row.error) for row in found)
    if as_json:
        facts = {"rows": [*map(asdict, found)], "notes": [*notes.lines()], "interrupted": interrupted is not None}
        show_json({"file": None if out is None else str(out), "errors": errors, **facts})
    else:
        show_rows(found)
        notes.show()
        where = "" if out is None else f"wrote {out}: "
        echo(f"{'interrupted; ' if interrupted else ''}{where}{len(found)} rows, {errors} errors")
    if interrupted or errors:
        raise SystemExit(130 if interrupted else 1) from interrupted


def _append(run: ScoringRun, out: Path, found: list[Row], notes: Notes, shown: bool | None) -> None:
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


def to_store(
    run: ScoringRun,
    path: Path,
    columns: Mapping[str, Mapping[str, Any]],
    executor: Callable[[int], Executor],
    shown: bool | None = None,
    *,
    dry_run: bool = False,
    **keeping: Any,
) -> int:
    """Measure what the store does not have yet, and return the exit status: 1 if something failed.

    Args:
        run: what is asked.
        path: of the store.
        columns: metadata of the checkpoints, by their names.
        executor: makes what measures so many units.
        shown: whether a bar is, see :func:`.output.bar`.
        dry_run: to say what there is to do, and leave the store as it is.
        keeping: the options of :func:`.keep`.

    Raises:
        StoreError: the store cannot be written; what was committed is kept.
        SystemExit: 130 after Ctrl-C or SIGTERM.
    """
    if keeping.get("ends"):
        click.echo("the data are known by their first and last batch: a change between these goes unnoticed", err=True)
    with Store.copied(path) if dry_run else Store(path, write=True, command=command_line()) as store:
        kept = keep(run, store, **keeping)
        for note in kept.notes:
            click.echo(printable(note), err=True)
        store.describe(columns)
        echo(_summary(run, kept, path))
        if dry_run:
            _estimate(run, kept.jobs)
            return 0
        done, interrupted = _measured(run, store, kept, executor, shown, notes := Notes())
        counts = store.counts(kept.setting, kept.contents.values())
        errors = store.errors(kept.setting, kept.contents.values())
        failed = kept.failures(store)
    echo(f"{path}: {done} units done, {len(kept.jobs) - done} to do; {counts['failed']} values failed")
    notes.show()
    if failed:
        echo(f"spectra that failed: {len(failed)}")
    echo(*(f"{name}: {error}" for name, error in (errors + failed)[:_SHOWN]))
    if counts["failed"] or failed:
        click.echo(f"pyflatness store show {path} CHECKPOINT has all errors of one; --retry computes again what failed")
    if interrupted:
        echo("interrupted: what was done is kept, and the same command goes on from there")
        raise SystemExit(130) from interrupted
    return 1 if counts["failed"] or failed else 0


def _summary(run: ScoringRun, kept: Kept, path: Path) -> str:
    checkpoints, units = len(kept.contents), len(kept.jobs)
    values = sum(len(job.unit.pairs) for job in kept.jobs)
    spectra = sum(bool(job.spectrum) for job in kept.jobs)
    also = f", and {spectra} spectra of some 600 Hessian products each" if spectra else ""
    reads = f"{run.reads(kept.jobs)} reads of the data{also}"
    return f"{path}: {checkpoints} checkpoints, {units} units to do ({values} values, {reads})"


def _estimate(run: ScoringRun, jobs: list[Job]) -> None:
    """Measure the first unit, keep nothing of it, and print how long all of them, but for spectra, will take."""
    jobs = [job for job in jobs if not job.spectrum]
    if jobs:
        seconds = math.inf
        for _ in range(2):  # what is done once for a process counts once, if the unit is short
            start = time.perf_counter()
            outcome = run.bench.outcome(jobs[0])
            seconds = min(seconds, time.perf_counter() - start)
            if seconds > _SHORT:
                break
        note = f" (it failed: {outcome.errors[0]})" if outcome.errors else ""
        total = seconds * run.reads(jobs) / max(1, run.reads(jobs[:1]))
        echo(f"the first took {seconds:.3g} s{note}; all of them one after the other: {duration(total)}")


def _measured(
    run: ScoringRun, store: Store, kept: Kept, executor: Callable[[int], Executor], shown: bool | None, notes: Notes
) -> tuple[int, KeyboardInterrupt | None]:
    """Measure the units and take the notes; return how many were committed, and what interrupted this."""
    done = 0

    def take(job: Job, outcome: Outcome) -> None:
        nonlocal done
        kept.commit(store, job, outcome)
        notes.add(str(job.weights), outcome.notes)
        done += 1
        progress.advance(task)

    with bar("units", shown) as progress:
        task = progress.add_task("scoring", total=len(kept.jobs))
        workers = executor(len(kept.jobs)) if kept.jobs else executors.Serial()
        try:
            run.go(kept.jobs, workers, take)
        except KeyboardInterrupt as error:
            return done, error
        finally:
            workers.shutdown(cancel_futures=True)
    return done, None
