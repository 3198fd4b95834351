"""The kernels of heads on CUDA: the names and signatures of :mod:`.reference`."""

import torch
from torch import Tensor

from ..errors import BackendError
from .arrays import array, dense, dense_rows, strided
from .cuda_device import HALF, SUFFIX, launch
from .precision import promoted_dtype

_WEIGHT_SUFFIX = {**SUFFIX, **HALF}


def pair_distances(weight: Tensor) -> Tensor:
    """See :func:`.reference.pair_distances`."""
    weight = dense(weight)
    d, m = weight.shape
    out = weight.new_empty(d, d)
    launch("pair_distances", [weight], array(weight), d, m, array(out))
    return out


def softmax_variance(features: Tensor, weight: Tensor, bias: Tensor, distances: Tensor) -> Tensor:
    """See :func:`.reference.softmax_variance`; at most ``_cuda.MAX_FUSED_OUTPUTS`` outputs."""
    features, weight, bias = dense_rows(features), dense(weight), dense(bias)
    (n, m), d = features.shape, weight.shape[0]
    out = features.new_empty(n, dtype=torch.float64)
    launch(
        "softmax_variance", [features, weight, bias, distances],
        strided(features), features.stride(0), array(weight), array(bias), array(dense(distances)), n, m, d, array(out),
    )  # fmt: skip
    return out


def exponentiate(
    logits: Tensor, row_norms: Tensor | None, top_value: float, maximum: Tensor
) -> tuple[Tensor, Tensor | None, Tensor]:
    """See :func:`.reference.exponentiate`; ``logits`` and ``maximum`` must be contiguous, as they change in place."""
    n, d = logits.shape
    norms = logits.new_empty(0) if row_norms is None else dense(row_norms)
    rest = logits.new_empty(n, dtype=torch.float64)
    moment = rest.new_empty(0 if row_norms is None else n)
    top = logits.new_empty(n, dtype=torch.int64)
    launch(
        "exponentiate", [logits, norms, maximum],
        array(logits), array(norms), top_value, n, d, array(maximum), array(rest), array(moment), array(top),
    )  # fmt: skip
    return rest, (None if row_norms is None else moment), top


def exponentiate_rounded(
    logits: Tensor, bias: Tensor | None, row_norms: Tensor, maximum: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See :func:`.reference.exponentiate_rounded`; float32 logits, contiguous."""
    n, d = logits.shape
    given_bias = logits.new_empty(0) if bias is None else dense(bias)
    row_norms, rounded = dense(row_norms), torch.empty_like(logits, dtype=torch.bfloat16)
    rest = logits.new_empty(n, dtype=torch.float64)
    moment, top = torch.empty_like(rest), logits.new_empty(n, dtype=torch.int64)
    if logits.dtype != torch.float32:
        raise BackendError(f"exponentiate_rounded: wants float32 logits, got {logits.dtype}")
    launch(
        "exponentiate_rounded", [logits, given_bias, row_norms, maximum],
        array(logits), array(given_bias), array(row_norms), n, d, array(maximum), array(rounded), array(rest),
        array(moment), array(top), suffix="_bf16",
    )  # fmt: skip
    return rounded, rest, moment, top


def row_dots(a: Tensor, b: Tensor) -> Tensor:
    """See :func:`.reference.row_dots`."""
    a, b = dense_rows(a), dense_rows(b)
    n, k = a.shape
    out = a.new_empty(n, dtype=torch.float64)
    launch("row_dots", [a, b], strided(a), a.stride(0), strided(b), b.stride(0), n, k, array(out))
    return out


def sigmoid_curvature(logits: Tensor, coefficients: Tensor, row_norms: Tensor) -> Tensor:
    """See :func:`.reference.sigmoid_curvature`."""
    logits, coefficients, row_norms = dense(logits), dense(coefficients), dense(row_norms)
    n, d = logits.shape
    out = logits.new_empty(n, dtype=torch.float64)
    launch(
        "sigmoid_curvature", [logits, coefficients, row_norms],
        array(logits), array(coefficients), array(row_norms), n, d, array(out),
    )  # fmt: skip
    return out


def norms_about(weight: Tensor, centre: Tensor) -> Tensor:
    """See :func:`.reference.norms_about`."""
    weight, centre = dense(weight), dense(centre)
    d, m = weight.shape
    out = centre.new_empty(d)
    suffix = _weight_suffix("norms_about", weight, centre)
    launch("norms_about", [centre], array(weight), array(centre), d, m, array(out), suffix=suffix)
    return out


def rejoin(summed: Tensor, weight: Tensor, centre: Tensor | None, top: Tensor, factor: Tensor) -> None:
    """See :func:`.reference.rejoin`; ``summed``, ``top`` and ``factor`` contiguous."""
    weight = dense(weight)
    (n, m), d = summed.shape, len(weight)
    given_centre = summed.new_empty(0) if centre is None else dense(centre)
    launch(
        "rejoin", [summed, given_centre],
        array(summed), array(weight), array(given_centre), array(top), array(factor), n, d, m,
        suffix=_weight_suffix("rejoin", weight, summed),
    )  # fmt: skip


def spread(
    features: Tensor, maximum: Tensor, mean: Tensor, weight: Tensor, centre: Tensor, bias: Tensor, chosen: Tensor
) -> Tensor:
    """See :func:`.reference.spread`."""
    features, mean, weight, bias = (dense(t) for t in (features, mean, weight, bias))
    (n, m), d = features.shape, len(weight)
    out = features.new_empty(n, dtype=torch.float64)
    launch(
        "spread", [features, maximum, mean, centre, bias],
        array(features), array(maximum), array(mean), array(weight), array(centre), array(bias), array(chosen),
        n, d, m, array(out), suffix=_weight_suffix("spread", weight, features),
    )  # fmt: skip
    return out


def _weight_suffix(name: str, weight: Tensor, beside: Tensor) -> str:
    """Of a kernel whose weight may be in half precision beside float32."""
    fits = (weight.device, promoted_dtype(weight.dtype)) == (beside.device, beside.dtype)
    if not fits or weight.dtype not in _WEIGHT_SUFFIX:
        kinds = f"{weight.dtype} on {weight.device}, what is beside it {beside.dtype} on {beside.device}"
        raise BackendError(f"{name}: the weight is {kinds}")
    return _WEIGHT_SUFFIX[weight.dtype]
