"""Make tables for HTML. Every text in them is escaped where they are written, by the templates."""

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from ...errors import MissingExtraError, printable
from ...messages import with_error
from .. import intervals

if TYPE_CHECKING:
    import jinja2

Record = Mapping[str, Any]
"""A value of a model, by name: ``checkpoint``, ``layer`` (``""`` the network), ``measure``, ``value``, ``stderr``,
``low``, ``high``, ``exact``, ``method``, ``samples`` and ``error``, which is empty where there is a value."""

NETWORK = "network"  # stands for the layer of the network's values

LEGEND = (
    "A plain number is exact up to rounding. ± is the standard error of a sampled value, and the brackets are its 95 % "
    "interval. ≈ marks any other value that is not exact; its cell says more where the pointer rests on it."
)


class Cell(NamedTuple):
    """Hold a cell of a table.

    Attributes:
        text: what is read.
        key: the number that rows are sorted by; None: the text.
        kind: its class in the style sheet: ``"failed"``, ``"long"`` for a text that may break, or nothing.
        note: shown where the pointer rests on it.
    """

    text: str
    key: float | None = None
    kind: str = ""
    note: str = ""


@dataclass(frozen=True)
class Table:
    """Hold a table of which the first cell of a row is its heading.

    Attributes:
        caption: says what it is of.
        header: names of the columns.
        rows: cells, as many as there are columns.
        measures: columns of which a reader may choose one.
        layer: which column is the layer, of which a reader may choose one; None: there is none.
    """

    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    measures: tuple[str, ...] = ()
    layer: int | None = None

    def __post_init__(self) -> None:
        """Leave out columns that are empty in every row."""
        there = [not self.rows or any(row[place].text for row in self.rows) for place in range(len(self.header))]
        if self.layer is not None:
            object.__setattr__(self, "layer", sum(there[: self.layer]))
        object.__setattr__(self, "header", (*itertools.compress(self.header, there),))
        object.__setattr__(self, "rows", tuple((*itertools.compress(row, there),) for row in self.rows))

    @property
    def numeric(self) -> list[bool]:
        """Return which columns have numbers."""
        return [any(row[place].key is not None for row in self.rows) for place in range(len(self.header))]

    @property
    def layers(self) -> list[str]:
        """Return the layers that there are to choose from."""
        return [] if self.layer is None else [*dict.fromkeys(row[self.layer].text for row in self.rows)]


@functools.cache
def templates() -> "jinja2.Environment":
    """Return the templates beside this module, which escape whatever is put into them.

    Raises:
        MissingExtraError: without Jinja2.
    """
    try:
        import jinja2
    except ImportError:
        raise MissingExtraError("HTML needs jinja2: pip install 'pyflatness[html]'") from None

    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    return jinja2.Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )


def fragment(table: Table, notes: Sequence[str]) -> str:
    """Return a table with notes below it as HTML for a notebook's cell."""
    return templates().get_template("fragment.html").render(table=table, notes=notes)


def text(given: object) -> Cell:
    """Return what is no measure as a cell: texts on one line, numbers to be sorted as such."""
    if given is None:
        return Cell("")
    if isinstance(given, str):
        return Cell(printable(given), _number(given))
    if isinstance(given, float):
        return number(given)
    return Cell(str(given), float(given) if isinstance(given, int) and not isinstance(given, bool) else None)


def finite(value: float | None) -> float | None:
    """Return a number as JSON has it: NaN and infinity are null."""
    return value if value is not None and math.isfinite(value) else None


def number(given: float | None) -> Cell:
    """Return a number as a cell, or an empty one."""
    return Cell("") if given is None else Cell(f"{given:.4g}", finite(given), note=f"{given:.10g}")


