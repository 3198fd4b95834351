"""Run ``pyflatness merge``: the stores of several shards or machines in one."""

from pathlib import Path

import click

from ..messages import printable
from ..scoring import upkeep
from ..scoring.store import Store
from . import invocation


@click.command(short_help="Unite stores.")
@click.argument("store", type=click.Path(path_type=Path))
@click.argument("others", metavar="OTHER...", nargs=-1, required=True, type=click.Path(path_type=Path))
def merge(store: Path, others: tuple[Path, ...]) -> None:
    """Take what each OTHER store has into STORE, which is made if it is not there."""
    with Store(store, write=True, command=invocation.command()) as held:
        for other in others:
            with Store(other) as source:
                taken = upkeep.merge(held, source)
            click.echo(printable(f"{other}: {taken} values taken"))
