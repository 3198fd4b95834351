"""The kernels in plain torch: any dtype, any device, the truth that the compiled ones are held to.

Axes: ``n`` rows (one loss term each), ``d`` outputs, ``m`` features. Per-row results are float64.
"""

import torch
from torch import Tensor

# torch's first exp of a process, if several threads make it at once, can be right to 1e-4 only (seen in one process
# of ten with torch 2.13's CPU build, MKL behind it). One serial call beforehand settles it.
torch.zeros(1).exp_()


def pair_distances(weight: Tensor) -> Tensor:
    """``|w_s - w_t|²`` for all pairs of rows of ``weight`` (d, m), as (d, d), from the differences themselves."""
    return torch.cdist(weight, weight, compute_mode="donot_use_mm_for_euclid_dist").square()


def softmax_variance(features: Tensor, weight: Tensor, bias: Tensor, distances: Tensor) -> Tensor:
    """``|φ_i|² Σ_{s<t} p_s p_t distances[s, t]`` with p = softmax(W φ_i + b), as (n,)."""
    logits = torch.addmm(bias, features, weight.t())
    rest, _, _ = exponentiate(logits, None, top_value=1.0)
    pairs = row_dots(logits, logits @ distances) / 2
    return row_dots(features, features) * pairs / (1 + rest).square()


def exponentiate(logits: Tensor, row_norms: Tensor | None, top_value: float) -> tuple[Tensor, Tensor | None, Tensor]:
    """Replace ``logits`` (n, d) by ``exp(z - max z)``, with ``top_value`` at each row's (first) maximum.

    Returns:
        ``rest`` (n,), the row sums without the maximum; the same sums weighted by ``row_norms`` (d,), or None; the
        places of the maxima (n,).
    """
    top = logits.argmax(dim=1, keepdim=True)
    maximum = logits.gather(1, top)
    logits.sub_(maximum).exp_()
    finite = logits.gather(1, top).isfinite()
    logits.scatter_(1, top, torch.where(finite, 0.0, torch.nan).to(logits.dtype))
    rest = logits.sum(dim=1, dtype=torch.float64)
    moment = None if row_norms is None else row_dots(logits, row_norms.expand_as(logits))
    logits.scatter_(1, top, top_value)
    return rest, moment, top.squeeze(1)


def row_dots(a: Tensor, b: Tensor) -> Tensor:
    """``Σ_j a_ij b_ij`` as (n,)."""
    return (a * b).sum(dim=1, dtype=torch.float64)


def sigmoid_curvature(logits: Tensor, coefficients: Tensor, row_norms: Tensor) -> Tensor:
    """``Σ_s coefficients[i, s] row_norms[s] σ'(logits[i, s])`` as (n,), σ' from the tail that does not cancel."""
    small = logits.abs().neg().exp()
    return row_dots(coefficients * small / (1 + small).square(), row_norms.expand_as(logits))
