"""Run ``pyflatness export``: a store's values as a table, for other programs."""

from pathlib import Path

import click

from ..errors import InputError
from ..messages import printable
from ..scoring import export as formats
from ..scoring import metadata
from ..scoring.store import Store
from .paths import prepare_file, write_whole


@click.command(name="export", short_help="Write a table for other programs: CSV, JSON, Parquet.")
@click.argument("store", type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    required=True,
    help="File to write; its ending is the format: .csv, .json, .jsonl, .parquet.",
)
@click.option(
    "--metadata",
    "table",
    type=click.Path(path_type=Path),
    help="CSV or JSON file with columns to add to the checkpoints, by their names.",
)
def export(store: Path, out: Path, table: Path | None) -> None:
    """Write the values in STORE as a table, a row for each value or error, with the columns of the metadata."""
    try:
        formats.check_format(out)
    except InputError as error:
        raise click.BadParameter(str(error), param_hint="--out") from None
    prepare_file(out)
    with Store(store) as held:
        names = [row["name"] for row in held.select("SELECT name FROM checkpoints")]
        found = [*formats.records(held, metadata.read(table, names) if table else {})]
    write_whole(out, formats.content(found, out))
    click.echo(printable(f"wrote {out}: {len(found)} rows"))
