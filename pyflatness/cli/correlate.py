"""Run ``pyflatness correlate``: correlations of measures with the generalisation gap, over networks."""

from pathlib import Path
from typing import Any

import click

from ..messages import printable
from ..scoring import page
from ..scoring.store import Store
from ..statistics import correlations, plot_correlation
from ..statistics.tables import is_store
from .options import PATH, json_option, several_option
from .output import finite, prepare_file, show_json


@click.command()
@click.argument("table", type=PATH)
@click.option("--test", type=PATH, help="Table or store of the same networks on test data, for the gap.")
@several_option("--measures", "x", help="Columns, as 'trace network'.  [all]")
@click.option("--against", "y", metavar="COLUMN", default="gap", show_default=True, help="What they are held against.")
@several_option("--exclude", help="Networks to leave out.")
@several_option("--settings", metavar="COLUMN,…", help="Columns in which dependent networks agree.")
@several_option("--given", metavar="COLUMN,…", help="Columns that are held fixed.")
@several_option("--strata", metavar="COLUMN,…", help="Columns; networks equal in them are compared.")
@click.option("--seeds", metavar="COLUMN", help="The seeds, where recipes share them.")
@click.option("--interval", type=click.Choice(["bootstrap", "fisher"]), default="bootstrap", show_default=True)
@click.option("--plot", type=PATH, help="Figure to write, of one measure.")
@json_option
def correlate(
    table: Path,
    test: Path | None,
    x: tuple[str, ...],
    y: str,
    settings: tuple[str, ...],
    plot: Path | None,
    as_json: bool,
    **how: Any,
) -> None:
    """Show how measures correlate with the generalisation gap over the networks of TABLE, with confidence intervals.

    TABLE, and that of --test, is a CSV file of pyflatness score or store export, or a store.
    """
    if plot is not None and len(x) != 1:
        raise click.UsageError("--plot goes with one measure: --measures 'relative_flatness network'")
    if plot is not None:
        prepare_file(plot)
    held = _read(table)
    how |= {"settings": settings or None, "test": None if test is None else _read(test)}
    found = correlations(held, x or None, y, **how)
    if plot is not None:
        plot_correlation(held, x[0], y, **how, path=plot)
    if as_json:
        show_json(finite([row.to_dict() for row in found]))
    else:
        for line in str(found).splitlines():
            click.echo(printable(line))


def _read(path: Path) -> Any:
    """Return the columns of a store, or the path of any other file."""
    if not is_store(path):
        return path
    with Store(path) as store:
        return page.table(store)
