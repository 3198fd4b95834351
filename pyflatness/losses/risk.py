"""The empirical risk E of a model over data, at its own parameters or others, and the loss terms that make it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import losses
from ..errors import InputError, NonFiniteError
from ..model import calling, data, parameters
from ..model.data import Batches
from . import BinaryCrossEntropy, CrossEntropy, CustomLoss, Loss, SquaredError


def rows(outputs: Tensor, targets: Any, loss: Loss, number: int) -> losses.Rows:
    """The loss terms of the outputs of batch ``number``.

    Raises:
        InputError: targets that do not fit.
    """
    targets = losses.tensor_targets(targets, number)
    with losses.of_batch(number):
        return losses.rows(outputs, targets, loss)


def divisor(loss: Loss, normaliser: float) -> float:
    """Return what E divides sums by; NaN for a normaliser of NaN, that of a loss that is not a number.

    Raises:
        InputError: no target counts.
    """
    normaliser = divisor_of_mean(normaliser)
    return normaliser if loss.reduction == "mean" or math.isnan(normaliser) else 1.0


def divisor_of_mean(normaliser: float) -> float:
    """Return what a mean over loss terms divides by, whatever the loss's reduction.

    Raises:
        InputError: no target counts.
    """
    if normaliser == 0:
        raise InputError("targets: every one is ignored (or has class weight 0), so the loss has no terms")
    return normaliser


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
            raise InputError(
                f"targets of batch {number}: the outputs' shape {tuple(outputs.shape)}, got {tuple(labels.shape)}"
            )
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
            f"targets of batch {number}: an accuracy needs classes of shape {wanted} for outputs "
            f"{tuple(outputs.shape)}, got {targets.dtype} of shape {tuple(targets.shape)}"
        )
    right = (outputs.argmax(dim) == labels) & ~outputs.isnan().any(dim)
    if isinstance(loss, CrossEntropy):
        return right, labels != loss.ignore_index
    return right, torch.ones_like(right)


def has_classes(outputs: Tensor, targets: Tensor, loss: Loss) -> bool:
    """Whether the targets are something a prediction can be right about, so that :func:`hits` takes them."""
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
    """E, and over how many samples."""

    value: float
    samples: int


def at(
    model: nn.Module,
    points: Sequence[Mapping[str, Tensor]],
    loss: Loss,
    batches: Batches,
    forward: calling.Forward | None,
    nan_policy: str = "raise",
) -> list[Risk]:
    """E of the model with other parameters, see :func:`.parameters.run`, at several points in one pass over the data.

    Raises:
        InputError: targets that do not fit.
        NonFiniteError: E is NaN or infinite at a point, but under ``"propagate"``.
    """
    sums, normaliser, samples = [0.0] * len(points), 0.0, 0
    for number, batch in enumerate(batches):
        for place, values in enumerate(points):
            outputs, targets = parameters.run(model, values, batch, forward)
            if place == 0:
                terms = rows(outputs, targets, loss, number).terms
                normaliser += float(terms.weights.sum())
                samples += data.size(batch)
            value = float(loss.value(outputs, targets))
            if not math.isfinite(value) and nan_policy != "propagate":
                where = " under noise" if values else ""
                raise NonFiniteError(
                    f"batch {number}: the loss of the model{where} is {value}; no sample is left out of it, whatever "
                    "nan_policy says"
                )
            sums[place] += value
    whole = divisor(loss, normaliser)
    return [Risk(total / whole, samples) for total in sums]
