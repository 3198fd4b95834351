"""Hold measures of a network over the steps of its training: table, figure and JSON."""

import itertools
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError, NonFiniteError
from ..messages import shown
from ..options import check_count, check_number
from ..report import Estimate, Readable, Report, views
from ..report.report import aligned
from ..report.result import write_json
from . import budget as budgets
from . import curves
from .budget import Ran, TimeBudget

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SHOWN = 20  # records of a printed table
_COLUMNS = {"seconds", "weights", "measure", *Estimate.__dataclass_fields__}  # of a frame, beside the numbers


@dataclass(frozen=True, eq=False)
class Record(Readable):
    """Hold what was measured at one step of a training.

    Attributes:
        step: how many steps the optimiser had taken; None where that was not said.
        epoch: of the training, which may be a fraction; None where that was not said.
        numbers: what else was recorded, such as the training loss, by name.
        reports: the measures by the weights that they are of: ``"live"``, ``"ema"`` or ``"swa"``. Averaged weights have
            none before their first update.
        seconds: how long measuring took; None where that was not said. Equal records may differ in it; NaN is equal to
            NaN.
    """

    step: int | None
    epoch: float | None
    numbers: Mapping[str, float]
    reports: Mapping[str, Report]
    seconds: float | None

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> "Record":
        """Return what :meth:`to_dict` was made from.

        Raises:
            InputError: not such a dict.
        """
        names = [*cls.__dataclass_fields__]
        if not isinstance(facts, Mapping) or {*facts} != {*names} or not isinstance(facts["reports"], Mapping):
            raise InputError(f"history: a record is a dict of {', '.join(names)}, got {shown(facts)}")
        reports = {weights: Report.from_dict(report) for weights, report in facts["reports"].items()}
        return cls(**{**facts, "reports": reports})

    def __eq__(self, other: object) -> bool:
        return self._facts() == other._facts() if isinstance(other, Record) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # as its reports have none

    def _facts(self) -> str:
        return write_json({**self.to_dict(), "seconds": None})


