"""Run ``pyflatness correlate``: correlations of measures with the generalisation gap, over networks."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import click
from rich import box
from rich.table import Table

from ..errors import printable
from ..report.page.tables import NETWORK
from ..results import Correlations
from ..scoring import page
from ..statistics import correlations, plot_correlation, tables
from ..statistics.coefficients import STATISTICS
from .options import Column, Columns, Interval, Json, MaxLoss, Names, command, errors_of_options, with_options
from .output import echo, finite, prepare_file, show, show_json

_SHOWN = 10  # measures


@command(plot_correlation, correlations)
def correlate(
    table: Path,
    *,
    test: Path | None = None,
    measures: Names = (),
    layers: bool = False,
    against: Annotated[str, {"metavar": "COLUMN"}] = "gap",
    exclude: Names = (),
    max_loss: MaxLoss = None,
    settings: Columns = (),
    given: Columns = (),
    strata: Columns = (),
    seeds: Column = None,
    interval: Interval = "bootstrap",
    plot: Path | None = None,
    title: str | None = None,
    xlabel: str | None = None,
    ylabel: str | None = None,
    log: bool | None = None,
    as_json: Json = False,
) -> None:
    """Show how measures correlate with the generalisation gap over the networks of TABLE, with confidence intervals.

    TABLE, and that of --test, is a CSV file of pyflatness score or store export, or a store. The strongest
    correlations come first.

    Args:
        test: table or store of the same networks on test data.
        measures: columns, as trace of the network or 'trace 3' of layer 3.  [default: all of whole networks]
        layers: values of layers too.
        against: what they are held against: gap, test_error, test_accuracy or test_loss with --test, or any other
            column.
        exclude: networks to leave out.
        plot: figure to write, of one measure.
    """
    prepare_file(plot)
    held, tested = page.table(table), None if test is None else page.table(test)
    networks = tables.read(held, tested)
    how: dict[str, Any] = {"test": tested, "exclude": exclude, "max_loss": max_loss, "interval": interval}
    how |= {"settings": settings or None, "given": given, "strata": strata, "seeds": seeds}
    besides = {against, seeds, *settings, *given, *strata}
    names = [name for name in networks.measures if layers or not _is_of_a_layer(name, networks)]
    shown = {_shown(name): name for name in networks.columns} | {name: name for name in networks.columns}
    x = [shown.get(name, name) for name in measures] or [name for name in names if name not in besides]
    if plot is not None and len(x) != 1:
        raise click.UsageError(f"--plot goes with one measure: --measures with one of {', '.join(map(_shown, x))}")
    with errors_of_options():
        found = _by_strength(correlations(held, x or None, against, **how))
        if plot is not None:
            how |= {"title": title, "xlabel": xlabel, "ylabel": ylabel, "log": log}
            plot_correlation(held, x[0], against, **how, path=plot)
    if as_json:
        show_json(finite([row.to_dict() for row in found]))
        return
    head, *_ = str(found).splitlines()
    echo(head)
    show(_table(found))
    more = len(found) // len(STATISTICS) - _SHOWN
    echo(*([f"and {more} weaker ones, which --measures or --json shows"] if more > 0 else []))
    echo(*map(with_options, found.footnotes()))


def _shown(name: str) -> str:
    return name.removesuffix(f" {NETWORK}")


def _is_of_a_layer(name: str, networks: tables.Networks) -> bool:
    """Return whether a column has a measure's values of one of several layers."""
    measure, layer = tables.measure_and_layer(name)
    return layer != NETWORK and f"{measure} {NETWORK}" in networks.columns


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
        table.add_row(printable(_shown(name)), *cells)
    return table
