"""Print whole tables whatever the width, and raise an error where standard output cannot be written."""

import contextlib
import io
import os
import sys
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from ..errors import InputError

_NARROWEST = 80  # with less room whole columns would vanish; a terminal that has less breaks the lines by itself
_WIDTH_OF_FILES = 200  # a file or pipe has no width that lines would have to be folded at


def show(table: Table) -> None:
    """Print a table, its text as it is, without markup; cells are folded where it is too wide, and never cut off."""
    console = Console(markup=False, highlight=False, emoji=False)
    console.width = max(console.width, _NARROWEST) if console.is_terminal else _WIDTH_OF_FILES
    for column in table.columns:
        column.overflow, column.no_wrap = "fold", False
    console.print(table)


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
