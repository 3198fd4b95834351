"""What every public call on a model opens with: the user's model, loss and data, taken in hand once."""

import contextlib
import difflib
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import nn

from . import losses
from .errors import InputError
from .losses import Loss
from .messages import shown
from .model import calling, state
from .model.data import Batches
from .model.selectors import Selection
from .options import Options, check_flag
from .passes.checked import Checked, explained
from .passes.detached import TAKEN_AS_CONSTANT
from .passes.task import Task
from .report import Estimate

P = ParamSpec("P")
R = TypeVar("R")

_WITHOUT_LOSS = ("weights", "jacobian", "ascent")  # methods
_WITHOUT_DERIVATIVES = ("weights", "head", "monte-carlo")


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """Keep ``torch.compile`` from tracing a public function, and say how it is called where it is called otherwise.

    Its types stay visible.
    """
    parameters = inspect.signature(function).parameters
    names = [*parameters]
    positional = [name for name in names if parameters[name].kind is not inspect.Parameter.KEYWORD_ONLY]

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        if len(args) > len(positional):
            others = zip(names[len(positional) :], args[len(positional) :], strict=False)
            by_name = ", ".join(f"{name}={shown(value)}" for name, value in others)
            raise TypeError(
                f"{function.__name__}({', '.join(positional)}, *, …) takes {len(positional)} positional arguments, got "
                f"{len(args)}; the others are passed by name, as in {by_name}"
            )
        for name in kwargs:
            if name not in parameters:
                near = ", ".join(difflib.get_close_matches(name, names)) or ", ".join(names)
                raise TypeError(f"{function.__name__}() has no argument {name!r}; did you mean {near}?")
        return function(*args, **kwargs)

    return cast(Callable[P, R], torch.compiler.disable(called))


@dataclass(frozen=True)
class Opened:
    """The user's model, loss and data, while a public call works on them.

    Attributes:
        model: inside :func:`.state.observing`.
        loss: from :func:`.losses.resolve`.
        batches: the data.
        forward: the user's, or a call of the model itself, with its checks.
        progress: whether reading data shows a bar.
    """

    model: nn.Module
    loss: Loss
    batches: Batches
    forward: Checked
    progress: bool | None

    def noted(self, estimate: Estimate) -> Estimate:
        """Return an estimate with what there is to say of the loss and the model's forward pass, where it matters."""
        if self.forward.notes and estimate.method not in _WITHOUT_LOSS:
            estimate = replace(estimate, notes=(*estimate.notes, *self.forward.notes))
        if self.forward.detaches and estimate.method not in _WITHOUT_DERIVATIVES:
            estimate = replace(estimate, exact=False, notes=(*estimate.notes, TAKEN_AS_CONSTANT))
        return estimate

    def on(self, data: Any) -> "Opened":
        """Return the same with other data, to be read once."""
        return replace(self, batches=Batches(data, state.device(self.model), shown=self.progress))

    def task(self, options: Options, selection: Selection | None = None) -> Task:
        """Return these as what a measure of the selected layers, or of no layer, is asked about."""
        chosen = Selection({}, frozenset()) if selection is None else selection
        return Task(self.model, chosen, self.loss, self.batches, self.forward, options)


@contextlib.contextmanager
def opened(
    model: nn.Module,
    loss: Any,
    data: Any,
    *,
    reduction: str | None = None,
    forward: calling.Forward | None = None,
    passes: int = 1,
    ordered: bool = False,
    progress: bool | None = None,
) -> Iterator[Opened]:
    """Hold the user's model, loss and data ready to be measured; afterwards everything is as it was.

    Args:
        model: any module.
        loss: see :func:`.losses.resolve`.
        data: see :class:`.data.Batches`.
        reduction: ``"mean"`` or ``"sum"``, if the loss does not say or means another.
        forward: the user's, see :func:`.calling.run`.
        passes: how often the data will be read.
        ordered: whether the samples have to come in the same order at each read.
        progress: whether reading shows a bar.

    Raises:
        InputError: a model, loss or data that cannot be measured, see :func:`.state.observing`,
            :func:`.losses.resolve`, :class:`.data.Batches` and :class:`.checked.Checked`.
    """
    resolved = losses.resolve(loss, reduction)
    if forward is not None and not callable(forward):
        raise InputError(f"forward={shown(forward)}: a function (model, batch) -> (outputs, targets) is wanted")
    progress = None if progress is None else check_flag("progress", progress)
    with explained(), state.observing(model) as (module, random):
        batches = Batches(data, state.device(module), passes=passes, ordered=ordered, shown=progress)
        yield Opened(module, resolved, batches, Checked(module, resolved, forward, random), progress)