class History(Readable):
    """Hold measures of a network over its training, a :class:`Record` for each step at which it was measured.

    :func:`pyflatness.track` makes one, whose :meth:`record` measures. One that was read from a file only holds records,
    and so does ``pf.results.History()``, to which reports that were measured otherwise can be added by :meth:`add`.
    Iterating gives the records, ``history[-1]`` is the last one. A history without records is true too: ``if history:``
    asks whether there is a history. Over ranks, one of them writes :meth:`to_json`.

    ``history.to_frame()`` has a row per step, weights, layer and measure; the network's rows have the layer ``""``.
    Columns: ``step``, ``epoch``, the recorded numbers, ``seconds`` and ``weights``, and what that of a report has.
    ``frame.query("layer == 'head'").pivot(index="step", columns="measure", values="value")`` is a table of one layer
    over the steps.

    Args:
        records: to begin with.
        measure: returns a report for each set of weights; None: nothing can be recorded.
        budget: chooses when :meth:`step` measures; ``measure`` then takes the samples to measure on.
    """

    def __init__(
        self,
        records: Iterable[Record] = (),
        measure: Callable[..., Mapping[str, Report]] | None = None,
        budget: TimeBudget | None = None,
    ) -> None:
        self._records, self._measure, self._budget = [*records], measure, budget
        self._ran = records.ran if isinstance(records, History) else None
        self._said: set[str] = set()
        if budget is not None:
            budget.resume(self._records, self._ran)

    @property
    def ran(self) -> Ran | None:
        """How long the training and the measurements of ``budget=`` took until now; None without one."""
        return self._ran if self._budget is None else self._budget.ran

    def step(self, *, step: int | None = None, epoch: float | None = None, **numbers: Any) -> Record | None:
        """Count a step of the training, and measure where the budget allows it, see :func:`pyflatness.track`.

        Where it meets NaN or infinity, as in a training that diverges, nothing is recorded, and a warning says so the
        first time. ``nan_policy="propagate"`` records NaN, and ``"omit"`` leaves out the samples that have it.

        Args:
            step: how many steps the optimiser has taken; None: one more than at the last call. Where it is less than a
                record's, as after a return to an older checkpoint, the records of later steps are dropped, with a
                warning.
            epoch: the epoch, or a fraction of one.
            numbers: whatever else belongs to this step, by name.

        Returns:
            The new record, with ``train_seconds`` among its numbers, or None.

        Raises:
            InputError: a history without ``budget=``, and as :meth:`record`.
        """
        measure, budget = self._measure_or_raise(), self._budget
        if budget is None:
            raise InputError("history: step() is for pf.track(…, budget=0.01); record() measures at once")
        batch = budget.due(step=None if step is None else check_count("step", step, 0, "a number of steps"))
        self._drop_later(budget.steps)
        if batch is None:
            return None
        when = _checked(budget.steps, epoch, {**numbers, budgets.CLOCK: budget.trained})
        try:
            reports = measure(batch)
        except NonFiniteError as error:
            self._once("a step", f"step {budget.steps} is not measured, and no later one with NaN or infinity: {error}")
            return None
        finally:
            seconds = budget.took()
        return self._appended(Record(*when, reports, seconds))

    def pooled(self, measure: str = "relative_flatness", weights: str = "live") -> dict[str, Estimate]:
        """Return each layer's last value, estimated from all records; older ones count less the faster values drift.

        Values are taken to walk at random, as fast as the records of the last half of the steps allow, so that
        intervals are rather too wide.

        Raises:
            InputError: no records of the measure with steps, or steps that go back.
        """
        held = [(float(one.step), one.reports[weights]) for one in self if one.step and weights in one.reports]
        if not any(measure in report.measures for _, report in held):
            raise InputError(f"history: {shown(measure)} of {weights!r} weights is in no record with a step")
        back = next(((one, other) for (one, _), (other, _) in itertools.pairwise(held) if other < one), None)
        if back is not None:
            raise InputError(
                f"history: after step {back[0]:.0f} comes step {back[1]:.0f}, so that no record is the last; keep "
                "those of one training, pf.results.History(record for record in history if …)"
            )
        return budgets.pooled(held, measure)

    def record(self, *, step: int | None = None, epoch: float | None = None, **numbers: Any) -> Record:
        """Measure the network now, and append the record.

        The network is measured in eval mode, without gradients. Modes, gradients, buffers and the state of all random
        generators are as before afterwards, also after an error, which leaves the history as it was.

        Args:
            step: how many steps the optimiser has taken.
            epoch: the epoch, or a fraction of one.
            numbers: whatever else belongs to this step, by name, as ``train_loss=0.3``.

        Returns:
            The new record; ``record.reports["live"]`` is a :class:`pyflatness.results.Report`.

        Raises:
            InputError: a step or number that is none, a name that a column of the table has, or a history that was
                read from a file; and as :func:`pyflatness.measure`.
        """
        if self._budget is not None:
            raise InputError("history: budget= chooses when to measure: call step() after each step of the training")
        measure, when = self._measure_or_raise(), _checked(step, epoch, numbers)  # before time goes into measuring
        began = time.perf_counter()
        reports = measure()
        return self._appended(Record(*when, reports, time.perf_counter() - began))

    def alarms(self, measure: str = "relative_flatness", weights: str = "live") -> tuple[Record, ...]:
        """Return the records of ``budget=`` at which the values of single samples suddenly vary much less.

        Their standard deviation over the network's value is then less than 0.65 times the median of the last ten
        records, which have to be there, and the record has 32 samples or more. It is so where predictions lose their
        certainty for all samples at once, as when labels become random. It does not find a training that diverges.
        Where more records than ten cannot be one, since their samples are too few or have no standard errors, a warning
        says so once.

        Raises:
            InputError: records, and none of the measure.
        """
        held = [(one, one.reports[weights]) for one in self if weights in one.reports]
        found = [(one, report[measure]) for one, report in held if measure in report.measures]
        if self._records and not found:
            raise InputError(f"history: {shown(measure)} of {weights!r} weights is in no record")
        places, missing = budgets.alarms([value for _, value in found])
        if missing:
            self._once("alarms", f"alarms() can find none: {missing}")
        return tuple(found[place][0] for place in places)

    def add(
        self,
        reports: Report | Mapping[str, Report],
        *,
        step: int | None = None,
        epoch: float | None = None,
        seconds: float | None = None,
        **numbers: Any,
    ) -> Record:
        """Append reports that were measured already, and return their record.

        Args:
            reports: of :func:`pyflatness.measure`; several by the names of the weights that they are of.
            step: as for :meth:`record`.
            epoch: the epoch, or a fraction of one.
            seconds: how long measuring took.
            numbers: whatever else belongs to this step, by name.

        Raises:
            InputError: no reports, a step or number that is none, or a name that a column of the table has.
        """
        named = {"live": reports} if isinstance(reports, Report) else reports
        if not isinstance(named, Mapping) or not all(isinstance(report, Report) for report in named.values()):
            raise InputError(f"history: a report of pf.measure is wanted, or a dict of them, got {shown(reports)}")
        spent = None if seconds is None else _number("seconds", seconds)
        return self._appended(Record(*_checked(step, epoch, numbers), dict(named), spent))

    def _measure_or_raise(self) -> Callable[..., Mapping[str, Report]]:
        if self._measure is None:
            raise InputError(
                "history: this one was read from a file or made without a model; pf.track(model, loss, data, "
                "history=history, …) goes on with it, and history.add(report, …) takes what was measured otherwise"
            )
        return self._measure

    def _drop_later(self, step: int) -> None:
        """Drop the records of later steps than the training is at now."""
        last = self._records[-1].step if self._records else None
        if last is None or last <= step:
            return
        kept = [record for record in self._records if record.step is None or record.step <= step]
        warnings.warn(
            f"history: step {step} follows step {last}, as where a training goes on from an older checkpoint: the "
            f"{len(self) - len(kept)} records of later steps are dropped (step= counts over all epochs)",
            RuntimeWarning,
            stacklevel=3,
        )
        self._records = kept

    def _once(self, about: str, text: str) -> None:
        if about not in self._said:
            self._said.add(about)
            warnings.warn(f"history: {text}", RuntimeWarning, stacklevel=3)

    def _appended(self, record: Record) -> Record:
        self._records.append(record)
        return record

    @property
    def records(self) -> tuple[Record, ...]:
        """All records, in the order in which they were made."""
        return tuple(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records)

    def __getitem__(self, place: int) -> Record:
        return self._records[place]

    def __eq__(self, other: object) -> bool:
        return self._records == other._records if isinstance(other, History) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # it grows

    def __repr__(self) -> str:
        steps = [record.step for record in self if record.step is not None]
        until = f" from step {steps[0]} to {steps[-1]}" if steps else ""
        cost = f"; {self.ran.cost()}" if self.ran is not None and self.ran.spent else ""
        return f"History({len(self)} records{until}: {', '.join(self._measures) or 'nothing measured'}{cost})"

    def __getstate__(self) -> dict[str, Any]:
        """Return what pickling and copying keep: the records, which ``pf.track(…, history=)`` goes on with."""
        return {**vars(self), "_measure": None, "_budget": None, "_ran": self.ran}

    def __str__(self) -> str:
        """Return a table of the network's values as a report prints them, a row for each record and kind of weights.

        Of many records it has the last ones.
        """
        shown = [(record, *held) for record in self._records[-_SHOWN:] for held in record.reports.items()]
        beside = [
            {"step": record.step, "epoch": record.epoch, **record.numbers, "weights": weights}
            for record, weights, _ in shown
        ]
        several = ["weights"] if any(len(record.reports) > 1 for record in self) else []
        names = ["step", "epoch", *dict.fromkeys(name for record in self for name in record.numbers), *several]
        values = {name: [report.by_measure().get(name, {}).get("") for *_, report in shown] for name in self._measures}
        columns = [[name, *(_cell(row.get(name)) for row in beside)] for name in names]
        columns += [[name, *aligned(held)] for name, held in values.items() if any(one is not None for one in held)]
        columns = [column for column in columns if any(column[1:])]
        cells = [[cell.rjust(max(map(len, column))) for cell in column] for column in columns]
        lines = ["  ".join(line).rstrip() for line in zip(*cells, strict=True)]
        sampled = any(one is not None and one.stderr is not None for held in values.values() for one in held)
        return "\n".join([repr(self), *lines, *(["[95 % intervals]"] if sampled else ())])

    @property
    def _measures(self) -> tuple[str, ...]:
        reports = (report for record in self for report in record.reports.values())
        return tuple(dict.fromkeys(name for report in reports for name in report.measures))

    def _rows(self) -> list[dict[str, Any]]:
        return [
            {"step": record.step, "epoch": record.epoch, **record.numbers, "seconds": record.seconds}
            | {"weights": weights, **row}
            for record in self
            for weights, report in record.reports.items()
            for row in views.rows(report)
        ]

    def plot(
        self,
        path: str | Path | None = None,
        *,
        measures: str | Sequence[str] | None = None,
        layers: str | Sequence[str] | None = None,
        x: str | None = None,
        axes: "Axes | Iterable[Axes] | None" = None,
    ) -> "tuple[Figure, list[Axes]]":
        """Draw what was recorded over the steps: an axis for each measure, in it a line for each layer.

        Sampled values have a band, their 95 % intervals. The network's value is black, averaged weights
        are dashed. An axis is logarithmic where all that is in it is positive.

        Args:
            path: where the figure is written too; its ending is its format.
            measures: names of measures or of recorded numbers, an axis for each; None: all measures, then all numbers
                but ``train_seconds``.
            layers: names of layers, ``""`` for the network; None: all.
            x: ``"step"`` or ``"epoch"``; None: the first of these that all records have, else the records' count.
            axes: matplotlib's, as many as there are measures, to draw into; None: those of a new figure.

        Returns:
            Figure and axes of matplotlib, outside of pyplot.

        Raises:
            InputError: nothing was recorded, or not under such a name; another number of axes.
            MissingExtraError: without matplotlib.
        """
        figure, drawn = curves.draw(self._records, measures, layers, x, axes)
        views.save(figure, path)
        return figure, drawn

    def to_csv(self, path: str | Path) -> None:
        """Write the rows of :meth:`to_frame` as CSV, see :meth:`.Report.to_csv`."""
        views.write_csv(self._rows(), path)

    def to_dict(self) -> dict[str, Any]:
        """Return the records as plain numbers, strings, lists and dicts; nothing is lost."""
        ran = {} if self.ran is None else {"ran": self.ran._asdict()}
        return {"records": [record.to_dict() for record in self], **ran}

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> "History":
        """Return the records that :meth:`to_dict` was made from.

        Raises:
            InputError: not such a dict.
        """
        if not isinstance(facts, Mapping) or not isinstance(facts.get("records"), list):
            raise InputError("history: JSON of History.to_json() is wanted, with its records")
        history, ran = cls(Record.from_dict(record) for record in facts["records"]), facts.get("ran")
        if ran is not None:
            if not isinstance(ran, Mapping) or {*ran} != {*Ran._fields}:
                raise InputError(f"history: ran is a dict of {', '.join(Ran._fields)}, got {shown(ran)}")
            steps = check_count("steps", ran["steps"], 0, "a number of steps")
            seconds = (check_number(name, ran[name], "seconds", lambda one: one >= 0) for name in ("trained", "spent"))
            history._ran = Ran(steps, *seconds)
        return history


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _checked(step: Any, epoch: Any, numbers: Mapping[str, Any]) -> tuple[int | None, float | None, dict[str, float]]:
    """Return step, epoch and numbers as plain Python numbers."""
    for name in numbers:
        if name in _COLUMNS:
            raise InputError(f"history: {name}= has the name of a column of the table; choose another name")
    return (
        None if step is None else check_count("step", step, 0, "a number of steps"),
        None if epoch is None else _number("epoch", epoch),
        {name: _number(name, number) for name, number in numbers.items()},
    )


def _number(name: str, value: Any) -> float:
    return check_number(name, value, "a number", lambda _: True)
