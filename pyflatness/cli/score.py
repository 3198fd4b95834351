"""Run ``pyflatness score``: many checkpoints of one network, measured on one data set.

A checkpoint that cannot be measured is a row with its error, and the others go on; so is a measure that fails of one.
With ``--out`` the rows go to a CSV file, with ``--store`` to a store. Processes that torchrun, or
``accelerate launch``, has started measure each checkpoint together.
"""

import contextlib
import glob
import math
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import click
import torch
import torch.distributed as dist
from click.core import ParameterSource

from .. import progress
from ..api import measure
from ..errors import InputError, PassesError, printable
from ..losses import auto
from ..messages import duration
from ..model import hugging_face, state
from ..model.data import Batches
from ..model.data import first as first_of
from ..model.layers import unwrap
from ..numerics.process_groups import joined
from ..numerics.ranks import ALONE, Ranks, is_known
from ..options import Options
from ..scoring import checkpoints, executors, metadata, pretrained
from ..scoring.keys import measured_anew
from ..scoring.run import ScoringRun, keep
from ..scoring.score import score as call
from ..scoring.store import Store
from ..scoring.units import NO_FIT, Held, Pair, Row, WorkUnit, csv_line, rows
from ..scoring.worker import Outcome, Setup
from .group import command_line
from .network import DEFAULT_MEASURES, SPEC, Estimates, Measures, Setting, loss_of, maker, moved
from .options import Count, Json, Keywords, Metadata, command, takes
from .output import Notes, append_whole, echo, is_same_file, note_lines, prepare_file, show_json, show_rows

_OF_A_LAUNCHER = "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"


def _shard(given: str) -> tuple[int, int]:
    """Return the number of a part, and how many parts there are."""
    number, _, count = given.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise InputError(f"{given!r}: I/N is wanted, the I-th of N parts, as in 2/4")
    return int(number), int(count)


