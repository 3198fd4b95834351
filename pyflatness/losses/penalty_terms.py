"""Compute the weight of each row of a head in a penalty, as a custom operator for compilers and transforms.

Checks of targets depend on their values, which ``torch.compile`` and ``torch.func.vmap`` do not have while they trace.
They see one operation, and its code runs as written here, with the checks.
"""

from typing import Any

import torch
from torch import Tensor

from ..contractions import promoted_dtype
from ..numerics.accumulate import normaliser_or_nan
from .base import Known
from .cross_entropy import CrossEntropy
from .elementwise import BinaryCrossEntropy, SquaredError
from .penalty import one_by_one

RowTerms = tuple[Tensor, Tensor, Tensor]
"""The weight of each row, (rows,) float64; coefficients of its outputs, (rows, d), or (0, d) for none; and a term to
add to the sum: NaN for a mean over no rows, otherwise 0."""


def of(loss: Known, features: Tensor, outputs: int, targets: Tensor | None) -> RowTerms:
    """Return the weight of each row of a head with d ``outputs``; no gradient flows to targets."""
    found: RowTerms = _operator(
        features.detach(),
        outputs,
        targets,
        type(loss).__name__,
        getattr(loss, "weight", None),
        getattr(loss, "pos_weight", None),
        getattr(loss, "ignore_index", 0),
        getattr(loss, "label_smoothing", 0.0),
        loss.reduction,
    )
    return found


@torch.library.custom_op("pyflatness::head_terms", mutates_args=())
def _operator(
    features: Tensor,
    outputs: int,
    targets: Tensor | None,
    kind: str,
    weight: Tensor | None,
    pos_weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
) -> tuple[Tensor, Tensor, Tensor]:
    loss: Known = SquaredError(reduction)
    if kind == CrossEntropy.__name__:
        loss = CrossEntropy(weight, ignore_index, label_smoothing, reduction)
    elif kind == BinaryCrossEntropy.__name__:
        loss = BinaryCrossEntropy(weight, pos_weight, reduction)
    shape = *features.shape[:-1], outputs
    terms = loss.terms(features.new_zeros(()).expand(shape), targets, len(shape) - 1)
    total = float(terms.weights.sum())
    divided_by = normaliser_or_nan(total, reduction)
    counts = terms.scale / (divided_by if total else 1.0)  # 0 without terms, so that gradients are the loss's
    coefficients = terms.extra[0].clone() if terms.extra else features.new_empty(0, outputs)
    added = features.new_tensor(0.0 if total or reduction == "sum" else torch.nan, dtype=promoted_dtype(features.dtype))
    return counts, coefficients, added


@_operator.register_fake
def _(features: Tensor, outputs: int, targets: Tensor | None, kind: str, *options: Any) -> RowTerms:
    rows = features.shape[:-1].numel()
    of_rows = rows if kind == BinaryCrossEntropy.__name__ else 0
    dtype = promoted_dtype(features.dtype)
    coefficients = features.new_empty(of_rows, outputs, dtype=dtype)
    return features.new_empty(rows, dtype=torch.float64), coefficients, features.new_empty((), dtype=dtype)


_operator.register_vmap(one_by_one(_operator))
