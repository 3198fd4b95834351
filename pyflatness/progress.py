"""Show how far long work is: a bar on a terminal; elsewhere, as in a log file, a line every half minute."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import TypeVar

Item = TypeVar("Item")
_EVERY = 30.0  # seconds between lines where there is no bar
_in_lines = ContextVar("_in_lines", default=False)


class Lines:
    """Print on standard error how many items are done, at most every half minute."""

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


@contextlib.contextmanager
def in_lines() -> Iterator[None]:
    """Print lines on a terminal too inside the context, where another library shows a bar there."""
    before = _in_lines.set(True)
    try:
        yield
    finally:
        _in_lines.reset(before)


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
"""Takes how many more items are done, and the text to show beside the title; empty: the text stays."""


def quiet(count: float, text: str) -> None:
    """Show nothing."""


@contextlib.contextmanager
def bar(title: str, total: int, shown: bool | None, what: str = "") -> Iterator[Advance]:
    """Show a bar with the time that is left on standard error, inside a ``with`` block.

    ``shown`` as for :func:`track`; ``what`` is counted.
    """
    if shown is False:
        yield quiet
        return
    if not (sys.stderr.isatty() and not _in_lines.get() if shown is None else shown):
        yield Lines(title, total).advance
        return
    from rich.console import Console  # rich takes as long to load as the first measurement
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
    from rich.text import Text

    class Count(ProgressColumn):
        """Show how many are done, and where these have a name how many are in a minute."""

        def render(self, task: Task) -> Text:
            """Return the text of the column."""
            total = "?" if task.total is None else f"{task.total:.6g}"
            if not what:
                return Text(f"{task.completed:.6g}/{total}")
            speed = task.finished_speed or task.speed
            rate = "" if speed is None else f" {60 * speed:.3g} {what}/min"
            return Text(f"{task.completed:.1f} of {total} {what}{rate}")

    columns = (TextColumn("{task.description}"), BarColumn(), Count(), TimeRemainingColumn())
    console = Console(stderr=True, force_terminal=True if shown else None)
    with Progress(*columns, console=console, transient=True) as shown_bar:
        task = shown_bar.add_task(title, total=total or None)

        def advance(count: float, text: str) -> None:
            shown_bar.update(task, advance=count, description=f"{title}: {text}" if text else None)

        yield advance
