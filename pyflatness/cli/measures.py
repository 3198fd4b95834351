"""``pyflatness measures``: what can be measured, by which formula, from where."""

import click
from rich import box
from rich.console import Console
from rich.table import Column, Table

from ..measures import MEASURES


@click.command()
def measures() -> None:
    """Show the measures: name, formula, source."""
    table = Table(Column("name", no_wrap=True), "formula", "source", box=box.SIMPLE_HEAD)
    for measure in MEASURES:
        table.add_row(measure.name, measure.formula, measure.source)
    Console(markup=False, highlight=False).print(table)
