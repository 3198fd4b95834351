"""Evaluate the loss of a model, and its accuracy, at many points of its parameters.

Small networks run at several points together, by ``torch.func.vmap``, as long as these fit a processor's caches, or
a GPU's memory: that saves the overhead of starting each operation. Points go one by one where the operations themselves
take the time, and where vmap cannot run the model. Either way one read of the data serves several points.
"""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import interrupts, private
from ..losses import risk
from ..model import calling, data
from ..model.fingerprint import Fingerprint
from ..model.parameters import Parameters
from ..numerics.accumulate import Accumulator
from ..passes.guards import agree, rounding
from ..passes.task import Task

_CACHE = 2 * 2**20  # bytes; beyond it points together take longer than one by one, on a processor
_MOST = 64  # points of a read
_COPIES = 3  # of its parameters that a point takes: its own, one in the stack, and one while it is made


@dataclass(frozen=True)
class PointLosses:
    """Hold the loss, and the accuracy, at several points."""

    losses: Tensor  # (points,) float64 on the CPU; NaN and infinity are kept
    accuracies: Tensor | None  # (points,), or None


class Points:
    """Evaluate a model at points of its parameters, on the task's data.

    The data are read once when this is made, for the model's own parameters, and once in each call. ``fingerprint``
    identifies the data of all ranks. ``accuracy=None`` evaluates the accuracy where targets are classes.
    """

    def __init__(self, task: Task, accuracy: bool | None = None) -> None:
        self._task, self._classes, self._bytes = task, accuracy is not False, 0
        self._together, self._compared = True, False
        read, over = Fingerprint(), Accumulator("propagate", task.loss.reduction)
        losses = right = torch.zeros(1, dtype=torch.float64, device="cpu")
        self._targets, self._cuts = 0.0, task.cut_batches()
        for number, batch in enumerate(task.batches):
            read.add(data.with_samples(batch, data.size(batch)), data.size(batch))
            for part in self._cuts.of(batch):
                with _Written() as written:
                    outputs, targets = task.run(part)
                self._bytes = max(self._bytes, written.bytes)
                over.add(data.size(part), risk.weight(outputs, targets, task.loss, number))
                losses = losses + float(task.loss.value(outputs, targets))
                if self._classes and (accuracy or risk.has_classes(outputs, targets, task.loss)):
                    hits = risk.hits(outputs, targets, task.loss, number)
                    right, self._targets = right + float(hits.sum()), self._targets + len(hits)
                else:
                    self._classes = False
        shard = task.batches.shard
        self._classes = all(shard.every("the targets", self._classes))
        counted = torch.tensor([self._targets], dtype=torch.float64, device="cpu")
        sums = over.together(shard, {"losses": losses, "right": right, "targets": counted})
        self._targets, self._normaliser = float(sums["targets"]), over.normaliser
        self.own, self.samples = self._found(sums), over.samples
        self.fingerprint = "; ".join(shard.every("the samples", str(read)))

    def at_once(self, values: Parameters) -> int:
        """Return how many points one read of the data may serve, the same number on all ranks."""
        budget = self._task.budget()
        most = max(1, min(_MOST, budget.graph // max(1, self._size(values))))
        return int(min(self._task.batches.shard.every("points of a read", most)))

    def __call__(self, points: Sequence[Parameters]) -> PointLosses:
        """Return loss and accuracy at points by one read of the data.

        All have the same names of parameters and buffers.
        """
        task, loss = self._task, self._task.loss
        sums = {name: torch.zeros(len(points), dtype=torch.float64, device="cpu") for name in ("losses", "right")}
        with calling.dry_run():
            for number, part in self._cuts.numbered(task.batches):
                for place, (outputs, targets) in enumerate(self._outputs(points, part)):
                    sums["losses"][place] += float(loss.value(outputs, targets))
                    if self._classes:
                        sums["right"][place] += float(risk.hits(outputs, targets, loss, number).sum())
        return self._found(task.batches.shard.sum("the end of a read of the data", sums))

    def _outputs(self, points: Sequence[Parameters], batch: Any) -> Iterator[tuple[Tensor, Any]]:
        """Yield outputs and targets of a batch at each point."""
        together = self._room // max(1, self._size(points[0]))
        start = 0
        while start < len(points):
            some = points[start : start + together] if together > 1 and self._together else points[start : start + 1]
            found = self._at_once(some, batch) if len(some) > 1 else None
            if found is None:
                some = some[:1]
                yield self._task.run(batch, some[0])
            else:
                outputs, targets = found
                yield from ((each, targets) for each in outputs)
            start += len(some)

    def _at_once(self, points: Sequence[Parameters], batch: Any) -> tuple[Tensor, Any] | None:
        """Return outputs (points, …) by vmap; None if it fails, as an error of the model comes again at one point."""
        stacked = {name: torch.stack([point[name] for point in points]) for name in points[0]}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # of operations that vmap takes one by one
                outputs, targets = torch.func.vmap(
                    lambda values: self._task.run(batch, values),
                    out_dims=(0, None),  # type: ignore[arg-type]  # torch's annotation forgets it
                )(stacked)
            if not self._compared:
                first, _ = self._task.run(batch, points[0])
                self._together = agree(first, outputs[0], rounding(first.dtype))
                self._compared = True
        except Exception as error:
            interrupts.pass_on(error)
            self._together = False
        return (outputs, targets) if self._together else None

    def _size(self, values: Parameters) -> int:
        return self._bytes + _COPIES * sum(w.numel() * w.element_size() for w in values.values())

    @property
    def _room(self) -> int:
        budget = self._task.budget()
        return budget.buffers if budget.on_gpu else min(_CACHE, budget.graph)

    def _found(self, sums: dict[Any, Tensor]) -> PointLosses:
        losses, right = sums["losses"].cpu(), sums["right"].cpu()
        accurate = self._classes and self._targets > 0
        return PointLosses(losses / self._normaliser, right / self._targets if accurate else None)


class _Written(private.TorchDispatchMode):
    """Count the bytes of all that operations return, views too, as a measure of what a forward pass moves."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        for leaf in private.tree_leaves(returned):
            if isinstance(leaf, Tensor):
                self.bytes += leaf.numel() * leaf.element_size()
        return returned
