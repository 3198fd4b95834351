"""Call the kernels of heads on CUDA, with the names and signatures of :mod:`.reference`."""

import torch
from torch import Tensor

from ..errors import BackendError
from . import head_arguments
from .arrays import array, dense, strided
from .class_sums import ClassSums, MeanRow, RowSlopes, softmax_variance_gradient_by
from .cuda_device import HALF, SUFFIX, launch, module
from .precision import promoted_dtype

_WEIGHT_SUFFIX = {**SUFFIX, **HALF}


def pair_distances(weight: Tensor) -> Tensor:
    """See :func:`.reference.pair_distances`."""
    given = head_arguments.pair_distances(weight)
    launch("pair_distances", given.tensors, *given.arguments)
    return given.results


def softmax_variance(features: Tensor, weight: Tensor, bias: Tensor, distances: Tensor) -> Tensor:
    """See :func:`.reference.softmax_variance`; at most ``_cuda.MAX_FUSED_OUTPUTS`` outputs."""
    given = head_arguments.softmax_variance(features, weight, bias, distances)
    launch("softmax_variance", given.tensors, *given.arguments)
    return given.results


def softmax_variance_gradient(features: Tensor, weight: Tensor, bias: Tensor | None, shares: Tensor) -> RowSlopes:
    """See :func:`.reference.softmax_variance_gradient`."""
    return softmax_variance_gradient_by(pair_distances, row_dots, features, weight, bias, shares)


def exponentiate(
    logits: Tensor, row_norms: Tensor | None, top_value: float, maximum: Tensor
) -> tuple[Tensor, Tensor | None, Tensor]:
    """See :func:`.reference.exponentiate`; ``logits`` and ``maximum`` must be contiguous, as they change in place."""
    given = head_arguments.exponentiate(logits, row_norms, top_value, maximum)
    launch("exponentiate", given.tensors, *given.arguments)
    return given.results


def exponentiate_tile(
    logits: Tensor,
    bias: Tensor | None,
    norms: Tensor,
    first: int,
    sums: ClassSums,
    rounded: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See :func:`.reference.exponentiate_tile`; of logits and ``rounded`` a row's elements are neighbours."""
    (n, width), out = logits.shape, logits if rounded is None else rounded
    given_bias, norms = logits.new_empty(0) if bias is None else dense(bias), dense(norms)
    joining, factor = torch.empty_like(sums.top), torch.empty_like(sums.rest)
    if rounded is not None and (logits.dtype, rounded.dtype) != (torch.float32, torch.bfloat16):
        raise BackendError(f"exponentiate_tile: {logits.dtype} logits become float32 or bfloat16, not {rounded.dtype}")
    launch(
        "exponentiate_tile", [logits, given_bias, norms, sums.maximum],
        strided(logits), logits.stride(0), array(given_bias), array(norms), len(norms), first, n, width,
        strided(out), out.stride(0), *map(array, sums), array(joining), array(factor),
        suffix="" if rounded is None else "_bf16",
    )  # fmt: skip
    return joining, factor


def row_dots(a: Tensor, b: Tensor) -> Tensor:
    """See :func:`.reference.row_dots`."""
    given = head_arguments.row_dots(a, b)
    launch("row_dots", given.tensors, *given.arguments)
    return given.results


def sigmoid_curvature(logits: Tensor, coefficients: Tensor, row_norms: Tensor) -> Tensor:
    """See :func:`.reference.sigmoid_curvature`."""
    given = head_arguments.sigmoid_curvature(logits, coefficients, row_norms)
    launch("sigmoid_curvature", given.tensors, *given.arguments)
    return given.results


def norms_about(weight: Tensor, centre: Tensor) -> Tensor:
    """See :func:`.reference.norms_about`."""
    weight, centre = dense(weight), dense(centre)
    d, m = weight.shape
    out = centre.new_empty(d)
    suffix = _weight_suffix("norms_about", weight, centre)
    launch("norms_about", [centre], array(weight), array(centre), d, m, array(out), suffix=suffix)
    return out


def mean_row(
    summed: Tensor, weight: Tensor, centre: Tensor, sums: ClassSums, uncentred: Tensor | None, reach: bool
) -> MeanRow:
    """See :func:`.reference.mean_row`; ``summed`` contiguous."""
    weight, centre, given = dense(weight), dense(centre), sums.rest.new_empty(0) if uncentred is None else uncentred
    (n, m), d = summed.shape, len(weight)
    out = sums.rest.new_empty(3, n)
    launch(
        "mean_row", [summed, centre], array(summed), array(weight), array(centre), array(sums.top), array(sums.rest),
        array(given), n, d, m, array(out), suffix=_weight_suffix("mean_row", weight, summed),
    )  # fmt: skip
    return MeanRow(out[0], out[1], out[2] if reach else None)


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
    features: Tensor, maximum: Tensor, mean: Tensor, weight: Tensor, centre: Tensor | None, bias: Tensor, chosen: Tensor
) -> Tensor:
    """See :func:`.reference.spread`; ``maximum`` and ``chosen`` contiguous."""
    features, mean, weight, bias = (dense(t) for t in (features, mean, weight, bias))
    (n, m), d = features.shape, len(weight)
    given_centre = features.new_empty(0) if centre is None else dense(centre)
    out, rows = features.new_empty(n, dtype=torch.float64), features.new_empty(n + 1, dtype=torch.int64)
    partial = out.new_empty(n, module().spread_splits(d))
    launch(
        "spread", [features, maximum, mean, given_centre, bias],
        array(features), array(maximum), array(mean), array(weight), array(given_centre), array(bias), array(chosen),
        n, d, m, array(rows), array(partial), array(out), suffix=_weight_suffix("spread", weight, features),
    )  # fmt: skip
    return out


def _weight_suffix(name: str, weight: Tensor, beside: Tensor) -> str:
    """Return the suffix of a kernel whose weight may be in half precision beside float32."""
    fits = (weight.device, promoted_dtype(weight.dtype)) == (beside.device, beside.dtype)
    if not fits or weight.dtype not in _WEIGHT_SUFFIX:
        kinds = f"{weight.dtype} on {weight.device}, what is beside it {beside.dtype} on {beside.device}"
        raise BackendError(f"{name}: the weight is {kinds}")
    return _WEIGHT_SUFFIX[weight.dtype]
