"""Hold the backends, and choose one of them by its name."""

import importlib

import torch
from torch import Tensor

from ..errors import BackendError
from .compiled import Compiled
from .cuda import Cuda
from .kernels import Kernels
from .precision import promoted_dtype
from .reference import Backend

NAMES = ("auto", "compiled", "triton", "reference")
_TRITON = f"{__package__}.triton_head"  # imported where it is wanted: Triton takes its time
_WIDE = 1024  # classes of a head that may be Triton's by itself

reference, compiled, cuda = Backend(), Compiled(), Cuda()


def kernels(device: torch.device) -> Kernels:
    """Return the compiled backend of a device."""
    return cuda if device.type == "cuda" else compiled


def default_memory(device: torch.device) -> int:
    """Return how many bytes working buffers may take, unless a user says otherwise."""
    return kernels(device).memory


def choose(name: str, device: torch.device, dtype: torch.dtype) -> Backend:
    """Return the backend for tensors of a device and dtype; ``"triton"`` is for heads alone, and here as ``"auto"``."""
    if name == "reference":
        return reference
    found = kernels(device)
    reason = found.unavailable(device, dtype)
    if reason and name == "compiled":
        raise BackendError(reason)
    return reference if reason else found


def choose_for_head(name: str, weight: Tensor) -> Backend:
    """Return the backend for a head with this weight.

    ``"triton"`` is one for half precision on a GPU. ``"auto"`` takes it for many classes where the compiled kernels,
    which are about as fast, are not built.
    """
    if name == "triton" and not weight.is_cuda:
        raise BackendError(f'backend="triton" runs on a GPU, the weight is on {weight.device}; pass backend="auto"')
    found = choose(name, weight.device, promoted_dtype(weight.dtype))
    in_place = name == "auto" and found is reference and weight.is_cuda and len(weight) >= _WIDE
    if name != "triton" and not in_place:
        return found
    try:
        triton = importlib.import_module(_TRITON).triton
    except ImportError as error:
        if in_place:
            return found
        hint = "pip install 'pyflatness[triton]'"
        raise BackendError(f'backend="triton" needs Triton: {hint} ({error})') from error
    taken = triton.fuses(weight, weight) and (not in_place or triton.runs(weight.device))
    return triton if taken else found
