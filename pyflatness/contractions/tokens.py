"""Contract an embedding: a matrix w (d, m) with a column for each token, whose inputs φ are one-hot.

Only the columns of M = Σ_p δ_p φ_pᵀ for a sample's tokens are not zero, each the sum of δ over the positions of that
token. These columns are made, in no more memory than δ; one-hot vectors are not.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..interrupts import cached_property
from .factor import gram_factor
from .layer import Contraction, Contractor, Sign
from .precision import product, promoted
from .quantities import Forms, Quantities
from .reference import Backend
from .routes import Calls


class TokenContraction(Contractor):
    """Contract tokens (n, P) as inputs, and cotangents (n, P, d)."""

    def __init__(self, weight: Tensor, backend: Backend, quantities: Sequence[str]) -> None:
        super().__init__(quantities, (1, *weight.shape[1:], 1), weight.device)
        self._weight, self._backend = weight, backend

    @cached_property
    def _factor(self) -> Tensor | None:
        return gram_factor(promoted(self._weight))[0] if self._wanted.gram_factor else None

    def at(self, inputs: Calls, count: int, held: int = 0, positions: Tensor | None = None) -> Contraction:
        """Return the contraction at tokens (n, P), for any number of cotangents; none are held back."""
        at = Tokens(self._weight, self._factor, self._backend, self._wanted, inputs[0])
        return Contraction(self._wanted, at.forms, at.squared_entries)

    def traces(self, inputs: Calls, cotangent: Calls, coefficients: Tensor) -> Tensor:
        columns = Columns(inputs[0]).of(cotangent[0]).double()
        scaled = (columns * coefficients.view(-1, 1, 1)).flatten(0, 1)
        return (scaled.t() @ columns.flatten(0, 1)).unsqueeze(0)


class Columns:
    """Find the columns of M: the distinct tokens of each sample of (n, P), at most U.

    ``tokens`` (n, U) has each sample's distinct tokens, then zeros for columns of M that are zero. ``places`` (n, P)
    has the index of each position's token among them.
    """

    def __init__(self, tokens: Tensor) -> None:
        ordered, order = tokens.sort(dim=1)
        begins = torch.zeros_like(ordered)
        begins[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
        numbers = begins.cumsum(dim=1)
        self.places = torch.empty_like(numbers).scatter_(1, order, numbers)
        count = int(numbers.max()) + 1 if numbers.numel() else 0
        self.tokens = tokens.new_zeros(len(tokens), count).scatter_(1, numbers, ordered)

    def of(self, cotangent: Tensor) -> Tensor:
        """Return Mᵀ (n, U, d) of a cotangent (n, P, d)."""
        delta = promoted(cotangent)
        columns = delta.new_zeros(len(delta), self.tokens.shape[1], delta.shape[2])
        return columns.scatter_add_(1, self.places.unsqueeze(2).expand_as(delta), delta)


class Tokens:
    """Compute the forms of M from its columns, for a weight (1, d, m), a factor R (r, d) or None, and tokens (n, P)."""

    def __init__(
        self, weight: Tensor, factor: Tensor | None, backend: Backend, wanted: Quantities, tokens: Tensor
    ) -> None:
        self._shape, self._factor, self._dots, self._made = weight.shape, factor, backend.row_dots, wanted.forms
        self._columns = Columns(tokens.long())
        made = wanted.forms
        if made.weighted or made.by_column or made.by_row or made.gram_weighted_columns:
            self._weights = promoted(weight[0].t()[self._columns.tokens])  # (n, U, d)

    def forms(self, cotangent: Calls) -> Forms:
        made, columns = self._made, self._columns.of(cotangent[0])
        squares = gram_weighted = weighted = by_column = by_row = None
        if made.squares:
            squares = self._norms(columns)
        if self._factor is not None:
            gram_weighted = self._norms(product(columns, self._factor.to(columns.dtype).t()))
        if made.weighted or made.by_column or made.by_row:
            products = columns * self._weights.to(columns.dtype)
            weighted = self._norms(products) if made.weighted else None
            by_row = products.sum(dim=1).double() if made.by_row else None
            if made.by_column:
                sums = products.sum(dim=2).double()
                by_column = sums.new_zeros(len(sums), self._shape[2]).scatter_add_(1, self._columns.tokens, sums)
        columnwise = self._column_norms(columns) if made.gram_weighted_columns else None
        return Forms(squares, gram_weighted, weighted, by_column, by_row, columnwise)

    def squared_entries(self, cotangent: Calls, sign: Sign) -> Tensor:
        """Return Σ_i sign_i M_i ∘ M_i, (1, d, m) float64."""
        _, d, m = self._shape
        squares = self._columns.of(cotangent[0]).double().square()
        if sign is not None:
            squares = squares * (sign.view(-1, 1, 1) if isinstance(sign, Tensor) else sign)
        total = squares.new_zeros(m, d).index_add_(0, self._columns.tokens.flatten(), squares.flatten(0, 1))
        return total.t().unsqueeze(0)

    def _column_norms(self, columns: Tensor) -> Tensor:
        """Return |w Mᵀ|², (n,), for few tokens from the inner products of their columns of w and of M."""
        weights = self._weights.to(columns.dtype)
        if columns.shape[1] > columns.shape[2]:
            return self._norms(product(weights.mT, columns))
        return self._dots(product(weights, weights.mT).flatten(1), product(columns, columns.mT).flatten(1))

    def _norms(self, columns: Tensor) -> Tensor:
        flat = columns.flatten(1)
        return self._dots(flat, flat)
