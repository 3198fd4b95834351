"""Measure one checkpoint of a network: its rows of the table that ``pyflatness score`` writes."""

import functools
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import api, head, losses, plan
from ..losses import risk
from ..measures import Measure
from ..measures.base import Values
from ..messages import reason
from ..model import calling, layers, selectors
from ..options import Options
from ..report import Estimate
from ..scoring import checkpoints, loading
from ..session import session


@dataclass(frozen=True)
class Row:
    """Hold a checkpoint, a layer and a measure: either the numbers are there, or ``error`` says why not."""

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
    low: float | None = None  # of the 95 % interval
    high: float | None = None


@dataclass(frozen=True)
class Fit:
    """Hold how well a network does on its data; None where that is not known."""

    loss: float | None
    accuracy: float | None


@dataclass(frozen=True)
class Scoring:
    """Hold what is the same for all checkpoints; without selectors the layer is the last Linear that ran.

    With several layers a measure has a row for the network too, with no layer; measures of the network alone have only
    that one, over all layers whatever was chosen.
    """

    model: nn.Module
    data: Any
    loss: str
    selectors: tuple[str, ...]
    measures: tuple[Measure, ...]
    options: Options

    def layers(self) -> tuple[str | None, ...]:
        """Return the chosen layers' names; None for the last Linear that ran.

        Raises:
            InputError: a selector that matches nothing.
        """
        if not self.selectors:
            return (None,)
        return tuple(selectors.select(layers.unwrap(self.model), self.selectors).modules)

    def pairs(self) -> list[tuple[str | None, Measure]]:
        """Return the layer and measure of each row; the layer of the network's is empty."""
        chosen = self.layers()
        rows = [(layer, measure) for layer in chosen for measure in self.measures if not measure.of_network_alone]
        several = len(chosen) > 1
        network = (m for m in self.measures if m.of_network_alone or (several and "network" in m.granularity))
        return [*rows, *(("", measure) for measure in network)]

    def rows(self, path: Path, step: Callable[[float], None]) -> list[Row]:
        """Return a row for each layer and measure; nothing is raised.

        Measures that can share their reads of the data do. If one of them raises, each is taken by itself.

        Args:
            path: the checkpoint.
            step: called after each batch, with the rows that it is worth, times the number of batches.
        """
        try:
            loading.load(self.model, checkpoints.read(path).state)
        except Exception as error:
            return [Row(str(path), layer or "", measure.name, error=reason(error)) for layer, measure in self.pairs()]
        fit: Fit | None = None
        found: dict[str, Measured | str] = {}
        waiting = deque(self._runs())
        while waiting:
            run = waiting.popleft()
            recorder = FitRecorder(self.loss, functools.partial(step, self._worth(run)), active=fit is None)
            start = time.perf_counter()
            try:
                values, missing = self._values(run, recorder)
                seconds = time.perf_counter() - start
                if fit is None and any(measure.reads for measure in run):
                    fit = recorder.fit()
            except Exception as error:  # the user's model and data run here: whatever it is, the next row goes on
                if len(run) > 1:
                    waiting.extendleft((measure,) for measure in reversed(run))
                else:
                    found[run[0].name] = reason(error)
                continue
            found.update(
                (measure.name, Measured(values[measure.name], seconds, missing.get(measure.name, "")))
                for measure in run
            )
        return [*self._table(path, found, fit or Fit(None, None))]

    def _table(self, path: Path, found: Mapping[str, "Measured | str"], fit: "Fit") -> Iterator[Row]:
        for layer, measure in self.pairs():
            held = found[measure.name]
            if isinstance(held, str):
                yield Row(str(path), layer or "", measure.name, error=held)
                continue
            estimate = held.of(layer)
            if layer == "" and estimate is None:
                yield Row(str(path), "", measure.name, error=held.missing or "the network has no value of it")
            if estimate is not None:  # None: a layer of a pattern that did not run
                low, high = estimate.interval() or (None, None)
                yield Row(
                    *(str(path), estimate.layer, measure.name, estimate.value, estimate.stderr, estimate.method),
                    *(estimate.exact, estimate.samples, fit.loss, fit.accuracy, held.seconds),
                    low=low,
                    high=high,
                )

    def _runs(self) -> list[tuple[Measure, ...]]:
        """Return the measures, grouped by what shares its reads of the data."""
        every = [*selectors.select(layers.unwrap(self.model), None).modules]
        chosen = [*self.layers()]
        if chosen == every:
            return plan.shared(self.measures, self.options, layers=len(chosen))
        apart = [measure for measure in self.measures if measure.of_network_alone]  # of all layers, not of the chosen
        others = [measure for measure in self.measures if not measure.of_network_alone]
        runs = (plan.shared(some, self.options, layers=len(chosen)) for some in (others, apart))
        return sorted(chain(*runs), key=lambda run: self.measures.index(run[0]))

    def _worth(self, run: Sequence[Measure]) -> float:
        """Return how many rows come for a data read; a measure that reads none takes no step."""
        names = {measure.name for measure in run}
        rows = sum(measure.name in names for _, measure in self.pairs())
        return rows / max(1, *(measure.reads for measure in run))

    def _values(self, run: Sequence[Measure], forward: "FitRecorder") -> tuple[dict[str, Values], Mapping[str, str]]:
        """Return values by measure, and why there is none of the network."""
        measure, *others = run
        if len(self.layers()) == 1 and not others:  # by the head if it is that
            reads, ordered = plan.plan([measure], self.options).reads, self.options.by_sample
            with session(
                *(self.model, self.loss, self.data, self.options),
                forward=forward,
                reads=reads,
                ordered=ordered,
                progress=False,
            ) as task:
                measurement, name = plan.of_layer(measure, task, self.layers()[0])
                estimate = measurement.estimates()[name, measure.name]
            return {measure.name: {estimate.layer: estimate}}, {}
        chosen = None if all(one.of_network_alone for one in run) else self.selectors or self._last()
        report = api.measure(
            *(self.model, self.loss, self.data),
            layers=chosen,
            measures=[one.name for one in run],
            forward=forward,
            progress=False,
            **asdict(self.options),
        )
        return report.by_measure(), report.skipped

    def _last(self) -> str:
        """Return the last Linear that ran."""
        with session(self.model, self.loss, self.data) as task:
            return head.find(task, None)[0]


