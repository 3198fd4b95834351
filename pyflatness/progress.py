"""Show a progress bar for long work: on a terminal, never in a log file."""

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
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
