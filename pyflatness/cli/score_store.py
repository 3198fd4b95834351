"""Score checkpoints into a store: what is there stays, what is new is computed, and an interruption loses nothing."""

import contextlib
import math
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from ..messages import duration, printable
from ..scoring import executors
from ..scoring.measuring import Outcome
from ..scoring.run import Kept, Run, keep
from ..scoring.store import Store
from ..scoring.worker import Job
from . import invocation
from .bars import bar
from .output import Notes

_SHOWN = 5  # errors that are printed
_SHORT = 10  # seconds


@dataclass(frozen=True)
class How:
    """Hold how a run goes: the executor as :func:`.executors.named` takes it, what :func:`.keep` takes, and a bar."""

    executor: str
    workers: int
    arguments: Mapping[str, Any] = field(default_factory=dict)
    retry: bool = False
    ends: bool = False
    spectrum: int = 0
    shown: bool | None = None


def write(run: Run, path: Path, columns: Mapping[str, Mapping[str, Any]], how: How, *, dry_run: bool = False) -> None:
    """Measure what the store does not have yet.

    Args:
        run: what is asked.
        path: of the store.
        columns: metadata of the checkpoints, by their names.
        how: to go about it.
        dry_run: to say what there is to do, and leave the store as it is.

    Raises:
        StoreError: the store cannot be written; what was committed is kept.
        SystemExit: 1 if something failed, 130 after Ctrl-C or SIGTERM.
    """
    helps = run.ranks.rank > 0
    status = run.ranks.first("the exit status", _help(run) if helps else _write(run, path, columns, how, dry_run))
    if status:
        raise SystemExit(status)


def _help(run: Run) -> int:
    """Measure on one of several ranks what the first of them hands out."""
    run.go((), executors.Serial(), lambda job, outcome: None)
    return 0


def _write(run: Run, path: Path, columns: Mapping[str, Mapping[str, Any]], how: How, dry_run: bool) -> int:
    """Do what :func:`write` does, and return the exit status."""
    if how.ends:
        click.echo("the data are known by their first and last batch: a change between these goes unnoticed", err=True)
    with Store.copied(path) if dry_run else Store(path, write=True, command=invocation.command()) as store:
        kept = keep(run, store, retry=how.retry, ends=how.ends, spectrum=how.spectrum)
        for note in kept.notes:
            click.echo(printable(note), err=True)
        store.describe(columns)
        click.echo(printable(_summary(run, kept, path)))
        if dry_run:
            _estimate(run, kept.jobs)
            return 0
        done, interrupted = _go(run, store, kept, how, notes := Notes())
        counts = store.counts(kept.setting, kept.contents.values())
        errors = store.errors(kept.setting, kept.contents.values())
        failed = kept.failures(store)
    left = len(kept.jobs) - done
    click.echo(printable(f"{path}: {done} units done, {left} to do; {counts['failed']} values failed"))
    notes.show()
    if failed:
        click.echo(f"spectra that failed: {len(failed)}")
    for name, error in (errors + failed)[:_SHOWN]:
        click.echo(printable(f"{name}: {error}"))
    if counts["failed"] or failed:
        click.echo(f"pyflatness show {path} CHECKPOINT has all errors of one; --retry computes again what failed")
    if interrupted:
        click.echo("interrupted: what was done is kept, and the same command goes on from there")
        raise SystemExit(130) from interrupted
    return 1 if counts["failed"] or failed else 0


def _summary(run: Run, kept: Kept, path: Path) -> str:
    checkpoints, units = len(kept.contents), len(kept.jobs)
    values = sum(len(job.unit.pairs) for job in kept.jobs)
    spectra = sum(bool(job.spectrum) for job in kept.jobs)
    also = f", and {spectra} spectra of some 600 Hessian products each" if spectra else ""
    reads = f"{run.reads(kept.jobs)} reads of the data{also}"
    return f"{path}: {checkpoints} checkpoints, {units} units to do ({values} values, {reads})"


def _estimate(run: Run, jobs: list[Job]) -> None:
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
        click.echo(
            printable(f"the first took {seconds:.3g} s{note}; all of them one after the other: {duration(total)}")
        )


def _go(run: Run, store: Store, kept: Kept, how: How, notes: Notes) -> tuple[int, KeyboardInterrupt | None]:
    """Measure the units and take the notes; return how many were committed, and what interrupted this."""
    done = 0

    def take(job: Job, outcome: Outcome) -> None:
        nonlocal done
        kept.commit(store, job, outcome)
        notes.add(str(job.weights), outcome.notes)
        done += 1
        progress.advance(task)

    with bar("units", how.shown) as progress, _executor(how, len(kept.jobs)) as executor:
        task = progress.add_task("scoring", total=len(kept.jobs))
        try:
            run.go(kept.jobs, executor, take)
        except KeyboardInterrupt as error:
            return done, error
    return done, None


@contextlib.contextmanager
def _executor(how: How, units: int) -> Iterator[Executor]:
    executor = executors.named(how.executor, min(how.workers, units), how.arguments) if units else executors.Serial()
    try:
        yield executor
    finally:
        executor.shutdown(cancel_futures=True)
