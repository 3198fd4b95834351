"""Compute the curvature of cross-entropy at a head, |φ|² var_p(w), by operations that torch can differentiate.

:mod:`pyflatness.contractions.softmax` explains the formulas. Here they are composed for any device and derivative:

- up to 3 m / 2 outputs: var_p(w) = ½ pᵀ D p with D_st = |w_s - w_t|², which nothing cancels in;
- of more outputs: q (var_r(w) + p_t |E_r w - w_t|²), with t the most probable class, q = 1 - p_t and r the
  probabilities of the others.
"""

from typing import Any

import torch
from torch import Tensor

from ..contractions import FUSED_OUTPUTS, product
from ..contractions.centre import centre
from ..contractions.reference import pair_distances


def weighted_sum(features: Tensor, weight: Tensor, bias: Tensor | None, shares: Tensor) -> Tensor:
    """Return ``Σ_i shares_i |φ_i|² var_{p_i}(w)``; what is in rows of share 0 goes nowhere, be it NaN.

    Args:
        features: (n, m), like what follows in float32 or float64.
        weight: (d, m).
        bias: (d,) or None.
        shares: (n,) float64.
    """
    rows = torch.where((shares != 0).unsqueeze(1), features, 0.0)
    return (softmax_variance(rows, weight, bias).double() * shares).sum().to(features.dtype)


def softmax_variance(features: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``|φ_i|² var_{p_i}(w)``, (n,), for features (n, m), weight (d, m) and bias (d,), all of one dtype."""
    weight = weight - centre(weight.detach())
    logits = product(features, weight.t())
    if bias is not None:  # less its median, which moves no probability; it is -inf where most classes are masked
        logits = logits + (bias - bias.detach().median().nan_to_num(0.0, 0.0, 0.0))
    of_rows = _by_pairs if takes_pairs(*weight.shape) else _by_rows
    return features.square().sum(dim=1) * of_rows(logits, weight)


def takes_pairs(d: int, m: int) -> bool:
    """Return whether a head of d classes and m features takes pairs of classes, which is up to 3 m / 2 classes."""
    return d <= max(FUSED_OUTPUTS, 3 * m // 2)


def _by_pairs(logits: Tensor, weight: Tensor) -> Tensor:
    p = torch.softmax(logits, dim=1)
    distances: Tensor = _PairDistances.apply(weight)
    return (p * product(p, distances)).sum(dim=1) / 2


def _by_rows(logits: Tensor, weight: Tensor) -> Tensor:
    top, lowest = logits.detach().argmax(dim=1, keepdim=True), torch.finfo(logits.dtype).min
    others = logits.scatter(1, top, lowest).clamp_min(lowest)  # masked classes too: softmax of -inf alone is NaN
    odds = torch.logsumexp(others, dim=1) - logits.gather(1, top).squeeze(1)
    r = torch.softmax(others, dim=1)
    mean = product(r, weight)
    within = product(r, weight.square().sum(dim=1)) - mean.square().sum(dim=1)
    apart = (mean - weight[top.squeeze(1)]).square().sum(dim=1)
    return torch.sigmoid(odds) * (within + torch.sigmoid(-odds) * apart)


class _PairDistances(torch.autograd.Function):
    """Differentiate ``|w_s - w_t|²`` (d, d) by differences of rows, where torch's own has one derivative only."""

    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor) -> Tensor:
        return pair_distances(weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (weight,) = ctx.saved_tensors
        return apart(gradient + gradient.t(), weight)


def apart(pairs: Tensor, weight: Tensor) -> Tensor:
    """Return ``2 Σ_t pairs[s, t] (w_s - w_t)``, (d, m); ``pairs`` (d, d) is symmetric."""
    others = pairs * (1 - torch.eye(len(pairs), dtype=pairs.dtype, device=pairs.device))
    return 2 * (others.sum(dim=1, keepdim=True) * weight - product(others, weight))
