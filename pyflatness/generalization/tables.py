"""Read tables of networks (names and columns of numbers) from a data frame, a dict of lists, or a CSV file.

A file of ``pyflatness score`` has a row for each checkpoint, layer and measure; here it becomes a row for each
checkpoint, with a column for each measure (and layer, ``measure layer``, where a measure has several; ``measure
network`` for the network's), and one for each setting of ``pyflatness export``.
"""

import csv
import difflib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from ..messages import from_cell

Vector = NDArray[np.float64]

_NAMES = ("checkpoint", "name")
_SCORED = {"checkpoint", "layer", "measure", "value", "loss"}
_OF_VALUES = _SCORED | {
    *("schema", "arguments", "stderr", "low", "high", "exact", "method", "samples", "accuracy", "seconds", "model"),
    *("data", "versions", "error"),
}


@dataclass(frozen=True, eq=False)
class Networks:
    """Hold a row for each network.

    Attributes:
        names: of the rows.
        columns: numbers by name; NaN where a cell is empty.
        measures: columns that are measures, as far as that is known; else all.
    """

    names: tuple[str, ...]
    columns: dict[str, Vector]
    measures: tuple[str, ...]

    def column(self, name: str) -> Vector:
        """Return one column.

        Raises:
            InputError: there is none of that name.
        """
        if name not in self.columns:
            near = difflib.get_close_matches(name, self.columns) or [*self.columns]
            hint = "; pass test=, the same networks scored on test data" if name == "gap" else ""
            raise InputError(f"table: no column of numbers {name!r}; there are {', '.join(near[:8])}{hint}")
        return self.columns[name]

    def kept(self, exclude: Collection[str]) -> NDArray[np.bool_]:
        """Return which rows are not excluded, (rows,), by name or by the file name in it.

        Raises:
            InputError: a name that is not there.
        """
        if isinstance(exclude, str):
            raise InputError(f"exclude={exclude!r}: a list of names is wanted")
        known = [{name, Path(name).name, Path(name).stem} for name in self.names]
        for name in exclude:
            if not any(name in aliases for aliases in known):
                near = difflib.get_close_matches(name, self.names) or self.names[:3]
                raise InputError(f"exclude: {name!r} is not in the table; did you mean {', '.join(near)}?")
        return np.array([aliases.isdisjoint(exclude) for aliases in known], dtype=np.bool_)


def read(table: Any, test: Any = None) -> Networks:
    """Return a table, with the column ``gap`` if there is one of the test data too.

    Args:
        table: pandas data frame, mapping of sequences, or path of a CSV file.
        test: the same networks scored on test data; the gap is its ``loss`` less that of ``table``.

    Raises:
        InputError: not such a table, or networks that are missing in ``test``.
    """
    networks = _networks(table, "table")
    if test is None:
        return networks
    other = _networks(test, "test")
    losses = dict(zip(other.names, other.column("loss"), strict=True))
    missing = [name for name in networks.names if name not in losses]
    if missing:
        raise InputError(
            f"test: {len(missing)} of the {len(networks.names)} networks are not in it, e.g. {missing[0]!r}"
        )
    gap = np.array([losses[name] for name in networks.names]) - networks.column("loss")
    return Networks(networks.names, {**networks.columns, "gap": gap}, networks.measures)


def _networks(table: Any, what: str) -> Networks:
    cells, index = _cells(table, what)
    if {*cells} >= _SCORED:
        return _scored(cells, what)
    lengths = {len(column) for column in cells.values()}
    if len(lengths) != 1 or 0 in lengths:
        sizes = {name: len(column) for name, column in cells.items()}
        raise InputError(f"{what}: columns of one length, not empty, are wanted, got {sizes}")
    label = next((name for name in _NAMES if name in cells), None)
    rows = range(lengths.pop()) if index is None else index
    names = tuple(map(str, rows if label is None else cells[label]))
    columns = {name: numbers for name, column in cells.items() if (numbers := _numbers(column)) is not None}
    columns.pop(label or "", None)
    return Networks(names, columns, tuple(columns))


def _cells(table: Any, what: str) -> tuple[dict[str, Sequence[Any]], Sequence[Any] | None]:
    """Return columns by name, and names of the rows if the table has some."""
    if isinstance(table, (str, Path)):
        try:
            with Path(table).open(newline="", encoding="utf-8") as file:
                rows = list(csv.DictReader(file))
        except (OSError, ValueError) as error:
            raise InputError(f"{what}: {str(table)!r} cannot be read as CSV ({error})") from None
        if not rows:
            raise InputError(f"{what}: there are no rows in {str(table)!r}")
        if {*rows[0]} >= _SCORED:  # its text is written so that no spreadsheet runs it
            rows = [{name: from_cell(cell or "") for name, cell in row.items()} for row in rows]
        return {name: [row[name] for row in rows] for name in rows[0]}, None
    if hasattr(table, "columns") and hasattr(table, "to_dict"):  # a data frame, without importing pandas
        return {str(name): column for name, column in table.to_dict(orient="list").items()}, list(table.index)
    if isinstance(table, Mapping):
        return {str(name): list(column) for name, column in table.items()}, None
    raise InputError(
        f"{what}: a data frame, a dict of lists or the path of a CSV file is wanted, got {type(table).__name__}"
    )


def _scored(cells: Mapping[str, Sequence[Any]], what: str) -> Networks:
    """Return the table of a file of ``pyflatness score``, a row for each checkpoint."""
    rows = [dict(zip(cells, row, strict=True)) for row in zip(*cells.values(), strict=True)]
    places = {name: place for place, name in enumerate(dict.fromkeys(str(row["checkpoint"]) for row in rows))}
    layers: dict[str, set[str]] = {}
    for row in rows:
        if not math.isnan(_number(row["value"])):
            layers.setdefault(row["measure"], set()).add(row["layer"])
    columns: dict[str, Vector] = {}
    settings = {
        name: numbers for name in cells if name not in _OF_VALUES and (numbers := _numbers(cells[name])) is not None
    }
    for row in rows:
        several = len(layers.get(row["measure"], ())) > 1
        name = f"{row['measure']} {row['layer'] or 'network'}" if several else row["measure"]
        place = places[str(row["checkpoint"])]
        others = {key: row[key] for key in ("loss", "accuracy", *settings) if key in row}
        for key, cell in ((name, row["value"]), *others.items()):
            value = _number(cell)
            column = columns.setdefault(key, np.full(len(places), math.nan))
            if math.isnan(value):
                continue
            if key == name and not math.isnan(column[place]):
                raise InputError(f"{what}: {row['checkpoint']!r} has two rows of {name!r}")
            column[place] = value
    beside = {"loss", "accuracy", *settings}
    return Networks(tuple(places), columns, tuple(name for name in columns if name not in beside))


def _numbers(column: Sequence[Any]) -> Vector | None:
    """Return a column as numbers; None if a cell is not one."""
    try:
        return np.array([_number(cell) for cell in column], dtype=np.float64)
    except (TypeError, ValueError):
        return None


def _number(cell: Any) -> float:
    return math.nan if cell is None or cell == "" else float(cell)
