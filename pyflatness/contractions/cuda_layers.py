"""Call the kernels of layers on CUDA, with the names and signatures of :mod:`.reference`."""

import math

import torch
from torch import Tensor

from . import reference
from .arrays import array, dense, layer_sizes, plain, span
from .cuda_device import HALF, SUFFIX, check_kind, module, on_stream
from .cuda_head import row_dots
from .geometry import Geometry
from .precision import product
from .reference import Products


def patches(inputs: Tensor, geometry: Geometry) -> Tensor:
    """See :func:`.reference.patches`; inputs may have any strides, and be of half precision."""
    if (geometry.kernel, geometry.stride) == ((1, 1, 1), (1, 1, 1)):
        return geometry.patches(inputs)  # no copy, or a plain one
    inputs = plain(inputs)
    check_kind("patches", [inputs], {**SUFFIX, **HALF})
    sizes = layer_sizes(inputs, None, geometry)
    (n, groups, channels, _), _, places, *_ = sizes
    out = inputs.new_empty(n, groups, channels * geometry.kernel_elements, math.prod(places))
    on_stream(f"patches_{inputs.itemsize}", inputs.device, sizes, span(inputs), inputs.stride(), array(out))
    return out.mT


def products(gradients: Tensor, geometry: Geometry, factor: Tensor | None, weight: Tensor | None) -> Products:
    """See :func:`.reference.products`."""
    if weight is None:
        return reference.products(gradients, geometry, factor, None)
    n, groups, d, m = gradients.shape
    gradients, weight = dense(gradients), dense(weight)
    dtype = check_kind("products", [gradients, weight], SUFFIX)
    splits = -(-m // module().WEIGHTED_COLUMNS)
    totals = gradients.new_empty(n, groups * splits, 2, dtype=torch.float64)
    by_column, by_row = totals.new_empty(n, groups, m), totals.new_empty(n, groups, splits, d)
    on_stream(
        "weighted" + SUFFIX[dtype], gradients.device, array(gradients), array(weight), n * groups, groups, d, m,
        array(totals), array(by_column), array(by_row),
    )  # fmt: skip
    squares, weighted = totals.sum(dim=1).unbind(1)
    gram_weighted = None
    if factor is not None:
        made = product(factor, gradients).flatten(1)
        gram_weighted = row_dots(made, made)
    columns = by_column.unflatten(2, (-1, geometry.kernel_elements)).sum(dim=3).flatten(1)
    return Products(squares, gram_weighted, weighted, columns, by_row.sum(dim=2).flatten(1))
