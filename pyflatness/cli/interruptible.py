"""End a command that is interrupted before it has anything to report with the status that says so."""

import contextlib
import signal
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

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        click.echo("interrupted")
        raise SystemExit(130) from None
    finally:
        signal.signal(signal.SIGTERM, before)
