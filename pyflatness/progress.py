"""Show how far long work is: a bar on a terminal; elsewhere, as in a log file, a line every half minute."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")
_EVERY = 30.0  # seconds between lines where standard error is no terminal


class Lines:
    """Print how many are done, on standard error, when half a minute has gone by since the line before."""

    def __init__(self, title: str, total: int) -> None:
        self._title, self._total, self._done, self._text = title, total, 0.0, ""
        self._begun = self._last = time.monotonic()

    def advance(self, count: float = 1, text: str = "") -> None:
        """Count what is done."""
        self._done, self._text = self._done + count, text or self._text
        now = time.monotonic()
        if now - self._last >= _EVERY:
            self._last = now
            of = f" of {self._total}" if self._total else ""
            what = f"{self._title}: {self._text}" if self._text else self._title
            print(f"{what}: {self._done:.6g}{of} after {now - self._begun:.0f} s", file=sys.stderr, flush=True)


def track(items: Iterable[Item], total: int, title: str, shown: bool | None) -> Iterator[Item]:
    """Yield the items under a bar on standard error.

    Args:
        items: what to go through.
        total: how many there are; 0 if unknown.
        title: text before the bar.
        shown: True or False, or None for a bar if standard error is a terminal, and else for lines.
    """
    with bar(title, total, shown) as advance:
        for item in items:
            yield item
            advance(1, "")


Advance = Callable[[float, str], None]
"""Says that so many more are done, and what is being worked on, or what else there is to say; empty: as before."""


@contextlib.contextmanager
def bar(title: str, total: int, shown: bool | None, what: str = "") -> Iterator[Advance]:
    """Show a bar with the time that is left on standard error, inside a ``with`` block.

    ``shown`` as for :func:`track`; ``what`` is counted.
    """
    if shown is False:
        yield lambda count, text: None
        return
    if not (sys.stderr.isatty() if shown is None else shown):
        yield Lines(title, total).advance
        return
    from .bars import on_terminal  # rich takes as long to load as the first measurement

    with on_terminal(title, total, what, forced=bool(shown)) as advance:
        yield advance
