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

__all__ = ["small_eigenvalues", "unavailable"]

AUTOMATIC = False
"""Whether ``backend="auto"`` takes these kernels: not before their tests have run on a GPU."""

_SUFFIX = {torch.float32: "_f32", torch.float64: "_f64"}
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


def small_eigenvalues(matrices: Tensor) -> Tensor:
    """See :func:`.reference.small_eigenvalues`; at most ``_cuda.MAX_EIGEN_SIZE`` rows."""
    matrices = matrices.contiguous()
    n, size, _ = matrices.shape
    out = matrices.new_empty(n, size)
    if matrices.dtype != torch.float64:
        raise BackendError(f"small_eigenvalues: wants float64, got {matrices.dtype}")
    _launch("small_eigenvalues", [matrices], _array(matrices), n, size, _array(out))
    return out


def _launch(name: str, tensors: list[Tensor], *arguments: Any) -> None:
    """Runs a kernel on these tensors' device, on torch's current stream there."""
    if _MISSING:
        raise BackendError(_MISSING)
    kinds = sorted({f"{t.dtype} on {t.device}" for t in tensors})
    (device, dtype) = tensors[0].device, tensors[0].dtype
    if len(kinds) > 1 or device.type != _DEVICE or dtype not in _SUFFIX:
        raise BackendError(
            f"{name}: wants float32 or float64 tensors of one dtype on {_DEVICE}, got {', '.join(kinds)}"
        )
    kernel = getattr(_cuda, name + _SUFFIX[dtype])
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        kernel(*arguments, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0)


def _array(tensor: Tensor) -> tuple[int, int]:
    if not tensor.is_contiguous():
        raise BackendError(f"a contiguous tensor is wanted, got strides {tensor.stride()}")
    return tensor.data_ptr(), tensor.numel()
