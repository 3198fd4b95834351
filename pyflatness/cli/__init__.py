"""Run the command line, ``pyflatness``: one subcommand per file, those on a store in one.

What a subcommand needs beyond click and rich it imports when it runs.
"""

from collections.abc import Sequence

import click

from .. import __version__
from ..errors import FlatnessError
from ..messages import printable

_HELP = """Measure how flat the loss is around trained networks.

`pyflatness COMMAND --help` describes a command. Commands that print a table take --json, for programs.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit.

    Args:
        arguments: what follows the program's name; None takes the process's own.

    Raises:
        SystemExit: always; with a status of 0 if all went well, and else as :data:`.group.STATUSES` has it.
    """
    from .allocate import allocate
    from .demo import demo
    from .doctor import doctor
    from .group import Commands
    from .layers import layers
    from .measures import measures
    from .output import checked
    from .plan import plan
    from .report import report
    from .score import score
    from .store import store

    sections = {
        "Measure networks": [score, layers, plan, allocate],
        "Read and keep a store of values": [store, report],
        "Learn": [demo, measures, doctor],
    }
    group = click.version_option(__version__, prog_name="pyflatness")(Commands(sections, _HELP))
    try:
        with checked():
            group.main(arguments, prog_name="pyflatness")
    except FlatnessError as error:
        text = "Error: " + "\n".join(map(printable, str(error).splitlines()))
        click.echo(text, err=True)
        stop = SystemExit(text)  # for whoever calls this function
        stop.code = 2
        raise stop from None
