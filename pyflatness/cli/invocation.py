"""Say with which command line the program was started, for stores that keep how their values were made."""

import os
import re
import shlex

import click

_ARGUMENTS = "pyflatness.arguments"
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)


def note(context: click.Context, arguments: list[str]) -> None:
    """Note the arguments of the command line, before they are parsed."""
    context.meta[_ARGUMENTS] = [*arguments]


def command() -> str:
    """Return the command line that is running.

    What a shell put into it of environment variables that are named as secrets are has their names again.
    """
    arguments = click.get_current_context().meta[_ARGUMENTS]
    return _without_secrets(shlex.join(["pyflatness", *arguments]))


def _without_secrets(text: str) -> str:
    secrets = {value: name for name, value in os.environ.items() if _SECRET.search(name) and len(value) >= 8}
    for value in sorted(secrets, key=len, reverse=True):
        text = text.replace(value, f"${secrets[value]}")
    return text
