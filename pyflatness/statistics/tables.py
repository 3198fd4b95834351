"""Read tables of networks (names and columns of numbers) from a data frame, a dict of lists, or a CSV file.

A file of ``pyflatness score`` has a row for each checkpoint, layer and measure. It is turned into a table with a row
for each checkpoint, and a column for each measure and each setting of ``pyflatness store export``. A measure with
values of several layers has a column for each, ``measure layer``, and ``measure network`` for the network's.
"""

import csv
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from ..messages import from_cell, near, shown
from ..options import check_names, check_several
from ..report.page.tables import NETWORK

Vector = NDArray[np.float64]

_NAMES = ("checkpoint", "name")
BY_NAME = "excluded by name"
_UNTRAINED = 5.0  # times the median loss; a network with a larger loss was not trained as the others were
_ABOVE_CHANCE = 0.05  # of the largest possible accuracy above chance; a network with less is at chance
_LEARNED = 0.5  # of it; a network with more was trained, whatever its loss is
_SAME = 1e-6  # of a loss; losses of the same data differ by less, in their last digits
_SHOWN = 8  # columns that a message names at most
_SQLITE = b"SQLite format 3\0"  # the first bytes of a store
_SCORED = {"checkpoint", "layer", "measure", "value", "loss"}
_OF_VALUES = _SCORED | {
    *("schema", "arguments", "stderr", "low", "high", "exact", "method", "samples", "accuracy", "chance", "seconds"),
    *("model", "data", "versions", "error"),
}


@dataclass(frozen=True, eq=False)
class Networks:
    """Hold a row for each network."""

    names: tuple[str, ...]  # of the rows
    columns: dict[str, Vector]  # numbers by name; NaN where a cell is empty
    measures: tuple[str, ...]  # the columns that are measures, if that is known; otherwise all
    text_columns: dict[str, tuple[str, ...]] = field(default_factory=dict)  # the others; "" where a cell is empty

    def column(self, name: str) -> Vector:
        """Return one column."""
        if name not in self.columns:
            of_test = name in ("gap", "test_loss", "test_accuracy", "test_error")
            hint = "pass test=, the same networks scored on test data" if of_test else _instead(name, self.columns)
            raise InputError(f"table: no column of numbers {name!r}; {hint}")
        return self.columns[name]

    def finite(self, name: str, kept: NDArray[np.bool_]) -> Vector:
        """Return the numbers of a column in the rows that count, all finite."""
        values = self.column(name)
        self._whole(name, np.isfinite(values), kept, "empty, NaN or infinite")
        return values[kept]

    def left_out(self, exclude: Collection[str] = (), max_loss: float | None = None) -> tuple[str, ...]:
        """Return for each row why it does not count, or "": it is excluded by name, or not trained as the others were.

        Such a network is at chance. Or its loss is more than five times the median, where no loss is negative, and its
        accuracy is not known, or less than half way from chance to 1: learning rates alone make losses differ as much.
        With ``max_loss`` it is one of a larger loss. If this rule would leave out all networks, it leaves out none.
        """
        none = np.full(len(self.names), math.nan)
        loss, accuracy, chance = (self.columns.get(name, none) for name in ("loss", "accuracy", "chance"))
        there = loss[np.isfinite(loss)]
        middle = float(np.median(there)) if len(there) and there.min() >= 0 else 0.0  # nothing is five times a negative
        bound = max_loss if max_loss is not None else _UNTRAINED * middle if middle > 0 else math.inf
        at_chance = accuracy - chance <= (_ABOVE_CHANCE * (1 - chance) if max_loss is None else -math.inf)
        too_large = (loss > bound) & ~((accuracy - chance > _LEARNED * (1 - chance)) & (max_loss is None))
        reasons = [
            f"its loss is {own:.4g}" if large else f"its accuracy of {right:.4g} is that of chance" if out else ""
            for own, large, right, out in zip(loss, too_large, accuracy, at_chance, strict=True)
        ]
        untrained = [""] * len(reasons) if all(reasons) else reasons
        return tuple(why if kept else BY_NAME for why, kept in zip(untrained, self.kept(exclude), strict=True))

    def groups(self, names: Sequence[str], kept: NDArray[np.bool_]) -> tuple[NDArray[np.intp], tuple[str, ...]]:
        """Return the group of each row that counts, (rows,), by equal cells in some columns, and the groups' labels."""
        columns = []
        for name in names:
            if name in self.columns:
                cells = ["" if math.isnan(cell) else f"{cell:.15g}" for cell in self.columns[name]]
            elif name in self.text_columns:
                cells = [*self.text_columns[name]]
            else:
                raise InputError(f"table: no column {name!r}; {_instead(name, [*self.columns, *self.text_columns])}")
            self._whole(name, np.array([cell != "" for cell in cells]), kept, "empty")
            columns.append([cell for cell, counts in zip(cells, kept, strict=True) if counts])
        rows = [*zip(*columns, strict=True)]
        places = {row: place for place, row in enumerate(dict.fromkeys(rows))}
        return np.array([places[row] for row in rows], dtype=np.intp), tuple(map(", ".join, places))

    def _whole(self, column: str, good: NDArray[np.bool_], kept: NDArray[np.bool_], what: str) -> None:
        bad = self.named(kept & ~good)
        if bad:
            raise InputError(
                f"table: {column!r} is {what} for {', '.join(bad[:5])}{' …' if len(bad) > 5 else ''}; "
                "to leave them out, name them in exclude="
            )
        if not kept.any():
            raise InputError("exclude: every row is excluded")

    def named(self, chosen: NDArray[np.bool_]) -> tuple[str, ...]:
        """Return the names of some rows."""
        return tuple(name for name, wanted in zip(self.names, chosen, strict=True) if wanted)

    def kept(self, exclude: Collection[str]) -> NDArray[np.bool_]:
        """Return which rows are not excluded, (rows,); a row goes by its name or the file name in it."""
        exclude = check_names("exclude", exclude, " of networks")
        known = [{*aliases(name)} for name in self.names]
        for name in exclude:
            if not any(name in each for each in known):
                raise InputError(f"exclude: {name!r} is not in the table; did you mean {near(name, self.names, 3)}?")
        return np.array([each.isdisjoint(exclude) for each in known], dtype=np.bool_)


