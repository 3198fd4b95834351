"""Define losses that are sums over outputs: squared error, and binary cross-entropy on logits."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ..contractions import Backend, Bounded, product, promoted, promoted_dtype
from ..errors import InputError
from .base import Curvature, Factors, Known, Reduction, Terms, diagonal, marked, rows_like, uniform


class _Elementwise(Known):
    """Serve as the base of losses that are sums over outputs: a column for each output, and no class dimension."""

    elementwise: ClassVar[bool] = True

    def each(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return sums over the last dimension, the outputs of a row; in one dimension every output is a row."""
        values = self.reduced(outputs, targets, "none")
        return values if values.ndim < 2 else values.sum(dim=-1).flatten()


@dataclass
class SquaredError(_Elementwise):
    """Represent squared error: ∂²ℓ/∂z² = 2 I, with a mean over samples, positions and outputs."""

    reduction: Reduction

    def terms(self, outputs: Tensor, targets: Tensor | None, class_dim: int) -> Terms:
        d = outputs.shape[class_dim]
        terms = uniform(outputs.numel() // d, 2.0, float(d), outputs.device if targets is None else targets.device)
        return terms if targets is None else marked(terms, rows_like("targets", targets, outputs, class_dim))

    def curvature(
        self, weight: Tensor, bias: Tensor | None, backend: Backend, rows: int, memory: int, rtol: float
    ) -> Curvature:
        norm = backend.squared_norms(weight, memory).sum()
        return Curvature(lambda features, scale: Bounded(norm * backend.squared_norms(features, memory), None))

    def reduced(self, outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
        return F.mse_loss(outputs.double(), targets.double(), reduction=reduction)

    def factors(self, rows: Tensor, terms: Terms, *, alone: bool = False) -> Factors:
        """Return the columns √2 e_c."""
        return diagonal(terms.scale.to(promoted_dtype(rows.dtype)).unsqueeze(1).expand_as(rows))

    def sampled(self, rows: Tensor, terms: Terms, signs: Tensor) -> Tensor:
        return signs * terms.scale.sqrt().to(signs.dtype).unsqueeze(1)

    def penalty(
        self, features: Tensor, weight: Tensor, bias: Tensor | None, counts: Tensor, coefficients: Tensor
    ) -> Tensor:
        return _weighted(features.square().sum(dim=1) * weight.square().sum(), counts)


@dataclass
class BinaryCrossEntropy(_Elementwise):
    """Represent binary cross-entropy: ∂²ℓ/∂z_s² = ω_s (1 + (π_s - 1) y_s) σ'(z_s), π = ``pos_weight``."""

    weight: Tensor | None
    pos_weight: Tensor | None
    reduction: Reduction

    def terms(self, outputs: Tensor, targets: Tensor | None, class_dim: int) -> Terms:
        if targets is None:
            if self.pos_weight is not None:
                raise InputError("targets: binary cross-entropy with pos_weight cannot do without them")
            targets = torch.zeros_like(outputs)
        if not targets.is_floating_point():
            wanted = "floating-point labels in [0, 1] are wanted"
            raise InputError(f"targets: {wanted}, got {targets.dtype}; convert with .double()")
        dtype = promoted_dtype(outputs.dtype)
        coefficients = torch.ones_like(outputs, dtype=dtype)
        if self.pos_weight is not None:
            coefficients = 1 + (self._spread("pos_weight", self.pos_weight, outputs) - 1) * targets
        if self.weight is not None:
            coefficients = coefficients * self._spread("weight", self.weight, outputs)
        labels = rows_like("targets", targets, outputs, class_dim)
        rows = rows_like("coefficients", coefficients, outputs, class_dim).to(dtype)
        terms = marked(uniform(len(rows), 1.0, float(rows.shape[1]), rows.device), labels)
        return replace(terms, extra=(rows,))

    def _spread(self, name: str, value: Tensor, outputs: Tensor) -> Tensor:
        squeezed = outputs.shape[-1] == 1 and value.ndim and value.shape[-1] > 1  # the user's outputs were (n,)
        value = value.unsqueeze(-1) if squeezed else value
        if value.ndim == outputs.ndim and value.shape[0] > 1:
            raise InputError(
                f"loss: {name} of shape {tuple(value.shape)} holds one entry per sample of a batch; only a weight "
                "that is the same for every sample has a value over the data set"
            )
        try:
            return value.to(outputs.device, promoted_dtype(outputs.dtype)).expand_as(outputs)
        except RuntimeError:
            raise InputError(
                f"loss: {name} of shape {tuple(value.shape)} does not fit outputs {tuple(outputs.shape)}"
            ) from None

    def curvature(
        self, weight: Tensor, bias: Tensor | None, backend: Backend, rows: int, memory: int, rtol: float
    ) -> Curvature:
        weight, bias = promoted(weight), None if bias is None else promoted(bias)
        norms = backend.row_dots(weight, weight).to(weight.dtype)
        chunk = max(1, memory // (weight.element_size() * 3 * len(weight)))

        def values(features: Tensor, scale: Tensor, coefficients: Tensor) -> Bounded:
            curvatures = []
            for rows, weights in zip(features.split(chunk), coefficients.split(chunk), strict=True):
                rows = promoted(rows)
                logits = product(rows, weight.t(), bias)
                curvatures.append(backend.sigmoid_curvature(logits, weights, norms))
            return Bounded(torch.cat(curvatures) * backend.squared_norms(features, memory), None)

        return Curvature(values)

    def reduced(self, outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
        weight, pos_weight = (
            None if w is None else w.to(outputs.device, torch.float64) for w in (self.weight, self.pos_weight)
        )
        return F.binary_cross_entropy_with_logits(
            outputs.double(), targets.double(), weight, pos_weight=pos_weight, reduction=reduction
        )

    def factors(self, rows: Tensor, terms: Terms, *, alone: bool = False) -> Factors:
        """Return the columns √(ω_c (1 + (π_c - 1) y_c) σ'(z_c)) e_c, with σ' in a form without cancellation."""
        (coefficients,) = terms.extra
        small = promoted(rows).abs().neg().exp()
        return diagonal(coefficients * small / (1 + small).square())

    def sampled(self, rows: Tensor, terms: Terms, signs: Tensor) -> Tensor:
        (coefficients,) = terms.extra
        halved = -0.5 * promoted(rows).abs()  # the square root of an underflowing number has no finite derivative
        return signs * coefficients.sqrt() * halved.exp() / (1 + (2 * halved).exp())

    def penalty(
        self, features: Tensor, weight: Tensor, bias: Tensor | None, counts: Tensor, coefficients: Tensor
    ) -> Tensor:
        logits = product(features, weight.t(), bias)
        curvatures = coefficients * torch.sigmoid(logits) * torch.sigmoid(-logits)
        return _weighted(features.square().sum(dim=1) * product(curvatures, weight.square().sum(dim=1)), counts)


def _weighted(values: Tensor, counts: Tensor) -> Tensor:
    return (values.double() * counts).sum().to(values.dtype)
