"""One checkpoint of a network, measured: its rows of the table that ``pyflatness score`` writes."""

import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import capture
from ..measures import Measure
from ..options import Options
from ..pipeline import layer_measure
from . import checkpoints
from .specs import reason

_IGNORED = -100  # cross-entropy's ignore_index


@dataclass(frozen=True)
class Row:
    """A checkpoint, a layer, a measure. Either the numbers are there, or ``error`` says why not."""

    checkpoint: str
    layer: str
    measure: str
    value: float | None = None
    stderr: float | None = None
    method: str | None = None
    exact: bool | None = None
    samples: int | None = None
    loss: float | None = None
    accuracy: float | None = None
    seconds: float | None = None
    error: str = ""


@dataclass(frozen=True)
class Fit:
    """How well a network does on its data; None where that is not known."""

    loss: float | None
    accuracy: float | None


@dataclass(frozen=True)
class Scoring:
    """What is the same for all checkpoints; a layer of None is the last Linear that ran.

    Measures of the network alone have one row, with no layer.
    """

    model: nn.Module
    data: Any
    loss: str
    layers: tuple[str | None, ...]
    measures: tuple[Measure, ...]
    allow_pickle: bool
    options: Options

    def pairs(self) -> list[tuple[str | None, Measure]]:
        """The layer and measure of each row."""
        rows = [(layer, measure) for layer in self.layers for measure in self.measures if not measure.of_network_alone]
        return [*rows, *((None, measure) for measure in self.measures if measure.of_network_alone)]

    def rows(self, path: Path, step: Callable[[Measure], None]) -> Iterator[Row]:
        """A row for each layer and measure; nothing is raised.

        Args:
            path: the checkpoint.
            step: called after each batch.
        """
        problem: Exception | None = None
        fit: Fit | None = None
        try:
            checkpoints.fit(self.model, checkpoints.load(path, allow_pickle=self.allow_pickle))
        except Exception as error:
            problem = error
        for layer, measure in self.pairs():
            recorder = Recorder(self.loss, functools.partial(step, measure), active=fit is None)
            start = time.perf_counter()
            try:
                if problem is not None:
                    raise problem
                estimate = layer_measure(
                    *(measure, self.model, self.loss, self.data, layer, self.options), forward=recorder, progress=False
                )
                found = fit or recorder.fit()
                fit = found if measure.reads else fit
            except Exception as error:  # the user's model and data run here: whatever it is, the next row goes on
                yield Row(str(path), layer or "", measure.name, error=reason(error))
                continue
            yield Row(
                *(str(path), estimate.layer, measure.name, estimate.value, estimate.stderr, estimate.method),
                *(estimate.exact, estimate.samples, found.loss, found.accuracy, time.perf_counter() - start),
            )


class Recorder:
    """A ``forward`` that calls the model and keeps sums of the losses and of the correct predictions.

    A batch is counted when the next one begins: by then the measure has checked it, and says better than the loss
    function would what is wrong with its targets. A measure that reads the data twice has every batch counted twice,
    which changes no mean.

    Args:
        loss: the name of a function in torch.nn.functional.
        step: called after each batch.
        active: False to call the model and nothing else.
    """

    def __init__(self, loss: str, step: Callable[[], None], *, active: bool) -> None:
        self._name, self._step, self._active = loss, step, active
        self._loss = getattr(F, loss)
        self._pending: tuple[Tensor, Tensor] | None = None
        self._sums: list[Tensor] = []  # per batch: losses, loss terms, correct predictions, predictions

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        """See :data:`.capture.Forward`."""
        if capture.is_trial():
            return capture.run(model, batch, None)
        self._count()
        outputs, targets = capture.run(model, batch, None)
        if self._active and not outputs.is_meta:  # outputs without values have no loss
            self._pending = outputs.detach(), targets
        self._step()
        return outputs, targets

    def fit(self) -> Fit:
        """Means over all samples, however they were cut into batches."""
        self._count()
        if not self._sums:
            return Fit(None, None)
        loss, terms, correct, predictions = torch.stack(self._sums).sum(dim=0).tolist()
        return Fit(loss / terms if terms else None, correct / predictions if predictions else None)

    def _count(self) -> None:
        if self._pending is None:
            return
        (outputs, targets), self._pending = self._pending, None
        terms: Tensor | int
        correct: Tensor | int = 0
        predictions: Tensor | int = 0
        if self._name == "cross_entropy" and not targets.is_floating_point():
            targets = targets.long()
            kept = targets != _IGNORED
            terms = predictions = kept.sum()
            correct = ((outputs.argmax(dim=1) == targets) & kept).sum()
        else:
            targets = targets.to(outputs.dtype)
            terms = outputs.numel() // (outputs.shape[1] if self._name == "cross_entropy" else 1)
        sums = (self._loss(outputs, targets, reduction="sum"), terms, correct, predictions)
        self._sums.append(torch.stack([torch.as_tensor(x, dtype=torch.float64, device=outputs.device) for x in sums]))
