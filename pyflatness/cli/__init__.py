"""Run the command line, ``pyflatness``: one subcommand per file.

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
    from .add import add
    from .demo import demo
    from .doctor import doctor
    from .export import export
    from .gc import gc
    from .group import Group
    from .layers import layers
    from .ls import ls
    from .measures import measures
    from .merge import merge
    from .output import checked
    from .plan import plan
    from .report import report
    from .score import score
    from .show import show
    from .verify import verify

    sections = {
        "Measure networks": [score, layers, plan],
        "Read and keep a store of values": [ls, show, report, export, add, verify, merge, gc],
        "Learn": [demo, measures, doctor],
    }
    group = click.version_option(__version__, prog_name="pyflatness")(Group(sections, _HELP))
    try:
        with checked():
            group.main(arguments, prog_name="pyflatness")
    except FlatnessError as error:
        text = "Error: " + "\n".join(map(printable, str(error).splitlines()))
        click.echo(text, err=True)
        stop = SystemExit(text)  # for whoever calls this function
        stop.code = 2
        raise stop from None