def value(record: Record) -> Cell:
    """Return the value of a record as a cell, with its standard error and interval, and whether it is exact."""
    found, stderr = record["value"], record["stderr"]
    if found is None:
        return Cell("failed", kind="failed", note=printable(record["error"]))
    if stderr is not None:
        ends = None if record["low"] is None or record["high"] is None else (record["low"], record["high"])
        brackets = intervals.shown(found, ends).partition(" ")[2]
        note = f"{found:.10g}, standard error {standard_error(stderr)}; {_how(record)}"
        return Cell(f"{with_error(found, stderr)} {brackets}", finite(found), note=note)
    if record["exact"]:
        return Cell(f"{found:.4g}", finite(found), note=f"{found:.10g}; {_how(record)}")
    return Cell(f"≈ {found:.4g}", finite(found), note=f"{found:.10g}, not exact; {_how(record)}")


def standard_error(given: float) -> str:
    """Return the standard error of a sampled value as text, "unknown" where it is NaN."""
    return "unknown" if math.isnan(given) else f"{given:.3g}"


def values(
    records: Sequence[Record], caption: str, of_models: Sequence[str] = (), settings: Sequence[str] = ()
) -> Table:
    """Return values with a row for each model and layer, and a column for each measure.

    Args:
        records: in the order of their rows.
        caption: of the table.
        of_models: names of columns in front of the measures, such as the loss. A model that has a row of the network
            has them there alone.
        settings: names of columns behind them, in each row.
    """
    measures = tuple(dict.fromkeys(record["measure"] for record in records))
    rows: dict[tuple[str, str], dict[str, Record]] = {}
    for record in records:
        rows.setdefault((record["checkpoint"], record["layer"]), {})[record["measure"]] = record
    cells = tuple(
        (
            *(text(checkpoint), Cell(printable(layer) or NETWORK)),
            *(Cell("") if layer and (checkpoint, "") in rows else text(_first(held, name)) for name in of_models),
            *(value(held[name]) if name in held else Cell("") for name in measures),
            *(text(_first(held, name)) for name in settings),
        )
        for (checkpoint, layer), held in rows.items()
    )
    return Table(caption, ("model", "layer", *of_models, *measures, *settings), cells, measures, 1)


def summary(records: Sequence[Record], formulas: Mapping[str, str] = MappingProxyType({})) -> Table:
    """Return how the values of each measure came about: which are exact, what the others are, and its formula."""
    rows = []
    for measure in dict.fromkeys(record["measure"] for record in records):
        own = [record for record in records if record["measure"] == measure]
        there = [record for record in own if record["value"] is not None]
        exact = sum(bool(record["exact"]) for record in there)
        errors = [
            record["stderr"] / abs(record["value"])
            for record in there
            if record["value"] and record["stderr"] is not None and not math.isnan(record["stderr"])
        ]
        methods = ", ".join(dict.fromkeys(str(record["method"]) for record in there))
        samples = ", ".join(dict.fromkeys(str(record["samples"]) for record in there))
        counts = (len(there), exact, len(there) - exact, len(own) - len(there))
        worst = number(max(errors)) if errors else Cell("")
        formula = Cell(formulas.get(measure, ""), kind="long")
        rows.append((Cell(measure), *map(text, counts), Cell(methods), Cell(samples), worst, formula))
    counted = "values", "exact", "not exact", "failed"
    header = ("measure", *counted, "method", "samples", "largest relative standard error", "formula")
    return Table("How the values came about", header, tuple(rows))


def facts(caption: str, rows: Iterable[tuple[str, object]]) -> Table:
    """Return names and what they stand for as a table."""
    return Table(
        caption, ("what", "is"), tuple((Cell(name), Cell(printable(str(held)), kind="long")) for name, held in rows)
    )


def _first(records: Mapping[str, Record], name: str) -> object:
    return next((record[name] for record in records.values() if record.get(name) is not None), None)


def _how(record: Record) -> str:
    return f"method {record['method']}, {record['samples']} samples"


def _number(found: str) -> float | None:
    try:
        return finite(float(found))
    except ValueError:
        return None
