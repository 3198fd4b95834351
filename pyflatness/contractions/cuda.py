"""The kernels on CUDA: the names and signatures of :mod:`.reference`. The only module that imports ``_cuda``.

Every kernel runs on torch's current stream of the tensors' device and takes its memory from torch's allocator.
"""

import contextlib
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..errors import BackendError
from .compiled import _rows, _sizes, _span, _strided
from .geometry import Geometry
from .precision import promoted, promoted_dtype
from .reference import Products

__all__ = [
    "direct",
    "exponentiate",
    "exponentiate_rounded",
    "gram",
    "norms_about",
    "pair_distances",
    "patch_gram",
    "rejoin",
    "row_dots",
    "sigmoid_curvature",
    "small_eigenvalues",
    "softmax_variance",
    "spread",
    "unavailable",
]

AUTOMATIC = False
"""Whether ``backend="auto"`` takes these kernels: not before their tests have run on a GPU."""

_SUFFIX = {torch.float32: "_f32", torch.float64: "_f64"}
_WEIGHT_SUFFIX = {**_SUFFIX, torch.bfloat16: "_bf16", torch.float16: "_f16"}  # where a weight may be in half precision
_CAPABILITY = (8, 0)
_DEVICE = "cuda"

_cuda: Any
try:
    _cuda = importlib.import_module("pyflatness._cuda")
    _MISSING = ""
except ImportError as error:
    _cuda = None
    _MISSING = (
        f"the CUDA kernels are not here ({error}): install pyflatness with `pip install .` from its root where "
        'nvcc is, or pass backend="reference", which runs on the GPU in plain torch'
    )


def missing() -> str:
    """Why the module is not here; empty if it is."""
    return _MISSING


def unavailable(device: torch.device, dtype: torch.dtype) -> str:
    """Why tensors of this kind cannot be served; empty if they can."""
    if _MISSING:
        return _MISSING
    if device.type != _DEVICE:
        return f"the CUDA kernels run on CUDA devices, the tensors are on {device}"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _CAPABILITY:
        return f"the CUDA kernels need compute capability 8.0, {torch.cuda.get_device_name(device)} has less"
    if dtype not in _SUFFIX:
        return f"the CUDA kernels take float32 and float64, the tensors are {dtype}"
    return ""


@contextmanager
def emulated(module: Any) -> Iterator[None]:
    """Inside a ``with`` block, the kernels are those of a module compiled for CPU tensors (for tests)."""
    global _cuda, _MISSING, _DEVICE
    before = _cuda, _MISSING, _DEVICE
    _cuda, _MISSING, _DEVICE = module, "", "cpu"
    try:
        yield
    finally:
        _cuda, _MISSING, _DEVICE = before


def pair_distances(weight: Tensor) -> Tensor:
    """See :func:`.reference.pair_distances`."""
    weight = weight.contiguous()
    d, m = weight.shape
    out = weight.new_empty(d, d)
    _launch("pair_distances", [weight], _array(weight), d, m, _array(out))
    return out


def softmax_variance(features: Tensor, weight: Tensor, bias: Tensor, distances: Tensor) -> Tensor:
    """See :func:`.reference.softmax_variance`; at most ``_cuda.MAX_FUSED_OUTPUTS`` outputs."""
    features, weight, bias = _rows(features), weight.contiguous(), bias.contiguous()
    (n, m), d = features.shape, weight.shape[0]
    out = features.new_empty(n, dtype=torch.float64)
    _launch(
        "softmax_variance", [features, weight, bias, distances],
        _strided(features), features.stride(0), _array(weight), _array(bias), _array(distances), n, m, d, _array(out),
    )  # fmt: skip
    return out


def exponentiate(
    logits: Tensor, row_norms: Tensor | None, top_value: float, maximum: Tensor
) -> tuple[Tensor, Tensor | None, Tensor]:
    """See :func:`.reference.exponentiate`; ``logits`` and ``maximum`` must be contiguous, as they change in place."""
    n, d = logits.shape
    norms = logits.new_empty(0) if row_norms is None else row_norms.contiguous()
    rest = logits.new_empty(n, dtype=torch.float64)
    moment = rest.new_empty(0 if row_norms is None else n)
    top = logits.new_empty(n, dtype=torch.int64)
    _launch(
        "exponentiate", [logits, norms, maximum],
        _array(logits), _array(norms), top_value, n, d, _array(maximum), _array(rest), _array(moment), _array(top),
    )  # fmt: skip
    return rest, (None if row_norms is None else moment), top


