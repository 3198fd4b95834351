"""Measure how locally constant labels are around features (Petzka et al. 2021, Definition 9 and Corollary 10).

    D(δ) = (1/|S|) Σ_i sup_{|Δ_i| ≤ δ|φ_i|} |ℓ(ψ(φ_i + Δ_i), y[φ_i + Δ_i]) - ℓ(ψ(φ_i + Δ_i), y_i)|  ≤  C δ³

for labels that are approximately locally constant of order three. Then a minimum is feature robust on average over
orthogonal matrices for ε = δ² κ/(2m) + C δ³ up to O(δ³) (Corollary 10), where Theorem 5 takes C = 0. The supremum is
taken over draws of Δ, half of them on the sphere and half uniform in the ball, so D is found from below.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import interrupts, losses, tensor_head
from ..contractions import product, promoted
from ..errors import InputError
from ..messages import check_tensor, in_words, span
from ..options import check_draws, check_function, check_numbers, check_seed
from ..session import public

Labels = Callable[[Tensor], Tensor]
"""Features (n, m) -> targets as the loss takes them, (n, …)."""


@dataclass(frozen=True, eq=False)
class LabelConstancy:
    """Hold by how much changing labels change the loss around the features of a sample.

    Attributes:
        deltas: δ, (k,) float64.
        changes: D(δ), (k,) float64, in units of the loss, from below.
        features: m.
        samples: n.
        draws: of Δ, for each sample and δ.
    """

    deltas: Tensor
    changes: Tensor
    features: int
    samples: int
    draws: int

    @property
    def constant(self) -> float:
        """Return C, the largest of D(δ)/δ³."""
        return float((self.changes / self.deltas**3).max())

    def __repr__(self) -> str:
        return in_words(
            self,
            f"D(δ) {span(self.changes, '.4g')} for δ {span(self.deltas, 'g')}",
            f"C = {self.constant:.4g}",
            f"m = {self.features}",
            f"{self.samples} samples",
            f"{self.draws} draws",
        )

    def epsilon(self, kappa: float) -> Tensor:
        """Return δ² κ/(2m) + D(δ) for each δ, (k,): feature robustness by Corollary 10.

        Args:
            kappa: κ, relative flatness of the head on this sample.
        """
        return self.deltas.square() * float(kappa) / (2 * self.features) + self.changes


@public
def label_constancy(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    targets: Tensor | None = None,
    *,
    labels: Labels,
    loss: Any = "cross_entropy",
    deltas: Sequence[float],
    draws: int = 64,
    seed: int = 0,
) -> LabelConstancy:
    """Return how much labels that change around the features of a sample change a linear head's loss.

    (1/n) Σ_i max_Δ |ℓ(ψ(φ_i + Δ), y[φ_i + Δ]) - ℓ(ψ(φ_i + Δ), y_i)|, |Δ| ≤ δ|φ_i|   (Petzka et al. 2021, Definition 9).

    Args:
        features: φ, (n, m).
        weight: w, (d, m).
        bias: (d,) or None.
        targets: y_i, what ``loss`` takes, one per sample; None: ``labels(features)``.
        labels: y[·], a function from features (n, m) to targets.
        loss: as for :func:`pyflatness.head_flatness`; not a callable.
        deltas: δ, positive.
        draws: of Δ for each sample, at least 2; more of them find more of the supremum.
        seed: of the draws; another device gives other ones for it.

    Returns:
        D by δ, and C.

    Raises:
        InputError: shapes, targets or options that do not fit.

    Example:
        >>> import torch, pyflatness as pf
        >>> _ = torch.manual_seed(0)
        >>> phi, w = torch.randn(50, 2), torch.eye(2)
        >>> found = pf.label_constancy(phi, w, labels=lambda x: (x[:, 0] < x[:, 1]).long(), deltas=[1e-6, 0.5])
        >>> float(found.changes[0]), bool(found.changes[1] > 0.01)
        (0.0, True)
    """
    resolved = losses.resolve(loss, None)
    if isinstance(resolved, losses.CustomLoss):
        raise InputError("loss: a callable has no loss of a single sample; take a loss of torch")
    radii = check_numbers("deltas", deltas)
    draws, seed = check_draws("draws", draws, 2), check_seed("seed", seed)
    check_function("labels", labels, "of features (n, m) that returns their targets")
    targets = check_tensor("targets", labels(features) if targets is None else targets)
    tensor_head.check_tensors(features, weight, bias, targets, resolved)
    phi, w = promoted(features.detach()), promoted(weight.detach())
    shift = 0 if bias is None else promoted(bias.detach())
    generator = torch.Generator(phi.device).manual_seed(seed)
    changes = []
    with torch.no_grad():
        for radius in radii:
            largest = torch.zeros(len(phi), dtype=torch.float64, device=phi.device)
            for draw in range(draws):
                interrupts.check()
                moved = phi + radius * _within(phi, generator, on_sphere=draw % 2 == 0)
                outputs = product(moved, w.t()) + shift
                there, here = (_each(resolved, outputs, y) for y in (labels(moved.to(features.dtype)), targets))
                largest = torch.maximum(largest, (there - here).abs())
            changes.append(float(largest.mean()))
    grid = torch.tensor(radii, dtype=torch.float64, device="cpu")
    found = torch.tensor(changes, dtype=torch.float64, device="cpu")
    return LabelConstancy(grid, found, phi.shape[1], len(phi), draws)


def _within(phi: Tensor, generator: torch.Generator, *, on_sphere: bool) -> Tensor:
    """Return Δ of |Δ_i| ≤ |φ_i|, of that length or uniform in the ball."""
    normal: Tensor = torch.randn(phi.shape, generator=generator, dtype=phi.dtype, device=phi.device)
    length = phi.norm(dim=1, keepdim=True)
    if not on_sphere:
        uniform = torch.rand(len(phi), 1, generator=generator, dtype=phi.dtype, device=phi.device)
        length = length * uniform ** (1 / phi.shape[1])
    scale: Tensor = length / normal.norm(dim=1, keepdim=True)
    return normal * scale


def _each(loss: losses.Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of each sample, the mean of its terms, (n,) float64."""
    values: Tensor = loss.each(outputs, targets).double().view(len(outputs), -1).mean(dim=1)
    return values
