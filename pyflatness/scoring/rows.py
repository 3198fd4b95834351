"""Hold the one schema of a value: what is measured, kept in stores, exported and shown has these columns.

A new column is a field of :class:`Row`, and where it is measured (:mod:`.measuring`): stores, tables and files have it
by that.
"""

import csv
import io
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import NamedTuple, get_args

from ..messages import to_cell
from .units import Pair


@dataclass(frozen=True)
class Row:
    """Hold a checkpoint, a layer (``""`` the network) and a measure: the numbers are there, or ``error`` says why not.

    Attributes:
        checkpoint: its name.
        layer: qualified name of the layer; empty for the network's value.
        measure: its name.
        value: in units of the loss, where the measure is one of its second derivatives.
        stderr: standard error of a sampled value; NaN where it is not known.
        method: see :class:`pyflatness.results.Estimate`, as for the next two.
        exact: whether the value is the definition's up to rounding.
        samples: how many the value is over.
        loss: mean loss of the network on the data.
        accuracy: on the data, where targets are classes.
        seconds: what the measures took that were measured together, with this one among them; longer for the first of
            a process, as torch is slower the first time that it runs an operation.
        error: why there is no value; empty if there is one.
        low: lower end of the 95 % interval.
        high: its upper end.
    """

    checkpoint: str = ""
    layer: str = ""
    measure: str = ""
    value: float | None = None
    stderr: float | None = None
    method: str | None = None
    exact: bool | None = None
    samples: int | None = None
    loss: float | None = None
    accuracy: float | None = None
    seconds: float | None = None
    error: str = ""
    low: float | None = None
    high: float | None = None

    @property
    def is_there(self) -> bool:
        """Return whether there is anything to say; a layer of a pattern that did not run has no value and no error."""
        return self.value is not None or bool(self.error)


@dataclass(frozen=True)
class Fit:
    """Hold how well a network does on its data; None where that is not known."""

    loss: float | None = None
    accuracy: float | None = None


NO_FIT = Fit()


def kinds() -> dict[str, type]:
    """Return the type of each column, which may be missing in a row."""
    return {
        field.name: next(kind for kind in get_args(field.type) or (field.type,) if kind is not type(None))
        for field in fields(Row)
    }


class Held(NamedTuple):
    """Hold a row without its checkpoint, the loss and accuracy of its unit, and as JSON what it was computed with."""

    row: Row
    fit: Fit
    versions: str = ""


def rows(checkpoint: str, pairs: Iterable[Pair], held: Mapping[Pair, Held]) -> list[Row]:
    """Return the rows of a checkpoint in the order of the pairs; a layer that did not run has none.

    The loss and accuracy of the first unit that has them are those of all rows.

    Args:
        checkpoint: its name.
        pairs: what was asked.
        held: what came of them.
    """
    fit = next((one.fit for one in held.values() if one.fit != NO_FIT), NO_FIT)
    found = (held[pair].row for pair in pairs if pair in held and held[pair].row.is_there)
    return [replace(row, checkpoint=checkpoint, **({} if row.error else asdict(fit))) for row in found]


def csv_line(cells: Iterable[object]) -> bytes:
    """Return a line of a CSV file; only text is changed to be safe in it."""
    text = io.StringIO()
    safe = (to_cell(cell) if isinstance(cell, str) else cell for cell in cells)
    csv.writer(text, lineterminator="\n").writerow(safe)
    return text.getvalue().encode()
