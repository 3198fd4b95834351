"""Bring a weight in all of its uses into the form of its contractions: each sample's weight gradient, written out.

A use may be of any kind: rows of an embedding, the product of a head with features. M is the sum of what each call
gives, ∂⟨δ, call(w)⟩/∂w of one sample, which is linear in w.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ..contractions import WrittenContraction, promoted
from ..model import layers
from ..model.kinds import Linear
from .layer_form import LayerForm, Parts
from .pooled import Pooled
from .runner import Run


class WholeForm(LayerForm):
    """Hold a weight, and the inputs and output gradients of calls of several kinds; see :class:`.LayerForm`.

    Inputs and cotangents are those of each call, (n, q, …); which kinds these are is of the last run.
    """

    by_weight = True
    _kinds: tuple[Linear, ...] = ()

    def contraction(self, run: Run) -> WrittenContraction:
        """Return the contraction for the layer's calls in this run."""

        def gradients(inputs: Sequence[Tensor], cotangent: Sequence[Tensor]) -> Tensor:
            return self.gradients([*inputs], [*cotangent])

        geometry = self._kind.geometry
        return WrittenContraction(self.matrix, geometry, self.backend, self.quantities, self._memory, gradients)

    def inputs(self, run: Run) -> Parts:
        """Return the inputs of each call, (n, q, …)."""
        calls = run.calls(self.name)
        self._kinds = tuple(call.kind for call in calls)
        return [run.samples_first(self.name, call.inputs.detach()) for call in calls]

    def cotangent(self, run: Run, gradients: Sequence[Tensor]) -> Parts:
        """Return the gradients in the output of each call, (n, q, …)."""
        return [run.samples_first(self.name, gradient) for gradient in gradients]

    def cotangents(self, run: Run, gradients: Tensor) -> None:
        """Return that several gradients are taken one by one."""

    def pooled(self, run: Run) -> Pooled | None:
        """Return that no pooling behind the layer is looked at."""
        return None

    def fingerprints(self, run: Run) -> Tensor:
        """Return a number for each sample's inputs, (n,), by which its row can be known again."""
        total = torch.zeros(run.samples, dtype=torch.float64, device=run.outputs.device)
        for number, part in enumerate(self.inputs(run)):
            rows = part.flatten(1).double()
            total += rows @ (torch.arange(rows.shape[1], device=rows.device) + number).cos().double()
        return total

    def gradients(self, inputs: Parts, cotangent: Parts) -> Tensor:
        """Return M of some samples, (n, G, d, m), written out."""
        calls = [partial(self._gradient, kind) for kind in self._kinds]
        each = zip(calls, inputs, cotangent, strict=True)
        total = torch.stack([torch.func.vmap(call)(x, promoted(delta)) for call, x, delta in each]).sum(dim=0)
        gradients: Tensor = total.unflatten(1, (self._kind.groups, -1))
        return gradients

    def changed(self, run: Run, kind: Linear, inputs: Tensor, output: Tensor, changes: Tensor) -> Tensor:
        """Return how the output of a call changes with each sample's own change of the weight, (n, G, m, d)."""
        weights = torch.func.vmap(self._kind.as_weight)(changes.mT.flatten(1, 2))
        rows, like = (run.samples_first(self.name, part) for part in (inputs, output))
        found = torch.func.vmap(partial(_varied, kind))(rows, weights, like)
        empty = torch.zeros_like(output, requires_grad=True)
        first = run.samples_first(self.name, empty)
        (placed,) = torch.autograd.grad(first, empty, found.to(output.dtype), create_graph=True)
        return placed

    def _gradient(self, kind: Linear, inputs: Tensor, cotangent: Tensor) -> Tensor:
        """Return one sample's M of one call, (G d, m)."""
        zero = cotangent.new_zeros(self._kind.as_weight(layers.matrix(self._module)[0]).shape)
        _, back, *_ = torch.func.vjp(lambda weight: _varied(kind, inputs, weight, cotangent), zero)
        matrix: Tensor = self._kind.as_matrix(back(cotangent)[0])
        return matrix


def _varied(kind: Linear, inputs: Tensor, weight: Tensor, like: Tensor) -> Tensor:
    """Return how a call's output changes with a change of the weight."""
    return kind.varied(inputs, weight, like, kind.coefficients((inputs,), {}))
