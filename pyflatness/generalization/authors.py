"""Compute what the authors' code calls representativeness, which is not Eq. 3 of the paper.

    mean_{j∈T} [ ℓ(ψ(φ_j), y_j) - (1/|S|) Σ_{i∈S} v_i K(φ_j, φ_i) ℓ(ψ(φ_i), y_j) ]
    v_i = δ|φ_i| / Σ_S δ|φ|,   K(a, b) = exp(-|a - b|/2) / √(2π)

averaged over folds T. δ|φ_i|, meant as bandwidths, are passed as weights of a density estimate of bandwidth 1 which
normalises them, so δ cancels; its kernel is given √|a - b| for a distance and normalised for one dimension, and the sum
is divided by |S| once more. So what is taken off the mean loss of T is of order 1/|S|: the value is nearly that loss.
Read off ``SyntheticExperiments/interpolatingness.py`` of the authors' published code.
"""

import math
from typing import Any

import torch
from torch import Tensor

from .. import interrupts, losses, tensor_head
from ..contractions import product, promoted
from ..errors import InputError
from ..losses import Loss
from ..messages import check_tensor
from ..numerics import meeting
from ..numerics.meeting import Group
from ..options import check_count, check_seed
from ..session import public
from .representativeness import FOLDS, Fit, assigned, refit

_PAIRS = 2**18  # at once


@public
def authors_representativeness(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    targets: Tensor | None = None,
    *,
    loss: Any = "cross_entropy",
    folds: int = FOLDS,
    fit: Fit | None = None,
    seed: int = 0,
    reduction: str | None = None,
    process_group: Group = None,
) -> float:
    """Return the quantity that the authors' code calls representativeness, to compare with published figures.

    mean_T [ℓ(ψ(φ_j), y_j) - (1/|S|) Σ_S v_i K(φ_j, φ_i) ℓ(ψ(φ_i), y_j)], v_i = |φ_i| / Σ|φ|, K a kernel of the square
    root of the distance. There is no δ in it: it cancels. For Eq. 3 see :func:`pyflatness.representativeness`.

    Args:
        features: φ, (n, m).
        weight: w, (d, m).
        bias: (d,) or None.
        targets: one per sample.
        loss: as for :func:`pyflatness.head_flatness`; every sample counts the same.
        folds: k, at least 2.
        fit: (features, targets) -> (weight, bias) on the sample of each fold, as in the authors' notebook.
        seed: of the folds.
        reduction: ``"mean"`` or ``"sum"``, if the loss does not say or means another.
        process_group: False where ``torch.distributed`` is initialised: it is not there over several ranks.

    Returns:
        The mean over the folds.

    Raises:
        InputError: shapes, dtypes, targets or options that do not fit.

    Example:
        >>> import torch, pyflatness as pf
        >>> phi, w = torch.ones(4, 2), torch.zeros(2, 2)
        >>> value = pf.authors_representativeness(phi, w, targets=torch.tensor([0, 1, 0, 1]), folds=2)
        >>> abs(value - 0.693147 * (1 - 0.398942 / 2)) < 1e-6  # log 2, and K = 1/√(2π) divided by |S| = 2
        True
    """
    meeting.refuse(process_group, "authors_representativeness")
    folds, seed = check_count("folds", folds, 2), check_seed("seed", seed)
    resolved = losses.resolve(loss, reduction)
    features, targets = check_tensor("features", features), check_tensor("targets", targets)
    if features.ndim == 0:
        raise InputError("features: 2 dimensions are wanted, got shape ()")
    with interrupts.held(), torch.inference_mode(False), torch.no_grad():
        places = assigned(len(features), folds, seed).to(features.device)
        values = []
        for k in range(folds):
            w, b = (weight, bias) if fit is None else refit(fit, features[places != k], targets[places != k])
            tensor_head.check_tensors(features, w, b, targets, resolved)
            outputs = product(promoted(features), promoted(w).t()) + (0 if b is None else promoted(b))
            values.append(_fold(promoted(features).double(), outputs, targets, places == k, resolved))
    return sum(values) / folds


def _fold(features: Tensor, outputs: Tensor, targets: Tensor, held_out: Tensor, loss: Loss) -> float:
    sample, other = features[~held_out], features[held_out]
    norms = sample.norm(dim=1)
    weights = norms / norms.sum() / len(sample)
    own = float(_losses(loss, outputs[held_out], targets[held_out]).mean())
    total, rows = 0.0, max(1, _PAIRS // len(sample))
    for part, labels in zip(other.split(rows), targets[held_out].split(rows), strict=True):
        interrupts.check()
        kernel = torch.exp(-torch.cdist(part, sample) / 2) / math.sqrt(2 * math.pi)
        crossed = _losses(
            loss,
            outputs[~held_out].repeat(len(part), *(1,) * (outputs.ndim - 1)),
            labels.repeat_interleave(len(sample), 0),
        )
        total += float((kernel * crossed.view(len(part), -1)) @ weights @ kernel.new_ones(len(part)))
    return own - total / len(other)


def _losses(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss of each row, (rows,) float64."""
    dim = loss.class_dim(outputs)
    weights = loss.terms(outputs, targets, dim).weights.view(len(outputs), -1).sum(dim=1)
    values = torch.func.vmap(lambda f, t: loss.value(f[None], t[None]))(outputs, targets)
    return torch.where(weights > 0, values / weights, 0.0)
