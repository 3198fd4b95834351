"""Hold what the callbacks share: measuring a model in training, naming and keeping the values, counting the time."""

import contextlib
import itertools
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .. import interrupts, progress
from ..api import measure
from ..errors import InputError, NonFiniteError
from ..measures import are_named, named
from ..messages import shown, unknown_argument
from ..model import generators
from ..model.data import used_up
from ..model.selectors import Selector
from ..model.state import in_eval_mode
from ..numerics.process_groups import refuse
from ..options import EVERY, Options, check_count, check_flag
from ..report import Report
from ..training import loaders
from ..training.budget import CLOCK, HOW, Ran, TimeBudget, check, of_distribution
from ..training.history import History

NETWORK = "network"
_OPTIONS = [name for name in EVERY if name not in ("eval", "process_group")]


class Watch:
    """Measure a model at the ends of epochs, and leave all that the training depends on as it was; a base of callbacks.

    Attributes:
        history: a :class:`pyflatness.results.History` with a record for each measured epoch.
    """

    def __init__(
        self,
        layers: Selector | Sequence[Selector] | None = None,
        measures: str | Sequence[str] | None = "relative_flatness",
        data: Any = "train",
        *,
        loss: Any = None,
        model: str | None = None,
        every_n_epochs: int = 1,
        limit_batches: int | None = None,
        name: str = "flatness",
        strict: bool = False,
        budget: float | None = None,
        **options: Any,
    ) -> None:
        """Set what is measured, when and how; the documentation of the callbacks explains each argument."""
        super().__init__()
        for option in options:
            if option not in _OPTIONS:
                raise unknown_argument(type(self).__name__, option, _OPTIONS)
        Options.of(options)
        self._layers, self._data, self._loss, self._path, self._name = layers, data, loss, model, name
        self._budget = None if budget is None else TimeBudget(budget, None if data == "train" else data)
        by_budget: dict[str, Any] = {} if budget is None else {"progress": False, **HOW}
        if budget is not None:
            check(loss, options)
        self._options = {**by_budget, **options}
        self._measures: Any = measures
        if measures is not None and (not isinstance(measures, str) or are_named(measures)):
            self._measures = [row.name for row in named(measures)]  # some may be left out in later epochs
        self._every_n_epochs = check_count("every_n_epochs", every_n_epochs, 1)
        self._limit_batches = None if limit_batches is None else check_count("limit_batches", limit_batches, 1)
        self._strict = check_flag("strict", strict)
        if isinstance(data, str) and data not in ("train", "val"):
            raise InputError(f"data={shown(data)}: 'train', 'val', a loader or a tuple of tensors is wanted")
        if hasattr(data, "__next__"):
            raise used_up(data, "and every epoch is to read it")
        self.history = History(budget=self._budget)
        self._said: set[str] = set()
        self._begin()

    def _part_of(self, model: Any) -> nn.Module:
        """Return the module that is measured, at a path of attributes such as ``"net"`` or ``"ema.module"``."""
        found = model
        for name in self._path.split(".") if self._path is not None else ():
            found = getattr(found, name, None)
        if not isinstance(found, nn.Module):
            raise InputError(f"model={self._path!r}: {type(model).__name__} has no module of that name")
        return found

    def _begin(self) -> None:
        """Start the clock of the training, which the time of the measurements is compared with."""
        if self._budget is not None:
            refuse(None, "budget=")  # the group may be there since the callback was made
        self._begun, self._spent = time.perf_counter(), 0.0

    def _measured(
        self, epoch: float, step: int, problem: Callable[[], tuple[nn.Module, Any]], batches: Callable[[], Any]
    ) -> dict[str, float]:
        """Return the values by the names they are logged under; none, with a warning, if measuring is not possible.

        Epoch and step are as the trainer counts them; ``problem`` returns the model and its loss.
        """
        started = time.perf_counter()
        try:
            with interrupts.undone():
                report = self._as_found(problem, batches)
        except Exception as error:  # of any kind: it must not end hours of training
            if self._strict or interrupts.is_raised(error):
                raise
            kind = type(error).__name__
            when, about = f"epoch {epoch:.4g}", None
            if self._budget is not None:
                when = f"step {step}"
                about = kind if isinstance(error, NonFiniteError) else None  # its text counts samples of a batch
            self._once(f"{when} is not measured: ", f"{kind}: {error}", about)
            return {}
        finally:
            spent = time.perf_counter() - started
            self._spent += spent
            if self._budget is not None:
                self._budget.took()
        if self._layers is None and report.uncovered:
            names, share = ", ".join(report.uncovered), sum(report.uncovered.values())
            self._once("", f"weights with {share:.2g} of all entries are not measured, nor in any later epoch: {names}")
        numbers = {} if self._budget is None else {CLOCK: self._budget.trained}
        report = report if self._budget is None else of_distribution(report)
        self.history.add(report, step=step, epoch=epoch, seconds=spent, **numbers)
        values = {
            f"{self._name}/{name}/{layer}" if layer else f"{self._name}/{NETWORK}/{name}": found.value
            for name, held in report.by_measure().items()
            for layer, found in held.items()
        }
        return {**values, f"{self._name}/seconds": spent}

    def _due(self, batch: Any) -> Any:
        """Return what to measure after a step of the training on a batch, where there is a budget that allows it."""
        return None if self._budget is None else self._budget.due(batch if self._data == "train" else None)

    def _end(self, *, prints: bool) -> None:
        """Print what the measurements have cost since :meth:`_begin`, where something was measured."""
        if not self.history.records or not prints:
            return
        ran = Ran(0, time.perf_counter() - self._begun - self._spent, self._spent)
        of = {"train": "the training data", "val": "the validation data"}
        data = of[self._data] if isinstance(self._data, str) else "the data passed"
        print(f"{self._name}: {ran.cost(f' on {data}')}")

    def _limited(self, data: Any) -> Any:
        """Return the first batches as a list: a measure may read them several times, and a loader may shuffle."""
        if self._limit_batches is None:
            return data
        if isinstance(data, tuple):
            raise InputError("limit_batches= is for loaders; pass the tensors' first samples as data=")
        return [*itertools.islice(data, self._limit_batches)]

    def _as_found(self, problem: Callable[[], tuple[nn.Module, Any]], batches: Callable[[], Any]) -> Report:
        """Measure a model in training in eval mode, and leave it, its loader and random states as they were."""
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
        """Return a report of all measures; of measures that were named, those that are possible, from now on."""
        names = self._measures if isinstance(self._measures, list) and len(self._measures) > 1 else []
        refused: dict[str, Any] = {}
        try:
            report = self._of(model, loss, data, self._measures)
            refused = {name: why for name, why in report.skipped.items() if name in {*names} - {*report.measures}}
            if refused and self._strict:
                raise InputError(next(iter(refused.values())))
        except InputError:
            if self._strict or not names:
                raise
            for name in names:
                try:
                    self._of(model, loss, data, [name])
                except InputError as error:
                    refused[name] = error
            possible = [name for name in names if name not in refused]
            if not possible:
                raise next(iter(refused.values())) from None
            report = self._of(model, loss, data, possible)
        for name, why in refused.items():
            again = isinstance(why, NonFiniteError)  # the weights of another epoch may be finite
            self._warn(f"{name} is left out{'' if again else ' from now on'}: {why}")
        if names:
            self._measures = [n for n in names if n not in refused or isinstance(refused[n], NonFiniteError)]
        return report

    def _of(self, model: nn.Module, loss: Any, data: Any, measures: str | list[str] | None) -> Report:
        with progress.in_lines():  # the trainer may have a bar
            return measure(model, loss, data, layers=self._layers, measures=measures, **self._options)

    def _once(self, beginning: str, text: str, about: str | None = None) -> None:
        """Warn of something once, although it is so in every epoch."""
        if (about or text) not in self._said:
            self._said.add(about or text)
            self._warn(beginning + text)

    def _warn(self, text: str) -> None:
        if not _is_distributed() or dist.get_rank() == 0:
            warnings.warn(f"{self._name}: {text}", RuntimeWarning, stacklevel=2)


@contextlib.contextmanager
def _buffers_of_rank_zero(model: nn.Module) -> Iterator[None]:
    """Give all ranks the buffers of the first while the context is open, as DistributedDataParallel does.

    In training the BatchNorm of each rank collects statistics of the rank's own samples.
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
