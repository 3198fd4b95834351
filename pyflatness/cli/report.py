"""Run ``pyflatness report``: a store's values as a page to look at, in one file."""

from pathlib import Path

from ..report.page import charts
from ..scoring import metadata, page
from ..scoring.page import PageOptions
from ..scoring.store import Store
from ..statistics import correlations
from ..training.history import History
from .options import Column, Columns, Interval, MaxLoss, Metadata, Names, command, errors_of_options
from .output import echo, prepare_file, write_whole


@command(correlations)
def report(
    store: Path,
    *,
    out: Path,
    title: str | None = None,
    against: Column = None,
    test: Path | None = None,
    table: Metadata = None,
    exclude: Names = (),
    max_loss: MaxLoss = None,
    history: tuple[Path, ...] = (),
    interval: Interval = "bootstrap",
    settings: Columns = (),
    seeds: Column = None,
    colour: Column = None,
) -> None:
    """Write what is in STORE as one HTML file that needs no network.

    It has a table that can be sorted and filtered, the layers' profiles, the correlations of measures with the
    generalisation gap, what failed, and how the values were made.

    Args:
        out: HTML file to write.
        title: heading of the page.  [default: Results in STORE]
        against: what measures are held against: gap, test_error, test_accuracy, test_loss with --test, or any other
            column.  [default: gap, generalization_gap or loss]
        test: store or CSV file of the same checkpoints on test data.
        exclude: checkpoints to leave out of the correlations; with commas or repeated.
        history: JSON file that a pf.results.History wrote, to show; may be repeated.
        colour: a column, or a word with a number behind it in all names, such as lr of lr0.1_batch16.pt, that gives
            points their colours.  [default: the first such word with up to ten values]
        interval: how confidence intervals of correlations are found; fisher takes less time for many checkpoints.
    """
    charts.altair()  # before any work is done
    prepare_file(out)
    histories = {path.stem: History.from_json(path) for path in history}
    other = None if test is None else page.table(test)
    options = PageOptions(against, other, exclude, max_loss, interval, colour, histories, settings, seeds)
    with errors_of_options(), Store(store) as held:
        more = metadata.of_store(held, table)
        text = page.of_store(held, title or f"Results in {store.name}", options, more).html()
    write_whole(out, text.encode())
    echo(f"wrote {out}: {len(text) / 1e6:.1f} MB")
