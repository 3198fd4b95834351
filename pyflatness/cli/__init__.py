"""Run the command line, ``pyflatness``: one subcommand per file; those on a store are in one, and those on one network.

A command's module, and torch with it, is imported when the command is used: ``--help`` and ``--version`` take no time.
"""

from collections.abc import Sequence

import click

from .. import __version__
from ..errors import FlatnessError, printable
from .group import Commands, checked

_HELP = """Measure how flat the loss is around trained networks.

`pyflatness COMMAND --help` describes a command. Commands that print a table take --json, for programs.
"""
_SECTIONS = {
    "Measure networks": {
        "score": "Measure many checkpoints on one data set.",
        "measure": "Measure one network, and print the table of its layers.",
        "spectrum": "Show the Hessian's largest eigenvalues and its density.",
        "layers": "List the layers of a network that can be measured.",
        "allocate": "Choose bits for each layer under a budget.",
    },
    "Read and keep values": {
        "store": "List, show, export, extend, check, unite and tidy stores.",
        "report": "Write a page to look at: table, charts, correlations.",
        "correlate": "Correlate measures with the generalisation gap.",
    },
    "Learn": {
        "demo": "Train and measure 24 small networks.",
        "measures": "List the measures, or say which one is for what.",
        "doctor": "Check the installation and the numbers it computes.",
    },
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit, with a status of 0 if all went well, and else one of :data:`.group.STATUSES`."""
    group = click.version_option(__version__, prog_name="pyflatness")(Commands(_SECTIONS, _HELP))
    try:
        with checked():
            group.main(arguments, prog_name="pyflatness")
    except FlatnessError as error:
        text = "Error: " + "\n".join(map(printable, str(error).splitlines()))
        click.echo(text, err=True)
        stop = SystemExit(text)  # for whoever calls this function
        stop.code = 2
        raise stop from None
