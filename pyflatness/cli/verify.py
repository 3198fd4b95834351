"""Run ``pyflatness verify``: whether a store's file is whole."""

from pathlib import Path

import click

from ..messages import printable
from ..scoring import upkeep
from ..scoring.store import Store
from .output import json_option, show_json

_NEXT = "not whole: put a copy of it back, or run pyflatness score as before with another --store"


@click.command(short_help="Check that a store is whole.")
@click.argument("store", type=click.Path(path_type=Path))
@json_option
def verify(store: Path, as_json: bool) -> None:
    """Check the file of STORE and what is in it; exits with status 1 if something is wrong."""
    with Store(store, checked=False) as held:
        problems = upkeep.problems(held)
        orphans = [] if problems else upkeep.orphans(held)
    if as_json:
        show_json({"store": str(store), "whole": not problems, "problems": problems, "orphans": orphans})
    else:
        for line in problems:
            click.echo(printable(line))
        for line in orphans:
            click.echo(f"{line}: pyflatness gc takes them out")
        click.echo(printable(f"{store}: {_NEXT if problems else 'whole'}"))
    if problems:
        raise SystemExit(1)
