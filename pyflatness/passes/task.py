"""Hold what a public call is asked to measure: the user's model, loss and data, and the options."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..interrupts import cached_property
from ..losses import Loss, risk
from ..losses.loss_notes import OF_GGN_ALONE
from ..model import calling, data, parameters, selectors, shards, state, uses
from ..model.data import Batches
from ..model.selectors import Selection, Selector
from ..numerics.accumulate import Accumulator
from ..options import Options
from ..report import Estimate
from .cut_batches import CutBatches
from .guards import Checked
from .memory import Budget

_WITHOUT_LOSS = ("weights", "jacobian", "ascent")  # methods
_WITHOUT_DERIVATIVES = ("weights", "head", "monte-carlo")


_NO_LAYERS = Selection({}, frozenset())


class Risk(NamedTuple):
    """Hold the empirical risk E, and the number of its samples."""

    value: float
    samples: int


@dataclass(frozen=True)
class Task:
    """Hold a model, its layers, loss and data, and how they are measured, inside of :func:`.session.session`."""

    model: nn.Module  # inside :func:`.state.observing`
    loss: Loss  # from :func:`.losses.resolve`
    batches: Batches  # the data, to be read as often as the measure says
    forward: Checked  # the user's, or a call of the model itself, with its checks
    options: Options
    progress: bool | None = None  # whether reading data shows a bar
    selection: Selection = _NO_LAYERS

    def run(self, batch: Any, values: Mapping[str, Tensor] | None = None) -> tuple[Tensor, Any]:
        """Return outputs and targets of a batch, at the parameters (or buffers) in ``values`` if these are given.

        Backward passes at these belong in :func:`.parameters.inside`: activation checkpointing runs the model
        in them.
        """
        if values is None:
            return calling.run(self.model, batch, self.forward)
        with parameters.inside(self.model, values):
            return calling.run(self.model, batch, self.forward)

    def risks(self, points: Sequence[Mapping[str, Tensor]], nan_policy: str) -> list[Risk]:
        """Return E at several points by one data read; a point is parameters that replace the model's."""
        sums, over = [0.0] * len(points), Accumulator(nan_policy, self.loss.reduction)
        for number, part in self._whole_passes.numbered(self.batches):
            for place, values in enumerate(points):
                outputs, targets = self.run(part, values)
                if place == 0:
                    over.add(data.size(part), risk.weight(outputs, targets, self.loss, number))
                value, where = self.loss.value(outputs, targets), " under noise" if values else ""
                sums[place] += risk.finite(value, nan_policy, number, where)
        of_rank = {"sums": torch.tensor(sums, dtype=torch.float64, device="cpu")}
        totals = over.together(self.batches.shard, of_rank)["sums"]
        return [Risk(total / over.normaliser, over.samples) for total in totals.tolist()]

    def budget(self, *, halved: bool = False) -> Budget:
        """Return how the user's ``memory=`` is shared out."""
        return Budget.of(self.model, self.options.memory, halved=halved)

    @cached_property
    def _whole_passes(self) -> CutBatches:
        """Return the micro-batches of :meth:`risks`, kept since some measures call it many times."""
        return self.cut_batches()

    def cut_batches(self, work: Callable[[Any], Any] | None = None, *, derivatives: bool = False) -> CutBatches:
        """Return micro-batches for ``work`` that no :class:`.runner.Runner` does; by default it is :meth:`run`."""
        return CutBatches(work or self.run, self.budget(), self.forward.compare_by_itself, derivatives=derivatives)

    def of(self, layers: Selector | Sequence[Selector] | None) -> "Task":
        """Return the task with the layers that selectors match, see :func:`.selectors.select`."""
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

    def on(self, other: Any, reads: int = 1) -> "Task":
        """Return the task with other data, to be read ``reads`` times."""
        found = shards.batches(
            other, state.device(self.model), self.batches.shard.ranks, reads=reads, shown=self.progress
        )
        found.count_by = self.batches.count_by
        return replace(self, batches=found)

    def unite(self) -> None:
        """Collect what other ranks found out about the forward pass, before :meth:`noted`."""
        shard = self.batches.shard
        if not shard.ranks.alone:
            found = shard.every("the end of the measurement", [self.forward.notes or (), self.forward.doubts])
            self.forward.notes, self.forward.doubts = (
                tuple(dict.fromkeys(text for rank in found for text in rank[kind])) for kind in range(2)
            )

    def noted(self, estimate: Estimate) -> Estimate:
        """Return an estimate with those notes on the loss and the forward pass that matter for its method."""
        if self.forward.notes and estimate.method not in _WITHOUT_LOSS:
            notes = [note for note in self.forward.notes if note != OF_GGN_ALONE or "ggn" in estimate.method]
            estimate = replace(estimate, notes=(*estimate.notes, *notes))
        if self.batches.shard.notes and estimate.samples:
            estimate = replace(estimate, notes=(*estimate.notes, *self.batches.shard.notes))
        if self.forward.doubts and estimate.method not in _WITHOUT_DERIVATIVES:
            estimate = replace(estimate, exact=False, notes=(*estimate.notes, *self.forward.doubts))
        return estimate
