"""The kernels in C++: the names and signatures of :mod:`.reference`. The only module that imports ``_C``."""

import functools
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..errors import BackendError

_SUFFIX = {torch.float32: "_f32", torch.float64: "_f64"}

_C: Any
try:
    # After torch, so that both use the OpenMP runtime that torch brings and not a pool of threads each.
    _C = importlib.import_module("pyflatness._C")
    _MISSING = ""
except ImportError as error:
    _C = None
    _MISSING = (
        f"the compiled kernels are not here ({error}): install pyflatness with `pip install .` (or `pip install -e .`) "
        'from its root, which needs a C++ compiler, or pass backend="reference"'
    )


def unavailable(device: torch.device, dtype: torch.dtype) -> str:
    """Why tensors of this kind cannot be served; empty if they can."""
    if _MISSING:
        return _MISSING
    _require()
    if device.type != "cpu":
        return f"the compiled kernels run on the CPU, the tensors are on {device}"
    if dtype not in _SUFFIX:
        return f"the compiled kernels take float32 and float64, the tensors are {dtype}"
    return ""


def instruction_sets() -> list[str]:
    """The instruction sets that this build and processor have, widest first (empty without the compiled module)."""
    return [] if _C is None else list(_C.instruction_sets())


def instruction_set() -> str:
    """The instruction set in use."""
    _require()
    return str(_C.instruction_set())


@contextmanager
def forced_instruction_set(name: str) -> Iterator[None]:
    """Use one instruction set inside a ``with`` block (for tests; users set ``PYFLATNESS_ISA``)."""
    before = instruction_set()
    _C.select_instruction_set(name)
    try:
        yield
    finally:
        _C.select_instruction_set(before)


def pair_distances(weight: Tensor) -> Tensor:
    """See :func:`.reference.pair_distances`."""
    weight = weight.contiguous()
    d, m = weight.shape
    out = weight.new_empty(d, d)
    _kernel("pair_distances", weight)(_array(weight), d, m, _array(out), torch.get_num_threads())
    return out


def softmax_variance(features: Tensor, weight: Tensor, bias: Tensor, distances: Tensor) -> Tensor:
    """See :func:`.reference.softmax_variance`; at most ``_C.MAX_FUSED_OUTPUTS`` outputs."""
    features, weight, bias = _rows(features), weight.contiguous(), bias.contiguous()
    (n, m), d = features.shape, weight.shape[0]
    out = features.new_empty(n, dtype=torch.float64)
    _kernel("softmax_variance", features, weight, bias, distances)(
        _strided(features), features.stride(0), _array(weight), _array(bias), _array(distances), n, m, d,
        _array(out), torch.get_num_threads(),
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
    _kernel("exponentiate", logits, norms, maximum)(
        _array(logits), _array(norms), top_value, n, d, _array(maximum), _array(rest), _array(moment), _array(top),
        torch.get_num_threads(),
    )  # fmt: skip
    return rest, (None if row_norms is None else moment), top


def row_dots(a: Tensor, b: Tensor) -> Tensor:
    """See :func:`.reference.row_dots`."""
    a, b = _rows(a), _rows(b)
    n, k = a.shape
    out = a.new_empty(n, dtype=torch.float64)
    _kernel("row_dots", a, b)(
        _strided(a), a.stride(0), _strided(b), b.stride(0), n, k, _array(out), torch.get_num_threads()
    )
    return out


def sigmoid_curvature(logits: Tensor, coefficients: Tensor, row_norms: Tensor) -> Tensor:
    """See :func:`.reference.sigmoid_curvature`."""
    logits, coefficients, row_norms = logits.contiguous(), coefficients.contiguous(), row_norms.contiguous()
    n, d = logits.shape
    out = logits.new_empty(n, dtype=torch.float64)
    _kernel("sigmoid_curvature", logits, coefficients, row_norms)(
        _array(logits), _array(coefficients), _array(row_norms), n, d, _array(out), torch.get_num_threads()
    )
    return out


@functools.cache
def _require() -> None:
    """Raise without the compiled module; the first time, take the instruction set that the environment names."""
    if _MISSING:
        raise BackendError(_MISSING)
    name = os.environ.get("PYFLATNESS_ISA")
    try:
        if name:
            _C.select_instruction_set(name)
    except ValueError as error:
        raise BackendError(f"PYFLATNESS_ISA: {error}") from None


def _kernel(name: str, *tensors: Tensor) -> Any:
    _require()
    dtype = tensors[0].dtype
    kinds = sorted({f"{t.dtype} on {t.device}" for t in tensors})
    if len(kinds) > 1 or tensors[0].device.type != "cpu" or dtype not in _SUFFIX:
        raise BackendError(f"{name}: wants float32 or float64 tensors of one dtype on the CPU, got {', '.join(kinds)}")
    return getattr(_C, name + _SUFFIX[dtype])


def _rows(matrix: Tensor) -> Tensor:
    """The matrix, copied only if the elements of a row are not neighbours."""
    dense = matrix.stride(1) == 1 and matrix.stride(0) >= matrix.shape[1]
    return matrix if dense and min(matrix.shape) > 0 else matrix.contiguous()


def _array(tensor: Tensor) -> tuple[int, int]:
    if not tensor.is_contiguous():
        raise BackendError(f"a contiguous tensor is wanted, got strides {tensor.stride()}")
    return tensor.data_ptr(), tensor.numel()


def _strided(matrix: Tensor) -> tuple[int, int]:
    n, m = matrix.shape
    return matrix.data_ptr(), (n - 1) * matrix.stride(0) + m if n and m else 0
