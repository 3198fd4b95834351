"""Treat a weight that has uses of several kinds as one matrix: an embedding that is the head too, say.

A use may be of any kind: rows of an embedding, the product of a head with features. M is the sum of what each call
gives, ∂⟨δ, call(w)⟩/∂w of one sample, which is linear in w.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ...contractions import Contractor, Ingredients, WrittenContraction, promoted
from .linear import Linear


class Together(Linear):
    """Say how a weight is a matrix whatever its uses are: as a layer of one kind keeps it; see :class:`.Linear`.

    What φ is, and which rows an output has, is said by the kind of each call. So inputs and cotangents in common form
    are those of each call, (n, q, …), as they are.

    Args:
        home: the kind whose matrix it is.
    """

    has_input = False
    pointwise = False
    by_weight = True
    stacks_cotangents = False

    def __init__(self, home: Linear) -> None:
        self._home = home
        self.groups, self.geometry = home.groups, home.geometry

    def as_matrix(self, weight: Tensor) -> Tensor:
        """Return a tensor of the shape of the weight as (d, m)."""
        return self._home.as_matrix(weight)

    def as_weight(self, matrix: Tensor) -> Tensor:
        """Return a (d, m) matrix as a tensor of the shape of the weight; undoes :meth:`as_matrix`."""
        return self._home.as_weight(matrix)

    def contraction(self, given: Ingredients) -> Contractor:
        """Return what contracts weight gradients that are written out."""
        return WrittenContraction(given, self.geometry)

    def in_common_form(self, tensor: Tensor) -> list[Tensor]:
        """Return what is of one call as it is."""
        return [tensor]

    def rows(self, cotangent: Tensor) -> Tensor:
        """Return what is of one call as it is."""
        return cotangent

    def patches(self, inputs: Tensor, columns: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return what is of one call as it is."""
        return inputs

    def changed(self, call: Linear, patches: Tensor, rows: Tensor, changes: Tensor) -> Tensor:
        """Return how the output of a call changes with each sample's own change of the weight."""
        weights = torch.func.vmap(self.as_weight)(changes.mT.flatten(1, 2))
        found: Tensor = torch.func.vmap(call.varied_alone)(patches, weights, rows)
        return found

    def joined(self, parts: list[Tensor]) -> list[Tensor]:
        """Return what is of several calls as it is."""
        return parts

    def gradients(
        self, inputs: Sequence[Tensor], cotangent: Sequence[Tensor], like: Tensor, calls: Sequence[Linear]
    ) -> Tensor:
        """Return M of some samples, (n, G, d, m), written out."""
        each = zip(calls, inputs, cotangent, strict=True)
        parts = [torch.func.vmap(partial(self._gradient, kind, like))(x, promoted(delta)) for kind, x, delta in each]
        gradients: Tensor = torch.stack(parts).sum(dim=0).unflatten(1, (self.groups, -1))
        return gradients

    def _gradient(self, kind: Linear, like: Tensor, inputs: Tensor, cotangent: Tensor) -> Tensor:
        """Return one sample's M of one call, (G d, m)."""
        zero = cotangent.new_zeros(self.as_weight(like).shape)
        _, back, *_ = torch.func.vjp(lambda weight: kind.varied_alone(inputs, weight, cotangent), zero)
        return self.as_matrix(back(cotangent)[0])