@command(call, config=True)
def score(
    paths: Annotated[tuple[Path, ...], {"metavar": "[CHECKPOINT]..."}] = (),
    *,
    model: Annotated[str | None, SPEC] = None,
    model_args: Keywords,
    setting: Setting,
    measures: Measures = DEFAULT_MEASURES,
    estimates: Estimates,
    out: Path | None = None,
    store: Path | None = None,
    retry: bool = False,
    version: Annotated[str | None, {"metavar": "TEXT"}] = None,
    spectrum: Annotated[int | None, {"metavar": "K", "type": click.IntRange(1)}] = None,
    shard: Annotated[tuple[int, int] | None, takes(_shard, "I/N", nargs=1)] = None,
    executor: Annotated[str, {"type": click.Choice(executors.NAMES)}] = "processes",
    executor_args: Keywords,
    ray_address: Annotated[str | None, {"metavar": "ADDRESS"}] = None,
    workers: Count = 1,
    table: Metadata = None,
    settings: bool = False,
    fingerprint: Literal["all", "ends"] = "all",
    dry_run: bool = False,
    progress_shown: Annotated[bool | None, {"names": ["--progress/--no-progress"]}] = None,
    as_json: Json = False,
) -> None:
    """Measure the network of each CHECKPOINT, with its loss and accuracy from the same pass.

    CHECKPOINTs are files, folders and quoted patterns; without one the model is measured as it is made. Without --model
    they are networks of libraries, such as hf:FOLDER, and --model-args are of all of them. With --store
    the same command goes on after an interruption, and one that names more checkpoints, layers or measures computes
    what is new; options from --retry to --dry-run go with it.

    Exit status: 0 if all is done, 1 if there are rows with errors, 2 for a command that cannot be done, 130 if
    interrupted.

    Args:
        model: what returns the model: file.py:callable or package.module:callable. Or hf:FOLDER, hf:ORG/NAME@REVISION
            (from the local cache), timm:NAME, torchvision:NAME. CHECKPOINTs that are such names need none.
        model_args: keyword arguments of that callable: k=v, with commas or repeated, or a JSON object.
        out: CSV file that the rows are written to, beside standard output.
        store: SQLite file that keeps the values: run again, the command goes on where it was.
        shard: measure only the I-th of N parts of the checkpoints, into a store of its own, for pyflatness store merge.
        executor: what runs the workers: processes of this machine, this process alone, ray or slurm.
        executor_args: options of ray or slurm, such as partition, time in minutes, cpus_per_task.
        ray_address: address of the Ray cluster to use, or 'auto' to find a running one.  [default: a new, local one]
        settings: with --store, add columns with the settings that checkpoint files hold.
        fingerprint: which batches tell whether the data are still the same: all, or the first and last alone.
        dry_run: say what there is to do and how long it will take, and keep nothing.
        progress_shown: show a progress bar.  [default: on a terminal; elsewhere a line every half minute]
    """
    if out is not None and store is not None:
        raise click.UsageError("pass one of --out and --store; pyflatness store export writes the table of a store")
    of_stores = {"--retry": retry, "--version": version, "--spectrum": spectrum, "--shard": shard, "--metadata": table}
    of_stores |= {"--workers": workers > 1, "--settings": settings, "--dry-run": dry_run}
    used = [name for name, given in of_stores.items() if given]
    if store is None and used:
        raise click.UsageError(f"{', '.join(used)}: only with --store FILE, in the place of --out")
    if store is not None and as_json:
        raise click.UsageError(
            "--json goes without --store; of a store pyflatness store ls --json and show --json print what it has"
        )
    if not paths and (shard or workers > 1):
        raise click.UsageError("--shard and --workers go with several CHECKPOINTs, and none is there")
    criterion, to = loss_of(setting.loss, setting.loss_args), moved(setting.device, setting.dtype)
    lost = next((path for path in paths if out is not None and is_same_file(out, path)), None)
    if lost is not None:
        message = f"{out} is one of the checkpoints: it is the same file as {lost}"
        raise click.BadParameter(printable(message), param_hint="--out")
    own = _networks(paths) if model is None else []
    spec = own[0] if model is None else model
    makers = {name: maker("model", name, model_args, to) for name in own or [spec]}
    source = setting.source(spec)
    bare = own or ([] if paths else [spec])
    random = [one for one in bare if pretrained.is_named(one) and not pretrained.is_trained(one, model_args)]
    if random:
        raise click.UsageError(
            f"{random[0]} has random weights; pass CHECKPOINTs of it with --model, or --model-args that name weights"
        )
    try:
        options = Options(seed=setting.seed, **vars(estimates))
    except InputError as error:
        named = re.sub(r"\b(probes|rtol|fraction|max_passes|seed)=", r"--\1 ", str(error))  # --rtol 2 for rtol=2
        raise InputError(named.replace("_passes", "-passes").replace("  ", " ")) from None
    with _launched() as ranks:
        by_default = click.get_current_context().get_parameter_source("executor") == ParameterSource.DEFAULT
        if not ranks.alone and (dry_run or workers > 1 or not (executor == "serial" or by_default)):
            raise click.UsageError(
                f"the {ranks.size} processes of a launcher measure each checkpoint together, one after the other; "
                "--executor, --workers and --dry-run are for a command that is started once"
            )
        listed = [] if own else [*map(str, checkpoints.find(paths))]
        found = [*map(Path, ranks.first("the checkpoints", listed))]
        if shard is not None:
            found = found[shard[0] - 1 :: shard[1]]
        checkpoints.check_readers(found)
        if ranks.rank == 0:
            _check_there(found)
            prepare_file(out)
            if not found and not pretrained.is_named(spec):
                echo(f"no checkpoint given: {spec} is measured with the weights that it is made with", err=True)
        run = ScoringRun(
            {str(path): path for path in found} or {name: make.network() for name, make in makers.items()},
            Setup(
                makers[spec] if found else None,
                source,
                *(criterion, measures, setting.layers or None, options),
                setting.batch_size,
                setting.limit,
                version=version,
                progress=progress_shown is not False,
            ),
            ranks,
        )
        if auto.is_auto(criterion) and hugging_face.inner(unwrap(run.network(next(iter(run.models))))) is None:
            raise click.UsageError(
                "--loss: the model is none of Hugging Face's; pass the loss that it was trained with"
            )
        if auto.is_auto(criterion):
            _check_passes(run)
        if store is None:
            file, shown = (out, progress_shown) if ranks.rank == 0 else (out and Path(os.devnull), False)
            to_csv(run, file, shown, as_json=as_json)
        else:
            columns = metadata.read(table, run.models) if table else {}
            if settings:
                of_files = metadata.of_files({str(path): path for path in found})
                columns = {name: of_files.get(name, {}) | columns.get(name, {}) for name in run.models}
            path = store if shard is None else store.with_stem(f"{store.stem}-{shard[0]}-of-{shard[1]}")
            arguments = executor_args | ({"address": ray_address} if ray_address else {})
            name, status = executor if ranks.alone and found else "serial", 0
            if ranks.rank > 0:  # measures what the first rank hands out
                run.go((), None, lambda unit, outcome: None)
            else:
                status = to_store(
                    *(run, path, columns),
                    lambda units: executors.named(name, min(workers, units), arguments),
                    progress_shown,
                    dry_run=dry_run,
                    retry=retry,
                    ends=fingerprint == "ends",
                    spectrum=spectrum or 0,
                )
            status = ranks.first("the exit status", status)
            if status:
                raise SystemExit(status)


