"""Show reports as tables, data frames and figures; rich, pandas and matplotlib are loaded when they are needed."""

import csv
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..errors import InputError, MissingExtraError
from ..messages import check_path, to_cell

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.table import Table

    from . import Estimate, Report

_OF_TENSORS = ("per_sample", "per_neuron")
_NARROWEST = 12  # of a column whose cells may break
_NAMED = 3  # rows that a note names, if it is on many


def rows(report: "Report") -> list[dict[str, Any]]:
    """Return one row per estimate: its layer, its measure and its facts; the network's have the layer ``""``."""
    return [{"layer": layer, "measure": measure, **estimate.to_dict()} for layer, measure, estimate in report]


def write_csv(rows: list[dict[str, Any]], path: str | Path) -> None:
    """See :meth:`.Report.to_csv`."""
    columns = [name for name in dict.fromkeys(name for row in rows for name in row) if name not in _OF_TENSORS]
    with check_path("path", path).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        for row in rows:
            texts = {**row, "notes": "; ".join(row.get("notes", ()))}
            writer.writerow({name: to_cell(cell) if isinstance(cell, str) else cell for name, cell in texts.items()})


def frame(rows: list[dict[str, Any]]) -> "pandas.DataFrame":
    """Return rows as a data frame, without columns of values by sample or neuron that nothing has."""
    try:
        import pandas
    except ImportError:
        raise MissingExtraError("a data frame needs pandas: pip install 'pyflatness[frame]'") from None
    table = pandas.DataFrame(rows)
    return table.drop(columns=[name for name in _OF_TENSORS if name in table and table[name].isna().all()])


def least_width(table: "Table") -> int:
    """Return the least width at which no cell breaks in columns with ``no_wrap``, which hold names of layers."""
    if not any(column.no_wrap for column in table.columns):
        return 0
    from rich.cells import cell_len
    from rich.console import Console

    console = Console(width=10_000)  # all that a cell might want
    spare = 0
    for column in table.columns:
        cells = [cell_len(str(cell)) for cell in (column.header, *column.cells)]
        spare += 0 if column.no_wrap else max(0, max(cells) - max(_NARROWEST, column.min_width or 0))
    return console.measure(table).maximum - spare


def text(table: "Table", width: int) -> list[str]:
    """Return the lines of a table, as without a terminal; it is no wider than ``width``, unless it has to be."""
    from rich.console import Console

    console = Console(
        width=max(width, least_width(table)), markup=False, highlight=False, emoji=False, color_system=None
    )
    with console.capture() as capture:
        console.print(table)
    return [line.rstrip() for line in capture.get().splitlines() if line.strip()]


def figure() -> "tuple[Figure, Axes]":
    """Return an empty figure, outside of pyplot: no window, no global state."""
    empty = _figure(6.0, 4.5)
    return empty, empty.subplots()


def panels(count: int) -> "tuple[Figure, list[Axes]]":
    """Return an empty figure with ``count`` axes, up to three in a row, outside of pyplot."""
    columns = min(3, count)
    rows = -(-count // columns)
    empty = _figure(5.0 * columns, 3.6 * rows)
    axes = [empty.add_subplot(rows, columns, place + 1) for place in range(count)]
    return empty, axes


def _figure(width: float, height: float) -> "Figure":
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError("a figure needs matplotlib: pip install 'pyflatness[plot]'") from None
    return Figure(figsize=(width, height), layout="constrained")


def onto_each(axes: "Axes | Iterable[Axes]", names: Collection[str]) -> "tuple[Figure, list[Axes]]":
    """Return the user's axes, one for each name, with the figure of the first."""
    given: list[Any] = [*axes] if isinstance(axes, Iterable) else [axes]
    if len(given) != len(names):
        raise InputError(f"axes: one for each of {', '.join(names)} is wanted, got {len(given)}")
    figures = [onto(each)[0] for each in given]
    return figures[0], given


def save(figure: "Figure", path: Any) -> None:
    """Write a figure to a path, or to a file that is open; to None not at all."""
    if path is not None:
        figure.savefig(path if hasattr(path, "write") else check_path("path", path))


def footnotes(report: "Report") -> list[str]:
    """Return what a reader of the values should know: the notes on them, and what was left out, with the reasons."""
    by_measure = report.by_measure().values()
    on: dict[str, list[str]] = {}
    for row in (*report.layers, ""):
        for note in dict.fromkeys(note for held in by_measure if row in held for note in held[row].notes):
            on.setdefault(note, []).append(row or "network")
    left_out = [f"skipped {names}: {reason}" for names, reason in by_reason(report.skipped)]
    left_out += [f"without {names}: {reason}" for names, reason in by_reason(report.why_uncovered)]
    kinds = [textwrap.fill(f"network, {what}: {names}", 100) for names, what in by_reason(report.network_of)]
    lines = (f"{_first(names)}: {note}" for note, names in on.items())
    return [*lines, *(kinds if len(kinds) > 1 else ()), *left_out]


def _first(names: Sequence[str]) -> str:
    """Return the first names of rows, and how many there are besides."""
    more = len(names) - _NAMED
    return ", ".join(names) if more <= 1 else f"{', '.join(names[:_NAMED])} and {more} more"


def by_reason(reasons: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the names that share a reason, joined by commas, with the reason."""
    together: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        together.setdefault(reason, []).append(name)
    return [(", ".join(names), reason) for reason, names in together.items()]


def onto(axes: "Axes | None") -> "tuple[Figure, Axes]":
    """Return the user's axes with their figure; for None those of an empty figure."""
    if axes is None:
        return figure()
    if not hasattr(axes, "plot"):
        raise InputError(f"axes: axes of matplotlib are wanted, as of plt.subplots(), got {type(axes).__name__}")
    return cast("Figure", axes.figure), axes


def profile(report: "Report", axes: "Axes | Sequence[Axes] | None" = None) -> "tuple[Figure, list[Axes]]":
    """See :meth:`.Report.plot`."""
    held = {measure: {layer: e for layer, e in of.items() if layer} for measure, of in report.by_measure().items()}
    drawn = {measure: of for measure, of in held.items() if of}
    if not drawn:
        raise InputError(f"report: {', '.join(report.measures)} has values of the network alone; no profile of layers")
    if axes is None:
        whole = _figure(max(6.0, 2.5 + 0.35 * len(report.layers)), 2.5 + 2.0 * len(drawn))
        panels = [*whole.subplots(len(drawn), sharex=True, squeeze=False)[:, 0]]
    else:
        whole, panels = onto_each(axes, drawn)
    for axis, (measure, of) in zip(panels, drawn.items(), strict=True):
        _draw(axis, [report.layers.index(layer) for layer in of], [*of.values()])
        axis.set_ylabel(measure)
    panels[-1].set_xticks(range(len(report.layers)), report.layers, rotation=45, ha="right", rotation_mode="anchor")
    panels[-1].set_xlabel("layer, in the model's order")
    return whole, panels


def _draw(axis: "Axes", places: list[int], values: list["Estimate"]) -> None:
    ends = [e.interval() or (e.value, e.value) for e in values]
    errors = [(high - low) / 2 for low, high in ends]
    shown = errors if any(errors) else None
    axis.errorbar(places, [e.value for e in values], yerr=shown, marker="o", markersize=4, capsize=2)
    if all(e.value > 0 for e in values):
        axis.set_yscale("log")
    axis.grid(alpha=0.3)
