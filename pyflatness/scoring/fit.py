"""Take the loss and accuracy of a network from the passes that measure it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import losses
from ..losses import auto, risk
from ..model import calling
from ..numerics.ranks import ALONE, Ranks


@dataclass(frozen=True)
class Fit:
    """Hold how well a network does on its data; None where that is not known."""

    loss: float | None = None
    accuracy: float | None = None


NO_FIT = Fit()


class FitRecorder:
    """Record sums of the losses and of the correct predictions: a ``forward`` that calls the model.

    A batch is counted when the next one begins: by then the measure has checked it, and says better than the loss
    function would what is wrong with its targets. A measure that reads the data twice has every batch counted twice,
    which changes no mean.

    Args:
        loss: see :func:`.losses.resolve`; ``"auto"`` is found by the first batch.
        step: called after each batch.
        active: False to call the model and nothing else.
    """

    def __init__(self, loss: Any, step: Callable[[], None], *, active: bool) -> None:
        self._step, self._active = step, active
        self._loss = None if auto.is_auto(loss) else losses.resolve(loss)
        self._pending: tuple[Tensor, Tensor] | None = None
        self._sums: list[Tensor] = []  # per batch: losses, loss terms, correct predictions, predictions

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        """See :data:`.calling.Forward`."""
        if self._loss is None:
            self._loss = auto.unchecked(model, batch)
        if calling.is_dry_run():
            return calling.run(model, batch, None)
        self._count()
        outputs, targets = calling.run(model, batch, None)
        if self._active and not outputs.is_meta:  # outputs without values have no loss
            self._pending = outputs.detach(), targets
        self._step()
        return outputs, targets

    def fit(self, ranks: Ranks = ALONE) -> Fit:
        """Return means over all samples, of all ranks, however they were cut into batches."""
        self._count()
        found = ranks.exchange("loss and accuracy", torch.stack(self._sums).sum(dim=0).tolist() if self._sums else None)
        sums = [each for each in found if each is not None]
        if not sums:
            return NO_FIT
        loss, terms, correct, predictions = map(sum, zip(*sums, strict=True))
        return Fit(loss / terms if terms else None, correct / predictions if predictions else None)

    def _count(self) -> None:
        if self._pending is None:
            return
        (outputs, targets), self._pending = self._pending, None
        loss, number = self._loss, len(self._sums)
        assert loss is not None
        right = counting = torch.zeros(0, dtype=torch.bool, device="cpu")
        if not targets.is_floating_point():  # class indices; the column is empty for probabilities and values
            right, counting = risk.judged(outputs, targets, loss, number)
        sums = (loss.value(outputs, targets), risk.weight(outputs, targets, loss, number), right & counting, counting)
        numbers = [float(part.sum() if isinstance(part, Tensor) else part) for part in sums]
        self._sums.append(torch.tensor(numbers, dtype=torch.float64, device="cpu"))
