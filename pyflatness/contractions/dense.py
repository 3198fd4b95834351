"""Contract a convolution as one dense matrix, all outputs × all inputs; see :mod:`.layer`."""

import itertools
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from .layer import Contraction, Contractor
from .precision import product, promoted
from .quantities import Forms, Made
from .reference import Backend
from .routes import Calls


class DenseLayer(Protocol):
    """Represent a convolution as one dense matrix W (d, m), all outputs × all inputs, by its products with vectors."""

    d: int
    m: int
    device: torch.device

    def carried(self, delta: Tensor) -> Tensor:
        """Return Wᵀ δ for δ (n, …), in the shape of the unpadded inputs."""

    def applied(self, inputs: Tensor, power: int) -> Tensor:
        """Return W x for unpadded inputs x (n, …), in the shape of the outputs; (W ∘ W) x for power 2."""


class DenseContraction(Contractor):
    """Contract a convolution as one dense matrix W."""

    def __init__(self, layer: DenseLayer, backend: Backend, quantities: Sequence[str]) -> None:
        super().__init__(quantities, (1, layer.d, layer.m, 1), layer.device)
        self._layer, self._backend = layer, backend

    def at(self, inputs: Calls, count: int, held: int = 0, positions: Tensor | None = None) -> Contraction:
        """Return the contraction at the unpadded inputs (n, …) of each call; there is a cotangent for each call too."""
        return Contraction(self._wanted, _DenseForms(self._layer, self._backend, self._wanted.forms, inputs).of)

    def traces(self, inputs: Calls, cotangent: Calls, coefficients: Tensor) -> Tensor:
        """Return Σ_i coefficient_i M_i M_iᵀ, (1, d, d) float64 for d the number of outputs of a sample."""
        columns, rows = _flat(inputs).double(), _flat(cotangent).double()
        return torch.einsum("nas,nab,nbt,n->st", rows, columns @ columns.transpose(1, 2), rows, coefficients)[None]


class _DenseForms:
    """Compute the forms of M = Σ_q vec(δ_q) vec(x_q)ᵀ over a dense matrix's calls q, without making M.

    |Wᵀ M|² = Σ ⟨x_q, x_q'⟩ ⟨γ_q, γ_q'⟩ with γ = Wᵀ δ, the cotangent sent back through this layer alone. The sums of
    W ∘ M are Σ_q δ_q ∘ W x_q by row and Σ_q x_q ∘ γ_q by column. |W ∘ M|² = Σ_qq' ⟨δ_q ∘ δ_q', (W ∘ W)(x_q ∘ x_q')⟩,
    and |W Mᵀ|² = Σ_qq' ⟨δ_q, δ_q'⟩ ⟨W x_q, W x_q'⟩.
    """

    def __init__(self, layer: DenseLayer, backend: Backend, made: Made, inputs: Calls) -> None:
        self._layer, self._backend, self._made = layer, backend, made
        self._columns = _flat(inputs)
        self._gram = product(self._columns, self._columns.mT).unsqueeze(1)
        applied = made.by_row or made.gram_weighted_columns
        self._outputs = _flat([layer.applied(x, 1) for x in inputs]) if applied else None
        pairs = itertools.combinations_with_replacement(range(len(inputs)), 2)
        self._pairs = [*pairs] if made.weighted else []
        self._variances = [
            layer.applied(promoted(inputs[a] * inputs[b]), 2).flatten(1) * (1 + (a != b)) for a, b in self._pairs
        ]

    def of(self, cotangent: Calls) -> Forms:
        rows, contract, dots = _flat(cotangent), self._backend.gram, self._backend.row_dots
        carried = None
        if self._made.gram_weighted or self._made.by_column:
            carried = _flat([self._layer.carried(delta) for delta in cotangent])
        each = zip(self._pairs, self._variances, strict=True)
        weighted = [dots(rows[:, a] * rows[:, b], variances) for (a, b), variances in each]
        column_norms = None
        if self._made.gram_weighted_columns and self._outputs is not None:
            gram = product(self._outputs, self._outputs.mT).unsqueeze(1)
            column_norms = contract(rows.unsqueeze(1), gram.to(rows.dtype))
        return Forms(
            contract(rows.unsqueeze(1), self._gram) if self._made.squares else None,
            contract(carried.unsqueeze(1), self._gram) if carried is not None and self._made.gram_weighted else None,
            sum(weighted[1:], start=weighted[0]) if weighted else None,
            None if carried is None else (self._columns * carried).sum(dim=1).double(),
            (rows * self._outputs).sum(dim=1).double() if self._outputs is not None and self._made.by_row else None,
            column_norms,
        )


def _flat(calls: Calls) -> Tensor:
    """Return (n, calls, entries of a sample)."""
    return torch.stack([promoted(call).flatten(1) for call in calls], dim=1)
