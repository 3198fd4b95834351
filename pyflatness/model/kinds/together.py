"""Treat a weight with uses of several kinds as one matrix, for example an embedding that is also the head.

A use may be of any kind, such as a lookup of rows, or a product with features. For one sample, M is the sum over calls
of ∂⟨δ, call(w)⟩/∂w; each call is linear in w.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ...contractions import Contractor, Ingredients, WrittenContraction, promoted
from .linear import Linear


class Together(Linear):
    """Treat a weight as the matrix of the ``home`` kind, for uses of any kind; see :class:`.Linear`.

    The kind of each call determines φ and the rows of an output. So the common form is one unchanged tensor for each
    call.
    """

    has_input = False
    pointwise = False
    by_weight = True
    stacks_cotangents = False

    def __init__(self, home: Linear) -> None:
        self._home = home
        self.groups, self.geometry = home.groups, home.geometry

    def as_matrix(self, weight: Tensor) -> Tensor:
        return self._home.as_matrix(weight)

    def as_weight(self, matrix: Tensor) -> Tensor:
        return self._home.as_weight(matrix)

    def as_rows(self, weight: Tensor) -> Tensor:
        return self._home.as_rows(weight)

    def from_rows(self, matrix: Tensor) -> Tensor:
        return self._home.from_rows(matrix)

    def contraction(self, given: Ingredients) -> Contractor:
        return WrittenContraction(given, self.geometry)

    def in_common_form(self, tensor: Tensor) -> list[Tensor]:
        return [tensor]

    def rows(self, cotangent: Tensor) -> Tensor:
        return cotangent

    def patches(self, inputs: Tensor, columns: Tensor | None, dtype: torch.dtype) -> Tensor:
        return inputs

    def changed(self, call: Linear, patches: Tensor, rows: Tensor, changes: Tensor) -> Tensor:
        weights = torch.func.vmap(self.as_weight)(changes.mT.flatten(1, 2))
        found: Tensor = torch.func.vmap(call.varied_alone)(patches, weights, rows)
        return found

    def joined(self, parts: list[Tensor]) -> list[Tensor]:
        return parts

    def gradients(
        self, inputs: Sequence[Tensor], cotangent: Sequence[Tensor], like: Tensor, calls: Sequence[Linear]
    ) -> Tensor:
        each = zip(calls, inputs, cotangent, strict=True)
        parts = [torch.func.vmap(partial(self._gradient, kind, like))(x, promoted(delta)) for kind, x, delta in each]
        gradients: Tensor = torch.stack(parts).sum(dim=0).unflatten(1, (self.groups, -1))
        return gradients

    def _gradient(self, kind: Linear, like: Tensor, inputs: Tensor, cotangent: Tensor) -> Tensor:
        """Return one sample's M of one call, (G d, m)."""
        zero = cotangent.new_zeros(self.as_weight(like).shape)
        _, back, *_ = torch.func.vjp(lambda weight: kind.varied_alone(inputs, weight, cotangent), zero)
        return self.as_matrix(back(cotangent)[0])
