"""Run the command line, ``pyflatness``: one subcommand per file.

What a subcommand needs beyond click and rich it imports when it runs.
"""

from collections.abc import Sequence

import click

from .. import __version__
from ..errors import FlatnessError
from ..messages import printable


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit.

    Args:
        arguments: what follows the program's name; None takes the process's own.

    Raises:
        SystemExit: always; with a status of 0 if all went well, and of 2 for what cannot be done.
    """
    from .demo import demo
    from .doctor import doctor
    from .example_zoo import example_zoo
    from .export import export
    from .gc import gc
    from .layers import layers
    from .ls import ls
    from .measures import measures
    from .merge import merge
    from .output import checked
    from .plan import plan
    from .reproduce import reproduce
    from .score import score
    from .show import show
    from .verify import verify

    commands = [demo, doctor, example_zoo, export, gc, layers, ls, measures, merge]
    commands += [plan, reproduce, score, show, verify]
    group = click.Group("pyflatness", help="How flat is the loss around a trained network.", commands=commands)
    group = click.version_option(__version__, prog_name="pyflatness")(group)
    try:
        with checked():
            group.main(arguments, prog_name="pyflatness")
    except FlatnessError as error:
        text = "Error: " + "\n".join(map(printable, str(error).splitlines()))
        click.echo(text, err=True)
        stop = SystemExit(text)  # for whoever calls this function
        stop.code = 2
        raise stop from None
