"""Find out whether a layer is the model's head, and read the rows (features, loss terms) that it then gives.

At a head the layer's output z = W φ + b *is* the model's output, one loss term per position, so relative flatness
(Petzka et al. 2021, Definition 3) needs no derivative of the model:

    κ(w) = Σ_{s,s'} ⟨w_s, w_s'⟩ Tr(H_ss') = Σ_i scale_i |φ_i|² ⟨w wᵀ, ∂²ℓ_i/∂z_i²⟩ / Σ_i ω_i
"""

import contextlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from . import interrupts, losses
from .errors import InputError
from .interrupts import cached_property
from .messages import check_tensor
from .model import calling, layers, selectors, spread, state, uses, walk
from .model.data import first, rows_of, same, size, take
from .model.generators import Randomness
from .model.row_order import order_in_memory
from .numerics.ranks import ALONE, Ranks
from .numerics.shard import Shard
from .passes.guards import Spacing, check_of_user, check_unchanged, two_alone
from .passes.task import Task

_SECOND = torch.tensor([1], dtype=torch.int64, device="cpu")  # the place of a sample
_WIDE_OUTPUTS = 1024  # outputs from which the model is spared its own logits


class NotTheHeadError(InputError):
    """Report that a layer's output is not the model's."""


MakeTerms = Callable[[], losses.Terms]  # of a batch


@dataclass
class HeadBatch:
    """Hold the rows of one batch at a head.

    ``labels`` are the class indices of rows that all have the same weight, not yet checked; None where class indices
    alone do not determine the terms. The terms are made when they are first asked for.
    """

    features: Tensor  # (rows, m), a row per loss term; (rows, …, m) for a term of several positions
    samples: int  # entries of dimension 0 of the batch
    per_sample: int  # consecutive rows that belong to one sample; 0 where rows cannot be told apart by sample
    number: int  # place of the batch in the data
    make_terms: MakeTerms
    labels: losses.Labels | None

    @cached_property
    def terms(self) -> losses.Terms:
        """Return what the loss says of the rows."""
        return self.make_terms()


