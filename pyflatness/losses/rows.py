"""Turn a batch's outputs into rows, one for each loss term, with errors that name the batch."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..errors import InputError
from ..messages import check_tensor
from .base import Loss, Terms, wrong_shape


@dataclass(frozen=True)
class Rows:
    """Hold the loss terms of a model's outputs."""

    terms: Terms
    positions: bool  # whether each position is a term; otherwise each sample is
    dim: int  # the dimension of a term's outputs, if each position is a term

    def of(self, entries: Tensor) -> Tensor:
        """Return entries of the outputs' shape as (rows, C)."""
        if not self.positions:
            return entries.reshape(len(entries), -1)
        channels_last = entries.unsqueeze(-1) if entries.ndim == 1 else entries.movedim(self.dim, -1)
        return channels_last.reshape(-1, channels_last.shape[-1])


def rows(outputs: Tensor, targets: Tensor, loss: Loss) -> Rows:
    """Return the rows of outputs, without their graph; these are (n, C, …), or (n,) for one output a sample."""
    outputs, targets = outputs.detach(), targets.detach()
    if loss.elementwise and outputs.ndim == 1 and targets.shape != outputs.shape:  # torch might broadcast them
        raise wrong_shape("targets", targets, outputs)
    if loss.positions and outputs.ndim == 1:
        outputs, targets = outputs.unsqueeze(-1), targets.unsqueeze(-1) if targets.ndim == 1 else targets
        return Rows(loss.terms(outputs, targets, 1), True, 1)
    dim = loss.class_dim(outputs)
    if dim >= outputs.ndim:
        raise InputError(
            f"the model's output {tuple(outputs.shape)} has no dimension {dim} for the classes; have "
            "the model (or forward=) return outputs (n, classes)"
        )
    return Rows(loss.terms(outputs, targets, dim), loss.positions, dim)


def check_squares(gradients: Tensor, weights: Tensor) -> None:
    """Raise if a term of weight 0 has a gradient, whose square over the weight is infinite.

    Args:
        gradients: (rows,) or (rows, C), each the term's weight times the gradient of its loss.
        weights: (rows,).

    Raises:
        InputError: there is such a term.
    """
    if bool((gradients[weights == 0].nan_to_num() != 0).any()):
        raise InputError(
            "a loss term of weight 0 is not 0, as label_smoothing= makes it at targets of a class with weight 0: the "
            "square of its gradient over its weight is infinite; leave these samples out (ignore_index=), or pass "
            "label_smoothing=0 or a weight above 0"
        )


def tensor_targets(targets: Any, number: int) -> Tensor:
    """Return the targets of batch ``number``."""
    return check_tensor(f"batch {number}: targets", targets).detach()


@contextlib.contextmanager
def of_batch(number: int) -> Iterator[None]:
    """Make input errors in this context name batch ``number``."""
    try:
        yield
    except InputError as error:
        raise type(error)(f"batch {number}: {error}") from error.__cause__
