"""Draw a random cotangent of a batch's outputs that is differentiable in them.

    v = Σ_c r_c s_·c,    r_c = ±1 at random,    E v vᵀ = ∂²ℓ/∂f²

The signs of all columns of all loss terms are independent, so that the mean over them has no cross terms.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import losses
from ..contractions import promoted


@dataclass(frozen=True)
class LossTerms:
    """Hold a batch's loss terms, which of them the loss does not ignore (terms,), and its outputs, with their graph."""

    used: Tensor
    _outputs: Tensor
    _rows: losses.Rows
    _loss: losses.Known

    @classmethod
    def of(cls, outputs: Tensor, targets: Tensor, loss: losses.Known) -> "LossTerms":
        """Return the terms of outputs (n, C, …), or (n,)."""
        rows = losses.rows(outputs, targets, loss)
        used = torch.ones_like(rows.terms.scale, dtype=torch.bool) if rows.terms.used is None else rows.terms.used
        return cls(used, outputs, rows, loss)

    def reduced(self, total: Tensor) -> Tensor:
        """Return a sum over the terms as the loss reduces it; a mean over none is NaN, with gradients of 0."""
        if self._loss.reduction == "sum":
            return total
        weight = self._rows.terms.weights.sum()
        return torch.where(weight == 0, torch.nan, total) / weight

    def cotangent(self, signs: Callable[[Tensor], Tensor]) -> tuple[Tensor | float, Tensor]:
        """Return a number and a cotangent like the outputs, whose product is v, by ``signs`` like a tensor."""
        rows, terms = promoted(self._rows.of(self._outputs)), self._rows.terms
        counted = (terms.scale != 0).unsqueeze(1)
        whole = bool(counted.all())
        rows = rows if whole else torch.where(counted, rows, 0.0)  # NaN in an ignored row goes nowhere
        mixed = self._loss.sampled(rows, terms, signs(rows.detach()))
        mixed = mixed if whole else torch.where(counted, mixed, 0.0)
        size: Tensor | float = 1.0
        if self._outputs.dtype is torch.float16:  # the small ones would underflow on their way
            size = mixed.detach().abs().amax().clamp_min(torch.finfo(mixed.dtype).tiny)
        return size, self._shaped(mixed / size).to(self._outputs.dtype)

    def _shaped(self, rows: Tensor) -> Tensor:
        if self._outputs.ndim == 1:
            return rows.view_as(self._outputs)
        return rows.view(self._outputs.movedim(self._rows.dim, -1).shape).movedim(-1, self._rows.dim)
