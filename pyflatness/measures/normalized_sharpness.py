"""Compute normalised sharpness: the least over all scales of rows and columns.

It is defined by Tsuzuku et al. (2019), and by C24 in Eq. 36 (λ = ½).

    min_{σ, σ'} Σ_sj (H_sj (σ_s σ'_j)² + w_sj² / (4 λ² (σ_s σ'_j)²)),    H_sj = ∂²E/∂w_sj²

for each layer's weight matrix (d, m), of a convolution its flattened filters, each group its own; the sum over its
layers for a network. With a = σ², b = σ'² the minimum over a for fixed b is a_s² = Σ_j w_sj²/b_j / Σ_j H_sj b_j, and
the other way round: these in turn. In logarithms of a and b the function is convex, so where its gradient vanishes it
is least. The sum of the gradient's absolute entries, relative to the value, says how far that is reached. Rows and
columns in which H or w vanishes let their terms go to zero at no cost and are left out. Where an H_sj is negative the
function has no lower bound. By the GGN H_sj = Σ_i Σ_c σ_ic (M_i^(c))_sj². It is invariant to layer-wise and neuron-wise
rescalings.

C24: "From Loss Flatness to Compressed Representations".
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InputError
from .base import Measure

TOLERANCE, STEPS = 1e-7, 2000  # of the relative gradient, whose square is the value's error; iterations at most
_ROUNDING = 100.0  # a negative H within this many units in the last place of the largest is zero


@dataclass(frozen=True)
class Minimum:
    """Hold where the iteration stopped."""

    value: float  # the least value found
    gradient: float  # Σ |gradient entries| in log a and log b, over the value
    columns: Tensor  # (m,), b; 0 for a column that was left out


def minimised(curvature: Tensor, weight: Tensor) -> Minimum:
    """Return the minimum over a, b > 0 of Σ_sj H_sj a_s b_j + w_sj² / (a_s b_j), for H ≥ 0 and w (d, m), float64."""
    squares, curvature, kept = _shrunk(weight.square(), curvature)
    columns = squares.new_zeros(weight.shape[1])
    if not squares.numel():
        return Minimum(0.0, 0.0, columns)
    b = squares.new_ones(squares.shape[1])
    value, gradient = float("inf"), float("inf")
    for _ in range(STEPS):
        a = ((squares @ b.reciprocal()) / (curvature @ b)).sqrt()
        falling, rising = (squares.t() @ a.reciprocal()) / b, (curvature.t() @ a) * b  # for rows they are equal
        before, value = value, float(falling.sum() + rising.sum())
        gradient = float((rising - falling).abs().sum()) / value
        if gradient <= TOLERANCE or not value < before:
            break
        b = b * (falling / rising).sqrt()
    columns[kept] = b
    return Minimum(value, gradient, columns)


def _shrunk(squares: Tensor, curvature: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return both without rows and columns in which either vanishes, and which columns are left."""
    kept = torch.arange(squares.shape[1], device=squares.device)
    while squares.numel():
        rows = (squares > 0).any(dim=1) & (curvature > 0).any(dim=1)
        columns = (squares > 0).any(dim=0) & (curvature > 0).any(dim=0)
        if bool(rows.all()) and bool(columns.all()):
            break
        squares, curvature, kept = squares[rows][:, columns], curvature[rows][:, columns], kept[columns]
    return squares, curvature, kept


def of_layer(name: str, weight: Tensor, diagonal: Tensor) -> tuple[float, str]:
    """Return the value for a weight (G, d, m) and a Hessian diagonal (G, d, m), and a note if it is not a minimum."""
    if not bool(diagonal.isfinite().all()):
        return float("nan"), ""
    rounding = _ROUNDING * torch.finfo(weight.dtype).eps * float(diagonal.abs().max())
    negative = diagonal < -rounding
    if bool(negative.any()):
        raise InputError(
            f"layer {name!r}: {int(negative.sum())} of the {negative.numel()} diagonal entries of its Hessian are "
            f"negative (down to {float(diagonal.min()):.3g}), so normalised sharpness has no lower bound; leave it out "
            "of measures=, or pass curvature='ggn' for the GGN value, another number"
        )
    weight = weight.double().cpu()
    found = [minimised(h, w) for h, w in zip(diagonal.clamp_min(0.0), weight, strict=True)]
    gradient = max(minimum.gradient for minimum in found)
    note = f"normalized_sharpness: stopped at a relative gradient of {gradient:.1e}" if gradient > TOLERANCE else ""
    return sum(minimum.value for minimum in found), note


NORMALIZED_SHARPNESS = Measure(
    name="normalized_sharpness",
    formula="min_{σ, σ'} Σ_sj H_sj (σ_s σ'_j)² + w_sj² / (σ_s σ'_j)²",
    source="From Loss Flatness to Compressed Representations, Eq. 36",
    quantity="diagonal",
    of_summands=of_layer,
    invariant="layer-wise, neuron-wise",
    cost="one sweep, shared; weight gradients are made for it",
)
