"""Hold what a public call is asked to measure: the user's model, loss and data, taken in hand, and the options."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ..losses import Loss
from ..losses.remarks import OF_GGN_ALONE
from ..model import selectors, shards, state, uses
from ..model.data import Batches
from ..model.selectors import Selection, Selector
from ..options import Options
from ..report import Estimate
from .checked import Checked

_WITHOUT_LOSS = ("weights", "jacobian", "ascent")  # methods
_WITHOUT_DERIVATIVES = ("weights", "head", "monte-carlo")


_NO_LAYERS = Selection({}, frozenset())


@dataclass(frozen=True)
class Task:
    """Hold a model, its layers, loss and data, and how they are measured, inside of :func:`.session.session`.

    Attributes:
        model: inside :func:`.state.observing`.
        loss: from :func:`.losses.resolve`.
        batches: the data, to be read as often as the measure says.
        forward: the user's, or a call of the model itself, with its checks.
        options: of the user.
        progress: whether reading data shows a bar.
        selection: the chosen layers.
    """

    model: nn.Module
    loss: Loss
    batches: Batches
    forward: Checked
    options: Options
    progress: bool | None = None
    selection: Selection = _NO_LAYERS

    def of(self, layers: Selector | Sequence[Selector] | None) -> "Task":
        """Return the task with the layers that selectors mean, see :func:`.selectors.select`."""
        return self._with(selectors.select(self.model, layers))

    def only(self, layer: str) -> "Task":
        """Return the task with one layer, by its qualified name, which has to run."""
        return self._with(Selection({layer: uses.layer(self.model, layer)}, frozenset([layer])))

    def _with(self, selection: Selection) -> "Task":
        """Return the task with these layers, which are the same on all ranks."""
        ranks = self.batches.shard.ranks
        if not ranks.alone:
            ranks.check_alike("the choice of layers", {"layers": ", ".join(selection.modules)})
        return replace(self, selection=selection)

    def on(self, data: Any, reads: int = 1) -> "Task":
        """Return the task with other data, to be read so many times."""
        found = shards.batches(
            data, state.device(self.model), self.batches.shard.ranks, reads=reads, shown=self.progress
        )
        return replace(self, batches=found)

    def unite(self) -> None:
        """Take in what other ranks found out about the forward pass, before :meth:`noted`."""
        shard = self.batches.shard
        if not shard.ranks.alone:
            found = shard.every("the end of the measurement", [self.forward.notes or (), self.forward.doubts])
            self.forward.notes, self.forward.doubts = (
                tuple(dict.fromkeys(text for rank in found for text in rank[kind])) for kind in range(2)
            )

    def noted(self, estimate: Estimate) -> Estimate:
        """Return an estimate with notes on the loss and the model's forward pass, where they matter to a reader."""
        if self.forward.notes and estimate.method not in _WITHOUT_LOSS:
            notes = [note for note in self.forward.notes if note != OF_GGN_ALONE or "ggn" in estimate.method]
            estimate = replace(estimate, notes=(*estimate.notes, *notes))
        if self.batches.shard.notes and estimate.samples:
            estimate = replace(estimate, notes=(*estimate.notes, *self.batches.shard.notes))
        if self.forward.doubts and estimate.method not in _WITHOUT_DERIVATIVES:
            estimate = replace(estimate, exact=False, notes=(*estimate.notes, *self.forward.doubts))
        return estimate
