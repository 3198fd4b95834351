"""The generalisation gap: mean loss and accuracy on training and test data, one pass each.

    gap = E_test - E_train,   E = Σ terms of the loss / Σ their mass

E is the user's own loss over the whole data set; for the reduction ``"sum"`` it is the mean that goes with it, since
sums over data sets of different size have no difference that means anything.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import capture, risk
from ..data import size
from ..errors import InputError, NonFiniteError
from ..losses import Loss
from ..opening import Opened, opened
from ..options import Options


@dataclass(frozen=True)
class Performance:
    """How well a model does on a data set.

    Attributes:
        loss: the mean over its loss terms.
        accuracy: the share of predictions that are right; None where targets are no classes.
        samples: how many.
        omitted: samples left out by ``nan_policy="omit"``.
    """

    loss: float
    accuracy: float | None
    samples: int
    omitted: int = 0


@dataclass(frozen=True)
class GeneralizationGap:
    """How much worse a model does on data that it was not trained on.

    Attributes:
        train: on the training data.
        test: on the test data.
    """

    train: Performance
    test: Performance

    @property
    def gap(self) -> float:
        """The loss on test data less that on training data."""
        return self.test.loss - self.train.loss

    @property
    def accuracy_gap(self) -> float | None:
        """The accuracy on training data less that on test data; None where targets are no classes."""
        if self.train.accuracy is None or self.test.accuracy is None:
            return None
        return self.train.accuracy - self.test.accuracy


@capture.eager
def generalization_gap(
    model: nn.Module,
    loss: Any,
    train: Any,
    test: Any,
    *,
    nan_policy: str = "raise",
    reduction: str | None = None,
    forward: capture.Forward | None = None,
    progress: bool | None = None,
) -> GeneralizationGap:
    """Loss and accuracy of a model on training and test data, in one pass over each.

    E(f) - E_emp(f, S)   (Petzka et al. 2021, section 1), the risk estimated on ``test``.

    Args:
        model: in eval mode; left as it was found.
        loss: the loss the model was trained with; its options count, and the values are means over its terms.
        train: a tuple of tensors, or batches, as for :func:`pyflatness.relative_flatness`.
        test: the same.
        nan_policy: ``"raise"``; ``"propagate"``: a loss that is NaN makes the mean NaN; ``"omit"``: samples whose loss
            is NaN or infinite are left out, of the accuracy too, and counted.
        reduction: ``"mean"`` or ``"sum"``, if the loss does not say or means another.
        forward: ``(model, batch) -> (outputs, targets)``.
        progress: show a bar.

    Returns:
        Both, and their differences.

    Raises:
        InputError: batches, targets, modes or options that do not fit.
        NonFiniteError: a loss that is NaN or infinite, under ``nan_policy="raise"``.

    Example:
        >>> import torch, pyflatness as pf
        >>> model = torch.nn.Linear(2, 2, bias=False)
        >>> _ = model.weight.data.copy_(torch.eye(2))
        >>> train = torch.eye(2), torch.tensor([0, 1])
        >>> test = torch.eye(2), torch.tensor([0, 0])
        >>> found = pf.generalization_gap(model, torch.nn.CrossEntropyLoss(), train, test)
        >>> round(found.gap, 6), found.accuracy_gap
        (0.5, 0.5)
    """
    policy = Options(nan_policy=nan_policy).nan_policy
    with opened(model, loss, train, reduction=reduction, forward=forward, progress=progress) as call:
        return GeneralizationGap(performance(call, policy), performance(call.on(test), policy))


def performance(call: Opened, nan_policy: str = "raise") -> Performance:
    """Loss and accuracy in one pass."""
    loss = call.loss
    total = mass = 0.0
    right = predictions = samples = omitted = 0
    classes = True
    for number, batch in enumerate(call.batches):
        outputs, targets = capture.run(call.model, batch, call.forward)
        terms, count = risk.rows(outputs, targets, loss, number).terms, size(batch)
        value = float(loss.value(outputs, targets))
        if not math.isfinite(value) and nan_policy != "propagate":
            if nan_policy == "raise":
                raise NonFiniteError(
                    f"batch {number}: the loss is {value}; nan_policy='omit' leaves such samples out, 'propagate' "
                    "lets them through"
                )
            kept = _finite(loss, outputs, targets, count, number)
            outputs, targets, omitted = outputs[kept], targets[kept], omitted + int((~kept).sum())
            terms, count = risk.rows(outputs, targets, loss, number).terms, int(kept.sum())
            value = float(loss.value(outputs, targets)) if count else 0.0
        total, mass, samples = total + value, mass + float(terms.mass.sum()), samples + count
        classes = classes and risk.has_classes(outputs, targets, loss)
        if classes:
            hits = risk.hits(outputs, targets, loss, number)
            right, predictions = right + int(hits.sum()), predictions + len(hits)
    accuracy = right / predictions if classes and predictions else None
    return Performance(total / risk.divisor_of_mean(mass), accuracy, samples, omitted)


def _finite(loss: Loss, outputs: Tensor, targets: Tensor, samples: int, number: int) -> Tensor:
    """(samples,): whether a sample's own loss is a finite number."""
    if len(outputs) != samples or len(targets) != samples:
        raise InputError(
            f"batch {number}: nan_policy='omit' cannot tell the {samples} samples apart in outputs of shape "
            f"{tuple(outputs.shape)} and targets of shape {tuple(targets.shape)}"
        )
    values = [loss.value(outputs[i : i + 1], targets[i : i + 1]) for i in range(samples)]
    return torch.stack(values).isfinite().to(outputs.device)
