"""Write results: tables, rows and JSON to standard output, and files completely or not at all.

An error says when standard output or a file cannot be written.
"""

import contextlib
import json
import math
import os
import tempfile
from io import FileIO
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from ..errors import InputError, printable
from ..report import views
from ..scoring.scores import table as table_of
from ..scoring.units import Row

_NARROWEST = 80  # with less room whole columns would vanish; a terminal that has less breaks the lines by itself
_WIDTH_OF_FILES = 200  # a file or pipe has no width that lines would have to be folded at


def show(table: Table, width: int = _WIDTH_OF_FILES) -> None:
    """Print a table without markup; its cells are folded where it is too wide, and never cut off.

    Names of layers (columns with ``no_wrap``) are not folded: the table is as wide as they need.

    Colours and bold type are for terminals, and not with ``NO_COLOR`` in the environment. Lines of files and pipes end
    where their text does, after ``width`` characters at the most.
    """
    plain = bool(os.environ.get("NO_COLOR"))  # rich would leave bold type, which is escape codes too
    console = Console(markup=False, highlight=False, emoji=False, color_system=None if plain else "auto")
    for column in table.columns:
        column.overflow = "fold"
    console.width = max(console.width if console.is_terminal else width, _NARROWEST, views.least_width(table))
    if console.is_terminal:
        console.print(table)
        return
    with console.capture() as captured:
        console.print(table)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))  # click would take ASCII for UTF-8


def show_json(facts: Any) -> None:
    """Print dicts, lists, texts and numbers as JSON, which has no NaN and no infinity: these are null."""
    click.echo(json.dumps(finite(facts), indent=1, ensure_ascii=False, allow_nan=False))


def finite(facts: Any) -> Any:
    """Return dicts, lists, texts and numbers with None for NaN and infinity, and lists for tuples."""
    if isinstance(facts, dict):
        return {name: finite(held) for name, held in facts.items()}
    if isinstance(facts, (list, tuple)):
        return [*map(finite, facts)]
    return None if isinstance(facts, float) and not math.isfinite(facts) else facts


def echo(*lines: str, err: bool = False) -> None:
    """Print lines of text, with all characters of names from outside that a terminal cannot show escaped."""
    for line in lines:
        click.echo(printable(line), err=err)


def show_rows(found: list[Row]) -> None:
    """Print rows as a table, and their errors below it."""
    names = _short([row.checkpoint for row in found])
    show(table_of(found, names))
    errors: Notes = {}
    for name, row in zip(names, found, strict=True):
        if row.error:
            errors.setdefault(row.error, set()).add(name)
    echo(*note_lines(errors))


def _short(paths: list[str]) -> list[str]:
    """Return paths without the folder that all of them share."""
    try:
        shared = os.path.commonpath([Path(path).parent for path in paths])
    except ValueError:  # nothing in common, or no paths
        return paths
    return [os.path.relpath(path, shared) for path in paths]


Notes = dict[str, set[str]]  # the names of the checkpoints that a note is on


def note_lines(notes: Notes) -> list[str]:
    """Return each note with the first checkpoint that it is on."""
    firsts = {note: sorted(names) for note, names in notes.items()}  # workers have them in no order
    return [f"{first}{f' and {len(more)} more' if more else ''}: {note}" for note, (first, *more) in firsts.items()]


def prepare_folder(path: Path) -> None:
    """Make the folder of ``--out``, and check that files can be written there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise InputError(f"--out {path}: no folder to write to ({error.strerror})") from None


def is_same_file(a: Path, b: Path) -> bool:
    """Return whether both are one file: by device and inode, so also through links or on a file system without case."""
    try:
        return a.samefile(b)
    except OSError:  # one of them is not there yet, or cannot be looked at
        return a.absolute() == b.absolute()


def append_whole(file: FileIO, content: bytes) -> None:
    """Append all of the content or, if that fails, nothing of it: a full disk must leave no torn line."""
    end = file.tell() if file.seekable() else None
    rest = memoryview(content)
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except BaseException:
        with contextlib.suppress(OSError):  # devices have no end to cut
            file.truncate(end)
        raise


def write_whole(path: Path, content: bytes) -> None:
    """Write a file of results, which replaces an older one only when it is complete."""
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_bytes(content)
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise InputError(f"--out: {path} cannot be written ({error.strerror})") from None


def prepare_file(path: Path | None) -> None:
    """Make the folder of a file, if there is one to write, and check that it can be written; its content stays."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        existed = path.exists()
        with path.open("a"):  # to append: an older result is lost only when there is a new one
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise InputError(f"--out {path}: cannot be written ({error.strerror})") from None
