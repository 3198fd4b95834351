"""Hold Ctrl-C back while a call runs, and raise it between two of the call's steps.

Python runs a signal's handler between any two bytecodes of the main thread. One that raises there, as Ctrl-C's does,
can do so inside of an ``__exit__`` or a ``finally`` too, and what they were about to put back stays as it is. Inside
:func:`held` interrupts are only counted, and passed to the handler that was there before

- by :func:`check`, which every loop of long work calls between two steps, and when :func:`held` is left;
- at once where a batch is waited for (:func:`at_once`);
- where the user's model or loss runs (:func:`at_second`): when that has run, so that what torch changes meanwhile is
  put back too; a second one at once, for it may hang.

Other threads get no signals, and there this module does nothing. Neither does it where the handler is not Python's: a
signal that is ignored, or that ends the process.
"""

import contextlib
import math
import threading

# What ``signal.signal`` and ``getsignal`` call; these look each handler up in an enumeration, which takes ten times as
# long as all the rest here.
from _signal import SIGINT, getsignal, signal  # type: ignore[import-not-found]
from collections.abc import Callable
from types import FrameType
from typing import Any


class _Handler:
    """Count interrupts, and pass them on where there are more than a limit."""

    def __init__(self, before: Callable[[int, FrameType | None], Any]) -> None:
        self._before = before
        self.pending = 0
        self.limit = math.inf

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.pending += 1
        if self.pending > self.limit:
            self.deliver(frame)

    def deliver(self, frame: FrameType | None = None) -> None:
        """Pass what is pending to the handler of before, which raises as a rule; no more until it is dealt with."""
        limit, self.limit = self.limit, math.inf
        self.pending = 0
        self._before(SIGINT, frame)
        self.limit = limit


class _Here(threading.local):
    handler: _Handler | None = None


_here = _Here()


class _Held:
    """Hold interrupts back as :func:`held` says, where no handler of this module is installed yet.

    This and what follows are classes rather than generators because they cost less time.
    """

    def __enter__(self) -> None:
        before = getsignal(SIGINT)
        self._handler: _Handler | None = None
        if threading.current_thread() is threading.main_thread() and callable(before):
            self._before, self._handler = before, _Handler(before)
            signal(SIGINT, self._handler)
            _here.handler = self._handler

    def __exit__(self, *exception: object) -> None:
        if self._handler is None:
            return
        _here.handler = None
        if getsignal(SIGINT) is self._handler:  # else the user's code set another one meanwhile
            signal(SIGINT, self._before)
        if self._handler.pending:
            self._handler.deliver()


def held() -> contextlib.AbstractContextManager[None]:
    """Hold interrupts back inside; one that is left over is raised at the end, when all is put back."""
    return _Held() if _here.handler is None else _Limit(math.inf)  # in a call inside of another


def check() -> None:
    """Raise an interrupt that was held back, where nothing is half done."""
    handler = _here.handler
    if handler is not None and handler.pending:
        handler.deliver()


class _Limit:
    """Raise an interrupt at once while more than a limit are pending; raise one that was held back at both ends."""

    def __init__(self, limit: float) -> None:
        self._limit = limit

    def __enter__(self) -> None:
        self._handler = handler = _here.handler
        if handler is not None:
            if handler.pending:
                handler.deliver()
            self._before, handler.limit = handler.limit, self._limit

    def __exit__(self, *exception: object) -> None:
        handler = self._handler
        if handler is not None:
            handler.limit = self._before
            if handler.pending:
                handler.deliver()


def at_once() -> contextlib.AbstractContextManager[None]:
    """Return a context in which the user's data are waited for: an interrupt is raised at once."""
    return _Limit(0)


def at_second() -> contextlib.AbstractContextManager[None]:
    """Return a context in which the user's model or loss runs.

    An interrupt is raised when it has run, a second one at once.
    """
    return _Limit(1)
