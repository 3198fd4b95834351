"""Add up a row's sums over the classes of a head: tile by tile with the mean row of them, or at once with slopes.

What backends do by kernels of their own here is handed in, so that they share the rest.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .centre import centre, shifted
from .precision import product, promoted


class ClassSums(NamedTuple):
    """Hold sums over each row's classes but the most probable one t, relative to its exp(z).

    Attributes:
        maximum: z_t, (n,) in the logits' dtype; -inf before the first class.
        top: t, (n,) int64; -1: there is none.
        rest: ``Σ e_s`` with e_s = exp(z_s - z_t), (n,) float64.
        moment: ``Σ e_s |w_s|²``, (n,) float64.
    """

    maximum: Tensor
    top: Tensor
    rest: Tensor
    moment: Tensor


class MeanRow(NamedTuple):
    """Hold squared lengths, (n,) float64, in which w_t is the row of a sample's most probable class.

    Attributes:
        others: of the mean of the other classes' rows.
        away: of that mean less w_t.
        reach: of ``Σ e_s w_s + w_t``; None where it was not asked for.
    """

    others: Tensor
    away: Tensor
    reach: Tensor | None


class RowSlopes(NamedTuple):
    """Hold what the gradient of a sum over the rows of a head is made of, v_i = var_{p_i}(w).

    Attributes:
        total: ``Σ shares_i |φ_i|² v_i``, a number, or a float64 tensor that the host has not waited for.
        slopes: ``shares_i |φ_i|² ∂v_i/∂z_is``, (d, n).
        probabilities: p_is, (d, n).
        factors: ``2 shares_i v_i`` and ``shares_i |φ_i|²``, (2, n).
    """

    total: float | Tensor
    slopes: Tensor
    probabilities: Tensor
    factors: Tensor


def add_tile(
    exponentiate: Callable[[Tensor, Tensor | None, float, Tensor], tuple[Tensor, Tensor | None, Tensor]],
    logits: Tensor,
    bias: Tensor | None,
    norms: Tensor,
    first: int,
    sums: ClassSums,
    rounded: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Do what :func:`.reference.exponentiate_tile` does by a backend's ``exponentiate``."""
    before, tile = sums.maximum.clone(), slice(first, first + logits.shape[1])
    if bias is not None:
        logits.add_(bias[tile])
    rest, moment, place = exponentiate(logits, None if rounded is not None else norms[tile], 0.0, sums.maximum)
    if rounded is not None:
        values = rounded.copy_(logits).to(logits.dtype)
        both = values.sum(dim=1, dtype=torch.float64), (values * norms[tile]).sum(dim=1, dtype=torch.float64)
        rest, moment = (rows.masked_fill_((place >= 0) & (sums.maximum == torch.inf), torch.nan) for rows in both)
    assert moment is not None
    raised = place >= 0
    joining, top = torch.where(raised, sums.top, -1), place.add_(first)
    joined = joining >= 0
    factor = torch.where(joined, (before - sums.maximum).double().exp(), 1.0)
    joined_norms = torch.where(joined, norms[joining.clamp_min(0)], 0.0)
    sums.rest.add_(joined).mul_(factor).add_(rest)
    sums.moment.add_(joined_norms).mul_(factor).add_(moment)
    sums.top.copy_(torch.where(raised, top, sums.top))
    return joining, factor


def mean_row_by(
    dots: Callable[[Tensor, Tensor], Tensor],
    summed: Tensor,
    weight: Tensor,
    centre: Tensor,
    sums: ClassSums,
    uncentred: Tensor | None,
    reach: bool,
) -> MeanRow:
    """Do what :func:`.reference.mean_row` does by a backend's ``row_dots``."""
    dtype = summed.dtype
    if uncentred is not None:
        summed.addr_(uncentred.to(dtype), centre, alpha=-1)
    top = promoted(weight[sums.top.clamp_min(0)]).sub_(centre)
    whole = dots(*[summed + top] * 2) if reach else None
    mean = summed.div_(sums.rest.to(dtype).clamp_min(torch.finfo(dtype).tiny).unsqueeze(1))
    others, away = dots(mean, mean), top.neg_().add_(mean)
    lengths = MeanRow(others, dots(away, away), whole)
    mean.addcmul_(away, (-1 / (1 + sums.rest)).unsqueeze(1).to(dtype))
    if uncentred is not None:
        mean.add_(centre)
    return lengths


def softmax_variance_gradient_by(
    pair_distances: Callable[[Tensor], Tensor],
    row_dots: Callable[[Tensor, Tensor], Tensor],
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    shares: Tensor,
) -> RowSlopes:
    """See :func:`.reference.softmax_variance_gradient`; with a backend's own ``pair_distances`` and ``row_dots``."""
    dtype, centred = features.dtype, weight - centre(weight)
    p = torch.softmax(product(features, centred.t(), shifted(bias, weight)), dim=1)
    q = product(p, pair_distances(weight))
    twice = (p * q).sum(dim=1)
    scale = row_dots(features, features) * shares
    slopes = p * (q - twice.unsqueeze(1)) * scale.to(dtype).unsqueeze(1)
    factors = torch.stack([(twice * shares).to(dtype), scale.to(dtype)])
    return RowSlopes(scale @ twice.double() / 2, slopes.t(), p.t(), factors)
