"""Hold the commands by what they are for, as ``pyflatness --help`` shows them, and begin and end them alike."""

import os
import re
import shlex
import signal
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import click

STATUSES = {
    0: "all went well",
    1: "something failed: rows with errors (score), the self-check (doctor), a store that is not whole (store verify)",
    2: "cannot be done as it was asked; standard error says why",
    130: "interrupted, by Ctrl-C or SIGTERM",
}
_ARGUMENTS = "pyflatness.arguments"
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)


class Commands(click.Group):
    """Run the command that is named; an interruption that it does not take itself ends it with status 130.

    Args:
        sections: of the help, the commands of each by its title.
        what: the program does.
    """

    def __init__(self, sections: Mapping[str, Sequence[click.Command]], what: str) -> None:
        commands = [command for some in sections.values() for command in some]
        statuses = (f"  {status:<5}{meaning}" for status, meaning in STATUSES.items())
        epilog = "\n".join(["\b", "Exit status:", *statuses])
        super().__init__("pyflatness", help=what, commands=commands, epilog=epilog)
        self._sections = sections

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands in sections, with the ``short_help`` of each, which is a line."""
        longest = max(map(len, self.commands))
        for title, commands in self._sections.items():
            rows = [(str(c.name).ljust(longest), c.get_short_help_str()) for c in commands]
            with formatter.section(title):
                formatter.write_dl(rows)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments, which are noted as they are."""
        ctx.meta[_ARGUMENTS] = [*args]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. SIGTERM, which job schedulers send, is taken as Ctrl-C.

        Raises:
            SystemExit: of status 130 after an interruption that the command has not taken.
        """
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

    What a shell put into it of environment variables that are named as secrets are has their names again.
    """
    text = shlex.join(["pyflatness", *click.get_current_context().meta[_ARGUMENTS]])
    secrets = {value: name for name, value in os.environ.items() if _SECRET.search(name) and len(value) >= 8}
    for value in sorted(secrets, key=len, reverse=True):
        text = text.replace(value, f"${secrets[value]}")
    return text
