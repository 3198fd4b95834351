"""Measure a unit: some values of one network, which share their reads of the data, and loss and accuracy with them."""

import importlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .. import api, losses, plan
from ..curvature.spectrum import spectrum
from ..losses import auto, risk
from ..measures import named
from ..measures.base import Values
from ..messages import reason
from ..model import calling
from ..numerics.ranks import ALONE, Ranks, is_the_end
from ..report import Estimate
from ..session import session
from .rows import NO_FIT, Fit, Held, Row
from .units import Pair, Request, WorkUnit

Step = Callable[[float], None]
"""Called after each batch, with the part of the unit that a whole read of the data is."""


@dataclass(frozen=True)
class Outcome:
    """Hold what came of a unit: a row for each of its pairs, and the network's loss and accuracy if data were read.

    ``batch_size`` is what the batches had to be cut to for the memory, None where they stayed as they are. ``notes``
    say what was done in reading the checkpoint. Of a spectrum there is the ``file``, or an ``error``.
    """

    values: Mapping[Pair, Row]
    fit: Fit = NO_FIT
    seconds: float = 0.0
    batch_size: int | None = None
    notes: tuple[str, ...] = ()
    file: bytes = b""
    error: str = ""

    @classmethod
    def failed(cls, unit: WorkUnit, error: str) -> "Outcome":
        """Return the outcome of a unit of which nothing could be measured."""
        return cls({pair: _value(pair, error) for pair in unit.pairs}, error=error)

    @property
    def held(self) -> dict[Pair, Held]:
        """Return the rows with the loss and accuracy."""
        return {pair: Held(row, self.fit) for pair, row in self.values.items()}

    @property
    def errors(self) -> list[str]:
        """Return the errors of values and of the whole, each once."""
        return [*dict.fromkeys(filter(None, (*(row.error for row in self.values.values()), self.error)))]


class FitRecorder:
    """Record sums of the losses and of the correct predictions: a ``forward`` that calls the model.

    A batch is counted when the next one begins: by then the measure has checked it, and says better than the loss
    function would what is wrong with its targets. A measure that reads the data twice has every batch counted twice,
    which changes no mean.

    Args:
        loss: see :func:`.losses.resolve`; ``"auto"`` is found by the first batch.
        step: called after each batch.
        active: False to call the model and nothing else.
    """

    def __init__(self, loss: Any, step: Callable[[], None], *, active: bool) -> None:
        self._step, self._active = step, active
        self._loss = None if auto.is_auto(loss) else losses.resolve(loss)
        self._pending: tuple[Tensor, Tensor] | None = None
        self._sums: list[Tensor] = []  # per batch: losses, loss terms, correct predictions, predictions

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        """See :data:`.calling.Forward`."""
        if self._loss is None:
            self._loss = auto.unchecked(model, batch)
        if calling.is_dry_run():
            return calling.run(model, batch, None)
        self._count()
        outputs, targets = calling.run(model, batch, None)
        if self._active and not outputs.is_meta:  # outputs without values have no loss
            self._pending = outputs.detach(), targets
        self._step()
        return outputs, targets

    def fit(self, ranks: Ranks = ALONE) -> Fit:
        """Return means over all samples, of all ranks, however they were cut into batches."""
        self._count()
        found = ranks.exchange("loss and accuracy", torch.stack(self._sums).sum(dim=0).tolist() if self._sums else None)
        sums = [each for each in found if each is not None]
        if not sums:
            return NO_FIT
        loss, terms, correct, predictions = map(sum, zip(*sums, strict=True))
        return Fit(loss / terms if terms else None, correct / predictions if predictions else None)

    def _count(self) -> None:
        if self._pending is None:
            return
        (outputs, targets), self._pending = self._pending, None
        loss, number = self._loss, len(self._sums)
        assert loss is not None
        right = counting = torch.zeros(0, dtype=torch.bool, device="cpu")
        if not targets.is_floating_point():  # class indices; the column is empty for probabilities and values
            right, counting = risk.judged(outputs, targets, loss, number)
        sums = (loss.value(outputs, targets), risk.weight(outputs, targets, loss, number), right & counting, counting)
        numbers = [float(part.sum() if isinstance(part, Tensor) else part) for part in sums]
        self._sums.append(torch.tensor(numbers, dtype=torch.float64, device="cpu"))


def spectrum_of(model: nn.Module, data: Any, request: Request, k: int, ranks: Ranks = ALONE) -> Outcome:
    """Compute the spectrum of a network's Hessian, in all of its parameters: k eigenvalues, and the density of all.

    Raises:
        RankError: as :func:`measured`.
    """
    options = request.options
    start = time.perf_counter()
    try:
        with ranks.agreed("a spectrum"):
            found = spectrum(
                *(model, request.loss, data),
                k=k,
                density=True,
                curvature=options.curvature,
                memory=options.memory,
                seed=options.seed,
                progress=False,
                process_group=ranks,
            )
    except Exception as error:  # as of a unit
        if is_the_end(error):
            raise
        return Outcome({}, error=reason(error))
    return Outcome({}, seconds=time.perf_counter() - start, file=found.to_json().encode())


