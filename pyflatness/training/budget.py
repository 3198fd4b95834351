"""Choose when to measure in a training, and on how many samples, so that it takes at most a part of the time.

The time between two calls is the training's. A measurement of n samples is due if the time spent on measurements, plus
what this one is expected to take, is within the part. Each measurement has a fixed cost too, so n doubles while that
makes a sample cheaper, unless fewer than :data:`_OFTEN` such measurements would have been within the part so far.
"""

import math
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError
from ..messages import shown
from ..model import data
from ..numerics.process_groups import refuse
from ..options import check_number
from ..report import Estimate, Report

if TYPE_CHECKING:
    from .history import Record

HOW = {"curvature": "ggn", "probes": 1, "per_sample": True}
CLOCK = "train_seconds"  # the number in a record that says how long the training took until then
_CHEAPER = 1.6  # twice the samples are cheaper by the sample if they take less than this many times as long
_OFTEN = 5
_DRIFTS = (0.0, *(10.0 ** (k / 4) for k in range(-36, 1)))  # relative variances of the drift in a step
_ENOUGH = 32  # samples of the first measurement, and the fewest of an alarm: they show how much samples differ
_BEFORE, _ALIKE = 10, 0.65  # records before an alarm, and the part of their median spread that it falls below
_NEARLY = 1.0  # the difference of log-likelihoods below which one drift is nearly as likely as another


def check(loss: Any, how: Mapping[str, Any]) -> None:
    """Raise for a loss whose values grow with the samples, and for options that choose the probes."""
    if "sum" in (how.get("reduction"), getattr(loss, "reduction", None)):
        raise InputError(
            "loss: budget= measures more samples later, and values of reduction='sum' grow with them; pass the mean"
        )
    if how.get("rtol") is not None:
        raise InputError("rtol: budget= takes one probe of each sample, as often as the time allows; leave rtol= out")


class Ran(NamedTuple):
    """Hold the steps of a training, and the seconds that it and its measurements took."""

    steps: int
    trained: float
    spent: float

    def cost(self, what: str = "") -> str:
        """Return in words the seconds that the measurements, on ``what``, took of the whole time."""
        whole = self.trained + self.spent
        share = self.spent / whole if whole else 0.0
        return f"measured{what} in {self.spent:.1f} s, {share:.1%} of the training's {whole:.1f} s"


