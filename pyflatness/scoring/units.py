"""Say what is asked of each checkpoint, cut it into units that share reads of the data, and hold what comes of them.

:class:`Row` is the one schema of a value: what is measured, kept in stores, exported and shown has its columns. A new
column is a field of it, and where it is measured (:mod:`.worker`).
"""

import csv
import io
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, get_args

from torch import nn

from .. import plan
from ..measures import Measure, named
from ..messages import to_cell
from ..model import layers, selectors
from ..options import Options

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
class Request:
    """Hold what is asked of every checkpoint."""

    loss: Any  # see :func:`.losses.resolve`
    selectors: tuple[str, ...] | None  # of layers; None: all that can be measured
    measures: tuple[str, ...]
    options: Options  # of the user

    def pairs(self, model: nn.Module) -> list[Pair]:
        """Return the values that are asked of a model, in the order of their rows.

        With several layers a measure has a value of the network too. Measures of the network alone have only that one,
        over all layers whatever was chosen.
        """
        chosen = tuple(selectors.select(layers.unwrap(model), self.selectors).modules)
        rows = named(self.measures)
        pairs = [Pair(layer, row.name) for layer in chosen for row in rows if not row.of_network_alone]
        for row in rows:
            if row.of_network_alone:
                pairs.append(Pair((), row.name))
            elif "network" in row.granularity and len(chosen) != 1:
                pairs.append(Pair(() if self.selectors is None else chosen, row.name))
        return pairs

    def units(self, model: nn.Module, pairs: Iterable[Pair]) -> list["WorkUnit"]:
        """Return some of the pairs of a model in groups that share their reads of the data."""
        rows = {row.name: row for row in named(self.measures)}
        every = tuple(selectors.select(layers.unwrap(model), None).modules)
        by_measure: dict[str, list[Pair]] = {name: [] for name in rows}
        for pair in pairs:
            by_measure[pair.measure].append(pair)
        by_layers: dict[tuple[str, ...], list[Measure]] = {}
        for name, own in by_measure.items():
            if own:  # a value of the network takes all of its layers
                places = [place if isinstance(place, tuple) else (place,) for place, _ in own]
                needed = tuple(dict.fromkeys(itertools.chain(*places))) if all(places) else every
                by_layers.setdefault(needed, []).append(rows[name])
        units = [
            WorkUnit(
                tuple(pair for row in group for pair in by_measure[row.name]), self._selectors(needed, every, group)
            )
            for needed, wanted in by_layers.items()
            for group in plan.shared(wanted, self.options, layers=len(needed))
        ]
        units.sort(key=lambda unit: self.measures.index(unit.measures[0]))
        # Of units that read no data themselves, the first one reads them for loss and accuracy, if no other unit does.
        reading = [any(rows[name].reads for name in unit.measures) for unit in units]
        first = reading.index(True) if any(reading) else 0
        return [replace(unit, fit=reading[place] or place == first) for place, unit in enumerate(units)]

    def _selectors(
        self, needed: tuple[str, ...], every: tuple[str, ...], group: Sequence[Measure]
    ) -> tuple[str, ...] | None:
        """Return what selects these layers: those of a pattern need not run, as in the user's own."""
        by_default = self.selectors is None and needed == every and len(every) > 1
        if by_default or all(row.of_network_alone for row in group):
            return None
        own = needed if len(needed) == 1 else self.selectors or ()
        return tuple(name if not name or name in own else f"re:{re.escape(name)}" for name in needed)


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
