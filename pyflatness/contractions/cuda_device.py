"""Load and launch the CUDA kernels.

This is the only module that imports ``_cuda``.

Every kernel runs on torch's current stream of the tensors' device and takes its memory from torch's allocator.
"""

import contextlib
import functools
import importlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..errors import BackendError

SUFFIX = {torch.float32: "_f32", torch.float64: "_f64"}
HALF = {torch.bfloat16: "_bf16", torch.float16: "_f16"}
"""Dtypes that some kernels take beside float32 and float64, accumulating in float32."""

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
        'nvcc and a torch with CUDA are, or pass backend="reference", which runs on the GPU in plain torch'
    )


def missing() -> str:
    """Return why the module is not here; empty if it is."""
    return _MISSING


def unavailable(device: torch.device, dtype: torch.dtype) -> str:
    """Return why tensors of this kind cannot be served; empty if they can."""
    if _MISSING:
        return _MISSING
    if device.type != _DEVICE:
        return f"the CUDA kernels run on CUDA devices, the tensors are on {device}"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _CAPABILITY:
        return f"the CUDA kernels need compute capability 8.0, {torch.cuda.get_device_name(device)} has less"
    if dtype not in SUFFIX:
        return f"the CUDA kernels take float32 and float64, the tensors are {dtype}"
    index = torch.cuda.current_device() if device.type == "cuda" and device.index is None else device.index
    return _refused(_cuda, torch.device(device.type, index))


@functools.cache
def _refused(kernels: Any, device: torch.device) -> str:
    """Return why a device launches nothing of a module, as where its driver is older than the CUDA of the build."""
    one = torch.ones(1, dtype=torch.float32, device=device)
    out = torch.empty(1, dtype=torch.float64, device=device)
    try:
        on_stream("row_dots_f32", device, (one.data_ptr(), 1), 1, (one.data_ptr(), 1), 1, 1, 1, (out.data_ptr(), 1))
    except RuntimeError as error:
        return (
            f"the CUDA kernels do not start on {device} ({error}): its driver must have the CUDA that they were built "
            'with; update it, rebuild pyflatness with an older CUDA, or pass backend="reference"'
        )
    return ""


@contextmanager
def emulated(compiled: Any) -> Iterator[None]:
    """Take for the CUDA kernels, inside a ``with`` block, those of a module compiled for CPU tensors (for tests)."""
    global _cuda, _MISSING, _DEVICE
    before = _cuda, _MISSING, _DEVICE
    _cuda, _MISSING, _DEVICE = compiled, "", "cpu"
    try:
        yield
    finally:
        _cuda, _MISSING, _DEVICE = before


def module() -> Any:
    """Return the compiled module.

    Raises:
        BackendError: it is not here.
    """
    if _MISSING:
        raise BackendError(_MISSING)
    return _cuda


def check_kind(name: str, tensors: Sequence[Tensor], dtypes: Collection[torch.dtype]) -> torch.dtype:
    """Return the one dtype of the tensors.

    Raises:
        BackendError: they are of several, or elsewhere, or the dtype is not among ``dtypes``; there is no module.
    """
    module()
    kinds = sorted({f"{t.dtype} on {t.device}" for t in tensors})
    device, dtype = tensors[0].device, tensors[0].dtype
    if len(kinds) > 1 or device.type != _DEVICE or dtype not in dtypes:
        *others, last = (str(dtype).removeprefix("torch.") for dtype in dtypes)
        wanted = f"{', '.join(others)} or {last}"
        raise BackendError(f"{name}: wants {wanted} tensors of one dtype on {_DEVICE}, got {', '.join(kinds)}")
    return dtype


def launch(name: str, tensors: list[Tensor], *arguments: Any, suffix: str = "") -> None:
    """Run a kernel on these tensors' device, on torch's current stream there."""
    dtype = check_kind(name, tensors, SUFFIX)
    on_stream(name + (suffix or SUFFIX[dtype]), tensors[0].device, *arguments)


def on_stream(kernel: str, device: torch.device, *arguments: Any) -> None:
    """Launch a kernel on torch's current stream of the device."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    on_device(device, getattr(module(), kernel), *arguments, stream)


def on_device(device: torch.device, function: Any, *arguments: Any, **named: Any) -> Any:
    """Call a function while the device is the current one, and return its result."""
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        return function(*arguments, **named)
