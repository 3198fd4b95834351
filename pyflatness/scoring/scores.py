"""Hold the scores of many models, as a call of :func:`pyflatness.score` returns them."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from ..errors import InputError, printable
from ..messages import near
from ..report import Result, intervals, views
from ..report.page import tables, written
from ..statistics.figures import plot_correlation
from ..training.history import History
from . import page
from .units import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SHOWN = 200  # values that a notebook's cell shows


@dataclass(frozen=True, repr=False)
class Scores(Result):
    """Hold a row for each model, layer and measure. ``str(scores)`` is a table; iterating gives the rows.

    ``scores[checkpoint, layer, measure]`` is one row, with the layer ``""`` for the network's value;
    ``scores[checkpoint, measure]`` is that one, or the only row of the measure.

    Attributes:
        rows: in the order of the models, and of what was asked of each.
        computed: how many units were measured by this call; the rest was in the store.
        notes: why a store will not find values again.
    """

    rows: tuple[Row, ...]
    computed: int
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __getitem__(self, key: tuple[str, ...]) -> Row:
        if not isinstance(key, tuple) or len(key) not in (2, 3):
            raise InputError("scores: scores[checkpoint, layer, measure] or scores[checkpoint, measure] is wanted")
        checkpoint, *layer, measure = key
        found = [row for row in self.rows if (row.checkpoint, row.measure) == (checkpoint, measure)]
        of_network = [row for row in found if not row.layer]
        found = [row for row in found if row.layer == layer[0]] if layer else of_network or found
        if len(found) == 1:
            return found[0]
        if found:
            raise InputError(f"scores: {key!r} has rows of the layers {', '.join(repr(row.layer) for row in found)}")
        names = [*dict.fromkeys(row.checkpoint for row in self.rows)]
        raise InputError(f"scores: no row of {key!r}; there are {near(checkpoint, names)}")

    def columns(self) -> dict[str, list[Any]]:
        """Return the rows as columns by name, as :func:`pyflatness.statistics.correlations` takes them."""
        return {entry.name: [getattr(row, entry.name) for row in self.rows] for entry in fields(Row)}

    @property
    def errors(self) -> dict[str, str]:
        """Return the models of which something could not be measured, each with its first error."""
        return {row.checkpoint: row.error for row in reversed(self.rows) if row.error}

    def _rows(self) -> list[dict[str, Any]]:
        return [asdict(row) for row in self.rows]

    def to_html(
        self,
        path: str | Path | None = None,
        *,
        title: str = "Scores",
        against: str | None = None,
        test: Any = None,
        exclude: Collection[str] = (),
        max_loss: float | None = None,
        interval: str = "bootstrap",
        histories: Mapping[str, History] | None = None,
        colour: str | None = None,
    ) -> str:
        """Return a page of all values, with charts and correlations, as one file that loads nothing.

        Args:
            path: where the page is written too.
            title: its heading.
            against: the column that measures are held against, such as ``"test_error"``; None: ``"gap"`` if there is
                ``test``, else the loss.
            test: scores of the same models on test data, or a table as for :func:`pyflatness.statistics.correlations`,
                of which ``gap``, ``test_loss``, ``test_accuracy`` and ``test_error`` are.
            exclude: names of models that do not count in the correlations, and are drawn hollow.
            max_loss: models with a larger loss do not count either; None: those at chance, or with a loss of more than
                five times the median and no accuracy above half way from chance to 1. The page names them.
            interval: ``"bootstrap"``, or ``"fisher"``, which takes less time for many models.
            histories: of trainings, by the names that they are shown under.
            colour: a column of metadata, or a word with a number behind it in all names, such as ``"lr"`` of
                ``lr0.1_batch16``, that gives points their colours; None: the first such word with up to ten values.

        Raises:
            InputError: no rows, no such column, no such model, or a model that is not in ``test``.
            MissingExtraError: without Altair.
        """
        options = page.PageOptions(against, test, exclude, max_loss, interval, colour, histories or {})
        return written(page.page(title, [page.SettingValues("", self._rows())], options), path)

    def plot(
        self,
        x: str,
        y: str = "loss",
        *,
        test: "Scores | None" = None,
        exclude: Collection[str] = (),
        max_loss: float | None = None,
        path: str | Path | None = None,
        axes: "Axes | None" = None,
    ) -> "tuple[Figure, Axes]":
        """Draw a measure against the loss or the gap; see :func:`pyflatness.statistics.plot_correlation`.

        Args:
            x: a measure; of one with values of several layers ``"trace network"``, or ``"trace"`` and a layer's name.
            y: ``"loss"``, ``"accuracy"``, ``"gap"`` with ``test``, or another measure.
            test: scores of the same models on test data.
            exclude: names of models that do not count, and are drawn hollow.
            max_loss: models with a larger loss do not count either; None: those at chance, or with a loss of more than
                five times the median and no accuracy above half way from chance to 1.
            path: where the figure is written too; its ending is its format.
            axes: matplotlib's, to draw into; None: those of a new figure.

        Returns:
            Figure and axes of matplotlib, outside of pyplot.

        Raises:
            InputError: no such column or model, or a model that counts and has no value.
            MissingExtraError: without matplotlib.
        """
        return plot_correlation(self, x, y, test=test, exclude=exclude, max_loss=max_loss, path=path, axes=axes)

    def __str__(self) -> str:
        return "\n".join([*views.text(table(self.rows), 200), *map(printable, self.notes)])

    def _repr_html_(self) -> str:
        records = self._rows()
        shown = tables.values(records[:_SHOWN], "Scores", ("loss", "accuracy"))
        more = [f"and {len(records) - _SHOWN} more values"] if len(records) > _SHOWN else []
        return tables.fragment(shown, [tables.LEGEND, *more])


def table(rows: tuple[Row, ...] | list[Row], names: list[str] | None = None) -> Table:
    """Return rows as a table for the terminal; ``names`` stand for their checkpoints."""
    found = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for header in ("checkpoint", "layer", "measure"):
        found.add_column(header, overflow="fold", no_wrap=header == "layer")
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
