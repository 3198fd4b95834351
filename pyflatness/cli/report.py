"""Run ``pyflatness report``: a store's values as a page to look at, in one file."""

from pathlib import Path
from typing import Any

import click

from ..report.page import charts
from ..scoring import metadata, page
from ..scoring.page import PageOptions
from ..scoring.store import Store
from ..training.history import History
from . import options as given
from .options import PATH, metadata_option, several_option
from .output import echo, prepare_file, write_whole


@click.command(name="report")
@click.argument("store", type=PATH)
@click.option("--out", type=PATH, required=True, help="HTML file to write.")
@click.option("--title", help="Heading of the page.  [default: Results in STORE]")
@click.option(
    *("--against",),
    metavar="COLUMN",
    help="What measures are held against: gap, test_error, test_accuracy, test_loss with --test, or any other column.  "
    "[default: gap, generalization_gap or loss]",
)
@click.option("--test", type=PATH, help="Store or CSV file of the same checkpoints on test data.")
@metadata_option()
@several_option("--exclude", help="Checkpoints to leave out of the correlations; with commas or repeated.")
@given.max_loss_option
@click.option(
    "--history", type=PATH, multiple=True, help="JSON file that a pf.results.History wrote, to show; may be repeated."
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
    max_loss: float | None,
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
    other: Any = test
    if test is not None and test.suffix != ".csv":
        with Store(test) as held:
            other = page.table(held)
    options = PageOptions(against, other, exclude, max_loss, interval, histories)
    with Store(store) as held:
        more = metadata.of_store(held, table)
        text = page.of_store(held, title or f"Results in {store.name}", options, more).html()
    write_whole(out, text.encode())
    echo(f"wrote {out}: {len(text) / 1e6:.1f} MB")
