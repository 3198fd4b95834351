"""What every public call on a model opens with: the user's model, loss and data, taken in hand once."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from . import capture, losses
from .checked import Checked, explained
from .data import Batches
from .detached import TAKEN_AS_CONSTANT
from .errors import InputError
from .losses import Loss
from .options import Options, check_flag
from .received import shown
from .report import Estimate
from .selectors import Selection
from .task import Task

_WITHOUT_LOSS = ("weights", "jacobian", "ascent")  # methods
_WITHOUT_DERIVATIVES = ("weights", "head", "monte-carlo")


@dataclass(frozen=True)
class Opened:
    """The user's model, loss and data, while a public call works on them.

    Attributes:
        model: inside :func:`.capture.observing`.
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
        return replace(self, batches=Batches(data, capture.device(self.model), shown=self.progress))

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
    forward: capture.Forward | None = None,
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
        forward: the user's, see :func:`.capture.run`.
        passes: how often the data will be read.
        ordered: whether the samples have to come in the same order at each read.
        progress: whether reading shows a bar.

    Raises:
        InputError: a model, loss or data that cannot be measured, see :func:`.capture.observing`,
            :func:`.losses.resolve`, :class:`.data.Batches` and :class:`.checked.Checked`.
    """
    resolved = losses.resolve(loss, reduction)
    if forward is not None and not callable(forward):
        raise InputError(f"forward={shown(forward)}: a function (model, batch) -> (outputs, targets) is wanted")
    progress = None if progress is None else check_flag("progress", progress)
    with explained(), capture.observing(model) as module:
        batches = Batches(data, capture.device(module), passes=passes, ordered=ordered, shown=progress)
        yield Opened(module, resolved, batches, Checked(module, resolved, forward), progress)
