"""Hold the scores of many models, as a call of :func:`pyflatness.score` returns them."""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from ..errors import InputError, MissingExtraError
from ..messages import printable
from ..report import intervals
from .rows import Row

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, repr=False)
class Scores:
    """Hold a row for each model, layer and measure. ``str(scores)`` is a table; iterating gives the rows.

    ``scores[checkpoint, layer, measure]`` is one row, with the layer ``""`` for the network's value;
    ``scores[checkpoint, measure]`` is the only row of that measure.

    Attributes:
        rows: in the order of the models, and of what was asked of each.
        computed: how many units were measured by this call; the rest was in the store.
    """

    rows: tuple[Row, ...]
    computed: int

    @classmethod
    def of(cls, computed: int, *rows: Mapping[str, Any]) -> "Scores":
        """Return scores whose rows are mappings."""
        return cls(tuple(Row(**row) for row in rows), computed)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __getitem__(self, key: tuple[str, ...]) -> Row:
        if not isinstance(key, tuple) or len(key) not in (2, 3):
            raise InputError("scores: scores[checkpoint, layer, measure] or scores[checkpoint, measure] is wanted")
        checkpoint, *layer, measure = key
        found = [row for row in self.rows if (row.checkpoint, row.measure) == (checkpoint, measure)]
        found = [row for row in found if not layer or row.layer == layer[0]]
        if len(found) == 1:
            return found[0]
        if found:
            raise InputError(f"scores: {key!r} has rows of the layers {', '.join(repr(row.layer) for row in found)}")
        names = [*dict.fromkeys(row.checkpoint for row in self.rows)]
        near = difflib.get_close_matches(checkpoint, names) or names
        raise InputError(f"scores: no row of {key!r}; there are {', '.join(near[:5])}")

    @property
    def errors(self) -> dict[str, str]:
        """Return the models of which something could not be measured, each with its first error."""
        return {row.checkpoint: row.error for row in reversed(self.rows) if row.error}

    def to_frame(self) -> "pandas.DataFrame":
        """Return the rows as a data frame.

        Raises:
            MissingExtraError: without pandas.
        """
        try:
            import pandas
        except ImportError:
            raise MissingExtraError("a data frame needs pandas: pip install 'pyflatness[frame]'") from None
        return pandas.DataFrame([asdict(row) for row in self.rows])

    def __str__(self) -> str:
        console = Console(width=200, markup=False, highlight=False, emoji=False, color_system=None)
        with console.capture() as capture:
            console.print(table(self.rows))
        return "\n".join(line.rstrip() for line in capture.get().splitlines() if line.strip())

    __repr__ = __str__


def table(rows: tuple[Row, ...] | list[Row], names: list[str] | None = None) -> Table:
    """Return rows as a table for the terminal; ``names`` stand for their checkpoints."""
    found = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for header in ("checkpoint", "layer", "measure"):
        found.add_column(header)
    for header in ("value", "loss", "accuracy", "seconds"):
        found.add_column(header, justify="right")
    for name, row in zip(names or [row.checkpoint for row in rows], rows, strict=True):
        numbers = ("" if x is None else f"{x:.5g}" for x in (row.loss, row.accuracy, row.seconds))
        found.add_row(printable(name), printable(row.layer), row.measure, _value(row), *numbers)
    return found


def _value(row: Row) -> str:
    if row.value is None:
        return "error"
    if row.stderr is None:
        return f"{row.value:.5g}"
    return intervals.shown(row.value, None if row.low is None or row.high is None else (row.low, row.high))