def measured(
    model: nn.Module,
    data: Any,
    request: Request,
    unit: WorkUnit,
    step: Step,
    *,
    fit: bool,
    counts: bool = True,
    ranks: Ranks = ALONE,
) -> Outcome:
    """Measure a unit; what goes wrong is in its values. If measures fail together, each is taken by itself.

    Args:
        model: the network, with its weights.
        data: batches, which can be read again.
        request: what is asked of all networks.
        unit: what is asked now.
        step: called after each batch.
        fit: whether to take loss and accuracy too.
        counts: whether there are samples in the data of this rank.
        ranks: that measure the unit together, each with data of its own.

    Raises:
        RankError: they cannot go on together, which is no fault of the unit's.
    """
    importlib.import_module("torch._dynamo")  # torch loads it at first use: seconds, which are no measure's
    start = time.perf_counter()
    found: dict[str, _MeasureValues | str] = {}
    known: Fit | None = None
    waiting = deque([unit.measures])
    while waiting:
        names = waiting.popleft()
        of_names = named(names)
        part = len(names) / len(unit.measures) / max(1, *(row.reads for row in of_names))
        active = fit and known is None and counts
        recorder = FitRecorder(request.loss, lambda part=part: step(part), active=active)  # type: ignore[misc]
        begin = time.perf_counter()
        try:
            with ranks.agreed("a unit"):
                by_measure, missing = _values(model, data, request, unit, names, recorder, ranks)
                seconds = time.perf_counter() - begin
                if fit and known is None and any(row.reads for row in of_names):
                    known = recorder.fit(ranks)
        except Exception as error:  # the user's model and data run here: whatever it is, the next unit goes on
            if is_the_end(error):
                raise
            if len(names) > 1:
                waiting.extendleft([name] for name in reversed(names))
            else:
                found[names[0]] = reason(error)
            continue
        found.update((name, _MeasureValues(by_measure.get(name, {}), missing.get(name, ""), seconds)) for name in names)
    return Outcome(
        {pair: _value(pair, found[pair.measure]) for pair in unit.pairs}, known or NO_FIT, time.perf_counter() - start
    )


@dataclass(frozen=True)
class _MeasureValues:
    """Hold a measure's values by layer (``""`` the network), why the network's is missing, and the time taken."""

    values: Values
    missing: str
    seconds: float

    def of(self, pair: Pair) -> Estimate | None:
        return self.values.get("" if isinstance(pair.place, tuple) else pair.place)


def _value(pair: Pair, held: _MeasureValues | str) -> Row:
    """Return the row of a pair: the numbers; or the error; or neither, of a pattern's layer that did not run."""
    empty = Row(layer=pair.place if isinstance(pair.place, str) else "", measure=pair.measure)
    if isinstance(held, str):
        return replace(empty, error=held)
    estimate = held.of(pair)
    if estimate is None:
        missing = held.missing or "the network has no value of it"
        return replace(empty, error=missing if isinstance(pair.place, tuple) else "")
    low, high = estimate.interval() or (None, None)
    numbers = {name: getattr(estimate, name) for name in ("layer", "value", "stderr", "method", "exact", "samples")}
    return replace(empty, **numbers, low=low, high=high, seconds=held.seconds)


def _values(
    model: nn.Module,
    data: Any,
    request: Request,
    unit: WorkUnit,
    names: Sequence[str],
    forward: FitRecorder,
    ranks: Ranks,
) -> tuple[Mapping[str, Values], Mapping[str, str]]:
    """Return values by measure, and why there is none of the network."""
    if unit.selectors is not None and len(unit.selectors) == 1 and len(names) == 1:  # by the head if it is that
        (row,), options = named(names), request.options
        reads = plan.plan([row], options).reads
        with session(
            *(model, request.loss, data, options),
            {"forward": forward, "progress": False, "process_group": ranks},
            reads=reads,
            ordered=options.by_sample,
        ) as task:
            measurement, layer = plan.of_layer(row, task, unit.selectors[0])
            estimate = measurement.estimates()[layer, row.name]
        return {row.name: {estimate.layer: estimate}}, {}
    report = api.measure(
        *(model, request.loss, data),
        layers=unit.selectors,
        measures=names,
        forward=forward,
        progress=False,
        process_group=ranks,
        **asdict(request.options),
    )
    return report.by_measure(), report.skipped
