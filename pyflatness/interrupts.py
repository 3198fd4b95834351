"""Undo what a call changes however it ends, and let signals wait meanwhile.

Python runs the handler of a signal, such as Ctrl-C's, between any two bytecodes of the main thread, and
``PyThreadState_SetAsyncExc`` raises in any thread. So an exception can cut off an ``__exit__`` or a ``finally`` too,
and what they were about to put back stays as it is. What a call changes is therefore noted before (:func:`later`), and
undone where a public call ends (:func:`undo`); only there do signals wait, and where processes send each other messages
(:func:`shielded`).

A timeout's handler raises an ``Exception``, which those would catch who look for errors of the user's code. From there
it goes through the package as a :class:`Signalled`, and comes out as it was raised.
"""

import contextlib
import sys
import threading
import traceback

# What ``signal.signal`` and ``getsignal`` call; these look each handler up in an enumeration, which takes ten times as
# long as all the rest here.
from _signal import NSIG, getsignal, signal  # type: ignore[import-not-found]
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Generic, TypeVar, overload

from typing_extensions import Self

T = TypeVar("T")


class cached_property(Generic[T]):  # noqa: N801, as the one of functools
    """Compute an attribute when it is first asked for, and keep it: :class:`functools.cached_property` without a lock.

    The lock that it has before Python 3.12 is one for all instances. An interrupt between the end of its ``with`` block
    and its release leaves it held, and other threads wait for it forever.
    """

    def __init__(self, function: Callable[[Any], T]) -> None:
        self._function, self._name, self.__doc__ = function, function.__name__, function.__doc__

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...

    @overload
    def __get__(self, instance: object, owner: type) -> T: ...

    def __get__(self, instance: object | None, owner: type) -> Self | T:
        if instance is None:
            return self
        value: T = self._function(instance)
        vars(instance)[self._name] = value
        return value


class Signalled(BaseException):
    """Carry what a handler raised past everything that catches errors."""

    def __init__(self, raised: Exception) -> None:
        self.raised = raised


def is_raised(error: BaseException) -> bool:
    """Return whether an exception comes from a handler of a signal."""
    handlers: list[Any] = [one for number in range(1, NSIG) if callable(one := getsignal(number))]
    codes = [getattr(one, "__code__", getattr(type(one).__call__, "__code__", None)) for one in handlers]
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def raised_in(error: BaseException | None) -> BaseException | None:
    """Return what a handler raised: an exception itself, or one in whose place it came, as from torch's ``finally``.

    One that the user's code raised ``from`` it is the user's own.
    """
    while error is not None and id(error) != _here.handled:
        if isinstance(error, KeyboardInterrupt) or is_raised(error):
            return error
        is_meant = error.__suppress_context__ and not type(error).__module__.startswith(f"{__package__}.")
        error = None if is_meant else error.__context__
    return None


def pass_on(error: Exception) -> None:
    """Raise again what a signal's handler raised, where errors of the user's code are caught."""
    raised = raised_in(error)
    try:
        if raised is not None and not isinstance(raised, Exception):
            raise raised
        if isinstance(raised, Exception) and _here.undo:  # else nobody would unpack it
            raise Signalled(raised) from error
    finally:
        del raised  # or it would hold this frame, which holds it


def replaced(error: Exception) -> None:
    """Raise what a signal's handler raised, if an error of other code has taken its place."""
    raised = raised_in(error)
    try:
        if raised is not None and raised is not error:
            raise raised
    finally:
        del raised


@contextlib.contextmanager
def suppressed() -> Iterator[None]:
    """Ignore errors of the user's code."""
    try:
        yield
    except Exception as error:
        pass_on(error)


@contextlib.contextmanager
def users_code() -> Iterator[None]:
    """Keep what a signal's handler raises inside from being taken for an error of the user's model or loss."""
    try:
        yield
    except Exception as error:
        pass_on(error)
        raise
    check()


class _Shield:
    """Stand for the handlers of signals, and note signals."""

    def __init__(self) -> None:
        self._pending: list[int] = []
        is_main = threading.current_thread() is threading.main_thread()  # other threads get no signals
        numbers = range(1, NSIG if is_main else 1)
        self._before = {number: handler for number in numbers if callable(handler := getsignal(number))}

    def install(self) -> None:
        """Take the place of the handlers."""
        _here.shield = self
        for number in self._before:
            signal(number, self)

    def put_back(self) -> None:
        """Install the handlers again, but for those that the user's code set meanwhile."""
        for number, handler in self._before.items():
            if getsignal(number) is self:
                signal(number, handler)
        _here.shield = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._pending.append(number)

    def deliver(self) -> None:
        """Pass on what is pending to the handlers, which raise as a rule."""
        while self._pending:
            number = self._pending[0]
            self._pending = [other for other in self._pending if other != number]
            self._before[number](number, None)


class _Here(threading.local):
    shield: _Shield | None = None

    def __init__(self) -> None:
        self.undo: list[Callable[[], object]] = []
        self.handled = id(None)  # of the exception that the user's code handles while it makes a call


_here = _Here()


@contextlib.contextmanager
def shielded() -> Iterator[None]:
    """Hold signals back inside, until :func:`check` or the end of the block."""
    if _here.shield is not None:
        yield
        return
    shield = _Shield()
    try:
        with undone():
            later(shield.put_back)
            shield.install()
            yield
    finally:
        shield.deliver()


def check() -> None:
    """Deliver the signals that are held back, where no change is half done."""
    if _here.shield is not None:
        _here.shield.deliver()


def later(step: Callable[[], object]) -> None:
    """Register how to undo what is about to be changed; a step may be interrupted, and is then called again."""
    _here.undo.append(step)


@contextlib.contextmanager
def undone() -> Iterator[None]:
    """Undo at the end of the block, also after an error, what is registered inside by :func:`later`."""
    before = depth()
    try:
        yield
    finally:
        undo(before)


def depth() -> int:
    """Return how many steps are noted in this thread, where a call begins, or a part of it."""
    if not _here.undo:
        _here.handled = id(sys.exc_info()[1])
    return len(_here.undo)


def cuts_off() -> BaseException | None:
    """Return the exception of a signal, or of another thread, that ends the call; None if an error does, or nothing."""
    error = sys.exc_info()[1]
    if error is None or id(error) == _here.handled:
        return None
    return error if not isinstance(error, Exception) or raised_in(error) else None


def end_generators() -> None:
    """End generators that an exception of a signal's has cut off, so that each puts back what it changed."""
    error = cuts_off()
    if error is not None:
        traceback.clear_frames(error.__traceback__)


def undo(depth: int) -> None:
    """Take all steps that were noted since :func:`depth`, the last one first, while signals wait."""
    steps, shield = _here.undo, None
    end_generators()
    if len(steps) > depth and _here.shield is None:
        shield = _Shield()
        steps.insert(depth, shield.put_back)
        shield.install()
    failed = None
    while len(steps) > depth:
        failed = _failed(steps[-1]) or failed
        steps.pop()
    if shield is not None:
        shield.deliver()
    try:
        if failed is not None:
            raise failed
    finally:
        del failed  # or it would hold this frame, which holds it


def _failed(step: Callable[[], object]) -> Exception | None:
    """Take a step, again if something cut it off; return what did, or the error of one that cannot be taken."""
    try:
        step()
    except Exception as error:
        with contextlib.suppress(Exception):
            step()
        return error
    return None
