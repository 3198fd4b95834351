"""Treat an embedding as a matrix with a row for each feature and a column for each token; φ is a one-hot vector.

One-hot vectors are not made, except for second derivatives. The token of padding has no derivative in torch, and so its
coefficient is 0.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...contractions import Contractor, Ingredients, TokenContraction, promoted
from .deviations import TokenScale
from .linear import First, Linear


class Embedding(Linear):
    """Treat an embedding of tokens of any shape as a matrix; the column of token ``padding`` has no derivative."""

    tokens = True
    has_input = False
    keeps_graph = False
    stacks_cotangents = False  # each token has a coefficient
    least_dims = 1

    def __init__(self, padding: int | None) -> None:
        self._padding = padding

    def as_matrix(self, weight: Tensor) -> Tensor:
        return weight.t()

    def as_weight(self, matrix: Tensor) -> Tensor:
        return matrix.t()

    def as_rows(self, weight: Tensor) -> Tensor:
        """Return the table, with tokens as rows."""
        return weight

    def from_rows(self, matrix: Tensor) -> Tensor:
        return matrix

    def coefficients(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
        inputs = self.inputs_of(args, kwargs)
        return None if inputs is None or self._padding is None else inputs != self._padding

    def affine(self, inputs: Tensor, weight: Tensor, bias: Tensor | None, like: Tensor | None = None) -> Tensor:
        return F.embedding(inputs, weight, self._padding)

    def varied(self, inputs: Tensor, weight: Tensor, like: Tensor, coefficients: Tensor | None) -> Tensor:
        changes = F.embedding(inputs, weight)
        return changes if coefficients is None else changes * coefficients.unsqueeze(-1).to(changes.dtype)

    def at_ends(
        self, inputs: Tensor, output: Tensor, weight: Tensor, coefficients: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return self.affine(inputs.flatten()[[0, -1]], weight, None), output.reshape(-1, output.shape[-1])[[0, -1]]

    def divided(self, inputs: Tensor, scale: Tensor) -> Tensor:
        """Return the tokens of a call unchanged, since the scale is in their coefficients."""
        return inputs

    def input_rows(self, inputs: Tensor, coefficients: Tensor | None, first: First) -> Tensor:
        """Return each token followed by its coefficient 1, (n, rows, 2); padding counts like other tokens here."""
        tokens = first(inputs)
        tokens = tokens.reshape(len(tokens), -1, 1).double()
        return torch.cat([tokens, torch.ones_like(tokens)], dim=2)

    def deviations(self, columns: int) -> TokenScale:
        return TokenScale(columns)

    def contraction(self, given: Ingredients) -> Contractor:
        return TokenContraction(given.weight, given.backend, given.quantities)

    def in_common_form(self, tensor: Tensor) -> list[Tensor]:
        """Return the tokens of a call, (n, q, …), as (n, P)."""
        return [tensor.flatten(1).long()]

    def joined(self, parts: list[Tensor]) -> list[Tensor]:
        return [torch.cat(parts, dim=1)]

    def cotangents(
        self, gradient: Tensor, inputs: Tensor, coefficients: Tensor | None, scale: Tensor | None, first: First
    ) -> list[Tensor]:
        """Return a gradient in the output of a call at each token, (n, P, d), times the tokens' coefficients."""
        rows = self._by_token(first(gradient), inputs, first)
        if rows.is_meta:
            return [rows]
        given = None if coefficients is None else first(coefficients).flatten(1)
        if scale is not None:
            inverse = torch.where(scale > 0, 1 / scale, 0.0)[first(inputs).flatten(1)]
            given = inverse if given is None else inverse * given
        return [rows if given is None else rows * given.unsqueeze(2).to(rows.dtype)]

    def _by_token(self, gradient: Tensor, inputs: Tensor, first: First) -> Tensor:
        """Return a gradient (n, q, …, d) in the output of a call at each of its tokens, (n, P, d)."""
        return gradient.reshape(len(gradient), -1, gradient.shape[-1])

    def rows(self, cotangent: Tensor) -> Tensor:
        return promoted(cotangent).unsqueeze(1)

    def columns(self, inputs: Callable[[], Sequence[Tensor]]) -> Tensor:
        """Return the tokens that occur, (U,), ascending; only their columns have second derivatives."""
        columns: Tensor = torch.unique(inputs()[0])
        return columns

    def patches(self, inputs: Tensor, columns: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return one-hot φ in the columns of some tokens, (n, 1, P, U)."""
        assert columns is not None
        return inputs.unsqueeze(2).eq(columns).to(dtype).unsqueeze(1)

    def gradients(
        self, inputs: Sequence[Tensor], cotangent: Sequence[Tensor], like: Tensor, calls: Sequence[Linear]
    ) -> Tensor:
        (tokens,), delta = inputs, promoted(cotangent[0])
        columns = delta.new_zeros(len(delta), like.shape[1], delta.shape[2])
        columns.scatter_add_(1, tokens.unsqueeze(2).expand_as(delta), delta)
        gradients: Tensor = columns.transpose(1, 2).unsqueeze(1)
        return gradients


class EmbeddingBag(Embedding):
    """Treat sums or means of an embedding over bags of tokens (n, tokens) as a matrix."""

    least_dims = 2
    pointwise = False
    twice_differentiable = False
    when_idle = "bags that are given by offsets=, and not as (n, tokens of a bag), cannot be told apart by sample"

    def __init__(self, mean: bool, padding: int | None) -> None:
        super().__init__(padding)
        self._mean = mean

    def inputs_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
        """Return the tokens of a call; None for bags given by offsets, whose samples are not known."""
        inputs = super().inputs_of(args, kwargs)
        return inputs if inputs is not None and inputs.ndim == 2 else None

    def coefficients(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
        inputs = super().inputs_of(args, kwargs)
        assert inputs is not None
        given = args[2] if len(args) > 2 else kwargs.get("per_sample_weights")
        if given is not None and self._padding is None:
            return given.detach()  # type: ignore[no-any-return]
        kept = torch.ones_like(inputs, dtype=torch.bool) if self._padding is None else inputs != self._padding
        if given is not None:
            return given.detach() * kept  # type: ignore[no-any-return]
        return kept / kept.sum(dim=1, keepdim=True).clamp_min(1).double() if self._mean else kept

    def forward(self, args: Sequence[Any], kwargs: Mapping[str, Any], weight: Tensor, bias: Tensor | None) -> Tensor:
        inputs, coefficients = super().inputs_of(args, kwargs), self.coefficients(args, kwargs)
        assert inputs is not None
        return self.varied(inputs, weight, inputs, coefficients)

    def varied(self, inputs: Tensor, weight: Tensor, like: Tensor, coefficients: Tensor | None) -> Tensor:
        return super().varied(inputs, weight, like, coefficients).sum(dim=1)

    def at_ends(
        self, inputs: Tensor, output: Tensor, weight: Tensor, coefficients: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        assert coefficients is not None
        return self.varied(inputs[[0, -1]], weight, output, coefficients[[0, -1]]), output[[0, -1]]

    def _by_token(self, gradient: Tensor, inputs: Tensor, first: First) -> Tensor:
        return gradient.unsqueeze(2).expand(-1, -1, first(inputs).shape[2], -1).flatten(1, 2)

    def input_rows(self, inputs: Tensor, coefficients: Tensor | None, first: First) -> Tensor:
        """Return the k tokens of each bag followed by their k coefficients, (n, bags, 2 k)."""
        assert coefficients is not None
        return torch.cat([first(inputs).double(), first(coefficients).double()], dim=2)
