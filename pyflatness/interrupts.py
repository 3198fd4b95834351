"""Hold back what signal handlers raise while a call runs, and undo what a call changes however it ends.

Python runs the handler of a signal between any two bytecodes of the main thread. One that raises there, as Ctrl-C's or
a timeout's does, can do so inside of an ``__exit__`` or a ``finally`` too, and what they were about to put back stays
as it is. Inside :func:`held` signals are only noted, and passed to the handlers that were there before

- by :func:`check`, which every loop of long work calls between two steps, and when :func:`held` is left;
- at once where a batch is waited for (:func:`at_once`);
- where the user's model or loss runs (:func:`at_second`): when that has run, so that what torch changes meanwhile is
  put back too; a second one at once, for it may hang.

What a handler raises goes through the package as a :class:`_Signalled`, so that nobody takes it for an error of a
model's, and comes out as it was raised.

Other threads get no signals. An exception can be raised in any thread by ``PyThreadState_SetAsyncExc``, too, and cannot
be held back: so what is changed is noted before (:func:`later`), and undone where a public call ends (:func:`undo`).
"""

import contextlib
import math
import os
import threading

# What ``signal.signal`` and ``getsignal`` call; these look each handler up in an enumeration, which takes ten times as
# long as all the rest here.
from _signal import NSIG, getsignal, signal  # type: ignore[import-not-found]
from collections.abc import Callable
from types import FrameType

_RAISED = "_pyflatness_raised_by_a_signal"


class _Signalled(BaseException):
    """Carry what a handler raised past everything that catches errors."""

    def __init__(self, raised: Exception) -> None:
        self.raised = raised


def is_raised(error: BaseException) -> bool:
    """Return whether a signal's handler raised an exception that came out of a call."""
    return hasattr(error, _RAISED)


class _Handler:
    """Stand for the user's handlers: note signals, and pass them on where there are more than a limit."""

    def __init__(self) -> None:
        self.pending: list[int] = []
        self.limit = math.inf
        self.raised: BaseException | None = None  # by a handler, in the user's code
        self._before = {number: handler for number in range(1, NSIG) if callable(handler := getsignal(number))}

    def install(self) -> None:
        """Take the place of the user's handlers."""
        for number in self._before:
            signal(number, self)

    def put_back(self) -> None:
        """Install the user's handlers again, but for those that the user's code set meanwhile."""
        for number, handler in self._before.items():
            if getsignal(number) is self:
                signal(number, handler)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.pending.append(number)
        if len(self.pending) > self.limit:
            try:
                self._pass_on(frame)
            except Exception as error:
                self.raised = error
                raise

    def deliver(self) -> None:
        """Pass on what is pending; what a handler raises comes as a :class:`_Signalled` if it could be caught."""
        try:
            self._pass_on(None)
        except Exception as error:
            raise _Signalled(error) from error

    def _pass_on(self, frame: FrameType | None) -> None:
        """Call the handlers of before, which raise as a rule; no more until it is dealt with."""
        limit, self.limit = self.limit, math.inf
        while self.pending:
            number = self.pending[0]
            self.pending = [other for other in self.pending if other != number]
            self._before[number](number, frame)
        self.limit = limit


class _Here(threading.local):
    handler: _Handler | None = None

    def __init__(self) -> None:
        self.undo: list[Callable[[], object]] = []


_here = _Here()
_installed: list[_Handler] = []  # by the main thread


class _Held:
    """Hold signals back as :func:`held` says, where no handler of this module is installed yet.

    This and what follows are classes rather than generators because they cost less time.
    """

    def __enter__(self) -> None:
        self._handler: _Handler | None = None
        if threading.current_thread() is threading.main_thread():
            self._depth = depth()
            self._handler = handler = _Handler()
            later(self._put_back)
            _installed[:] = [handler]
            handler.install()
            _here.handler = handler

    def _put_back(self) -> None:
        assert self._handler is not None
        _here.handler = None
        _installed.clear()
        self._handler.put_back()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._handler is None:
            return
        undo(self._depth)
        try:
            self._handler.deliver()
            if isinstance(error, _Signalled):
                raise error
        except _Signalled as signalled:
            raised = signalled.raised
            with contextlib.suppress(Exception):  # of a class without attributes
                setattr(raised, _RAISED, True)
            raise raised from raised.__cause__


def held() -> contextlib.AbstractContextManager[None]:
    """Hold signals back inside; what is left over is passed on at the end, when all is put back."""
    return _Held() if _here.handler is None else _Limit(math.inf)  # in a call inside of another


def check() -> None:
    """Pass on signals that were held back, where nothing is half done."""
    handler = _here.handler
    if handler is not None and handler.pending:
        handler.deliver()


class _Limit:
    """Pass signals on at once while more than a limit are pending; pass on what was held back at both ends."""

    def __init__(self, limit: float) -> None:
        self._limit = limit

    def __enter__(self) -> None:
        self._handler = handler = _here.handler
        if handler is not None:
            if handler.pending:
                handler.deliver()
            self._before, handler.limit = handler.limit, self._limit

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        handler = self._handler
        if handler is not None:
            handler.limit = self._before
            raised, handler.raised = handler.raised, None
            if isinstance(raised, Exception) and raised is error:
                raise _Signalled(raised) from raised
            if handler.pending:
                handler.deliver()


def at_once() -> contextlib.AbstractContextManager[None]:
    """Return a context in which the user's data are waited for: signals are passed on at once."""
    return _Limit(0)


def at_second() -> contextlib.AbstractContextManager[None]:
    """Return a context in which the user's model or loss runs.

    A signal is passed on when it has run, a second one at once.
    """
    return _Limit(1)


def later(step: Callable[[], object]) -> None:
    """Note how to undo what is about to be changed; a step may be cut off and taken again."""
    _here.undo.append(step)


def depth() -> int:
    """Return how many steps are noted in this thread."""
    return len(_here.undo)


def undo(depth: int) -> None:
    """Take all steps that were noted since :func:`depth`, the last one first."""
    steps = _here.undo
    while len(steps) > depth:
        steps[-1]()
        steps.pop()


def _in_child() -> None:
    """Give a forked process its handlers back, if it was another thread that had held signals back."""
    if _here.handler is None and _installed:
        _installed.pop().put_back()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
