"""Hold what is asked of a checkpoint, in units that share reads of the data, and what comes of them.

:class:`Row` is the one schema of a value: what is measured, kept in stores, exported and shown has its columns. A new
column is a field of it, and where it is measured (:mod:`.worker`).
"""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import NamedTuple, get_args

from torch import nn

from ..messages import to_cell

Place = str | tuple[str, ...]
"""Of what a value is asked: a layer by name; several names, the network's value over these layers; no name, ``()``, the
network's value over all layers."""


class Pair(NamedTuple):
    """A place and the name of a measure: what one value is asked of."""

    place: Place
    measure: str

    @property
    def layer(self) -> str:
        """Return the layer's name; empty for the network's value."""
        return self.place if isinstance(self.place, str) else ""

    @classmethod
    def of(cls, place: str | Sequence[str], measure: str) -> "Pair":
        """Return the pair that JSON has, which knows no tuples."""
        return cls(place if isinstance(place, str) else tuple(place), measure)


@dataclass(frozen=True)
class WorkUnit:
    """Hold the values of one model that share their reads of the data, and where its weights are.

    With ``spectrum`` so many eigenvalues are wanted, and the unit has no values.
    """

    pairs: tuple[Pair, ...] = ()  # what is asked
    selectors: tuple[str, ...] | None = None  # of the layers that these need; None for all layers
    weights: Path | nn.Module = Path()  # a file, or a network itself
    content: str = ""  # the key of the file's bytes
    fit: bool = True  # whether loss and accuracy are wanted too
    spectrum: int = 0

    @property
    def measures(self) -> list[str]:
        """Return the names of the unit's measures."""
        return [*dict.fromkeys(pair.measure for pair in self.pairs)]


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
        chance: the accuracy of always giving the most frequent class.
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
    chance: float | None = None

    @property
    def is_there(self) -> bool:
        """Return whether there is anything to say; a layer of a pattern that did not run has no value and no error."""
        return self.value is not None or bool(self.error)


@dataclass(frozen=True)
class Fit:
    """Hold how well a network does on its data; None where that is not known."""

    loss: float | None = None
    accuracy: float | None = None
    chance: float | None = None  # the accuracy of always giving the most frequent class


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
    """Return the rows of a checkpoint in the order of pairs, of layers that ran, with one loss and accuracy."""
    fit = next((one.fit for one in held.values() if one.fit != NO_FIT), NO_FIT)
    found = (held[pair].row for pair in pairs if pair in held and held[pair].row.is_there)
    return [replace(row, checkpoint=checkpoint, **({} if row.error else asdict(fit))) for row in found]


def csv_line(cells: Iterable[object]) -> bytes:
    """Return a line of a CSV file; only text is changed to be safe in it."""
    text = io.StringIO()
    safe = (to_cell(cell) if isinstance(cell, str) else cell for cell in cells)
    csv.writer(text, lineterminator="\n").writerow(safe)
    return text.getvalue().encode()
