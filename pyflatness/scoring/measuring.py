"""Measure a unit: some values of one network, which share their reads of the data."""

import importlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

from .. import api, plan
from ..curvature.spectrum import spectrum
from ..measures import named
from ..measures.base import Values
from ..messages import reason
from ..numerics.ranks import ALONE, Ranks, is_the_end
from ..report import Estimate
from ..session import session
from .fit import NO_FIT, Fit, FitRecorder
from .rows import Held, Row
from .units import Pair, Request, Unit

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
    def failed(cls, unit: Unit, error: str) -> "Outcome":
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
    unit: Unit,
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
    found: dict[str, _Held | str] = {}
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
        found.update((name, _Held(by_measure.get(name, {}), missing.get(name, ""), seconds)) for name in names)
    return Outcome(
        {pair: _value(pair, found[pair.measure]) for pair in unit.pairs}, known or NO_FIT, time.perf_counter() - start
    )


@dataclass(frozen=True)
class _Held:
    """Hold a measure's values by layer (``""`` the network), why the network's is missing, and the time taken."""

    values: Values
    missing: str
    seconds: float

    def of(self, pair: Pair) -> Estimate | None:
        return self.values.get("" if isinstance(pair.place, tuple) else pair.place)


def _value(pair: Pair, held: _Held | str) -> Row:
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
    model: nn.Module, data: Any, request: Request, unit: Unit, names: Sequence[str], forward: FitRecorder, ranks: Ranks
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
