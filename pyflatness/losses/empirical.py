"""Replace a loss's curvature by the outer products of its gradients: the empirical Fisher matrix.

    F = Σ_t ω_t ∇ℓ_t ∇ℓ_tᵀ / Σ_t ω_t        over the loss terms ω_t ℓ_t of E = Σ_t ω_t ℓ_t / Σ_t ω_t

In the outputs a term's square-root factor is one column, √ω_t ∂ℓ_t/∂f. For a loss that is a sum over outputs (squared
error, binary cross-entropy), all outputs of a row of dimension 0 are one term, as for the measure ``fisher_rao``.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from .base import Factors, Loss, Mixtures, Terms
from .rows import check_squares
from .rows import rows as rows_of


def empirical_fisher(loss: Loss) -> Loss:
    """Return a loss with the outer products of its gradients in place of its second derivatives."""
    return cast(Loss, _EmpiricalFisher(loss))


@dataclass
class _EmpiricalFisher:
    """Represent this loss; attributes that are not defined here are those of ``loss``."""

    loss: Loss
    convex: ClassVar[bool] = True
    known: ClassVar[bool] = False
    by_rows: ClassVar[bool] = False

    def __getattr__(self, name: str) -> Any:
        if name == "loss":  # not set yet while this is copied
            raise AttributeError(name)
        return getattr(self.loss, name)

    @property
    def positions(self) -> bool:
        """Return whether each position is a loss term."""
        return self.loss.positions and not self.loss.elementwise

    def columns(self, outputs: int) -> int:
        return 1

    def terms(self, outputs: Tensor, targets: Tensor | None, class_dim: int) -> Terms:
        """Return the loss's terms with their columns √ω ∂ℓ/∂f, (rows, C), as ``extra``."""
        assert targets is not None
        seen = rows_of(outputs, targets, self.loss)
        with torch.enable_grad():
            leaf = outputs.detach().double().requires_grad_()
            (gradient,) = torch.autograd.grad(self.loss.value(leaf, targets), leaf)
        columns, terms = seen.of(gradient), seen.terms
        if self.loss.elementwise:
            terms, columns = self._joined(terms, len(outputs)), gradient.reshape(len(gradient), -1)
        check_squares(columns, terms.weights)
        roots = terms.weights.sqrt().unsqueeze(1)
        columns = torch.where(roots > 0, columns / roots, 0.0)
        scale = torch.where(terms.scale == 0, 0.0, terms.scale / terms.scale)  # NaN stays
        return replace(terms, scale=scale, extra=(columns,))

    def _joined(self, terms: Terms, count: int) -> Terms:
        """Return terms in which all terms of one row of dimension 0 are summed to one."""
        scale, weights = (each.reshape(count, -1).sum(dim=1) for each in (terms.scale, terms.weights))
        return Terms(scale, weights if self.loss.reduction == "mean" else torch.ones_like(weights))

    def factors(self, rows: Tensor, terms: Terms, *, alone: bool = False) -> Factors:
        (columns,) = terms.extra
        return Factors(1, lambda c: (columns, None), lambda: _mixtures(columns), lambda: columns.square().sum(dim=1))


def _mixtures(columns: Tensor) -> Mixtures:
    """Return mixtures of one column for each row, multiplied by the first of the row's signs."""

    def weights() -> Tensor:
        found = torch.zeros_like(columns)
        found[:, 0] = columns.square().sum(dim=1)
        return found

    return Mixtures(
        lambda signs: [(columns * signs[:, :1], 1.0)], weights, lambda index: _mixtures(columns[index]), orthogonal=True
    )