def measure_and_layer(column: str) -> tuple[str, str]:
    """Return the measure and the layer that a column is of."""
    measure, _, layer = column.partition(" ")
    return measure, layer or NETWORK


def aliases(name: str) -> tuple[str, str, str]:
    """Return what a network goes by: its name, the file's name in that, and this without its ending."""
    return name, Path(name).name, Path(name).stem


def one_name(option: str, given: Any) -> str:
    """Return the name of a column."""
    if not isinstance(given, str):
        raise InputError(f"{option}={shown(given)}: the name of a column is wanted")
    return given


def listed(option: str, names: str | Sequence[str]) -> tuple[str, ...]:
    """Return one name or several as a tuple."""
    given = (names,) if isinstance(names, str) else tuple(check_several(option, names, "a name or several of columns"))
    check_names(option, given, " of columns")
    return given


def read(table: Any, test: Any = None) -> Networks:
    """Return a data frame, mapping or CSV file as a table.

    With test data it has the columns ``test_loss``, ``gap``, their loss less that of the table, and where targets are
    classes ``test_accuracy`` and ``test_error``, 1 less the accuracy.
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
    columns = {"gap": np.array([losses[name] for name in networks.names]) - networks.column("loss")}
    for what, of, names in (("table", networks, networks.names), ("test", other, losses)):
        if not np.isfinite(of.column("loss")).any():
            raise InputError(f"{what}: it has no loss of any of its {len(names)} networks, and gaps are of two losses")
    there = np.isfinite(columns["gap"])
    if there.any() and (abs(columns["gap"]) <= _SAME * abs(networks.column("loss")))[there].all():
        raise InputError("test: all networks have the losses that they have in the table: these are the same data")
    for name in ("loss", "accuracy"):
        if name in other.columns:
            held = dict(zip(other.names, other.columns[name], strict=True))
            columns[f"test_{name}"] = np.array([held[each] for each in networks.names])
    if "test_accuracy" in columns:
        columns["test_error"] = 1 - columns["test_accuracy"]
    return replace(networks, columns={**networks.columns, **columns})


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
    columns, text_columns = _sorted({name: column for name, column in cells.items() if name != label})
    return Networks(names, columns, tuple(columns), text_columns)


def is_store(path: Path) -> bool:
    """Return whether a file is a store of ``pyflatness score``, by its first bytes."""
    try:
        with path.open("rb") as start:
            return start.read(len(_SQLITE)) == _SQLITE
    except (OSError, ValueError) as error:  # ValueError: NUL in the path
        why = "there is no such file" if isinstance(error, FileNotFoundError) else f"it cannot be read ({error})"
        raise InputError(f"{str(path)!r}: {why}") from None


def _cells(table: Any, what: str) -> tuple[dict[str, Sequence[Any]], Sequence[Any] | None]:
    """Return the columns by name, and the index of the rows if the table has one."""
    if isinstance(table, (str, Path)):
        if is_store(Path(table)):
            raise InputError(
                f"{what}: {str(table)!r} is a store, no table; pyflatness store export {table} --out FILE.csv "
                "writes the table of it"
            )
        try:
            with Path(table).open(newline="", encoding="utf-8") as file:
                rows = list(csv.DictReader(file))
        except (OSError, ValueError) as error:
            raise InputError(f"{what}: {str(table)!r} cannot be read as CSV ({error})") from None
        if not rows:
            raise InputError(f"{what}: there are no rows in {str(table)!r}")
        if {*rows[0]} >= _SCORED:  # whose text is escaped so that no spreadsheet runs it
            rows = [{name: from_cell(cell or "") for name, cell in row.items()} for row in rows]
        return {name: [row[name] for row in rows] for name in rows[0]}, None
    if callable(getattr(table, "columns", None)):  # scores, without importing what makes them
        return table.columns(), None
    if hasattr(table, "columns") and hasattr(table, "to_dict"):  # a data frame, without importing pandas
        return {str(name): column for name, column in table.to_dict(orient="list").items()}, list(table.index)
    if isinstance(table, Mapping):
        return {str(name): check_several(f"{what}: {name}", cells, "cells") for name, cells in table.items()}, None
    raise InputError(
        f"{what}: a data frame, a dict of lists, scores or the path of a CSV file is wanted, got {type(table).__name__}"
    )


def _scored(cells: Mapping[str, Sequence[Any]], what: str) -> Networks:
    """Return the table of a file of ``pyflatness score``, a row for each checkpoint."""
    cells = {**cells, "layer": [*map(_text, cells["layer"])]}  # pandas reads the network's as NaN
    rows = [dict(zip(cells, row, strict=True)) for row in zip(*cells.values(), strict=True)]
    places = {name: place for place, name in enumerate(dict.fromkeys(str(row["checkpoint"]) for row in rows))}
    layers: dict[str, set[str]] = {}
    for row in rows:
        if not math.isnan(_number(row["value"])):
            layers.setdefault(row["measure"], set()).add(row["layer"])
    columns: dict[str, Vector] = {}
    settings, written = _sorted({name: column for name, column in cells.items() if name not in _OF_VALUES})
    text_columns = {name: [""] * len(places) for name in written}
    for row in rows:
        several = len(layers.get(row["measure"], ())) > 1
        name = f"{row['measure']} {row['layer'] or NETWORK}" if several else row["measure"]
        place = places[str(row["checkpoint"])]
        own = {name: row["value"]} if row["layer"] in layers.get(row["measure"], {row["layer"]}) else {}
        others = {key: row[key] for key in ("loss", "accuracy", "chance", *settings) if key in row}
        for key, cell in (own | others).items():
            value = _number(cell)
            column = columns.setdefault(key, np.full(len(places), math.nan))
            if math.isnan(value):
                continue
            if key == name and not math.isnan(column[place]):
                hint = "; the column 'setting' tells data, losses and options apart: pass rows of one setting"
                raise InputError(
                    f"{what}: {row['checkpoint']!r} has two rows of {name!r}{hint if 'setting' in row else ''}"
                )
            column[place] = value
        for key, column_of_text in text_columns.items():
            column_of_text[place] = _text(row[key]) or column_of_text[place]
    beside = {"loss", "accuracy", "chance", *settings}
    measures = tuple(name for name in columns if name not in beside)
    return Networks(tuple(places), columns, measures, {name: tuple(column) for name, column in text_columns.items()})


def _sorted(cells: Mapping[str, Sequence[Any]]) -> tuple[dict[str, Vector], dict[str, tuple[str, ...]]]:
    """Return the columns that are numbers, and the others as text."""
    numbers = {name: _numbers(column) for name, column in cells.items()}
    texts = {name: tuple(map(_text, cells[name])) for name, column in numbers.items() if column is None}
    return {name: column for name, column in numbers.items() if column is not None}, texts


def _numbers(column: Sequence[Any]) -> Vector | None:
    """Return a column as numbers; None if a cell is not one."""
    try:
        return np.array([_number(cell) for cell in column], dtype=np.float64)
    except (TypeError, ValueError):
        return None


def _number(cell: Any) -> float:
    return math.nan if cell is None or cell == "" else float(cell)


def _text(cell: Any) -> str:
    return "" if cell is None or str(cell) in ("nan", "<NA>") else str(cell)  # these are pandas' empty cells


def _instead(name: str, columns: Collection[str]) -> str:
    """Return the end of a message: the columns of a measure, columns with names like this one, or all columns."""
    network = f"{name} {NETWORK}"
    places = sorted((each for each in columns if each.startswith(f"{name} ")), key=lambda each: each != network)
    if places:
        return f"there are {_listed(places)}"
    likely = near(name, columns, _SHOWN)
    unlike = likely == ", ".join([*columns][:_SHOWN]) and len(columns) > 1
    return f"there are {_listed([*columns])}" if unlike else f"did you mean {likely}?"


def _listed(names: Sequence[str]) -> str:
    """Return the first of the names, and the number of others."""
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
