"""Run ``pyflatness demo``: does relative flatness go along with generalisation, over two dozen small networks?

Each network is trained on handwritten digits until its training loss is small; then relative flatness κ of its head on
the training set, plain and normalised (Petzka et al. 2021, Definition 3 and Theorem 4), is held against its
generalisation gap, the mean test loss minus the mean training loss. Every network is in the table, the plot and the
correlations, and the correlations are shown as they come out.
"""

import csv
import io
import itertools
import json
import math
import platform
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
import torch
from rich import box
from rich.table import Table

from .. import __version__
from ..errors import MissingExtraError
from ..messages import printable
from ..statistics.coefficients import STATISTICS
from ..statistics.correlation import Correlation, correlation
from . import demo_networks
from .demo_networks import Row
from .output import json_option, show, show_json
from .paths import prepare_folder, write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# By their field, the labels in the plot.
MEASURES = {"kappa": "κ", "normalised_kappa": "κ normalised"}


@click.command(short_help="Train and measure 24 small networks.")
@click.option(
    "--out", type=click.Path(path_type=Path), default="demo", show_default=True, help="Folder for the results."
)
@click.option(
    "--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="Seed of the data and networks."
)
@json_option
def demo(out: Path, seed: int, as_json: bool) -> None:
    """Measure relative flatness and generalisation of 24 small networks.

    The command trains them on handwritten digits (less than a minute), prints a table and the correlations, and writes
    scatter.png, results.json and results.csv. One seed gives one set of numbers.
    """
    _require_extras()
    prepare_folder(out)
    rows = demo_networks.run(demo_networks.recipes(seed), demo_networks.load_digits(seed))
    correlations = correlate(rows, seed)
    write(out, rows, correlations, seed)
    if as_json:
        show_json(_results(rows, correlations, seed))
        return
    _print(rows, correlations)
    click.echo(printable(f"scatter.png, results.json and results.csv are in {out}"))


def correlate(rows: list[Row], seed: int) -> list[Correlation]:
    """Return the correlation of each kappa with the gap, by each statistic."""
    gaps = np.array([row.gap for row in rows])
    return [
        Correlation(
            measure, statistic, *correlation(np.array([getattr(row, measure) for row in rows]), gaps, statistic, seed)
        )
        for measure in MEASURES
        for statistic in STATISTICS
    ]


def write(folder: Path, rows: list[Row], correlations: list[Correlation], seed: int) -> None:
    """Write the plot, and all numbers in full precision as JSON and CSV."""
    results = _results(rows, correlations, seed)
    table = io.StringIO()
    writer = csv.DictWriter(table, [field.name for field in fields(Row)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(map(asdict, rows))
    write_whole(folder / "scatter.png", _plot(rows, correlations))
    write_whole(folder / "results.json", (json.dumps(results, indent=2, allow_nan=False) + "\n").encode())
    write_whole(folder / "results.csv", table.getvalue().encode())


def _results(rows: list[Row], correlations: list[Correlation], seed: int) -> dict[str, Any]:
    """Return what results.json has."""
    return {
        "seed": seed,
        "versions": _versions(),
        "correlations": [_plain(item.to_dict()) for item in correlations],
        "networks": [_plain(asdict(row)) for row in rows],
    }


def _require_extras() -> None:
    try:
        import matplotlib  # noqa: F401
        import sklearn  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(f"the demo needs {error.name}: pip install 'pyflatness[demo]'") from None


def _print(rows: list[Row], correlations: list[Correlation]) -> None:
    show(_networks_table(rows))
    if not all(row.converged for row in rows):
        click.echo(f"* still above a training loss of {demo_networks.TARGET_LOSS} after the most epochs allowed")
    table = Table("", "", "correlation with the gap", "95 % interval", box=box.SIMPLE_HEAD)
    for item in correlations:
        interval = "too few networks" if math.isnan(item.low) else f"{item.low:.2f} to {item.high:.2f}"
        table.add_row(item.measure.replace("_", " "), item.statistic, f"{item.value:.2f}", interval)
    show(table)


def _networks_table(rows: list[Row]) -> Table:
    """Return a table narrow enough for 80 columns, without Greek, which not every terminal can show."""
    table = Table(box=box.SIMPLE_HEAD, padding=0)
    for header in ("network", "optimiser"):
        table.add_column(header)
    numbers = "batch size,rate,seed,epochs,train loss,test loss,test acc.,gap,kappa,norm. kappa"
    for header in numbers.split(","):
        table.add_column(header.replace(" ", "\n"), justify="right")
    for row in rows:
        table.add_row(
            *(row.network, row.optimiser, str(row.batch_size), f"{row.learning_rate:g}", str(row.seed)),
            f"{row.epochs}{'' if row.converged else '*'}",
            *(f"{value:.3f}" for value in (row.train_loss, row.test_loss, row.test_accuracy, row.gap)),
            *(f"{value:.4g}" for value in (row.kappa, row.normalised_kappa)),
        )
    return table


def _plot(rows: list[Row], correlations: list[Correlation]) -> bytes:
    from matplotlib.figure import Figure  # without pyplot: no window, no global state

    figure = Figure(figsize=(11, 5), layout="constrained")
    panels = figure.subplots(1, len(MEASURES), sharey=True)
    for panel, (measure, label) in zip(panels, MEASURES.items(), strict=True):
        for network, converged in itertools.product(demo_networks.NETWORKS, (True, False)):
            group = [row for row in rows if (row.network, row.converged) == (network, converged)]
            if group:
                x, y = [getattr(row, measure) for row in group], [row.gap for row in group]
                panel.plot(x, y, **_style(network, converged))
        panel.set_title("\n".join(str(item) for item in correlations if item.measure == measure), fontsize=10)
        _log_scale(panel, [getattr(row, measure) for row in rows])
        panel.set_xlabel(f"relative flatness {label}")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("generalisation gap (test loss − training loss)")
    panels[0].legend()
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=150)
    return image.getvalue()


def _log_scale(panel: "Axes", values: list[float]) -> None:
    """Make an axis logarithmic, with a place for zero if there is one: a network whose features died has κ = 0."""
    if 0 in values:
        panel.set_xscale("symlog", linthresh=min((value for value in values if value > 0), default=1.0))
        return
    from matplotlib.ticker import LogFormatter

    panel.set_xscale("log")
    for set_formatter in (panel.xaxis.set_major_formatter, panel.xaxis.set_minor_formatter):
        set_formatter(LogFormatter())  # 20, not 2 × 10¹


def _style(network: str, converged: bool) -> dict[str, Any]:
    number = list(demo_networks.NETWORKS).index(network)
    return {
        "linestyle": "none",
        "marker": "os^"[number],
        "color": f"C{number}",
        "fillstyle": "full" if converged else "none",
        "label": network if converged else f"{network}, training loss above {demo_networks.TARGET_LOSS}",
    }


def _plain(cells: dict[str, Any]) -> dict[str, Any]:
    """Return cells for JSON, which knows no NaN."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in cells.items()}


def _versions() -> dict[str, str]:
    import sklearn

    return {
        "pyflatness": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "scikit-learn": sklearn.__version__,
    }