@contextlib.contextmanager
def _launched() -> Iterator[Ranks]:
    """Join the processes of a launcher, of which the first alone prints, and yield their ranks; else one process."""
    if any(name not in os.environ for name in _OF_A_LAUNCHER) or os.environ["WORLD_SIZE"] == "1":
        yield ALONE
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    dist.init_process_group("gloo")  # for what is exchanged, which is on the CPU; a model is on one rank's device
    try:
        with contextlib.ExitStack() as stack:
            if dist.get_rank() > 0:
                stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w"))))  # noqa: PTH123
            yield stack.enter_context(joined(None))
    except Exception as error:
        if dist.get_rank() > 0 and is_known(error):
            raise SystemExit(2) from error
        raise
    finally:
        dist.destroy_process_group()


def _networks(paths: tuple[Path, ...]) -> list[str]:
    """Return the CHECKPOINTs that need no --model, each once: names of networks of libraries."""
    names = [*dict.fromkeys(map(str, paths))]
    odd = next((name for name in names if not pretrained.is_named(name)), None)
    if odd is not None or not names:
        of = f"what makes the network of {odd}" if odd else "file.py:callable that returns the network"
        raise click.UsageError(printable(f"Missing option '--model': {of}; names such as hf:FOLDER alone need none"))
    return names


def _check_there(found: list[Path]) -> None:
    """Raise if an argument names no checkpoints, so that a slip of the keyboard costs no results.

    A file that is missing beside others which are there is an error in its rows, if its name is that of a checkpoint.
    """
    missing = [path for path in found if path.is_dir() or not path.exists()]
    named = [path for path in missing if checkpoints.is_checkpoint(path) and not glob.has_magic(str(path))]
    lost = [path for path in missing if len(missing) == len(found) or path not in named]
    if lost:
        why = (
            f"no checkpoints ({', '.join(checkpoints.ENDINGS)}) are in it"
            if lost[0].is_dir()
            else "there is no such file"
        )
        raise click.BadParameter(printable(f"{lost[0]}: {why}; nothing was written"), param_hint="CHECKPOINT")


def _check_passes(run: ScoringRun) -> None:
    """Raise if one sample shows that exact values of a language model take too many passes, before it is measured."""
    setup, one = run.setup, replace(run.setup.options, max_passes=1)
    if one.probes is not None:
        return
    network = run.network(next(iter(run.models)))
    try:
        first = next(iter(Batches(run.bench.data, state.device(network))))
        options = {**asdict(one), "layers": setup.selectors, "measures": setup.measures}
        measure(network, setup.loss, [first_of(first, 1)], **options, progress=False, process_group=False)
    except PassesError as error:
        if error.needed > setup.options.max_passes:
            raise click.UsageError(
                f"--layers: {error.what} for one sample, more than --max-passes {setup.options.max_passes}; pass "
                "--probes 8 for values that are sampled by 8 backward passes, with standard errors (and --curvature "
                "ggn for those of the GGN, without Hessian products), the name of the head, which takes none, or "
                "--max-passes N to take the time"
            ) from None
    except Exception:  # of the user's model and data: whatever it is, the rows have it
        return


_SHOWN = 5  # errors that are printed
_SHORT = 10  # seconds


def to_csv(run: ScoringRun, out: Path | None, shown: bool | None, *, as_json: bool) -> None:
    """Measure everything, and print and write it; after Ctrl-C, what there is.

    The exit status is 1 if a row has an error.
    """
    found: list[Row] = []
    interrupted = None
    notes: Notes = defaultdict(set)
    try:
        _append(run, Path(os.devnull) if out is None else out, found, notes, shown)
    except KeyboardInterrupt as error:
        interrupted = error
    except OSError as error:  # all others end up in rows
        raise InputError(f"--out {out}: cannot be written ({error.strerror}); it has {len(found)} rows") from None
    errors = sum(bool(row.error) for row in found)
    if as_json:
        facts = {"rows": [*map(asdict, found)], "notes": note_lines(notes), "interrupted": interrupted is not None}
        show_json({"file": None if out is None else str(out), "errors": errors, **facts})
    else:
        show_rows(found)
        echo(*note_lines(notes))
        where = "" if out is None else f"wrote {out}: "
        echo(f"{'interrupted; ' if interrupted else ''}{where}{len(found)} rows, {errors} errors")
    if interrupted or errors:
        raise SystemExit(130 if interrupted else 1) from interrupted


