"""A progress bar for long work: on a terminal, when rich is installed; never in a log file."""

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

from .errors import MissingExtraError

Item = TypeVar("Item")


def track(items: Iterable[Item], total: int, title: str, shown: bool | None) -> Iterator[Item]:
    """Yields the items under a bar on standard error.

    Args:
        items: what to go through.
        total: how many there are; 0 if unknown.
        title: text before the bar.
        shown: True or False, or None for "if standard error is a terminal and rich is there".

    Raises:
        MissingExtraError: ``shown=True`` without rich.
    """
    if shown is None:
        shown = sys.stderr.isatty() and _has_rich()
    if not shown:
        yield from items
        return
    if not _has_rich():
        raise MissingExtraError("progress=True needs rich: pip install 'pyflatness[cli]'")
    from rich.console import Console
    from rich.progress import track as rich_track

    yield from rich_track(items, description=title, total=total or None, transient=True, console=Console(stderr=True))


def _has_rich() -> bool:
    try:
        import rich  # noqa: F401
    except ImportError:
        return False
    return True
