"""Treat a bilinear layer as a matrix that multiplies all products of two inputs' features."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from .linear import Linear


class Bilinear(Linear):
    """Treat a bilinear layer as a matrix (d, m₁ m₂) for φ = x₁ ⊗ x₂ of m₁ and m₂ features; see :class:`.Linear`."""

    has_input = False

    def __init__(self, first: int, second: int) -> None:
        self._sizes = first, second

    def inputs_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
        """Return φ, (…, m₁ m₂)."""
        first, second = (*args, *(kwargs[name] for name in ("input1", "input2")[len(args) :]))
        products: Tensor = (first.unsqueeze(-1) * second.unsqueeze(-2)).flatten(-2)
        return products

    def as_matrix(self, weight: Tensor) -> Tensor:
        return weight.flatten(1)

    def as_weight(self, matrix: Tensor) -> Tensor:
        weight: Tensor = matrix.unflatten(1, self._sizes)
        return weight

    def affine(self, inputs: Tensor, weight: Tensor, bias: Tensor | None, like: Tensor | None = None) -> Tensor:
        return F.linear(inputs, weight.flatten(1), bias)
