"""Run ``pyflatness gc``: take out of a store what no checkpoint has any more."""

from pathlib import Path

import click

from ..messages import printable
from ..scoring import upkeep
from ..scoring.store import Store


@click.command(short_help="Take out what belongs to no checkpoint any more.")
@click.argument("store", type=click.Path(path_type=Path))
def gc(store: Path) -> None:
    """Take out of STORE the values of weights that no checkpoint has any more, and give the space back."""
    with Store(store, write=True, new=False) as held:
        found = upkeep.collect(held)
    click.echo(printable(f"{store}: {', '.join(found) or 'nothing'} taken out"))