class Head:
    """Observe one layer, or the last Linear that ran, batch by batch, while it is established to be the head."""

    def __init__(self, task: Task, layer: str | None) -> None:
        model = task.model
        self._task, self._loss, self._data = task, task.loss, task.batches
        self._alone: tuple[Any, Tensor] | None = None  # a sample that was run by itself, and its features
        self.name = ""  # known once a batch went through
        if layer is not None:
            self._candidates = {layer: model.get_submodule(layer)}
            return
        self._candidates = {name: module for name, module in walk.named_modules(model) if layers.is_linear(module)}
        if not self._candidates:
            raise InputError("layer: the model has no Linear layer; name the layer to measure")

    @property
    def classes(self) -> Ranks:
        """Return the ranks that the rows of the weight are spread over, known once a batch went through."""
        return ALONE if self._own_rows() is None else spread.parallel()

    @property
    def shard(self) -> Shard:
        """Return which part of all data it is."""
        return self._data.shard

    def matrix(self) -> tuple[Tensor, Tensor | None]:
        """Return the weight (d, m) and the bias (d,) of the layer, or this rank's rows of them."""
        own = self._own_rows()
        return layers.matrix(self._candidates[self.name]) if own is None else own[:2]

    def _own_rows(self) -> tuple[Tensor, Tensor | None, int] | None:
        """Return the rows that this rank has of a tensor-parallel layer, see :func:`.spread.own_rows`."""
        return spread.own_rows(self._candidates[self.name]) if self._loss.by_rows else None

    def expected_rows(self, first: HeadBatch) -> int:
        """Return how many rows the whole data have, estimated from their first batch."""
        return first.features.shape[0] * max(1, len(self._data))

    def notes(self) -> tuple[str, ...]:
        """Return a note that the weight is used elsewhere too, where it is."""
        return layers.tie_notes(self._task.model, self._candidates[self.name])

    def established(self, batch: Any) -> bool:
        """Return whether the layer is the head, judged by one sample of a batch; its name is known afterwards."""
        with calling.Calls(self._candidates) as calls, calling.dry_run():
            try:  # the second sample alone, without its neighbours in the batch
                sample = take(batch, _SECOND) if size(batch) > 1 else batch
                outputs, targets = self._task.run(sample)
            except Exception as error:
                # Not a batch that one sample can be cut from; an error of the model's own comes again.
                check_of_user(error)
                calls.clear()
                sample = batch
                outputs, targets = self._task.run(batch)
            if not calls.last and len(self._candidates) == 1:  # the sample is not one that the layer is called on
                (self.name,) = self._candidates
                return False
            try:
                features = self._features(self._head_call(calls, outputs), outputs, targets)
            except NotTheHeadError:
                return False
            if sample is not batch:
                self._alone = sample, features
        return True

    def batches(self) -> Generator[HeadBatch, None, None]:
        """Run the model over the data and yield the layer's rows; hooks are there until it ends or is closed."""
        observed = {self.name: self._candidates[self.name]} if self.name else self._candidates
        spacing, done = Spacing(len(self._data)), 0
        with calling.Calls(observed) as calls, contextlib.ExitStack() as product:
            for number, batch in enumerate(self._data):
                if number == 0 and self.name:
                    self._skip_product(batch, calls, product)
                checked = number == 0 or spacing.due(number, done)
                done += size(batch)
                yield self._measured(batch, number, calls, checked)  # nothing of it is kept while the next one is run

    def _measured(self, batch: Any, number: int, calls: calling.Calls, checked: bool) -> HeadBatch:
        outputs, targets = self._task.run(batch)
        rows = self._rows(self._head_call(calls, outputs), outputs, targets, size(batch), number)
        del outputs
        calls.clear()
        if checked:
            self._check_independent(batch, rows, calls)
        return rows

    def _check_independent(self, batch: Any, rows: HeadBatch, calls: calling.Calls) -> None:
        """Raise an InputError if features of some samples change with the others in their batch."""
        if rows.per_sample == 0 or rows.samples == 1:
            return
        if self._alone is not None and rows.number == 0 and same(self._alone[0], take(batch, _SECOND)):
            check_unchanged(self._alone[1], rows_of(rows.features, rows.samples, _SECOND), "features")
            return

        def features(outputs: Tensor, targets: Any) -> Tensor:
            return self._features(self._head_call(calls, outputs), outputs, targets)

        check = two_alone(batch, self._task.run, features, "features")
        calls.clear()
        check(rows.features)

    def _skip_product(self, batch: Any, calls: calling.Calls, product: contextlib.ExitStack) -> None:
        """Let the model do without the product of a wide head, which was established on one sample.

        A batch's logits may be what fills the memory, although only their shape is needed.
        """
        module = self._candidates[self.name]
        width = len(layers.without_entries(module)) if self._loss.known and layers.is_linear(module) else 0
        if width <= _WIDE_OUTPUTS or not self.classes.alone or self._task.forward.decides:
            return
        random = Randomness(walk.modules(self._task.model))
        before = random.states()
        try:
            with state.without_product(module, width), calling.dry_run():
                self._task.run(first(batch, 1))
        except (RuntimeError, NotImplementedError) as error:
            interrupts.pass_on(error)
            return  # the model looks at its logits: let it have them
        finally:
            calls.clear()
        if random.states() != before:
            return  # the logits say whether the random numbers matter
        product.enter_context(state.without_product(module, width))

    def _head_call(self, calls: calling.Calls, outputs: Tensor) -> calling.Call:
        made = calls.last or {name: call for name, call in calls.empty.items() if name == self.name}
        if not made:
            raise layers.did_not_run(self._candidates, self._candidates)
        name = list(made)[-1]
        if not self.name:
            self.name = name
            layers.check_measurable(name, self._candidates[name])
        if name != self.name:
            raise InputError(f"layer: the last Linear that ran is {name!r} in this batch, it was {self.name!r} before")
        call = made[name]
        check_tensor(f"layer {name!r}: input", call.inputs)
        reason = ""
        if calls.count.get(name, 1) > 1:
            reason = f"it ran {calls.count[name]} times in one forward pass"
        elif (
            outputs.untyped_storage()._cdata != call.output.untyped_storage()._cdata
            or outputs.dtype != call.output.dtype
        ):
            reason = "its output is not the model's output"
        elif call.changed():
            reason = "its output (or input) is modified in place afterwards"
        elif not layers.computes(self._candidates[name], call.inputs, call.output):
            reason = "its output is not W φ + b of its weight and input (a hook or an adapter changes it)"
        if not layers.is_pointwise(self._candidates[name]):
            reason = "it is a convolution whose kernel has several elements"
        if reason:
            raise NotTheHeadError(f"layer {name!r} is not the model's head as in the batches before: {reason}")
        return call

    def _rows(self, call: calling.Call, outputs: Tensor, targets: Any, samples: int, number: int) -> HeadBatch:
        layers.check_dtype(f"layer {self.name!r}: input", call.inputs.dtype)
        layers.check_dtype(f"layer {self.name!r}: output", call.output.dtype)
        targets = losses.tensor_targets(targets, number)
        outputs, targets, dim, order = self._places(call, outputs, targets)
        features = self._ordered(call, order)
        told_apart = len(outputs) == samples and dim != 0
        per_sample = len(features) // samples if told_apart else 0

        def made() -> losses.Terms:
            with losses.of_batch(number):
                return self._loss.terms(outputs, targets, dim)

        terms, labels = terms_of(self._loss, outputs.shape, outputs.device, targets, dim, made)
        return HeadBatch(features, samples, per_sample, number, terms, labels)

    def _features(self, call: calling.Call, outputs: Tensor, targets: Any) -> Tensor:
        """Return the layer's inputs (rows, m) in the order of the model's outputs; raise if it is not the head."""
        return self._ordered(call, self._places(call, outputs, targets)[-1])

    def _ordered(self, call: calling.Call, order: Tensor) -> Tensor:
        features = layers.input_rows(self._candidates[self.name], call.inputs)
        return features if order.numel() == 0 else features[order.to(features.device)]

    def _places(self, call: calling.Call, outputs: Tensor, targets: Any) -> tuple[Tensor, Any, int, Tensor]:
        """Return outputs and targets with a class dimension, that dimension, and which rows of the layer they are."""
        output = call.output.detach().movedim(layers.kind_of(self._candidates[self.name]).class_dim, -1)
        outputs = outputs.detach()
        same_shape = isinstance(targets, Tensor) and outputs.shape == targets.shape
        if outputs.ndim and output.shape[-1] == 1 and same_shape and 1 not in outputs.shape[1:]:
            outputs, targets = outputs.unsqueeze(-1), targets.unsqueeze(-1)  # z.squeeze(-1), one output
        dim = _class_dim(outputs, output, self._loss)
        order = None if dim is None else order_in_memory(outputs.movedim(dim, -1), output)
        if dim is None or order is None or not (self._loss.positions or (outputs.ndim == 2 and dim == 1)):
            raise NotTheHeadError(
                f"layer {self.name!r} is not the model's head as in the batches before: the model's output "
                f"{tuple(outputs.shape)} is not a set of whole rows of the layer's {tuple(call.output.shape)}"
            )
        return outputs, targets, dim, order


