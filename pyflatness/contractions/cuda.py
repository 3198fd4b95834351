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
from .compiled import _rows, _strided
from .precision import promoted_dtype

__all__ = [
    "exponentiate",
    "exponentiate_rounded",
    "norms_about",
    "pair_distances",
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
