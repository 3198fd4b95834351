"""Measure units where an executor sends them: the model and the data are loaded once, the weights for each checkpoint.

What is sent to a worker is where the model, data and weights are, and what comes back are numbers.
"""

import contextlib
import functools
import importlib
import json
import sys
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import api, losses, plan
from ..curvature.spectrum import spectrum
from ..errors import InputError
from ..losses import auto, risk
from ..measures import named
from ..measures.base import Estimates
from ..messages import is_out_of_memory, reason
from ..model import calling, generators, state
from ..model.data import Batches, size, used_up
from ..numerics.ranks import ALONE, Ranks, is_the_end
from ..options import Options
from ..session import session
from . import checkpoints, cutting, data_specs, keys, pretrained, specs, user_files
from .cutting import Cut
from .units import NO_FIT, Fit, Held, Pair, Row, WorkUnit

_STEPS, _TRIAL = 75, 2  # products with the eight vectors of a density that a spectrum takes, about, and a trial of it
Step = Callable[[float], None]  # called after each batch, with the part of the unit that a whole read of the data is


@dataclass(frozen=True)
class Outcome:
    """Hold what came of a unit: a row for each of its pairs, and the network's loss and accuracy if data were read.

    ``batch_size`` is what the batches had to be cut to for the memory, None where they stayed as they are. ``notes``
    say what was done in reading the checkpoint, and ``unknown`` what no other run would find again. Of a spectrum there
    is the ``file``, or an ``error``.
    """

    values: Mapping[Pair, Row]
    fit: Fit = NO_FIT
    seconds: float = 0.0
    batch_size: int | None = None
    notes: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    file: bytes = b""
    error: str = ""

    @classmethod
    def failed(cls, unit: WorkUnit, error: str) -> "Outcome":
        """Return the outcome of a unit of which nothing could be measured."""
        return cls({pair: _failed(pair, error) for pair in unit.pairs}, error=error)

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
    """

    def __init__(self, loss: Any, step: Callable[[], None], *, active: bool) -> None:
        self._step, self._active = step, active
        self._loss = None if auto.is_auto(loss) else losses.resolve(loss)
        self._pending: tuple[Tensor, Tensor] | None = None
        self._sums: list[Tensor] = []  # per batch: losses, loss terms, correct predictions, predictions
        self._classes: Counter[int] = Counter()  # how often each is a target

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        """See :data:`.calling.Forward`."""
        if self._loss is None:
            self._loss = auto.unchecked(model, batch)
        if calling.now.dry:
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
        sums = torch.stack(self._sums).sum(dim=0).tolist() if self._sums else None
        found = [one for one in ranks.exchange("loss and accuracy", (sums, self._classes)) if one[0] is not None]
        if not found:
            return NO_FIT
        loss, terms, correct, predictions = map(sum, zip(*(each for each, _ in found), strict=True))
        mean = loss / terms if terms else None
        if not predictions:
            return Fit(mean)
        most = max(sum((classes for _, classes in found), Counter[int]()).values())
        return Fit(mean, correct / predictions, most / predictions)

    def _count(self) -> None:
        if self._pending is None:
            return
        (outputs, targets), self._pending = self._pending, None
        loss, number = self._loss, len(self._sums)
        assert loss is not None
        right = counting = torch.zeros(0, dtype=torch.bool, device="cpu")
        if not targets.is_floating_point():  # class indices; the column is empty for probabilities and values
            right, counting = risk.judged(outputs, targets, loss, number)
            classes, counts = targets[counting].unique(return_counts=True)
            self._classes.update(dict(zip(classes.tolist(), counts.tolist(), strict=True)))
        sums = (loss.value(outputs, targets), risk.weight(outputs, targets, loss, number), right & counting, counting)
        numbers = [float(part.sum() if isinstance(part, Tensor) else part) for part in sums]
        self._sums.append(torch.tensor(numbers, dtype=torch.float64, device="cpu"))


def _failed(pair: Pair, error: str) -> Row:
    return Row(layer=pair.layer, measure=pair.measure, error=error)


def _row(by_measure: Mapping[str, Estimates], missing: Mapping[str, str], seconds: float, pair: Pair) -> Row:
    """Return the row of a pair: the numbers; or the error; or neither, of a pattern's layer that did not run."""
    estimate = by_measure.get(pair.measure, {}).get(pair.layer)
    if estimate is None:
        why = missing.get(pair.measure) or "the network has no value of it"
        has_values = bool(by_measure.get(pair.measure))
        return _failed(pair, why if isinstance(pair.place, tuple) or not has_values else "")
    low, high = estimate.interval() or (None, None)
    numbers = {name: getattr(estimate, name) for name in ("layer", "value", "stderr", "method", "exact", "samples")}
    return Row(measure=pair.measure, **numbers, low=low, high=high, seconds=seconds)


