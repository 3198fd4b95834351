"""Run ``pyflatness correlate``: correlations of measures with the generalisation gap, over networks."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.table import Table

from ..messages import printable
from ..results import Correlations
from ..scoring import page
from ..scoring.store import Store
from ..statistics import correlations, plot_correlation, tables
from ..statistics.coefficients import STATISTICS
from .options import PATH, json_option, max_loss_option, several_option
from .output import echo, finite, prepare_file, show, show_json

_SHOWN = 10  # measures


@click.command()
@click.argument("table", type=PATH)
@click.option("--test", type=PATH, help="Table or store of the same networks on test data.")
@several_option("--measures", "x", help="Columns, as 'trace network'.  [default: all of whole networks]")
@click.option("--layers", is_flag=True, help="Values of layers too.")
@click.option(
    *("--against", "y"),
    metavar="COLUMN",
    default="gap",
    show_default=True,
    help="What they are held against: gap, test_error, test_accuracy or test_loss with --test, or any other column.",
)
@several_option("--exclude", help="Networks to leave out.")
@max_loss_option
@several_option("--settings", metavar="COLUMN,…", help="Columns in which dependent networks agree.")
@several_option("--given", metavar="COLUMN,…", help="Columns that are held fixed.")
@several_option("--strata", metavar="COLUMN,…", help="Columns; networks equal in them are compared.")
@click.option("--seeds", metavar="COLUMN", help="The seeds, where recipes share them.")
@click.option("--interval", type=click.Choice(["bootstrap", "fisher"]), default="bootstrap", show_default=True)
@click.option("--plot", type=PATH, help="Figure to write, of one measure.")
@click.option("--title", help="Of the figure.  [default: the correlations]")
@click.option("--xlabel", help="Of the figure.  [default: the measure]")
@click.option("--ylabel", help="Of the figure.  [default: the column]")
@click.option("--log/--no-log", default=None, help="Logarithmic axis of the measure.  [default: by its values]")
@json_option
def correlate(
    table: Path,
    test: Path | None,
    x: tuple[str, ...],
    layers: bool,
    y: str,
    exclude: tuple[str, ...],
    max_loss: float | None,
    settings: tuple[str, ...],
    plot: Path | None,
    as_json: bool,
    title: str | None,
    xlabel: str | None,
    ylabel: str | None,
    log: bool | None,
    **how: Any,
) -> None:
    """Show how measures correlate with the generalisation gap over the networks of TABLE, with confidence intervals.

    TABLE, and that of --test, is a CSV file of pyflatness score or store export, or a store. The strongest
    correlations come first.
    """
    if plot is not None and len(x) != 1:
        raise click.UsageError("--plot goes with one measure: --measures 'relative_flatness network'")
    if plot is not None:
        prepare_file(plot)
    held = _read(table)
    how |= {"settings": settings or None, "test": None if test is None else _read(test)}
    networks = tables.read(held, how["test"])
    left_out = networks.untrained(max_loss)
    how["exclude"] = [*left_out, *exclude]
    besides = {y, how["seeds"], *settings, *how["given"], *how["strata"]}
    names = [name for name in networks.measures if layers or not _is_of_a_layer(name, networks)]
    found = _by_strength(correlations(held, x or [name for name in names if name not in besides] or None, y, **how))
    if plot is not None:
        plot_correlation(held, x[0], y, **how, path=plot, title=title, xlabel=xlabel, ylabel=ylabel, log=log)
    if as_json:
        show_json(finite([row.to_dict() for row in found]))
        return
    head, *_ = str(found).splitlines()
    echo(head, *(f"left out: {name}, {why}; --max-loss inf keeps it" for name, why in left_out.items()))
    show(_table(found))
    more = len(found) // len(STATISTICS) - _SHOWN
    echo(*([f"and {more} weaker ones, which --measures or --json shows"] if more > 0 else []))
    echo(*(line.replace('given="loss"', "--given loss") for line in found.footnotes()))


def _is_of_a_layer(name: str, networks: tables.Networks) -> bool:
    """Return whether a column has a measure's values of one of several layers."""
    measure, _, layer = name.partition(" ")
    return layer not in ("", tables.NETWORK) and f"{measure} {tables.NETWORK}" in networks.columns


def _by_strength(found: Correlations) -> Correlations:
    """Return correlations with the measures of the largest Kendall coefficients first."""

    def strength(measure: str) -> float:
        value = abs(found[measure, "Kendall"].value)
        return -1.0 if math.isnan(value) else value

    names = sorted(dict.fromkeys(row.measure for row in found), key=strength, reverse=True)
    return replace(found, rows=tuple(found[name, statistic] for name in names for statistic in STATISTICS))


def _table(found: Correlations) -> Table:
    table = Table("measure", *STATISTICS, box=box.SIMPLE_HEAD)
    for name in [*dict.fromkeys(row.measure for row in found)][:_SHOWN]:
        cells = (str(found[name, statistic]).removeprefix(f"{statistic} ") for statistic in STATISTICS)
        table.add_row(printable(name.removesuffix(" network")), *cells)
    return table


def _read(path: Path) -> Any:
    """Return the columns of a store, or the path of any other file."""
    if not tables.is_store(path):
        return path
    with Store(path) as store:
        return page.table(store)
