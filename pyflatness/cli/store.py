"""Run ``pyflatness store``: list, show, export, extend, check, unite and tidy stores of values."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import click
from rich import box
from rich.table import Table

from ..errors import InputError, printable
from ..scoring import export, metadata, result_files
from ..scoring import store as stores
from ..scoring.store import Store
from ..scoring.units import rows
from . import output
from .group import command_line
from .options import Json, Metadata, command

_STATES = """
SELECT name, coalesce(sum(state = 'done'), 0) AS done, coalesce(sum(state = 'failed'), 0) AS failed,
    coalesce(sum(state = 'to do'), 0) AS todo
FROM checkpoints LEFT JOIN results USING (content) GROUP BY checkpoints.id ORDER BY checkpoints.id
"""
_TIME = "SELECT coalesce(sum(seconds), 0) FROM units"
_DAMAGED = "not whole: put a copy of it back, or run pyflatness score as before with another --store"


@click.group()
def store() -> None:
    """Read and keep the values that pyflatness score --store has written into STORE, an SQLite file."""


def _command(short_help: str) -> Callable[[Callable[..., None]], click.Command]:
    """Return what makes a function a command on a STORE, its first argument, and has its name."""

    def add(function: Callable[..., None]) -> click.Command:
        made = command()(function)
        made.short_help = short_help
        store.add_command(made)
        return made

    return add


@_command("Count what is done, failed and to do of each checkpoint.")
def ls(store: Path, *, as_json: Json = False) -> None:
    """Show how many values of each checkpoint in STORE are done, failed and to do."""
    with Store(store) as held:
        held.check()
        found = [dict(row) for row in held.select(_STATES)]
        facts = held.settings()
        ((seconds,),) = held.select(_TIME)
    texts = export.setting_texts(facts)
    if as_json:
        settings = [
            {**one["shown"], "loss": one["key"]["loss"]["name"], "setting": export.setting_hash(one), "text": text}
            for one, text in zip(facts.values(), texts.values(), strict=True)
        ]
        output.show_json({"checkpoints": found, "settings": settings, "seconds": seconds})
        return
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_footer=True)
    table.add_column("checkpoint", f"{len(found)} checkpoints")
    states = {"done": "done", "failed": "failed", "todo": "to do"}
    for name, header in states.items():
        table.add_column(header, str(sum(row[name] for row in found)), justify="right")
    for row in found:
        table.add_row(printable(row["name"]), *(str(row[name]) for name in states))
    output.show(table)
    output.echo(*texts.values(), f"{seconds:.3g} s of measuring")


@_command("Show the values and errors of one checkpoint.")
def show(store: Path, checkpoint: str, *, as_json: Json = False) -> None:
    """Show the values, errors and metadata that STORE has of a CHECKPOINT: its name, or that of its file."""
    with Store(store) as held:
        every = {row["name"]: row for row in held.select("SELECT * FROM checkpoints ORDER BY id")}
        name = result_files.meant(checkpoint, [*every])
        content, columns = every[name]["content"], json.loads(every[name]["columns"])
        settings = held.settings()
        texts = export.setting_texts(settings)
        found = [
            ({**facts["shown"], "text": texts[number]}, rows(name, values, values))
            for number, facts in settings.items()
            if (values := held.values(number, content))
        ]
        results = [one for one in result_files.found(held) if one.name == name]
    if as_json:
        held_of: Any = [{**shown, "rows": [*map(asdict, of)]} for shown, of in found]
        others = [{"kind": one.kind, "label": one.label, "text": one.error or str(one.result)} for one in results]
        facts = {"checkpoint": name, "content": content, "columns": columns, "settings": held_of, "results": others}
        output.show_json(facts)
        return
    output.echo(f"{name}: content {content[:16]}", *(f"{key}: {value}" for key, value in columns.items()))
    for shown, of in found:
        output.echo("", shown["text"])
        output.show_rows(of)
    for one in results:
        output.echo("", f"{one.kind} {one.label}".rstrip(), *(one.error or str(one.result)).splitlines())


@_command("Write a table for other programs: CSV, JSON, Parquet.")
def export_(store: Path, *, out: Path, table: Metadata = None) -> None:
    """Write the values in STORE as a table, a row for each value or error, with the columns of the metadata.

    Args:
        out: file to write; its ending is the format: .csv, .json, .jsonl, .parquet.
    """
    try:
        export.check_format(out)
    except InputError as error:
        raise click.BadParameter(str(error), param_hint="--out") from None
    output.prepare_file(out)
    with Store(store) as held:
        found = [*export.records(held, metadata.of_store(held, table))]
    output.write_whole(out, export.content(found, out))
    output.echo(f"wrote {out}: {len(found)} rows")


@_command("Put a spectrum, a landscape or a history into a store.")
def add(store: Path, name: str, files: Annotated[tuple[Path, ...], {"metavar": "FILE..."}], *, label: str = "") -> None:
    """Put each FILE into STORE, for its page: spectra and landscapes of the checkpoint NAME, or the history NAME.

    They are files that spectrum.to_json(FILE), landscape.to_npz(FILE) and history.to_json(FILE) wrote in Python. What
    STORE has of the same checkpoint, kind and label, or of the same history, is replaced.

    Args:
        label: name that tells results of one kind of the same checkpoint from each other.
    """
    results = {}
    for file in files:
        try:
            results[file] = result_files.read(file.read_bytes(), str(file))
        except OSError as error:
            raise InputError(f"{file} cannot be read ({error.strerror})") from None
    with Store(store, write=True, command=command_line()) as held:
        for file, result in results.items():
            result_files.add(held, name, result, label)
            output.echo(f"{file}: {result_files.kind_of(result)} of {name}")


@_command("Check that a store is whole.")
def verify(store: Path, *, as_json: Json = False) -> None:
    """Check the file of STORE and what is in it; exits with status 1 if something is wrong."""
    with Store(store) as held:
        problems = stores.problems(held)
        orphans = [] if problems else stores.orphans(held)
    if as_json:
        output.show_json({"store": str(store), "whole": not problems, "problems": problems, "orphans": orphans})
    else:
        output.echo(*problems, *(f"{line}: pyflatness store gc takes them out" for line in orphans))
        output.echo(f"{store}: {_DAMAGED if problems else 'whole'}")
    if problems:
        raise SystemExit(1)


@_command("Unite stores.")
def merge(store: Path, others: Annotated[tuple[Path, ...], {"metavar": "OTHER..."}]) -> None:
    """Take what each OTHER store has into STORE, which is made if it is not there."""
    with Store(store, write=True, command=command_line()) as held:
        for other in others:
            with Store(other) as source:
                taken = stores.merge(held, source)
            output.echo(f"{other}: {taken} values taken")


@_command("Take out what belongs to no checkpoint any more.")
def gc(store: Path) -> None:
    """Take out of STORE the values of weights that no checkpoint has any more, and give the space back."""
    with Store(store, write=True, new=False) as held:
        found = stores.collect(held)
    output.echo(f"{store}: {', '.join(found) or 'nothing'} taken out")