@dataclass(frozen=True)
class Maker:
    """Name what makes the model or the data, so that each worker can make it."""

    maker: Any  # a SPEC (see :func:`.data_specs.resolve`), a callable, or, for data, what it would return
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of the callable, by name
    name: str = ""  # what messages call it
    to: Mapping[str, Any] = field(default_factory=dict)  # of a model: what ``nn.Module.to`` takes

    def made(self) -> Any:
        """Return what the callable returns."""
        maker = self.function()
        if not callable(maker):
            return maker
        specs.check_arguments(maker, self.arguments)
        try:
            return maker(**self.arguments)
        except InputError as error:  # of a file or a library's network, which are no callables of the user's
            raise InputError(f"{self.name}: {reason(error)}") from error
        except Exception as error:
            raise InputError(f"{self.name}: the callable failed: {reason(error)}") from error

    def network(self) -> nn.Module:
        """Return the network that the callable returns, in eval mode, where and as precise as it is to be."""
        model = self.made()
        if not isinstance(model, nn.Module):
            kind = type(model).__name__
            raise InputError(f"{self.name}: a torch.nn.Module is wanted, the callable returned a {kind}")
        if self.to:
            try:
                model = model.to(**self.to)
            except (RuntimeError, AssertionError) as error:  # torch asserts that it is compiled with CUDA
                raise InputError(f"--device: the model cannot be moved: {reason(error)}") from None
        return model.eval()

    def function(self) -> Any:
        """Return the callable, or the data themselves."""
        return data_specs.resolve(self.maker) if isinstance(self.maker, str) else self.maker

    def identity(self) -> Any:
        """Return what it is for a store's keys; None for a library's network, which is what it makes."""
        return None if pretrained.is_named(self.maker) else [self.function(), {**self.arguments}]

    def text(self) -> str:
        """Return what a reader knows it by."""
        maker = self.maker if isinstance(self.maker, str) else getattr(self.maker, "__qualname__", None)
        arguments = json.dumps(self.arguments, default=repr) if self.arguments else ""
        return f"{maker or type(self.maker).__name__} {arguments}".strip()

    @property
    def is_made(self) -> bool:
        """Return whether workers can make it, without being sent it."""
        return isinstance(self.maker, str) or callable(self.maker)


@dataclass(frozen=True)
class Setup:
    """Hold what is the same for all units of a run."""

    model: Maker | None  # of the network that the checkpoints are of; None where each brings its own
    data: Maker
    loss: Any  # see :func:`.losses.resolve`
    measures: tuple[str, ...] = ()  # that are asked of each checkpoint
    selectors: tuple[str, ...] | None = None  # of their layers; None: all that can be measured
    options: Options = field(default_factory=Options)  # of the user
    batch_size: int | str | None = None  # most samples of a batch; "auto": half as many where memory does not suffice
    limit: float | None = None  # the first so many samples of the data, or this part of them; None: all
    fingerprint: keys.Facts | None = None  # of the data, which every worker's are held against; None: not kept
    code: keys.Code | None = None  # of model and loss, likewise
    version: str | None = None  # what stands for the user's code; None: it is looked at
    progress: bool = False  # whether long units print how far they are, where standard error is no terminal
    token: str = field(default_factory=lambda: uuid.uuid4().hex)  # a name that no other run has


AGREED: list[keys.Code] = []  # was compared before this process measured, which may change what modules hold


