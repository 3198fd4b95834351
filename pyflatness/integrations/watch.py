"""Do what the callbacks have in common: measure a model in training, name the values, keep them, and count the time."""

import contextlib
import itertools
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .. import interrupts
from ..api import measure
from ..errors import InputError, NonFiniteError
from ..measures import are_named, named
from ..messages import shown, unknown_argument
from ..model import generators, selectors
from ..model.data import used_up
from ..model.selectors import Selector
from ..model.state import in_eval_mode
from ..options import EVERY, Options, check_count, check_flag
from ..report import Report
from ..training import loaders
from ..training.history import History

NETWORK = "network"
_OPTIONS = [name for name in EVERY if name not in ("eval", "process_group")]


class Watch:
    """Measure a model at the ends of epochs, and leave all that the training depends on as it was.

    Options are those of the callbacks. ``history`` has what was measured, a record for each epoch.
    """

    def __init__(
        self,
        layers: Selector | Sequence[Selector] | None,
        measures: str | Sequence[str] | None,
        data: Any,
        every_n_epochs: int,
        limit_batches: int | None,
        name: str,
        strict: bool,
        options: dict[str, Any],
    ) -> None:
        self.layers, self.data, self.name, self.options = layers, data, name, _checked(options)
        self.measures = _asked(measures)
        self.every_n_epochs = check_count("every_n_epochs", every_n_epochs, 1)
        self.limit_batches = None if limit_batches is None else check_count("limit_batches", limit_batches, 1)
        self.strict = check_flag("strict", strict)
        if isinstance(data, str) and data not in ("train", "val"):
            raise InputError(f"data={shown(data)}: 'train', 'val', a loader or a tuple of tensors is wanted")
        if hasattr(data, "__next__"):
            raise used_up(data, "and every epoch is to read it")
        self.history = History()
        self._said: set[str] = set()
        self.begin()

    def check(self, model: nn.Module) -> None:
        """Raise if the model has no such layers."""
        if self.layers is not None:
            selectors.select(model, self.layers)

    def begin(self) -> None:
        """Say that the training begins now, against which the measurements' time is held."""
        self._begun, self._spent = time.perf_counter(), 0.0

    def is_due(self, epoch: int) -> bool:
        """Return whether an epoch, counted from 1, is to be measured."""
        return epoch % self.every_n_epochs == 0

    def measured(
        self, epoch: int, step: int, problem: Callable[[], tuple[nn.Module, Any]], batches: Callable[[], Any]
    ) -> dict[str, float]:
        """Return values by the names that they are logged under; none where it is not possible, with a warning.

        Epoch and step are as the trainer counts them; ``problem`` returns the model and its loss.
        """
        started = time.perf_counter()
        try:
            with interrupts.undone():
                report = self._as_found(problem, batches)
        except Exception as error:  # of whatever kind: hours of training are not to end by it
            if self.strict or interrupts.is_raised(error):
                raise
            self._once(f"epoch {epoch} is not measured: ", f"{type(error).__name__}: {error}")
            return {}
        finally:
            spent = time.perf_counter() - started
            self._spent += spent
        if self.layers is None and report.uncovered:
            names, share = ", ".join(report.uncovered), sum(report.uncovered.values())
            self._once("", f"weights with {share:.2g} of all entries are not measured, nor in any later epoch: {names}")
        self.history.add(report, step=step, epoch=epoch, seconds=spent)
        values = {
            self._logged_as(name, layer): found.value
            for name, held in report.by_measure().items()
            for layer, found in held.items()
        }
        return {**values, f"{self.name}/seconds": spent}

    def overhead(self) -> str:
        """Return in words what the measurements have cost since :meth:`begin`."""
        whole = time.perf_counter() - self._begun
        share = self._spent / whole if whole else 0.0
        of = {"train": "the training data", "val": "the validation data"}
        data = of[self.data] if isinstance(self.data, str) else "the data passed"
        return f"{self.name}: measured on {data} in {self._spent:.1f} s, {share:.1%} of the training's {whole:.1f} s"

    def _limited(self, data: Any) -> Any:
        """Return so many batches as a list, for a measure may read them several times, and a loader may shuffle."""
        if self.limit_batches is None:
            return data
        if isinstance(data, tuple):
            raise InputError("limit_batches= is for loaders; pass the tensors' first samples as data=")
        return [*itertools.islice(data, self.limit_batches)]

    def _as_found(self, problem: Callable[[], tuple[nn.Module, Any]], batches: Callable[[], Any]) -> Report:
        """Measure a model in training, in eval mode; afterwards it, its loader and random states are as they were."""
        model, loss = problem()
        with in_eval_mode(model), _buffers_of_rank_zero(model):
            random = generators.hold([*model.modules()])
            interrupts.later(random.put_back)
            with random.watched():
                data = batches()
            with loaders.as_found(data):
                with random.watched():
                    some = self._limited(data)
                return self._report(model, loss, some)

    def _report(self, model: nn.Module, loss: Any, data: Any) -> Report:
        """Return all measures, or those that are possible, if they were named; the others are not tried again."""
        several = isinstance(self.measures, list) and len(self.measures) > 1
        try:
            report = self._of(model, loss, data, self.measures)
            left = {name: why for name, why in report.skipped.items() if several and name not in report.measures}
            if left and self.strict:
                raise InputError(next(iter(left.values())))
            for name in left:
                self._warn(f"{name} is left out from now on: {left[name]}")
            if isinstance(self.measures, list):
                self.measures = [name for name in self.measures if name not in left]
            return report
        except InputError:
            if self.strict or not several:
                raise
        assert isinstance(self.measures, list)
        possible, refused = [], {}
        for name in self.measures:
            try:
                self._of(model, loss, data, [name])
                possible.append(name)
            except InputError as error:
                refused[name] = error
        if not possible:
            raise next(iter(refused.values()))
        for name, why in refused.items():
            again = isinstance(why, NonFiniteError)  # the weights of another epoch may be finite
            self._warn(f"{name} is left out{'' if again else ' from now on'}: {why}")
        self.measures = [n for n in self.measures if n in possible or isinstance(refused[n], NonFiniteError)]
        return self._of(model, loss, data, possible)

    def _of(self, model: nn.Module, loss: Any, data: Any, measures: str | list[str] | None) -> Report:
        return measure(model, loss, data, layers=self.layers, measures=measures, **self.options)

    def _once(self, beginning: str, text: str) -> None:
        """Warn of what is so in every epoch, in the first one alone."""
        if text not in self._said:
            self._said.add(text)
            self._warn(beginning + text)

    def _warn(self, text: str) -> None:
        if not _is_distributed() or dist.get_rank() == 0:
            warnings.warn(f"{self.name}: {text}", RuntimeWarning, stacklevel=2)

    def _logged_as(self, measure: str, layer: str) -> str:
        return f"{self.name}/{measure}/{layer}" if layer else f"{self.name}/{NETWORK}/{measure}"


