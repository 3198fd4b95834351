"""Make rows of outcomes: one for each value, as tables have them."""

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..messages import to_cell
from .fit import NO_FIT, Fit
from .measuring import Value
from .units import Pair


@dataclass(frozen=True)
class Row:
    """Hold a checkpoint, a layer (``""`` the network) and a measure: the numbers are there, or ``error`` says why not.

    Attributes:
        checkpoint: its name.
        layer: qualified name of the layer; empty for the network's value.
        measure: its name.
        value: in units of the loss, where the measure is one of its second derivatives.
        stderr: standard error of a sampled value.
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

    checkpoint: str
    layer: str
    measure: str
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


def rows(checkpoint: str, pairs: Sequence[Pair], held: Iterable[tuple[Value, Fit]]) -> list[Row]:
    """Return the rows of a checkpoint in the order of the pairs; a layer that did not run has none.

    Args:
        checkpoint: its name.
        pairs: what was asked.
        held: what came of them, each with the loss and accuracy of its unit; those of the first unit that has them are
            those of all rows.
    """
    held = [*held]
    fit = next((fit for _, fit in held if fit != NO_FIT), NO_FIT)
    found = {value.pair: value for value, _ in held}
    return [row(checkpoint, found[pair], fit) for pair in pairs if pair in found and is_there(found[pair])]


def is_there(value: Value) -> bool:
    """Return whether a value has a row."""
    return value.value is not None or bool(value.error)


def row(checkpoint: str, value: Value, fit: Fit) -> Row:
    """Return the row of a value."""
    if value.error:
        return Row(checkpoint, value.layer, value.pair.measure, error=value.error)
    return Row(
        *(checkpoint, value.layer, value.pair.measure, value.value, value.stderr, value.method, value.exact),
        *(value.samples, fit.loss, fit.accuracy, value.seconds),
        low=value.low,
        high=value.high,
    )


def csv_line(cells: Iterable[object]) -> bytes:
    """Return a line of a CSV file; only text is changed to be safe in it."""
    text = io.StringIO()
    safe = (to_cell(cell) if isinstance(cell, str) else cell for cell in cells)
    csv.writer(text, lineterminator="\n").writerow(safe)
    return text.getvalue().encode()
