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
    maximum = logits.new_full((len(logits),), -torch.inf)
    rest, _, _ = exponentiate(logits, None, 1.0, maximum)
    pairs = row_dots(logits, logits @ distances) / 2
    return row_dots(features, features) * pairs / (1 + rest).square()


def exponentiate(
    logits: Tensor, row_norms: Tensor | None, top_value: float, maximum: Tensor
) -> tuple[Tensor, Tensor | None, Tensor]:
    """A block of each row's logits (n, d), in place: ``exp(z - maximum)``.

    ``maximum`` (n,), the largest of the blocks before (-inf for the first), is raised to this block's largest logit
    first, in place. Where that raises it, the place of that logit takes ``top_value`` and stays out of the sums.

    Returns:
        ``rest`` (n,), the row sums; the same sums weighted by ``row_norms`` (d,), or None; the places of the maxima
        (n,), -1 where an earlier block has it.
    """
    largest, top = logits.nan_to_num(-torch.inf, posinf=torch.inf, neginf=-torch.inf).max(dim=1)
    raised = largest > maximum
    maximum.copy_(torch.where(raised, largest, maximum))
    logits.sub_(torch.where(maximum > -torch.inf, maximum, 0.0).unsqueeze(1)).exp_()
    top, hidden = top.unsqueeze(1), (raised & largest.isfinite()).unsqueeze(1)
    logits.scatter_(1, top, torch.where(hidden, 0.0, logits.gather(1, top)))
    rest = logits.sum(dim=1, dtype=torch.float64)
    moment = None if row_norms is None else row_dots(logits, row_norms.expand_as(logits))
    logits.scatter_(1, top, torch.where(raised.unsqueeze(1), top_value, logits.gather(1, top)))
    return rest, moment, torch.where(raised, top.squeeze(1), -1)


def row_dots(a: Tensor, b: Tensor) -> Tensor:
    """``Σ_j a_ij b_ij`` as (n,)."""
    return (a * b).sum(dim=1, dtype=torch.float64)


def sigmoid_curvature(logits: Tensor, coefficients: Tensor, row_norms: Tensor) -> Tensor:
    """``Σ_s coefficients[i, s] row_norms[s] σ'(logits[i, s])`` as (n,), σ' from the tail that does not cancel."""
    small = logits.abs().neg().exp()
    return row_dots(coefficients * small / (1 + small).square(), row_norms.expand_as(logits))
