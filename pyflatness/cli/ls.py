"""Run ``pyflatness ls``: what a store has of each checkpoint, and what is to do."""

from pathlib import Path

import click
from rich import box
from rich.table import Table

from ..messages import printable
from ..scoring.store import Store
from .output import show

_STATES = """
SELECT name, coalesce(sum(state = 'done'), 0) AS done, coalesce(sum(state = 'failed'), 0) AS failed,
    coalesce(sum(state = 'to do'), 0) AS todo
FROM checkpoints LEFT JOIN results USING (content) GROUP BY checkpoints.id ORDER BY checkpoints.id
"""
_TIME = "SELECT coalesce(sum(seconds), 0) FROM units"


@click.command()
@click.argument("store", type=click.Path(path_type=Path))
def ls(store: Path) -> None:
    """Show how many values of each checkpoint in STORE are done, failed and to do."""
    with Store(store) as held:
        rows = held.select(_STATES)
        settings = held.settings().values()
        ((seconds,),) = held.select(_TIME)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_footer=True)
    totals = {name: sum(row[name] for row in rows) for name in ("done", "failed", "todo")}
    table.add_column("checkpoint", f"{len(rows)} checkpoints")
    for header, name in (("done", "done"), ("failed", "failed"), ("to do", "todo")):
        table.add_column(header, str(totals[name]), justify="right")
    for row in rows:
        table.add_row(printable(row["name"]), *(str(row[name]) for name in totals))
    show(table)
    for facts in settings:
        shown = facts["shown"]
        loss = facts["key"]["loss"]["name"]
        click.echo(printable(f"model {shown['model'] or 'of each'}; data {shown['data']}; loss {loss}"))
    click.echo(f"{seconds:.3g} s of measuring")