@dataclass(frozen=True)
class Measured:
    """Hold a measure's values by layer (``""`` the network), the run's time, and why the network's is missing."""

    values: Values
    seconds: float
    missing: str = ""

    def of(self, layer: str | None) -> Estimate | None:
        """Return a layer's value; for None the only one's."""
        return next(iter(self.values.values())) if layer is None else self.values.get(layer)


class FitRecorder:
    """Record sums of the losses and of the correct predictions: a ``forward`` that calls the model.

    A batch is counted when the next one begins: by then the measure has checked it, and says better than the loss
    function would what is wrong with its targets. A measure that reads the data twice has every batch counted twice,
    which changes no mean.

    Args:
        loss: the name of a function in torch.nn.functional.
        step: called after each batch.
        active: False to call the model and nothing else.
    """

    def __init__(self, loss: str, step: Callable[[], None], *, active: bool) -> None:
        self._step, self._active, self._loss = step, active, losses.resolve(loss)
        self._pending: tuple[Tensor, Tensor] | None = None
        self._sums: list[Tensor] = []  # per batch: losses, loss terms, correct predictions, predictions

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        """See :data:`.calling.Forward`."""
        if calling.is_dry_run():
            return calling.run(model, batch, None)
        self._count()
        outputs, targets = calling.run(model, batch, None)
        if self._active and not outputs.is_meta:  # outputs without values have no loss
            self._pending = outputs.detach(), targets
        self._step()
        return outputs, targets

    def fit(self) -> Fit:
        """Return means over all samples, however they were cut into batches."""
        self._count()
        if not self._sums:
            return Fit(None, None)
        loss, terms, correct, predictions = torch.stack(self._sums).sum(dim=0).tolist()
        return Fit(loss / terms if terms else None, correct / predictions if predictions else None)

    def _count(self) -> None:
        if self._pending is None:
            return
        (outputs, targets), self._pending = self._pending, None
        loss, number = self._loss, len(self._sums)
        right = counting = torch.zeros(0, dtype=torch.bool, device="cpu")
        if not targets.is_floating_point():  # class indices; the column is empty for probabilities and values
            right, counting = risk.judged(outputs, targets, loss, number)
        sums = (loss.value(outputs, targets), risk.weight(outputs, targets, loss, number), right & counting, counting)
        self._sums.append(
            torch.tensor([float(torch.as_tensor(part).sum()) for part in sums], dtype=torch.float64, device="cpu")
        )
