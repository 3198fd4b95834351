"""Call the kernels of layers on CUDA, with the names and signatures of :mod:`.reference`."""

import math

import torch
from torch import Tensor

from ..errors import BackendError
from . import reference
from .arrays import array, dense, layer_sizes, plain, span
from .cuda_device import HALF, SUFFIX, check_kind, module, on_device, on_stream
from .cuda_head import row_dots
from .geometry import Geometry
from .precision import promoted
from .reference import Products

_PIXEL_GRAM_BYTES = 128 << 20
_BLOCKS = 16  # of a multiprocessor, that `direct` asks for


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
        made = (factor @ gradients).flatten(1)
        gram_weighted = row_dots(made, made)
    columns = by_column.unflatten(2, (-1, geometry.kernel_elements)).sum(dim=3).flatten(1)
    return Products(squares, gram_weighted, weighted, columns, by_row.sum(dim=2).flatten(1))


def direct(
    inputs: Tensor, cotangent: Tensor, geometry: Geometry, factor: Tensor | None, weight: Tensor | None
) -> Products:
    """See :func:`.reference.direct`; inputs and cotangent may have any strides, and be of half precision.

    ``factor`` and ``weight`` are then float32. More rows than fit a block's shared memory have |R M|² as the squares of
    another M, that of the cotangent R δ.
    """
    inputs, cotangent = plain(inputs), plain(cotangent)
    kind = _kind("direct", inputs, cotangent)
    if factor is not None:
        columns = inputs.shape[1] // geometry.groups * geometry.kernel_elements
        size = getattr(module(), "direct_shared" + kind)(factor.shape[2], columns, True, weight is not None)
        if size > on_device(inputs.device, module().shared_limit):
            others = _direct(kind, inputs, cotangent, geometry, None, weight)
            weighted = (factor @ geometry.rows(promoted(cotangent)).mT).flatten(1, 2).unflatten(2, cotangent.shape[2:])
            wide = kind if kind in SUFFIX.values() else "_tf32"
            return others._replace(
                gram_weighted=_direct(wide, promoted(inputs), weighted, geometry, None, None).squares
            )
    return _direct(kind, inputs, cotangent, geometry, factor, weight)


