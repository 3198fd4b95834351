"""Compute the curvature of cross-entropy at a head whose rows are spread over the ranks of a process group.

With p the softmax over all classes, P_r the part of it on rank r, p^r = p / P_r the softmax over that rank's classes
alone, and w̄_r = E_{p^r} w the mean of its rows,

    var_p(w) = Σ_r P_r var_{p^r}(w) + Σ_r P_r |w̄_r - Σ_r P_r w̄_r|²        (the law of total variance)

No term is negative, so that nothing cancels between the ranks. Of each row of features a rank sends its logarithm of
Σ exp z, its own variance and its mean: m + 2 numbers. The logits of all classes are nowhere.
"""

from functools import partial

import torch
from torch import Tensor

from ..contractions import product, promoted
from ..contractions.wide import Bounded
from ..losses import Curvature
from ..numerics.ranks import Ranks
from ..numerics.shard import Shard

_SENT = 2**22  # numbers of all ranks that are sent at a time


def over(ranks: Ranks, own: Curvature | None, weight: Tensor, bias: Tensor | None, memory: int) -> Curvature:
    """Return the curvature of the whole head.

    Args:
        ranks: which have the rows of the weight, and all get the same features.
        own: of this rank's rows; None where it has none.
        weight: these, (d, m).
        bias: (d,) or None.
        memory: bytes for logits.
    """
    return Curvature(partial(_by_row, Shard(ranks), own, weight, bias, memory))


def _by_row(
    shard: Shard,
    own: Curvature | None,
    weight: Tensor,
    bias: Tensor | None,
    memory: int,
    features: Tensor,
    scale: Tensor,
) -> Bounded:
    count = max(1, _SENT // (shard.ranks.size * (features.shape[1] + 2)))
    chunks = []
    for rows, counts in zip(features.split(count), scale.split(count), strict=True):
        variances = rows.new_zeros(len(rows), dtype=torch.float64) if own is None else own.by_row(rows, counts).values
        sizes, means = _moments(rows, weight, bias, memory)
        sent = torch.cat([sizes.unsqueeze(1), variances.unsqueeze(1), means], dim=1)
        found = torch.stack([each["rows"] for each in shard.each("the moments of rows", {"rows": sent})])
        sizes, variances, means = found.to(rows.device).split([1, 1, means.shape[1]], dim=2)
        parts = torch.softmax(sizes, dim=0)
        centre = (parts * means).sum(dim=0)
        between = (parts * (means - centre).square()).sum(dim=(0, 2))
        within = torch.where(parts > 0, parts * variances, 0.0).sum(dim=(0, 2))
        chunks.append(within + rows.double().square().sum(dim=1) * between)
    return Bounded(torch.cat(chunks), None)


def _moments(features: Tensor, weight: Tensor, bias: Tensor | None, memory: int) -> tuple[Tensor, Tensor]:
    """Return log Σ exp z (n,) over this rank's classes, and the mean of their rows (n, m), in float64."""
    if not len(weight):
        return features.new_full((len(features),), -torch.inf, dtype=torch.float64), torch.zeros_like(features).double()
    matrix, shift = promoted(weight), None if bias is None else promoted(bias).double()
    sizes, means = [], []
    for rows in features.split(max(1, memory // (16 * len(weight)))):
        scores = product(promoted(rows), matrix.t()).double()
        scores = scores if shift is None else scores.add_(shift)
        sizes.append(scores.logsumexp(dim=1))
        likely = scores.sub_(sizes[-1].unsqueeze(1)).exp_().to(matrix.dtype)
        means.append(product(likely, matrix).double())
    return torch.cat(sizes), torch.cat(means)