def check_model(model: Any, path: str) -> nn.Module:
    """Return the module at a path of attributes, such as ``"net"`` or ``"ema.module"``."""
    found = model
    for name in path.split("."):
        found = getattr(found, name, None)
    if not isinstance(found, nn.Module):
        raise InputError(f"model={path!r}: {type(model).__name__} has no module of that name")
    return found


def _checked(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a measurement, whose names and choices fit."""
    for name in options:
        if name not in _OPTIONS:
            raise unknown_argument("FlatnessCallback", name, _OPTIONS)
    Options.of(options)
    return {"progress": False, **options}


def _asked(measures: str | Sequence[str] | None) -> str | list[str] | None:
    """Return the names of measures, or what stands for several of which some may be left out."""
    if measures is None or (isinstance(measures, str) and not are_named(measures)):
        return measures
    return [row.name for row in named(measures)]


@contextlib.contextmanager
def _buffers_of_rank_zero(model: nn.Module) -> Iterator[None]:
    """Give all ranks the buffers of the first one inside, as DistributedDataParallel does before a forward pass.

    In training each rank's BatchNorm gathers statistics of its own samples.
    """
    buffers: Iterable[Any] = model.buffers() if _is_distributed() else ()
    kept = [(buffer, buffer.clone()) for buffer in buffers]
    for buffer, _ in kept:
        dist.broadcast(buffer, 0)
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in kept:
                buffer.copy_(before)


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