def _direct(
    kind: str, inputs: Tensor, cotangent: Tensor, geometry: Geometry, factor: Tensor | None, weight: Tensor | None
) -> Products:
    sizes = layer_sizes(inputs, cotangent, geometry)
    (n, groups, channels, d), columns = sizes[0], sizes[0][2] * geometry.kernel_elements
    like = promoted(inputs.new_empty(0))
    given_factor, given_weight = (like if t is None else dense(t) for t in (factor, weight))
    _same("direct", inputs, given_factor, given_weight, dtype=like.dtype)
    tiles = -(
        -columns // getattr(module(), "direct_columns" + kind)(d, columns, factor is not None and factor.shape[1] > 0)
    )
    splits = max(1, min(tiles, -(-_BLOCKS * _multiprocessors(inputs.device) // max(1, n * groups))))
    weighted = weight is not None
    totals = inputs.new_empty(n, groups, splits, 3, dtype=torch.float64)
    by_column = totals.new_empty((n, groups, columns) if weighted else 0)
    by_row = totals.new_empty((n, groups, splits, d) if weighted else 0)
    on_stream(
        "direct" + kind, inputs.device, sizes, span(inputs), inputs.stride(), span(cotangent), cotangent.stride(),
        array(given_factor), 0 if factor is None else factor.shape[1], array(given_weight), splits,
        array(totals), array(by_column), array(by_row),
    )  # fmt: skip
    squares, gram_weighted, weighted_squares = totals.sum(dim=(1, 2)).unbind(1)
    return Products(
        squares,
        None if factor is None else gram_weighted,
        weighted_squares if weighted else None,
        by_column.view(n, groups * channels, geometry.kernel_elements).sum(dim=2) if weighted else None,
        by_row.sum(dim=2).flatten(1) if weighted else None,
    )


def patch_gram(inputs: Tensor, geometry: Geometry) -> Tensor:
    """See :func:`.reference.patch_gram`; inputs may have any strides. Of half precision, the result is float32.

    Kernels of one element are a plain product, and so are those of stride 1 but for sums over its diagonals where that
    takes fewer multiply-adds; the rest reads patches where the inputs have them.
    """
    inputs = plain(inputs)
    kind = _kind("patch_gram", inputs)
    if geometry.kernel_elements == 1:
        a, b, c = geometry.stride
        return _product_of_pixels(inputs[..., ::a, ::b, ::c], geometry.groups)
    sizes = layer_sizes(inputs, None, geometry)
    (n, groups, channels, _), (s0, s1, s2), (p0, p1, p2), *_ = sizes
    pixels, places = s0 * s1 * s2, p0 * p1 * p2
    like = promoted(inputs.new_empty(0))
    out = like.new_empty(n, groups, places, places)
    by_pixels = channels * pixels**2 + geometry.kernel_elements * places**2
    if geometry.stride != (1, 1, 1) or by_pixels > channels * geometry.kernel_elements * places**2 / 2:
        on_stream("patch_gram" + kind, inputs.device, sizes, span(inputs), inputs.stride(), array(out))
        return out
    chunk = max(1, _PIXEL_GRAM_BYTES // (like.element_size() * groups * pixels**2))
    for part, made in zip(inputs.split(chunk), out.split(chunk), strict=True):
        square = _product_of_pixels(part, groups)
        sizes = ((len(part), *sizes[0][1:]), *sizes[1:])
        on_stream("sum_shifts" + SUFFIX[like.dtype], inputs.device, sizes, array(square), array(made))
    return out


def gram(rows: Tensor, patch_gram: Tensor) -> Tensor:
    """See :func:`.reference.gram`; rows may have any strides, and be of half precision beside a float32 Gram matrix."""
    return _gram(_kind("gram", rows), rows, patch_gram)


def factored_gram(factor: Tensor, rows: Tensor, patch_gram: Tensor) -> Tensor:
    """Return :func:`gram` of a = R δ for R (G, r, d) and δ (n, G, P, d) of half precision, a in float32, as TF32."""
    flat = rows.flatten(0, 1)
    weighted = factor.mT.expand(len(rows), *factor.mT.shape).flatten(0, 1)
    return _gram("_tf32", _wide_product(flat, weighted).unflatten(0, rows.shape[:2]), patch_gram)


def _gram(kind: str, rows: Tensor, patch_gram: Tensor) -> Tensor:
    rows, patch_gram = plain(rows), dense(patch_gram)
    _same("gram", rows, patch_gram, dtype=promoted(rows.new_empty(0)).dtype)
    n, groups, positions, r = rows.shape
    tiles = -(-positions // getattr(module(), "gram_tile" + kind)(positions))
    out = rows.new_empty(n, groups, tiles, tiles, dtype=torch.float64)
    on_stream(
        "gram" + kind, rows.device, span(rows), rows.stride(), n, groups, positions, r, array(patch_gram), array(out)
    )
    return out.sum(dim=(1, 2, 3))


def _kind(name: str, *tensors: Tensor) -> str:
    """Return the suffix of the kernels for these tensors; float32 goes to tensor cores where torch's own may."""
    dtype = check_kind(name, tensors, {**SUFFIX, **HALF})
    if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32":
        return "_tf32"
    return {**SUFFIX, **HALF}[dtype]


def _same(name: str, like: Tensor, *tensors: Tensor, dtype: torch.dtype) -> None:
    """Raise if one of the tensors is not of the dtype, or not where ``like`` is."""
    for tensor in tensors:
        if tensor.dtype != dtype or tensor.device != like.device:
            raise BackendError(
                f"{name}: beside {like.dtype} on {like.device} wants {dtype}, got {tensor.dtype} on {tensor.device}"
            )


def _product_of_pixels(inputs: Tensor, groups: int) -> Tensor:
    """Return ⟨x_p, x_p'⟩ for all pairs of pixels, (n, G, pixels, pixels); of half precision as float32."""
    columns = inputs.unflatten(1, (groups, -1)).flatten(3)  # n, G, c, pixels
    flat = columns.flatten(0, 1)
    square: Tensor = _wide_product(flat.mT, flat).unflatten(0, columns.shape[:2])
    return square


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """Return products of matrices (n, …), of half precision as float32."""
    if a.dtype in HALF and a.device.type == "cuda":
        product: Tensor = torch.bmm(a, b, out_dtype=torch.float32)
        return product
    return promoted(a) @ promoted(b)


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