class TimeBudget:
    """Hold the time of a training and of its measurements, and the samples that are measured next.

    ``batches`` are tensors or a list of batches to cycle through; None: each call passes the batch that was trained on.
    """

    def __init__(self, part: Any, batches: Any, process_group: Any = None) -> None:
        self._part = check_number("budget", part, "a part of the time between 0 and 1", lambda part: 0 < part < 1)
        if batches is not None and not isinstance(batches, (tuple, list)):
            raise InputError(
                f"data: budget= reads a part of them at a time, so tensors or a list of batches are wanted, as "
                f"list(itertools.islice(loader, 20)), got {shown(batches)}"
            )
        refuse(process_group, "budget=")  # the other processes cannot know when this one measures
        is_tensors = isinstance(batches, tuple) and len(batches) > 0 and isinstance(batches[0], (Tensor, np.ndarray))
        self._batches = [batches] if is_tensors else batches or ()
        sizes = [data.checked_size(batch, number) for number, batch in enumerate(self._batches)]
        if batches is not None and min(sizes, default=0) < 1:
            raise InputError(
                "data: budget= goes round in the batches, and each needs samples; there are none in one of them"
            )
        orders = torch.Generator("cpu").manual_seed(0)
        self._orders = [torch.randperm(data.size(batch), generator=orders, device="cpu") for batch in self._batches]
        self._place = (0, 0)
        self._samples, self._taken, self._costs = _ENOUGH, 0, dict[int, float]()
        self.resume(())

    @property
    def ran(self) -> Ran:
        """Return what was counted until now."""
        return Ran(self.steps, self.trained, self.spent)

    def resume(self, records: "Iterable[Record]", ran: Ran | None = None) -> None:
        """Continue from earlier counts, or, if these were not kept, from the steps and the time of records."""
        self._ended: float | None = None
        self.steps, self.trained, self.spent = ran or (0, 0.0, 0.0)
        for record in records if ran is None else ():
            self.steps, self.spent = record.step or 0, self.spent + (record.seconds or 0.0)
            self.trained = record.numbers.get(CLOCK, 0.0)

    def due(self, batch: Any = None, step: int | None = None) -> Any:
        """Count a step of the training, or set its number, and return the batch to measure now, or None."""
        now = time.perf_counter()
        self.steps = self.steps + 1 if step is None else step
        self.trained += 0.0 if self._ended is None else now - self._ended
        self._ended = now
        cost = self._expected(self._samples)
        if self.spent + cost > self._part * (self.trained + self.spent + cost) and self.spent:
            return None
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()  # what the steps before have asked for is the training's
            self.trained += time.perf_counter() - now
        self._ended = time.perf_counter()
        chosen = self._next() if batch is None else data.first(batch, min(self._samples, data.size(batch)))
        self._taken = data.size(chosen)
        return chosen

    def took(self) -> float:
        """Count a measurement of what :meth:`due` returned; return how long it took."""
        assert self._ended is not None
        samples, now = self._taken, time.perf_counter()
        seconds, self._ended = now - self._ended, now
        self.spent += seconds
        known = self._costs.get(samples)
        self._costs[samples] = seconds if known is None else min(seconds, 2 * known) * 0.5 + known * 0.5
        half = self._costs.get(samples // 2)
        more = samples >= self._samples and (half is None or seconds < _CHEAPER * half)
        warm = known is not None or samples > _ENOUGH
        if warm and more and self._part * self.trained > _OFTEN * self._expected(2 * samples):
            self._samples = 2 * samples
        return seconds

    def _expected(self, samples: int) -> float:
        """Return the seconds that ``samples`` are expected to take, extrapolated from half and a quarter as many.

        Where batches are smaller than that, it is the longest time so far.
        """
        half, quarter = (self._costs.get(samples // part, 0.0) for part in (2, 4))
        in_line = half + 2 * max(0.0, half - quarter) if quarter else 2 * half
        return self._costs.get(samples, in_line if half else max(self._costs.values(), default=0.0))

    def _next(self) -> Any:
        """Return the next samples, cycling through the batches."""
        number, start = self._place
        chosen = self._orders[number][start : start + self._samples]
        ends = start + len(chosen) == len(self._orders[number])
        self._place = ((number + 1) % len(self._batches), 0) if ends else (number, start + len(chosen))
        return data.take(self._batches[number], chosen)


def of_distribution(report: Report) -> Report:
    """Return a report whose standard errors are over the distribution of the samples, not given the data."""
    return replace(report, _estimates={key: _of_distribution(held) for key, held in report._estimates.items()})


def _of_distribution(held: Estimate) -> Estimate:
    if held.per_sample is None or held.samples < 2:
        return held
    counting = held.per_sample[~held.per_sample.isnan()] if held.omitted else held.per_sample
    stderr = float(counting.std() / held.samples**0.5) or math.nan
    return replace(held, per_sample=None, stderr=stderr, dof=float(held.samples - 1), exact=False)


def pooled(reports: Sequence[tuple[float, Report]], measure: str) -> dict[str, Estimate]:
    """Return each layer's last value, estimated from all records; older ones count less the faster values drift.

    The model is a random walk of the value, observed with each record's standard error; Kalman's filter estimates it.
    All variances are relative to the square of the value: q for the walk in a step, and for a record the layer's mean
    over the records at its number of samples, so that the weights of records do not depend on their values. q is the
    largest that makes the records of the last half of the steps nearly as likely as the likeliest q does, in the mean
    over the layers. Intervals are therefore rather too wide. A layer with a value that is not positive has its last
    record's.
    """
    held = [(step, report.by_measure()[measure]) for step, report in reports if measure in report.measures]
    held = [one for one in held if all(map(math.isfinite, map(float, one[1].values())))] or held[-1:]
    names = [name for name in held[-1][1] if all(name in values for _, values in held)]
    recent = [one for one in held if one[0] >= held[-1][0] / 2]
    series = {name: [(step, values[name]) for step, values in recent] for name in names}
    likely = [sum(_filtered(own, q)[2] for own in series.values()) for q in _DRIFTS]
    near = max(likely) - _NEARLY * len(names)
    q = max(q for q, one in zip(_DRIFTS, likely, strict=True) if one >= near)
    found = {}
    for name in names:
        value, variance, _ = _filtered(series[name], q)
        samples = sum(values[name].samples for _, values in recent)
        how: dict[str, Any] = {"stderr": value * math.sqrt(variance), "samples": samples, "dof": float(samples - 1)}
        found[name] = replace(held[-1][1][name], value=value, **how) if variance else held[-1][1][name]
    return found


def alarms(held: Sequence[Estimate]) -> tuple[list[int], str]:
    """Return the indices of values at which samples are much more alike than just before.

    c = s / value, with s the standard deviation over samples, is then less than :data:`_ALIKE` times the median of the
    last :data:`_BEFORE` ones. It falls where predictions lose their certainty for all samples at once. If there are
    more values than these, and none could raise an alarm, the second result says in words what is missing.
    """
    spreads = [
        (place, math.sqrt(_variance(one) * one.samples) / one.value)
        for place, one in enumerate(held)
        if one.value > 0 and _variance(one)
    ]
    later = [
        (place, spread < _ALIKE * statistics.median(before for _, before in spreads[number : number + _BEFORE]))
        for number, (place, spread) in enumerate(spreads[_BEFORE:])
    ]
    most = max((held[place].samples for place, _ in later), default=0)
    sizes = f", and from the {_BEFORE + 1}th on they have at most {most} samples" if later else ""
    missing = (
        f"it takes {_BEFORE} records with standard errors, as of budget=, and then one of at least {_ENOUGH} samples; "
        f"so far there are {len(spreads)} with standard errors{sizes}"
    )
    found = [place for place, is_alike in later if is_alike and held[place].samples >= _ENOUGH]
    return found, missing if len(held) > _BEFORE and most < _ENOUGH else ""


def _filtered(values: Sequence[tuple[float, Estimate]], q: float) -> tuple[float, float, float]:
    """Return a layer's last value by Kalman's filter, its relative variance, and the log-likelihood of the records.

    The variance is 0 where there is nothing to filter: of exact values, and with one that is not positive.
    """
    if min(one.value for _, one in values) <= 0:
        return values[-1][1].value, 0.0, 0.0
    spread = sum(_variance(one) / one.value * one.samples / one.value for _, one in values) / len(values)
    (step, first), *others = values
    level, variance, likelihood = first.value, spread / first.samples, 0.0
    for now, one in others if spread else ():
        variance += q * (now - step)
        off, step = one.value / level - 1, now
        total = variance + spread / one.samples
        likelihood -= math.log(level) + (math.log(total) + off**2 / total) / 2
        level, variance = level * (1 + variance / total * off), variance * (1 - variance / total)
    return level, variance, likelihood


def _variance(held: Estimate) -> float:
    return 0.0 if held.stderr is None or math.isnan(held.stderr) else held.stderr**2
