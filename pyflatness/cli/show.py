"""Run ``pyflatness show``: everything that a store has of one checkpoint."""

import difflib
import json
from dataclasses import asdict
from pathlib import Path

import click

from ..errors import InputError
from ..messages import printable
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
        name = _meant(checkpoint, [*every])
        content, columns = every[name]["content"], json.loads(every[name]["columns"])
        found = [(facts["shown"], held.values(setting, content)) for setting, facts in held.settings().items()]
    tables = [
        (shown, rows(name, [one.value.pair for one in values], [(one.value, one.fit) for one in values]))
        for shown, values in found
        if values
    ]
    if as_json:
        held_of = [{"model": shown["model"], "data": shown["data"], "rows": [*map(asdict, of)]} for shown, of in tables]
        show_json({"checkpoint": name, "content": content, "columns": columns, "settings": held_of})
        return
    click.echo(printable(f"{name}: content {content[:16]}"))
    for key, value in columns.items():
        click.echo(printable(f"{key}: {value}"))
    for shown, of in tables:
        click.echo()
        click.echo(printable(f"model {shown['model'] or 'of each'}; data {shown['data']}"))
        print_rows(of)


def _meant(given: str, names: list[str]) -> str:
    """Return the checkpoint that is meant.

    Raises:
        InputError: there is none, or several.
    """
    found = [name for name in names if given in (name, Path(name).name, Path(name).stem)]
    found = [given] if given in found else found
    if len(found) > 1:
        raise InputError(
            f"checkpoint {given!r} is the name of {len(found)}; pass the whole name: {', '.join(found[:5])}"
        )
    if not found:
        near = difflib.get_close_matches(given, names, cutoff=0.3) or names
        raise InputError(f"checkpoint {given!r} is not in the store; there are {', '.join(near[:5])}")
    return found[0]
