"""Hold the commands in sections, as ``pyflatness --help`` shows them, and run them with the same exit statuses."""

import contextlib
import difflib
import importlib
import io
import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import click
from click.shell_completion import CompletionItem

from ..errors import InputError

STATUSES = {
    0: "all went well",
    1: "something failed: rows with errors (score), the self-check (doctor), a store that is not whole (store verify)",
    2: "cannot be done as it was asked; standard error says why",
    130: "interrupted, by Ctrl-C or SIGTERM",
}
_OF_ONE_NETWORK = ("measure", "spectrum", "allocate", "layers")  # which share a module; others have one of their name
_ARGUMENTS = "pyflatness.arguments"
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)


class Commands(click.Group):
    """Run the command that is named; an interruption that it does not take itself ends it with status 130."""

    def __init__(self, sections: Mapping[str, Mapping[str, str]], what: str) -> None:
        statuses = (f"  {status:<5}{meaning}" for status, meaning in STATUSES.items())
        epilog = "\n".join(["\b", "Exit status:", *statuses])
        super().__init__("pyflatness", help=what, epilog=epilog)
        self._sections = sections
        self._lines = {name: line for some in sections.values() for name, line in some.items()}

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands, whose modules are not imported for it."""
        return sorted(self._lines)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of a name: the function of this name in its module."""
        if cmd_name not in self._lines:
            return None
        module = "network" if cmd_name in _OF_ONE_NETWORK else cmd_name
        found: click.Command = getattr(importlib.import_module(f"{__package__}.{module}"), cmd_name)
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that is named; the error for an unknown name lists near ones."""
        near = difflib.get_close_matches(args[0], self._lines)
        if near and args[0] not in self._lines:
            ctx.fail(f"No such command {args[0]!r}. Did you mean {', '.join(near)}?")
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the commands that a word may become, for the shell."""
        found = [CompletionItem(name, help=line) for name, line in self._lines.items() if name.startswith(incomplete)]
        return [*sorted(found, key=lambda item: str(item.value)), *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands in sections, with a line on each."""
        longest = max(map(len, self._lines))
        for title, commands in self._sections.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(longest), line) for name, line in commands.items()])

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments, and keep them for :func:`command_line`."""
        ctx.meta[_ARGUMENTS] = [*args]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. SIGTERM, which job schedulers send, is taken as Ctrl-C, whose status is 130."""
        if threading.current_thread() is not threading.main_thread():  # no other can have handlers of signals
            return super().invoke(ctx)
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            raise SystemExit(130) from None
        finally:
            signal.signal(signal.SIGTERM, before)


def command_line() -> str:
    """Return the command line that is running, for stores that keep how their values were made.

    Values of environment variables whose names are those of secrets are replaced by these names.
    """
    text = shlex.join(["pyflatness", *click.get_current_context().meta[_ARGUMENTS]])
    secrets = {value: name for name, value in os.environ.items() if _SECRET.search(name) and len(value) >= 8}
    for value in sorted(secrets, key=len, reverse=True):
        text = text.replace(value, f"${secrets[value]}")
    return text


@contextlib.contextmanager
def checked() -> Iterator[None]:
    """Escape characters that the output's encoding does not have, and raise InputError if it cannot be written."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        yield
    except OSError as error:
        if error.filename is not None:  # not of writing to an open file
            raise
        with contextlib.suppress(OSError):  # what is still in the buffer would fail once more at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise InputError(f"the output cannot be written ({error.strerror})") from None
