"""The same quadratic forms as :mod:`.layer`'s for a convolution as one dense matrix, all outputs × all inputs."""

import functools
import itertools
from collections.abc import Sequence
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from . import reference
from .layer import NEURONS, Contraction, Share, Signals, share_of
from .precision import promoted


class DenseLayer(Protocol):
    """A convolution as one dense matrix W (d, m), all outputs × all inputs, by what it does."""

    d: int
    m: int
    device: torch.device

    def carried(self, delta: Tensor) -> Tensor:
        """Wᵀ δ of δ (n, …), of the shape of the unpadded inputs."""

    def applied(self, inputs: Tensor, power: int) -> Tensor:
        """W x of unpadded inputs (n, …), of the shape of the outputs; for power 2 of W ∘ W."""


class DenseGradients:
    """The same for a convolution as one dense matrix W: M = Σ_q vec(δ_q) vec(x_q)ᵀ over its calls q, never made.

    |Wᵀ M|² = Σ ⟨x_q, x_q'⟩ ⟨γ_q, γ_q'⟩ with γ = Wᵀ δ, the signal carried back through this layer alone. Sums over W ∘ M
    by row Σ_q δ_q ∘ W x_q, by column Σ_q x_q ∘ γ_q; |W ∘ M|² = Σ_qq' ⟨δ_q ∘ δ_q', (W ∘ W)(x_q ∘ x_q')⟩.

    Args:
        layer: the convolution.
        backend: a module from :func:`.backends.choose`.
        quantities: of :data:`QUANTITIES`, but ``diagonal``.
    """

    def __init__(self, layer: DenseLayer, backend: ModuleType, quantities: Sequence[str]) -> None:
        self._layer, self._backend, self._quantities = layer, backend, quantities

    def of(self, inputs: Signals, signals: int) -> Contraction:
        """For unpadded inputs (n, …) of each call: signals (n, …) of each call."""
        columns = _flat(inputs)
        gram = (columns @ columns.transpose(1, 2)).unsqueeze(1)
        wants, layer = set(self._quantities).intersection, self._layer
        outputs = _flat([layer.applied(x, 1) for x in inputs]) if wants({"by_row"}) else None
        pairs = [*itertools.combinations_with_replacement(range(len(inputs)), 2)] if wants({"weighted"}) else []
        spreads = [layer.applied(promoted(inputs[a] * inputs[b]), 2).flatten(1) * (1 + (a != b)) for a, b in pairs]

        def share(signal: Signals, sign: Tensor | float | None = None) -> Share:
            rows, dots = _flat(signal), self._backend.row_dots
            carried = _flat([layer.carried(delta) for delta in signal]) if wants({"rooted", "by_column"}) else None
            weighted = [dots(rows[:, a] * rows[:, b], spread) for (a, b), spread in zip(pairs, spreads, strict=True)]
            found = reference.Products(
                self._backend.gram(rows.unsqueeze(1), gram) if wants({"squares"}) else None,
                self._backend.gram(carried.unsqueeze(1), gram) if carried is not None and wants({"rooted"}) else None,
                sum(weighted[1:], start=weighted[0]) if weighted else None,
                None if carried is None else (columns * carried).sum(dim=1).double(),
                None if outputs is None else (rows * outputs).sum(dim=1).double(),
            )
            return share_of(found, self._quantities, sign)

        return share

    def nothing(self, samples: int) -> Share:
        """Of no signal at all."""
        zeros = functools.partial(torch.zeros, dtype=torch.float64, device=self._layer.device)
        neurons = {"by_column": self._layer.m, "by_row": self._layer.d}
        parts = {name: zeros(samples, neurons[name]) for name in NEURONS if name in self._quantities}
        return Share(zeros(len(self._quantities), samples), parts)

    def traces(self, inputs: Signals, signal: Signals, coefficients: Tensor) -> Tensor:
        """Σ_i coefficient_i M_i M_iᵀ, (1, d, d) float64 for d the number of outputs of a sample."""
        columns, rows = _flat(inputs).double(), _flat(signal).double()
        return torch.einsum("nas,nab,nbt,n->st", rows, columns @ columns.transpose(1, 2), rows, coefficients)[None]


def _flat(calls: Signals) -> Tensor:
    """(n, calls, entries of a sample)."""
    return torch.stack([promoted(call).flatten(1) for call in calls], dim=1)
