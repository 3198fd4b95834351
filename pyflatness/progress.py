"""Show a progress bar for long work: on a terminal, never in a log file."""

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.progress import track as rich_track

Item = TypeVar("Item")


def track(items: Iterable[Item], total: int, title: str, shown: bool | None) -> Iterator[Item]:
    """Yield the items under a bar on standard error.

    Args:
        items: what to go through.
        total: how many there are; 0 if unknown.
        title: text before the bar.
        shown: True or False, or None for "if standard error is a terminal".
    """
    if shown is None:
        shown = sys.stderr.isatty()
    if not shown:
        yield from items
        return
    yield from rich_track(items, description=title, total=total or None, transient=True, console=Console(stderr=True))


Advance = Callable[[int, str], None]
"""Says that so many more are done, and what is being worked on."""


@contextlib.contextmanager
def bar(title: str, total: int, shown: bool | None) -> Iterator[Advance]:
    """Show a bar with the time that is left on standard error, inside a ``with`` block.

    Args:
        title: text before the bar.
        total: how many there are to do.
        shown: as for :func:`track`.
    """
    visible = sys.stderr.isatty() if shown is None else shown
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not visible) as shown_bar:
        task = shown_bar.add_task(title, total=total)

        def advance(count: int, text: str) -> None:
            shown_bar.update(task, advance=count, description=f"{title}: {text}" if text else None)

        yield advance
