"""Compute the empirical risk E of a model over data, at its own parameters or others, and its loss terms."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .. import losses
from ..errors import InputError, NonFiniteError
from ..model import calling, data, parameters
from ..model.data import Batches
from ..numerics.accumulate import Accumulator, check_together
from . import BinaryCrossEntropy, CrossEntropy, CustomLoss, Loss, SquaredError
from .base import wrong_shape


def rows(outputs: Tensor, targets: Any, loss: Loss, number: int) -> losses.Rows:
    """Return the loss terms of the outputs of batch ``number``.

    Raises:
        InputError: targets that do not fit.
    """
    targets = losses.tensor_targets(targets, number)
    with losses.of_batch(number):
        return losses.rows(outputs, targets, loss)


def weight(outputs: Tensor, targets: Any, loss: Loss, number: int) -> float:
    """Return the sum of the weights of a batch's loss terms, its contribution to the normaliser.

    Raises:
        InputError: targets that do not fit.
    """
    return float(rows(outputs, targets, loss, number).terms.weights.sum())


def not_finite(number: int, value: float, where: str = "") -> NonFiniteError:
    """Return the error for a loss of all samples together, which none is left out of."""
    return NonFiniteError(
        f"batch {number}: the loss of the model{where} is {value}; no sample can be left out of this value "
        "(nan_policy='omit' has no part in it), so leave samples with NaN or infinity out of the data"
    )


def hits(outputs: Tensor, targets: Any, loss: Loss, number: int) -> Tensor:
    """Return for each prediction of a batch whether it is right, (predictions,); see :func:`judged`."""
    right, counting = judged(outputs, targets, loss, number)
    return right[counting]


def judged(outputs: Tensor, targets: Any, loss: Loss, number: int) -> tuple[Tensor, Tensor]:
    """Return for each target of a batch whether it is predicted rightly, and whether it counts; bool, of one shape.

    The prediction is the largest output of a term, or the sign of a binary one.

    Raises:
        InputError: targets that are no classes.
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
    """Return whether the targets are something a prediction can be right about, so that :func:`hits` takes them."""
    if isinstance(loss, SquaredError) or _takes_several(loss):
        return False
    if isinstance(loss, (BinaryCrossEntropy, CrossEntropy)):
        return True
    dim = 0 if outputs.ndim == 1 else 1
    return not targets.is_floating_point() and targets.shape == (*outputs.shape[:dim], *outputs.shape[dim + 1 :])


def _takes_several(loss: Loss) -> bool:
    return isinstance(loss, CustomLoss) and loss.several is not None


@dataclass(frozen=True)
class Risk:
    """Hold E, and over how many samples it is."""

    value: float
    samples: int


def at(
    model: nn.Module,
    points: Sequence[Mapping[str, Tensor]],
    loss: Loss,
    batches: Batches,
    forward: calling.Forward | None,
    nan_policy: str,
) -> list[Risk]:
    """Return E of the model with other parameters, see :func:`.parameters.run`, at several points by one data read.

    Raises:
        InputError: targets that do not fit.
        NonFiniteError: E is NaN or infinite at a point, but under ``"propagate"``.
    """
    sums, over = [0.0] * len(points), Accumulator(nan_policy, loss.reduction)
    for number, batch in enumerate(batches):
        for place, values in enumerate(points):
            outputs, targets = parameters.run(model, values, batch, forward)
            if place == 0:
                over.add(data.size(batch), weight(outputs, targets, loss, number))
            value, where = float(loss.value(outputs, targets)), " under noise" if values else ""
            error = partial(not_finite, number, value, where)
            check_together(nan_policy, math.isfinite(value), error)
            sums[place] += value
    totals = over.together(batches.shard, {"sums": torch.tensor(sums, dtype=torch.float64, device="cpu")})["sums"]
    return [Risk(total / over.normaliser, over.samples) for total in totals.tolist()]
