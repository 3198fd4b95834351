"""Compute |wᵀ M|² of each sample at a layer, with a graph in everything that it is made of.

    M = Σ_p δ_p φ_pᵀ (d, m)        |wᵀ M|² = ⟨M, w wᵀ M⟩ = Σ_pp' ⟨φ_p, φ_p'⟩ ⟨wᵀ δ_p, wᵀ δ_p'⟩

In plain torch, so that it can be differentiated as often as is wanted.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..contractions import Geometry, product, promoted
from ..passes import normalize
from ..passes.batch_layout import Layout
from ..passes.recorder import RecordedCall


@dataclass(frozen=True)
class AtLayer:
    """Bring a layer's call into the form that :func:`squared_norms` takes."""

    call: RecordedCall
    layout: Layout
    samples: int

    def factors(self, weight: Tensor, module: nn.Module, used: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return w (G, d, m) and φ (n, G, m, P), a column for each position.

        With ``used``, which loss terms are not ignored, both are rescaled by the deviations of the input's channels.
        """
        kind, inputs = self.call.kind, promoted(self.call.inputs)
        matrix = promoted(kind.as_matrix(weight)).unflatten(0, (kind.groups, -1))
        if used is not None:
            scale = self._deviations(inputs, used)
            matrix = matrix * normalize.of_columns(module, scale).to(matrix.dtype)
            inputs = kind.divided(inputs, scale)
        padded = self.layout.samples_first(kind.pad(inputs, self.call.output), self.samples)
        return matrix, _joined([columns(part, kind.geometry) for part in kind.in_common_form(padded)], 3)

    def deltas(self, gradient: Tensor) -> Tensor:
        """Return a gradient in the layer's output as δ (n, G, P, d)."""
        kind = self.call.kind
        parts = kind.in_common_form(self.layout.samples_first(gradient, self.samples))
        return _joined([kind.geometry.rows(part) for part in parts], 2)

    def _deviations(self, inputs: Tensor, used: Tensor) -> Tensor:
        kind = self.call.kind
        rows = kind.input_rows(inputs, None, lambda tensor: self.layout.samples_first(tensor, self.samples))
        mask = normalize.rows_used(used.view(self.samples, -1), rows.shape[1], kind.pointwise)
        eps = torch.finfo(self.call.inputs.dtype).eps
        return normalize.differentiable_scale(rows.flatten(0, 1), mask.flatten(), eps)


def squared_norms(weight: Tensor, columns: Tensor, deltas: Tensor) -> Tensor:
    """Return |wᵀ M|² of each sample, summed over groups, (n,), for w (G, d, m), φ (n, G, m, P) and δ (n, G, P, d)."""
    groups, d, m = weight.shape
    if groups == 1:  # products with w are then one of matrices, for all samples together
        weight, columns, deltas = weight.squeeze(0), columns.squeeze(1), deltas.squeeze(1)
    positions, rank = deltas.shape[-2], min(d, m)
    if positions == 1:
        return _summed(columns.square().sum(dim=-2) * product(deltas, weight).square().sum(dim=-1))
    if positions**2 * (d + m) + rank * d * positions < positions * d * m + rank * d * m:
        if m <= d:
            left = right = product(deltas, weight)
        else:
            left, right = deltas, product(deltas, product(weight, weight.mT))
        return _summed(product(columns.mT, columns) * product(left, right.mT))
    gradients = product(columns, deltas)  # Mᵀ: so that the gradient in the columns comes in their own order
    if m < d:
        return _summed(product(gradients, weight).square())
    return _summed(gradients * product(gradients, product(weight, weight.mT)))


def columns(inputs: Tensor, geometry: Geometry) -> Tensor:
    """Return the patches of padded inputs as columns (n, G, m, P), of images by torch's own, faster function."""
    if geometry.kernel_elements == 1 or geometry.kernel[0] > 1 or inputs.shape[2] > 1:
        return geometry.patches(inputs).mT
    found = F.unfold(inputs.squeeze(2), geometry.kernel[1:], dilation=geometry.dilation[1:], stride=geometry.stride[1:])
    grouped: Tensor = found.unflatten(1, (geometry.groups, -1))
    return grouped


def _summed(values: Tensor) -> Tensor:
    return values.flatten(1).sum(dim=1)


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)
