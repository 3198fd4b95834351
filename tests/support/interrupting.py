"""Exceptions from outside at chosen lines of a call: of signals' handlers, and of other threads."""

import ctypes
import signal
import sys
import threading


class AlarmError(Exception):
    """What a timeout's handler raises."""


def _raise(error):
    def handler(number, frame):
        raise error

    return handler


KINDS = {
    "SIGINT": (KeyboardInterrupt, lambda: signal.raise_signal(signal.SIGINT)),
    "SIGALRM": (AlarmError, lambda: signal.raise_signal(signal.SIGALRM)),
    "SIGTERM": (SystemExit, lambda: signal.raise_signal(signal.SIGTERM)),
    "asynchronous": (
        KeyboardInterrupt,
        lambda: ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(threading.get_ident()), ctypes.py_object(KeyboardInterrupt)
        ),
    ),
}


class Handlers:
    """Set handlers that raise, inside."""

    def __enter__(self):
        self._before = {
            number: signal.signal(number, _raise(KINDS[number.name][0])) for number in (signal.SIGALRM, signal.SIGTERM)
        }

    def __exit__(self, *exception):
        for number, handler in self._before.items():
            signal.signal(number, handler)


class Interrupting:
    """Interrupts at chosen lines, counted in every frame that is entered inside: ours, torch's and the model's.

    One that falls into a finalizer, or the callback of a weak reference, is dropped by Python and not counted as sent.
    """

    def __init__(self, *lines, kind="SIGINT"):
        self._lines, self.seen, self.sent = set(lines), 0, 0
        self.error, self._send = KINDS[kind]

    def __enter__(self):
        self._before = sys.gettrace(), sys.unraisablehook
        sys.unraisablehook = self._dropped
        sys.settrace(self._trace)
        return self

    def __exit__(self, *exception):
        trace, sys.unraisablehook = self._before
        sys.settrace(trace)

    def _dropped(self, found):
        if found.exc_type is self.error:
            self.sent -= 1
        else:
            self._before[1](found)

    def _trace(self, frame, event, argument):
        name = frame.f_globals["__name__"]
        if name in (__name__, "copyreg") or name.startswith("test_"):  # copyreg has an `except` of everything
            return self._trace
        if event == "line":
            self.seen += 1
            if self.seen in self._lines:
                self.sent += 1
                self._send()
        return self._trace