def terms_of(
    loss: losses.Loss,
    shape: Sequence[int],
    device: torch.device,
    targets: Tensor | None,
    class_dim: int,
    made: MakeTerms,
) -> tuple[MakeTerms, losses.Labels | None]:
    """Return a function that makes the terms of outputs, and labels that determine them; None: they are made here."""
    labels = loss.labels(shape, targets, class_dim) if targets is None or targets.device == device else None
    if labels is not None:
        return made, labels
    terms = made()
    return lambda: terms, None


def find(task: Task, layer: str | nn.Module | None) -> tuple[str, Head | None]:
    """Return the layer's name (None: of the last Linear that ran), and its :class:`Head`, or None if it is no head."""
    name = None if layer is None else selectors.one(task.model, layer)
    if name is not None:
        module = uses.layer(task.model, name)
        if isinstance(module, uses.Use) or not layers.is_pointwise(module):
            return name, None
        if not task.options.tolerance and layers.feeds_another(task.model, name):
            return name, None
    source = Head(task, name)
    found = source.established(task.batches.peek())
    if not task.batches.shard.ranks.alone:
        found = all(task.batches.shard.every(f"the head, layer {source.name!r}", found))
    return source.name, source if found else None


def _class_dim(outputs: Tensor, output: Tensor, loss: losses.Loss) -> int | None:
    """Return the dimension of the model's output that is the layer's last one, found by size and stride."""
    same = [
        dim
        for dim in range(outputs.ndim)
        if outputs.shape[dim] == output.shape[-1]
        and (outputs.shape[dim] == 1 or outputs.stride(dim) == output.stride(-1))
    ]
    dim = loss.class_dim(outputs)
    if dim >= 0:
        return dim if dim in same else None
    return same[-1] if same else None
