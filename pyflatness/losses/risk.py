"""Compute the terms of an empirical risk and of an accuracy from the outputs of a batch."""

import functools
import math
from typing import Any

import torch
from torch import Tensor

from .. import losses
from ..errors import InputError, NonFiniteError
from ..numerics.accumulate import check_together
from . import BinaryCrossEntropy, CrossEntropy, CustomLoss, Loss, SquaredError
from .base import wrong_shape


def rows(outputs: Tensor, targets: Any, loss: Loss, number: int) -> losses.Rows:
    """Return the loss terms of the outputs of batch ``number``."""
    targets = losses.tensor_targets(targets, number)
    with losses.of_batch(number):
        return losses.rows(outputs, targets, loss)


def weight(outputs: Tensor, targets: Any, loss: Loss, number: int) -> float:
    """Return the sum of the weights of a batch's loss terms, its contribution to the normaliser."""
    return float(rows(outputs, targets, loss, number).terms.weights.sum())


def not_finite(number: int, value: float, where: str = "") -> NonFiniteError:
    """Return the error for a loss of all samples together, which cannot leave out a sample."""
    return NonFiniteError(
        f"batch {number}: the loss of the model{where} is {value}; no sample can be left out of this value "
        "(nan_policy='omit' has no part in it), so leave samples with NaN or infinity out of the data"
    )


def finite(value: Tensor, policy: str, number: int, where: str = "") -> float:
    """Return the loss of all samples of batch ``number``, or raise if it is not finite, by the policy."""
    found = float(value)
    check_together(policy, math.isfinite(found), functools.partial(not_finite, number, found, where))
    return found


def hits(outputs: Tensor, targets: Any, loss: Loss, number: int) -> Tensor:
    """Return whether each prediction of a batch that counts is right, (predictions,) bool; see :func:`judged`."""
    right, counting = judged(outputs, targets, loss, number)
    return right[counting]


def judged(outputs: Tensor, targets: Any, loss: Loss, number: int) -> tuple[Tensor, Tensor]:
    """Return whether each target of a batch is predicted correctly, and whether it counts; bool, of one shape.

    The prediction is the largest output of a term, or the sign of a binary one.
    """
    labels = losses.tensor_targets(targets, number)
    if isinstance(loss, BinaryCrossEntropy):
        if outputs.shape != labels.shape:
            raise wrong_shape(f"batch {number}: targets", labels, outputs)
        return ((outputs > 0) == (labels > 0.5)) & ~outputs.isnan(), torch.ones_like(labels, dtype=torch.bool)
    if _takes_several(loss):
        raise InputError(
            "model: it returns several outputs, and an accuracy is of one; pass forward=, a function (model, batch) -> "
            "(outputs, targets) that returns that one"
        )
    dim = 0 if outputs.ndim == 1 else 1
    if isinstance(loss, CrossEntropy) and labels.is_floating_point() and labels.shape == outputs.shape:
        labels = labels.argmax(dim)
    wanted = (*outputs.shape[:dim], *outputs.shape[dim + 1 :])
    if labels.is_floating_point() or tuple(labels.shape) != wanted:
        raise InputError(
            f"batch {number}: targets: an accuracy needs classes of shape {wanted} for outputs "
            f"{tuple(outputs.shape)}, got {targets.dtype} of shape {tuple(targets.shape)}"
        )
    right = (outputs.argmax(dim) == labels) & ~outputs.isnan().any(dim)
    if isinstance(loss, CrossEntropy):
        return right, labels != loss.ignore_index
    return right, torch.ones_like(right)


def has_classes(outputs: Tensor, targets: Tensor, loss: Loss) -> bool:
    """Return whether the targets are classes, so that there is an accuracy and :func:`hits` takes them."""
    if isinstance(loss, SquaredError) or _takes_several(loss):
        return False
    if isinstance(loss, (BinaryCrossEntropy, CrossEntropy)):
        return True
    dim = 0 if outputs.ndim == 1 else 1
    return not targets.is_floating_point() and targets.shape == (*outputs.shape[:dim], *outputs.shape[dim + 1 :])


def _takes_several(loss: Loss) -> bool:
    return isinstance(loss, CustomLoss) and loss.several is not None
