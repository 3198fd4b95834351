"""End a command that is interrupted before it has anything to report with the status that says so."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import click


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Take SIGTERM, which job schedulers send, as Ctrl-C, and end with status 130 after either.

    Raises:
        SystemExit: after an interruption that nothing inside has taken.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # no other can have handlers of signals
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        raise SystemExit(130) from None
    finally:
        signal.signal(signal.SIGTERM, before)
