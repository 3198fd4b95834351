"""Print whole tables whatever the width, or JSON, and raise an error where standard output cannot be written."""

import contextlib
import io
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from ..errors import InputError
from ..messages import printable

_NARROWEST = 80  # with less room whole columns would vanish; a terminal that has less breaks the lines by itself
_WIDTH_OF_FILES = 200  # a file or pipe has no width that lines would have to be folded at


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table, for programs.")


def show(table: Table, width: int = _WIDTH_OF_FILES) -> None:
    """Print a table, its text as it is, without markup; cells are folded where it is too wide, and never cut off.

    Colours and bold type are for terminals, and not with ``NO_COLOR`` in the environment. Lines of files and pipes end
    where their text does, after ``width`` characters at the most.
    """
    plain = bool(os.environ.get("NO_COLOR"))  # rich would leave bold type, which is escape codes too
    console = Console(markup=False, highlight=False, emoji=False, color_system=None if plain else "auto")
    console.width = max(console.width, _NARROWEST) if console.is_terminal else width
    for column in table.columns:
        column.overflow, column.no_wrap = "fold", False
    if console.is_terminal:
        console.print(table)
        return
    with console.capture() as captured:
        console.print(table)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))  # click would take ASCII for UTF-8


def show_json(facts: Any) -> None:
    """Print dicts, lists, texts and numbers as JSON, which has no NaN and no infinity: these are null."""
    click.echo(json.dumps(_finite(facts), indent=1, ensure_ascii=False, allow_nan=False))


def _finite(facts: Any) -> Any:
    if isinstance(facts, dict):
        return {name: _finite(held) for name, held in facts.items()}
    if isinstance(facts, (list, tuple)):
        return [*map(_finite, facts)]
    return None if isinstance(facts, float) and not math.isfinite(facts) else facts


class Notes:
    """Collect notes on checkpoints, to be printed once each."""

    def __init__(self) -> None:
        self._names: dict[str, set[str]] = {}

    def add(self, name: str, notes: Iterable[str]) -> None:
        """Take the notes on a checkpoint."""
        for note in notes:
            self._names.setdefault(note, set()).add(name)

    def lines(self) -> Iterator[str]:
        """Yield each note with the first checkpoint that it is on."""
        for note, names in self._names.items():
            first, *more = sorted(names)  # workers have them in no order
            yield printable(f"{first}{f' and {len(more)} more' if more else ''}: {note}")

    def show(self) -> None:
        """Print the lines."""
        for line in self.lines():
            click.echo(line)


@contextlib.contextmanager
def checked() -> Iterator[None]:
    """Run what prints: characters that the output's encoding does not have are escaped, and a full disk is an error.

    Raises:
        InputError: standard output cannot be written.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        yield
    except OSError as error:
        if error.filename is not None:  # not of writing to an open file
            raise
        with contextlib.suppress(OSError):  # what is still in the buffer would fail once more at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise InputError(f"the output cannot be written ({error.strerror})") from None