def _append(run: ScoringRun, out: Path, found: list[Row], notes: Notes, shown: bool | None) -> None:
    """Append each checkpoint's rows to the file, and those that are in the file to the list; collect the notes."""
    batches = run.bench.batches()
    done, end = 0.0, 0

    def step(part: float) -> None:
        nonlocal done
        if batches:
            more = min(part * len(unit.pairs) / batches, end - done)
            done += more
            advance(more, "")

    each = {name: run.pairs(name) for name in run.models}
    total = sum(map(len, each.values()))
    with out.open("wb", buffering=0) as file, progress.bar("scoring", total, shown, "rows") as advance:
        append_whole(file, csv_line(field.name for field in fields(Row)))
        for name, pairs in each.items():
            held: dict[Pair, Held] = {}
            end += len(pairs)
            for unit in run.units(name, pairs):
                known = any(one.fit != NO_FIT for one in held.values())
                outcome = run.bench.outcome(replace(unit, fit=unit.fit and not known), step)
                held |= outcome.held
                for note in outcome.notes:
                    notes[note].add(name)
            for row in rows(name, pairs, held):
                append_whole(file, csv_line(asdict(row).values()))
                found.append(row)
            advance(end - done, "")
            done = float(end)


def to_store(
    run: ScoringRun,
    path: Path,
    columns: Mapping[str, Mapping[str, Any]],
    executor: Callable[[int], Executor | None],
    shown: bool | None = None,
    *,
    dry_run: bool = False,
    **keeping: Any,
) -> int:
    """Measure what the store does not have yet, each kept once it is there; return 1 if something failed."""
    if keeping.get("ends"):
        echo("the data are known by their first and last batch: a change between these goes unnoticed", err=True)
    with Store(path, write=True, command=command_line(), copy=dry_run) as store:
        kept = keep(run, store, **keeping)
        echo(*kept.notes, err=True)
        store.describe(columns)
        spectra = [unit for unit in kept.units if unit.spectrum]
        also = f", and {len(spectra)} spectra of some 600 Hessian products each" if spectra else ""
        values = (
            f"{sum(len(unit.pairs) for unit in kept.units)} values, {run.reads(kept.units)} reads of the data{also}"
        )
        echo(f"{path}: {len(kept.contents)} checkpoints, {len(kept.units)} units to do ({values})")
        seconds = run.bench.spectrum_seconds(spectra[0]) if spectra and run.ranks.alone else None
        if seconds is not None:
            all_of_them = f"about {duration(seconds * len(spectra))} one after the other"
            echo(f"{len(spectra)} spectra, by a trial {seconds:.3g} s each: {all_of_them}")
        if dry_run:
            _estimate(run, kept.units)
            return 0
        notes: Notes = defaultdict(set)
        done, interrupted = 0, None

        def take(unit: WorkUnit, outcome: Outcome) -> None:
            nonlocal done
            kept.commit(store, unit, outcome)
            for note in (*outcome.notes, *map(measured_anew, outcome.unknown)):
                notes[note].add(str(unit.weights))
            done += 1
            advance(1, "")

        with progress.bar("scoring", len(kept.units), shown, "units") as advance:
            workers = executor(len(kept.units)) if kept.units else None
            try:
                run.go(kept.units, workers, take)
            except KeyboardInterrupt as error:
                interrupted = error
            finally:
                if workers is not None:
                    workers.shutdown(cancel_futures=True)
        counts = store.counts(kept.setting, kept.contents.values())
        errors = store.errors(kept.setting, kept.contents.values())
        failed = kept.failures(store)
    echo(f"{path}: {done} units done, {len(kept.units) - done} to do; {counts['failed']} values failed")
    echo(*note_lines(notes))
    if failed:
        echo(f"spectra that failed: {len(failed)}")
    echo(*(f"{name}: {error}" for name, error in (errors + failed)[:_SHOWN]))
    if counts["failed"] or failed:
        click.echo(f"pyflatness store show {path} CHECKPOINT has all errors of one; --retry computes again what failed")
    if interrupted:
        echo("interrupted: what was done is kept, and the same command goes on from there")
        raise SystemExit(130) from interrupted
    return 1 if counts["failed"] or failed else 0


def _estimate(run: ScoringRun, units: list[WorkUnit]) -> None:
    """Measure the first unit, keep nothing of it, and print how long all of them, but for spectra, will take."""
    units = [unit for unit in units if not unit.spectrum]
    if units:
        seconds = math.inf
        for _ in range(2):  # what is done once for a process counts once, if the unit is short
            start = time.perf_counter()
            outcome = run.bench.outcome(units[0])
            seconds = min(seconds, time.perf_counter() - start)
            if seconds > _SHORT:
                break
        note = f" (it failed: {outcome.errors[0]})" if outcome.errors else ""
        total = seconds * run.reads(units) / max(1, run.reads(units[:1]))
        echo(f"the first took {seconds:.3g} s{note}; all of them one after the other: {duration(total)}")
