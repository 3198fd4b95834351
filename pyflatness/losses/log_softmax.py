"""Treat losses that are linear in a model's log-probabilities as cross-entropy of its logits.

    -log softmax(z)_y,   Σ_c t_c (log t_c - log softmax(z)_c)

The second derivative of ``NLLLoss`` and ``KLDivLoss`` in their argument is 0, so that the GGN at the outputs is 0, and
so are costs of changes and importances by it. If a model ends in a ``log_softmax``, or the logarithm of a softmax, its
argument z counts as the model's outputs. The loss is the same number, and has all of the curvature.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import interrupts
from ..errors import InputError
from ..model.calling import Watcher, watched_by
from .base import Loss, Terms
from .cross_entropy import CrossEntropy
from .custom import CustomLoss

NOTE = (
    "the model's log_softmax is taken as a part of the loss, which together are cross-entropy (less the targets' "
    "entropy) of the logits in front of it: that changes no loss and no Hessian, and the GGN is that of the logits"
)


class OfLogits(CrossEntropy):
    """Represent ``NLLLoss`` of a log_softmax, in the logits."""

    def fits(self, logits: Tensor) -> bool:
        """Return whether the loss of logits of this shape is a sum or mean over their rows."""
        return logits.ndim > 1


@dataclass
class DivergenceOfLogits(OfLogits):
    """Represent ``KLDivLoss`` of a log_softmax, in the logits."""

    log_target: bool
    how: str  # the reduction of KLDivLoss

    def fits(self, logits: Tensor) -> bool:
        return logits.ndim == 2 or (logits.ndim > 2 and self.how != "batchmean")  # "batchmean" divides by n, not rows

    def terms(self, outputs: Tensor, targets: Tensor | None, class_dim: int) -> Terms:
        if targets is None or not targets.is_floating_point():
            raise InputError("targets: KLDivLoss wants probabilities (float), of the outputs' shape")
        made = super().terms(outputs, targets.exp() if self.log_target else targets, class_dim)
        return replace(made, scale=made.scale * self._factor(outputs))

    def labels(self, shape: Sequence[int], targets: Tensor | None, class_dim: int) -> None:
        """See :class:`.base.Loss`."""

    def _factor(self, outputs: Tensor) -> float:
        return 1 / outputs.shape[1] if self.how == "mean" else 1.0

    def reduced(self, outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
        log_p = F.log_softmax(outputs.double(), dim=1)
        each = F.kl_div(log_p, targets.double(), reduction="none", log_target=self.log_target).sum(dim=1)
        each = each * self._factor(outputs)
        return each.sum() if reduction == "sum" else each


def split(loss: Loss, run: Callable[[], Tensor]) -> Loss:
    """Return the loss in the logits if it is one of these and ``run`` returns a log_softmax; otherwise the loss."""
    found = _in_logits(loss)
    if found is None:
        return loss
    with interrupts.suppressed(), watched_by(last := Last()):  # an error of the model comes again in the measurement
        logits = last.argument(run())
        if logits is not None and found.fits(logits):
            return found
    return loss


def _in_logits(loss: Loss) -> OfLogits | None:
    """Return the loss in the logits for one of the two losses; None for others, or if the user gave a reduction."""
    if not isinstance(loss, CustomLoss):
        return None
    given: Any = loss.loss
    keywords = given.keywords if isinstance(given, functools.partial) and not given.args else {}
    function = given.func if keywords else given
    if function is F.nll_loss:
        given = nn.NLLLoss(**keywords)
    elif function is F.kl_div:
        given = nn.KLDivLoss(**keywords)
    if type(given) not in (nn.NLLLoss, nn.KLDivLoss):
        return None
    how = "mean" if given.reduction == "batchmean" else given.reduction
    if how != loss.reduction:
        return None
    if isinstance(given, nn.NLLLoss):
        return OfLogits(given.weight, given.ignore_index, 0.0, how)
    return DivergenceOfLogits(None, -100, 0.0, how, given.log_target, given.reduction)


_LOG_SOFTMAX = (F.log_softmax, torch.log_softmax, Tensor.log_softmax, torch.special.log_softmax)
_SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax)
_LOG = (torch.log, Tensor.log)


class Last(Watcher):
    """Watch a forward pass, and keep the argument of its last log_softmax, or of its last logarithm of a softmax."""

    def __init__(self) -> None:
        self._softmax: tuple[Any, Tensor | None] = (None, None)  # what the last softmax returned, and its argument
        self._found: tuple[Any, Tensor | None] = (None, None)

    def argument(self, outputs: Tensor) -> Tensor | None:
        """Return the argument of the log_softmax over dimension 1 that returned this tensor; otherwise None."""
        returned, logits = self._found
        return logits if returned is outputs else None

    def see(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """See :class:`.calling.Watcher`."""
        if func in _LOG_SOFTMAX:
            self._found = result, _over_classes(*args, **kwargs)
        elif func in _SOFTMAX:
            self._softmax = result, _over_classes(*args, **kwargs)
        elif func in _LOG and args and args[0] is self._softmax[0]:
            self._found = result, self._softmax[1]


def _over_classes(input: Tensor, dim: int | None = None, *_: Any, **__: Any) -> Tensor | None:  # noqa: A002, torch's
    """Return the argument of a softmax if it is over dimension 1."""
    over = 1 if dim is None and input.ndim == 2 else dim
    return input if over is not None and input.ndim > 1 and over % input.ndim == 1 else None
