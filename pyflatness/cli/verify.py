"""Run ``pyflatness verify``: whether a store's file is whole."""

from pathlib import Path

import click

from ..messages import printable
from ..scoring import upkeep
from ..scoring.store import Store


@click.command()
@click.argument("store", type=click.Path(path_type=Path))
def verify(store: Path) -> None:
    """Check the file of STORE and what is in it; exits with status 1 if something is wrong."""
    with Store(store) as held:
        problems, orphans = upkeep.problems(held), upkeep.orphans(held)
    for line in problems:
        click.echo(printable(line))
    for line in orphans:
        click.echo(f"{line}: pyflatness gc takes them out")
    if problems:
        raise SystemExit(1)
    click.echo(printable(f"{store}: whole"))