def exponentiate_rounded(
    logits: Tensor, bias: Tensor | None, row_norms: Tensor, maximum: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See :func:`.reference.exponentiate_rounded`; float32 logits, contiguous."""
    n, d = logits.shape
    given_bias = logits.new_empty(0) if bias is None else bias.contiguous()
    row_norms, rounded = row_norms.contiguous(), torch.empty_like(logits, dtype=torch.bfloat16)
    rest = logits.new_empty(n, dtype=torch.float64)
    moment, top = torch.empty_like(rest), logits.new_empty(n, dtype=torch.int64)
    if logits.dtype != torch.float32:
        raise BackendError(f"exponentiate_rounded: wants float32 logits, got {logits.dtype}")
    _launch(
        "exponentiate_rounded", [logits, given_bias, row_norms, maximum],
        _array(logits), _array(given_bias), _array(row_norms), n, d, _array(maximum), _array(rounded), _array(rest),
        _array(moment), _array(top), suffix="_bf16",
    )  # fmt: skip
    return rounded, rest, moment, top


def row_dots(a: Tensor, b: Tensor) -> Tensor:
    """See :func:`.reference.row_dots`."""
    a, b = _rows(a), _rows(b)
    n, k = a.shape
    out = a.new_empty(n, dtype=torch.float64)
    _launch("row_dots", [a, b], _strided(a), a.stride(0), _strided(b), b.stride(0), n, k, _array(out))
    return out


def sigmoid_curvature(logits: Tensor, coefficients: Tensor, row_norms: Tensor) -> Tensor:
    """See :func:`.reference.sigmoid_curvature`."""
    logits, coefficients, row_norms = logits.contiguous(), coefficients.contiguous(), row_norms.contiguous()
    n, d = logits.shape
    out = logits.new_empty(n, dtype=torch.float64)
    _launch(
        "sigmoid_curvature", [logits, coefficients, row_norms],
        _array(logits), _array(coefficients), _array(row_norms), n, d, _array(out),
    )  # fmt: skip
    return out


def norms_about(weight: Tensor, centre: Tensor) -> Tensor:
    """See :func:`.reference.norms_about`."""
    weight, centre = weight.contiguous(), centre.contiguous()
    d, m = weight.shape
    out = centre.new_empty(d)
    suffix = _weight_suffix("norms_about", weight, centre)
    _launch("norms_about", [centre], _array(weight), _array(centre), d, m, _array(out), suffix=suffix)
    return out


def rejoin(summed: Tensor, weight: Tensor, centre: Tensor | None, top: Tensor, factor: Tensor) -> None:
    """See :func:`.reference.rejoin`; ``summed``, ``top`` and ``factor`` contiguous."""
    weight = weight.contiguous()
    (n, m), d = summed.shape, len(weight)
    given_centre = summed.new_empty(0) if centre is None else centre.contiguous()
    _launch(
        "rejoin", [summed, given_centre],
        _array(summed), _array(weight), _array(given_centre), _array(top), _array(factor), n, d, m,
        suffix=_weight_suffix("rejoin", weight, summed),
    )  # fmt: skip


def spread(
    features: Tensor, maximum: Tensor, mean: Tensor, weight: Tensor, centre: Tensor, bias: Tensor, chosen: Tensor
) -> Tensor:
    """See :func:`.reference.spread`."""
    features, mean, weight, bias = (t.contiguous() for t in (features, mean, weight, bias))
    (n, m), d = features.shape, len(weight)
    out = features.new_empty(n, dtype=torch.float64)
    _launch(
        "spread", [features, maximum, mean, centre, bias],
        _array(features), _array(maximum), _array(mean), _array(weight), _array(centre), _array(bias), _array(chosen),
        n, d, m, _array(out), suffix=_weight_suffix("spread", weight, features),
    )  # fmt: skip
    return out


def small_eigenvalues(matrices: Tensor) -> Tensor:
    """See :func:`.reference.small_eigenvalues`; at most ``_cuda.MAX_EIGEN_SIZE`` rows."""
    matrices = matrices.contiguous()
    n, size, _ = matrices.shape
    out = matrices.new_empty(n, size)
    if matrices.dtype != torch.float64:
        raise BackendError(f"small_eigenvalues: wants float64, got {matrices.dtype}")
    _launch("small_eigenvalues", [matrices], _array(matrices), n, size, _array(out))
    return out


HALF = {torch.bfloat16: "_bf16", torch.float16: "_f16"}
"""Dtypes that the kernels of layers take beside float32 and float64, accumulating in float32."""

_PIXEL_GRAM_BYTES = 128 << 20
_BLOCKS = 16  # of a multiprocessor, that `direct` asks for


def direct(inputs: Tensor, signal: Tensor, geometry: Geometry, root: Tensor | None, weight: Tensor | None) -> Products:
    """See :func:`.reference.direct`; inputs and signal may have any strides, and be of half precision.

    ``root`` and ``weight`` are then float32. More rows than fit a block's shared memory have |R M|² as the squares of
    another M, that of the signal R δ.
    """
    kind = _kind("direct", inputs, signal)
    if root is not None:
        columns = inputs.shape[1] // geometry.groups * geometry.taps
        size = getattr(_cuda, "direct_shared" + kind)(root.shape[2], columns, True, weight is not None)
        if size > _on_device(inputs.device, _cuda.shared_limit):
            others = _direct(kind, inputs, signal, geometry, None, weight)
            turned = (root @ geometry.rows(promoted(signal)).mT).flatten(1, 2).unflatten(2, signal.shape[2:])
            wide = kind if kind in _SUFFIX.values() else "_tf32"
            return others._replace(rooted=_direct(wide, promoted(inputs), turned, geometry, None, None).squares)
    return _direct(kind, inputs, signal, geometry, root, weight)


def _direct(
    kind: str, inputs: Tensor, signal: Tensor, geometry: Geometry, root: Tensor | None, weight: Tensor | None
) -> Products:
    sizes = _sizes(inputs, signal, geometry)
    (n, groups, channels, d), columns = sizes[0], sizes[0][2] * geometry.taps
    like = promoted(inputs.new_empty(0))
    given_root, given_weight = (like if t is None else t.contiguous() for t in (root, weight))
    _same("direct", inputs, given_root, given_weight, dtype=like.dtype)
    tiles = -(-columns // getattr(_cuda, "direct_columns" + kind)(d, columns, root is not None and root.shape[1] > 0))
    splits = max(1, min(tiles, -(-_BLOCKS * _multiprocessors(inputs.device) // max(1, n * groups))))
    weighted = weight is not None
    totals = inputs.new_empty(n, groups, splits, 3, dtype=torch.float64)
    by_column = totals.new_empty((n, groups, columns) if weighted else 0)
    by_row = totals.new_empty((n, groups, splits, d) if weighted else 0)
    _on_stream(
        "direct" + kind, inputs.device, sizes, _span(inputs), inputs.stride(), _span(signal), signal.stride(),
        _array(given_root), 0 if root is None else root.shape[1], _array(given_weight), splits,
        _array(totals), _array(by_column), _array(by_row),
    )  # fmt: skip
    squares, rooted, weighted_squares = totals.sum(dim=(1, 2)).unbind(1)
    return Products(
        squares,
        None if root is None else rooted,
        weighted_squares if weighted else None,
        by_column.view(n, groups * channels, geometry.taps).sum(dim=2) if weighted else None,
        by_row.sum(dim=2).flatten(1) if weighted else None,
    )


def patch_gram(inputs: Tensor, geometry: Geometry) -> Tensor:
    """See :func:`.reference.patch_gram`; inputs may have any strides. Of half precision, the result is float32.

    Kernels of one tap are a plain product, and so are those of stride 1 but for sums over its diagonals where that
    takes fewer multiply-adds; the rest reads patches where the inputs have them.
    """
    kind = _kind("patch_gram", inputs)
    if geometry.taps == 1:
        a, b, c = geometry.stride
        return _product_of_pixels(inputs[..., ::a, ::b, ::c], geometry.groups)
    sizes = _sizes(inputs, None, geometry)
    (n, groups, channels, _), (s0, s1, s2), (p0, p1, p2), *_ = sizes
    pixels, places = s0 * s1 * s2, p0 * p1 * p2
    like = promoted(inputs.new_empty(0))
    out = like.new_empty(n, groups, places, places)
    by_pixels = channels * pixels**2 + geometry.taps * places**2
    if geometry.stride != (1, 1, 1) or by_pixels > channels * geometry.taps * places**2 / 2:
        _on_stream("patch_gram" + kind, inputs.device, sizes, _span(inputs), inputs.stride(), _array(out))
        return out
    chunk = max(1, _PIXEL_GRAM_BYTES // (like.element_size() * groups * pixels**2))
    for part, made in zip(inputs.split(chunk), out.split(chunk), strict=True):
        square = _product_of_pixels(part, groups)
        sizes = ((len(part), *sizes[0][1:]), *sizes[1:])
        _on_stream("sum_shifts" + _SUFFIX[like.dtype], inputs.device, sizes, _array(square), _array(made))
    return out


def gram(rows: Tensor, patch_gram: Tensor) -> Tensor:
    """See :func:`.reference.gram`; rows may have any strides, and be of half precision beside a float32 Gram matrix."""
    return _gram(_kind("gram", rows), rows, patch_gram)


def rooted_gram(root: Tensor, rows: Tensor, patch_gram: Tensor) -> Tensor:
    """The same of a = R δ for R (G, r, d) and δ (n, G, P, d) of half precision: a is float32, multiplied as TF32."""
    flat = rows.flatten(0, 1)
    turned = root.mT.expand(len(rows), *root.mT.shape).flatten(0, 1)
    return _gram("_tf32", _wide_product(flat, turned).unflatten(0, rows.shape[:2]), patch_gram)


def _gram(kind: str, rows: Tensor, patch_gram: Tensor) -> Tensor:
    patch_gram = patch_gram.contiguous()
    _same("gram", rows, patch_gram, dtype=promoted(rows.new_empty(0)).dtype)
    n, groups, positions, r = rows.shape
    tiles = -(-positions // getattr(_cuda, "gram_tile" + kind)(positions))
    out = rows.new_empty(n, groups, tiles, tiles, dtype=torch.float64)
    _on_stream(
        "gram" + kind, rows.device, _span(rows), rows.stride(), n, groups, positions, r, _array(patch_gram), _array(out)
    )
    return out.sum(dim=(1, 2, 3))


def _kind(name: str, *tensors: Tensor) -> str:
    """The suffix of the kernels for these tensors; float32 goes to tensor cores where torch's own products may."""
    if _MISSING:
        raise BackendError(_MISSING)
    kinds = sorted({f"{t.dtype} on {t.device}" for t in tensors})
    (device, dtype) = tensors[0].device, tensors[0].dtype
    if len(kinds) > 1 or device.type != _DEVICE or dtype not in {**_SUFFIX, **HALF}:
        raise BackendError(
            f"{name}: wants float32, float64, bfloat16 or float16 tensors of one dtype on {_DEVICE}, got "
            f"{', '.join(kinds)}"
        )
    if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32":
        return "_tf32"
    return {**_SUFFIX, **HALF}[dtype]


def _same(name: str, like: Tensor, *tensors: Tensor, dtype: torch.dtype) -> None:
    """Raise if one of the tensors is not of the dtype, or not where ``like`` is."""
    for tensor in tensors:
        if tensor.dtype != dtype or tensor.device != like.device:
            raise BackendError(
                f"{name}: beside {like.dtype} on {like.device} wants {dtype}, got {tensor.dtype} on {tensor.device}"
            )


def _product_of_pixels(inputs: Tensor, groups: int) -> Tensor:
    """⟨x_p, x_p'⟩ for all pairs of pixels, (n, G, pixels, pixels); of half precision as float32."""
    columns = inputs.unflatten(1, (groups, -1)).flatten(3)  # n, G, c, pixels
    flat = columns.flatten(0, 1)
    square: Tensor = _wide_product(flat.mT, flat).unflatten(0, columns.shape[:2])
    return square


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """Products of matrices (n, …), of half precision as float32."""
    if a.dtype in HALF and a.device.type == "cuda":
        product: Tensor = torch.bmm(a, b, out_dtype=torch.float32)
        return product
    return promoted(a) @ promoted(b)


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _weight_suffix(name: str, weight: Tensor, beside: Tensor) -> str:
    """Of a kernel whose weight may be in half precision beside float32."""
    fits = (weight.device, promoted_dtype(weight.dtype)) == (beside.device, beside.dtype)
    if not fits or weight.dtype not in _WEIGHT_SUFFIX:
        kinds = f"{weight.dtype} on {weight.device}, what is beside it {beside.dtype} on {beside.device}"
        raise BackendError(f"{name}: the weight is {kinds}")
    return _WEIGHT_SUFFIX[weight.dtype]


def _launch(name: str, tensors: list[Tensor], *arguments: Any, suffix: str = "") -> None:
    """Runs a kernel on these tensors' device, on torch's current stream there."""
    if _MISSING:
        raise BackendError(_MISSING)
    kinds = sorted({f"{t.dtype} on {t.device}" for t in tensors})
    (device, dtype) = tensors[0].device, tensors[0].dtype
    if len(kinds) > 1 or device.type != _DEVICE or dtype not in _SUFFIX:
        raise BackendError(
            f"{name}: wants float32 or float64 tensors of one dtype on {_DEVICE}, got {', '.join(kinds)}"
        )
    _on_stream(name + (suffix or _SUFFIX[dtype]), device, *arguments)


def _on_stream(kernel: str, device: torch.device, *arguments: Any) -> None:
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    _on_device(device, getattr(_cuda, kernel), *arguments, stream)


def _on_device(device: torch.device, function: Any, *arguments: Any) -> Any:
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        return function(*arguments)


def _array(tensor: Tensor) -> tuple[int, int]:
    if not tensor.is_contiguous():
        raise BackendError(f"a contiguous tensor is wanted, got strides {tensor.stride()}")
    return tensor.data_ptr(), tensor.numel()
