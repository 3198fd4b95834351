"""Run ``pyflatness show``: everything that a store has of one checkpoint."""

import json
from dataclasses import asdict
from pathlib import Path

import click

from ..messages import printable
from ..scoring import attached
from ..scoring.export import setting_texts
from ..scoring.rows import rows
from ..scoring.store import Store
from .output import json_option, show_json
from .score_csv import print_rows


@click.command(name="show", short_help="Show the values and errors of one checkpoint.")
@click.argument("store", type=click.Path(path_type=Path))
@click.argument("checkpoint")
@json_option
def show(store: Path, checkpoint: str, as_json: bool) -> None:
    """Show the values, errors and metadata that STORE has of a CHECKPOINT: its name, or that of its file."""
    with Store(store) as held:
        every = {row["name"]: row for row in held.select("SELECT * FROM checkpoints ORDER BY id")}
        name = attached.meant(checkpoint, [*every])
        content, columns = every[name]["content"], json.loads(every[name]["columns"])
        settings = held.settings()
        texts = setting_texts(settings)
        found = [
            ({**facts["shown"], "text": texts[number]}, held.values(number, content))
            for number, facts in settings.items()
        ]
        results = [one for one in attached.found(held) if one.name == name]
    tables = [(shown, rows(name, values, values)) for shown, values in found if values]
    if as_json:
        held_of = [{**shown, "rows": [*map(asdict, of)]} for shown, of in tables]
        others = [{"kind": one.kind, "label": one.label, "text": one.error or str(one.result)} for one in results]
        show_json({"checkpoint": name, "content": content, "columns": columns, "settings": held_of, "results": others})
        return
    click.echo(printable(f"{name}: content {content[:16]}"))
    for key, value in columns.items():
        click.echo(printable(f"{key}: {value}"))
    for shown, of in tables:
        click.echo()
        click.echo(printable(shown["text"]))
        print_rows(of)
    for one in results:
        click.echo()
        for line in (f"{one.kind} {one.label}".rstrip(), *(one.error or str(one.result)).splitlines()):
            click.echo(printable(line))
