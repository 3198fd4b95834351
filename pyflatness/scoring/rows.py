"""Make rows of outcomes: one for each value, as tables have them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .fit import NO_FIT, Fit
from .measuring import Outcome, Value
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
        method: see :class:`pyflatness.Estimate`, as for the next two.
        exact: whether the value is the definition's up to rounding.
        samples: how many the value is over.
        loss: mean loss of the network on the data.
        accuracy: on the data, where targets are classes.
        seconds: what the measures took that were measured together, with this one among them.
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


def rows(checkpoint: str, pairs: Sequence[Pair], outcomes: Iterable[Outcome]) -> list[Row]:
    """Return the rows of a checkpoint, in the order of what was asked; a layer that did not run has none."""
    known = NO_FIT
    found: dict[Pair, Value] = {}
    for outcome in outcomes:
        found.update((value.pair, value) for value in outcome.values)
        known = outcome.fit if known == NO_FIT else known
    return [_row(checkpoint, found[pair], known) for pair in pairs if _is_there(found[pair])]


def _is_there(value: Value) -> bool:
    return value.value is not None or bool(value.error)


def _row(checkpoint: str, value: Value, fit: Fit) -> Row:
    if value.error:
        return Row(checkpoint, value.layer, value.pair.measure, error=value.error)
    return Row(
        *(checkpoint, value.layer, value.pair.measure, value.value, value.stderr, value.method, value.exact),
        *(value.samples, fit.loss, fit.accuracy, value.seconds),
        low=value.low,
        high=value.high,
    )