class Bench:
    """Hold the network and the data, made once, and know whose weights the network has."""

    def __init__(self, setup: Setup, ranks: Ranks = ALONE) -> None:
        self.setup, self.ranks = setup, ranks
        with generators.seeded():  # a network may keep numbers that it drew before it had a checkpoint's weights
            self.network = None if setup.model is None else setup.model.network()
        self.data = setup.data.made()
        if hasattr(self.data, "__next__"):
            raise used_up(self.data, "and every model reads them", setup.data.name.rstrip("="))
        Batches(self.data, torch.device("cpu"))  # raises for what are no data, before any model is measured
        self._mine, self._counts = self.data, True
        if not ranks.alone:
            self._mine, samples = cutting.dealt(self.data, ranks, setup.limit)
            self._counts = samples > 0
        if setup.batch_size is not None or setup.limit is not None:
            device = torch.device("cpu") if self.network is None else state.device(self.network)
            most = setup.batch_size if isinstance(setup.batch_size, int) else None
            self.data = Cut(self.data, device, most=most, limit=setup.limit)
            self._mine = self.data if ranks.alone else Cut(self._mine, device, most=most)
        self._held: tuple[Path, str] | None = None
        self._notes: tuple[str, ...] = ()  # on reading what is held
        self._unknown: tuple[str, ...] = ()  # of the network, what no other run would find again

    def batches(self) -> int:
        """Return the number of batches that are measured here; 0 if the data cannot tell."""
        return len(Batches(self._mine, torch.device("cpu")))

    def code(self) -> keys.Code:
        """Return what the user's code is here."""
        setup = self.setup
        made = None if setup.model is None else setup.model.identity()
        return keys.Code.of(self.network, made, setup.loss, setup.version)

    def check(self) -> None:
        """Raise if the data, the model or the loss are not those of the program that hands out the work.

        Data with an unseeded split or noise differ in each process, and code may be edited since the program began.
        """
        fingerprint, code = self.setup.fingerprint, self.setup.code
        if code is not None and code not in AGREED:
            for name in code.loaded:
                with contextlib.suppress(Exception):
                    importlib.import_module(name)
            here = self.code().as_loaded_in(code)
            if here != code and here.but_for_attributes() == code.but_for_attributes():  # it holds the time, say
                self._unknown = ("model: its callable makes a network of other attributes in each process",)
            elif here != code:
                raise InputError(
                    "model, loss: a worker that made them got others than the process that hands out the work; have "
                    "their callables make the same in every process, leave the source files as they are while the work "
                    "goes on, set what a module holds in its file, not later; or pass a version (version=, --version)"
                )
            else:
                AGREED.append(code)
        if fingerprint is None:
            return
        if keys.of_data(self.data, ordered="order" in fingerprint, ends="ends" in fingerprint) != fingerprint:
            raise InputError(
                "data: a worker that loaded them got other samples than the process that hands out the work; have the "
                "callable return the same data whenever it is called (seed what is drawn)"
            )

    def outcome(self, unit: WorkUnit, step: Step = lambda part: None) -> Outcome:
        """Measure a unit; what goes wrong with its checkpoint or its measures is in its values."""
        try:
            with self.ranks.agreed("a checkpoint"):
                model, notes = self._with_weights(unit)
        except Exception as error:  # a damaged file can raise anything
            if is_the_end(error):
                raise
            return Outcome.failed(unit, reason(error))
        kept = self.setup.code is not None and self.setup.version is None
        while True:
            with user_files.opened(self.setup.loss) if kept else contextlib.nullcontext(set[str]()) as opened:
                if unit.spectrum:
                    shown = None if self.setup.progress and not sys.stderr.isatty() else False  # lines, as in a log
                    found = self._spectrum(model, unit.spectrum, progress=shown)
                else:
                    found = self._measured(model, unit, step)
            if self.setup.batch_size != "auto" or not self._halved(found):
                most = self._mine.most if isinstance(self._mine, Cut) else None
                read = (f"{path} is read while the network or the loss runs" for path in sorted(opened))
                return replace(found, batch_size=most, notes=notes, unknown=(*self._unknown, *read))

    def _measured(self, model: nn.Module, unit: WorkUnit, step: Step) -> Outcome:
        """Measure a unit.

        What goes wrong is in its values, each measure's by itself, but an error of the ranks together.
        """
        start = time.perf_counter()
        found: dict[Pair, Row] = {}
        known: Fit | None = None
        waiting = deque([unit.measures])
        while waiting:
            names = waiting.popleft()
            of_names = named(names)
            part = len(names) / len(unit.measures) / max(1, *(row.reads for row in of_names))
            active = unit.fit and known is None and self._counts
            recorder = FitRecorder(self.setup.loss, functools.partial(step, part), active=active)
            begin = time.perf_counter()
            try:
                with self.ranks.agreed("a unit"):
                    by_measure, missing = self._values(model, unit, names, recorder)
                    row = functools.partial(_row, by_measure, missing, time.perf_counter() - begin)
                    if unit.fit and known is None and any(measure.reads for measure in of_names):
                        known = recorder.fit(self.ranks)
            except Exception as error:  # the user's model and data run here: whatever it is, the next unit goes on
                if is_the_end(error):
                    raise
                if len(names) > 1:
                    waiting.extendleft([name] for name in reversed(names))
                    continue
                row = functools.partial(_failed, error=reason(error))
            found.update((pair, row(pair)) for pair in unit.pairs if pair.measure in names)
        # Of measures of weights alone no data were read.
        if unit.fit and known is None and not any(one.error for one in found.values()):
            known = self._fit(model)
        return Outcome({pair: found[pair] for pair in unit.pairs}, known or NO_FIT, time.perf_counter() - start)

    def _values(
        self, model: nn.Module, unit: WorkUnit, names: Sequence[str], forward: FitRecorder
    ) -> tuple[Mapping[str, Estimates], Mapping[str, str]]:
        what, options = (model, self.setup.loss, self._mine), self.setup.options
        how: dict[str, Any] = {"forward": forward, "progress": False, "process_group": self.ranks}
        if unit.selectors is not None and len(unit.selectors) == 1 and len(names) == 1:  # by the head if it is that
            (row,) = named(names)
            with session(*what, options, how, reads=plan.plan([row], options).reads, ordered=options.by_sample) as task:
                measurement, layer = plan.of_layer(row, task, unit.selectors[0])
                estimate = measurement.estimates()[layer, row.name]
            return {row.name: {estimate.layer: estimate}}, {}
        how |= {"layers": unit.selectors, "measures": names, **asdict(options)}
        report = api.measure(model, self.setup.loss, self._mine, **how)
        return report.by_measure(), report.skipped

    def _fit(self, model: nn.Module) -> Fit:
        """Return how well a network does, by forward passes alone; nothing where these fail."""
        recorder = FitRecorder(self.setup.loss, lambda: None, active=self._counts)
        how = {"forward": recorder, "progress": False, "process_group": self.ranks}
        try:
            with self.ranks.agreed("loss and accuracy"):
                options = self.setup.options
                with session(model, self.setup.loss, self._mine, options, how, reads=1) as task, torch.no_grad():
                    task.risks([{}], "propagate")
                return recorder.fit(self.ranks)
        except Exception as error:
            if is_the_end(error):
                raise
            return NO_FIT

    def _spectrum(self, model: nn.Module, k: int, **how: Any) -> Outcome:
        """Compute k eigenvalues of a network's Hessian in all of its parameters, and the density of all."""
        options = self.setup.options
        how |= {"curvature": options.curvature, "memory": options.memory, "seed": options.seed}
        start = time.perf_counter()
        try:
            with self.ranks.agreed("a spectrum"):
                what = model, self.setup.loss, self._mine
                found = spectrum(*what, k=k, density=True, process_group=self.ranks, **how)
        except Exception as error:  # as of a unit
            if is_the_end(error):
                raise
            return Outcome({}, error=reason(error))
        return Outcome({}, seconds=time.perf_counter() - start, file=found.to_json().encode())

    def spectrum_seconds(self, unit: WorkUnit) -> float | None:
        """Return about how long a spectrum takes, by a trial of a few of its products; None if that fails."""
        try:
            model, _ = self._with_weights(unit)
        except Exception:  # a damaged file, which is an error of the unit
            return None
        found = self._spectrum(model, 0, steps=_TRIAL, progress=False)
        return None if found.error else found.seconds * _STEPS / _TRIAL

    def _halved(self, found: Outcome) -> bool:
        """Halve the batches if memory did not suffice, for this unit and those that follow; return whether."""
        if not any(self.ranks.exchange("the memory", any(map(is_out_of_memory, found.errors)))):
            return False
        most = self._mine.most or max(map(size, self._mine), default=1)
        further = any(self.ranks.exchange("the batches", most > 1))
        self._mine.most = max(1, most // 2) if further else 0
        return further

    def _with_weights(self, unit: WorkUnit) -> tuple[nn.Module, tuple[str, ...]]:
        """Return the network with its weights, and the notes on reading them."""
        if isinstance(unit.weights, nn.Module):
            return unit.weights, ()
        assert self.network is not None
        if self._held != (unit.weights, unit.content):
            self._held = None  # a file that does not fit leaves a part of itself behind
            checkpoint = checkpoints.read(unit.weights)
            self._notes = checkpoint.notes + checkpoints.load(self.network, checkpoint.state)
            if unit.content and keys.of_file(unit.weights) != unit.content:
                raise InputError("the file changed after the run had begun")
            self._held = unit.weights, unit.content
        return self.network, self._notes


_here = threading.local()  # the bench of units that are measured in this thread


def measure(setup: Setup, unit: WorkUnit) -> Outcome:
    """Measure a unit in the thread or process that this is called in: the function that executors are given."""
    bench: Bench | None = getattr(_here, "bench", None)
    if bench is None or bench.setup.token != setup.token:
        bench = Bench(setup)
        bench.check()
        _here.bench = bench
    return bench.outcome(unit)
