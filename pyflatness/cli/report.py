"""Run ``pyflatness report``: a store's values as a page to look at, in one file."""

from pathlib import Path
from typing import Any

import click

from ..messages import printable
from ..report.page import charts
from ..scoring import metadata, store_page
from ..scoring.page import Choices
from ..scoring.store import Store
from ..training.history import History
from .paths import prepare_file, write_whole

_PATH = click.Path(path_type=Path)


@click.command(name="report", short_help="Write a page to look at: table, charts, correlations.")
@click.argument("store", type=_PATH)
@click.option("--out", type=_PATH, required=True, help="HTML file to write.")
@click.option("--title", help="Heading of the page.  [default: Results in STORE]")
@click.option(
    "--against", metavar="COLUMN", help="What measures are held against.  [default: gap, generalization_gap or loss]"
)
@click.option("--test", type=_PATH, help="Store or CSV file of the same checkpoints on test data, for the gap.")
@click.option(
    "--metadata", "table", type=_PATH, help="CSV or JSON file with columns to add to the checkpoints, by their names."
)
@click.option(
    "--exclude", metavar="NAME", multiple=True, help="Checkpoint to leave out of the correlations; may be repeated."
)
@click.option(
    "--history", type=_PATH, multiple=True, help="JSON file that a pf.results.History wrote, to show; may be repeated."
)
@click.option(
    "--interval",
    type=click.Choice(["bootstrap", "fisher"]),
    default="bootstrap",
    show_default=True,
    help="How confidence intervals of correlations are found; fisher takes less time for many checkpoints.",
)
def report(
    store: Path,
    out: Path,
    title: str | None,
    against: str | None,
    test: Path | None,
    table: Path | None,
    exclude: tuple[str, ...],
    history: tuple[Path, ...],
    interval: str,
) -> None:
    """Write what is in STORE as one HTML file that needs no network.

    It has a table that can be sorted and filtered, the layers' profiles, the correlations of measures with the
    generalisation gap, what failed, and how the values were made.
    """
    charts.altair()  # before any work is done
    prepare_file(out)
    histories = {path.stem: History.from_json(path) for path in history}
    choices = Choices(against, None if test is None else _table(test), exclude, interval, histories)
    with Store(store) as held:
        names = [row["name"] for row in held.select("SELECT name FROM checkpoints")]
        more = metadata.read(table, names) if table else {}
        text = store_page.of_store(held, title or f"Results in {store.name}", choices, more).html()
    write_whole(out, text.encode())
    click.echo(printable(f"wrote {out}: {len(text) / 1e6:.1f} MB"))


def _table(path: Path) -> Any:
    """Return scores on test data, of a store or of a CSV file."""
    if path.suffix == ".csv":
        return path
    with Store(path) as held:
        return store_page.table(held)
