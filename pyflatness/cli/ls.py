"""Run ``pyflatness ls``: what a store has of each checkpoint, and what is to do."""

from pathlib import Path

import click
from rich import box
from rich.table import Table

from ..messages import printable
from ..scoring.export import setting_hash, setting_texts
from ..scoring.store import Store
from .output import json_option, show, show_json

_STATES = """
SELECT name, coalesce(sum(state = 'done'), 0) AS done, coalesce(sum(state = 'failed'), 0) AS failed,
    coalesce(sum(state = 'to do'), 0) AS todo
FROM checkpoints LEFT JOIN results USING (content) GROUP BY checkpoints.id ORDER BY checkpoints.id
"""
_TIME = "SELECT coalesce(sum(seconds), 0) FROM units"


@click.command(short_help="Count what is done, failed and to do of each checkpoint.")
@click.argument("store", type=click.Path(path_type=Path))
@json_option
def ls(store: Path, as_json: bool) -> None:
    """Show how many values of each checkpoint in STORE are done, failed and to do."""
    with Store(store) as held:
        held.check()
        rows = [dict(row) for row in held.select(_STATES)]
        facts = held.settings()
        ((seconds,),) = held.select(_TIME)
    texts = setting_texts(facts)
    if as_json:
        settings = [
            {
                **{name: of["shown"][name] for name in ("model", "data")},
                **{"loss": of["key"]["loss"]["name"], "setting": setting_hash(of), "text": texts[number]},
            }
            for number, of in facts.items()
        ]
        show_json({"checkpoints": rows, "settings": settings, "seconds": seconds})
        return
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_footer=True)
    totals = {name: sum(row[name] for row in rows) for name in ("done", "failed", "todo")}
    table.add_column("checkpoint", f"{len(rows)} checkpoints")
    for header, name in (("done", "done"), ("failed", "failed"), ("to do", "todo")):
        table.add_column(header, str(totals[name]), justify="right")
    for row in rows:
        table.add_row(printable(row["name"]), *(str(row[name]) for name in totals))
    show(table)
    for text in texts.values():
        click.echo(printable(text))
    click.echo(f"{seconds:.3g} s of measuring")
