"""Hold the commands by what they are for, as ``pyflatness --help`` shows them, and end them alike."""

from collections.abc import Mapping, Sequence
from typing import Any

import click

from . import invocation
from .interruptible import interruptible

STATUSES = {
    0: "all went well",
    1: "something failed: rows with errors (score), the self-check (doctor), a store that is not whole (verify)",
    2: "cannot be done as it was asked; standard error says why",
    130: "interrupted, by Ctrl-C or SIGTERM",
}


class Group(click.Group):
    """Run the command that is named; an interruption that it does not take itself ends it with status 130.

    Args:
        sections: of the help, the commands of each by its title.
        what: the program does.
    """

    def __init__(self, sections: Mapping[str, Sequence[click.Command]], what: str) -> None:
        commands = [command for some in sections.values() for command in some]
        super().__init__("pyflatness", help=what, commands=commands, epilog=_epilog())
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
        invocation.note(ctx, args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        with interruptible():
            return super().invoke(ctx)


def _epilog() -> str:
    lines = (f"  {status:<5}{meaning}" for status, meaning in STATUSES.items())
    return "\n".join(["\b", "Exit status:", *lines])
