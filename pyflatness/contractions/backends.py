"""Hold the backends, and choose one by its name."""

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
_TRITON = f"{__package__}.triton_head"  # imported only when needed, since importing Triton takes long
_WIDE = 1024  # the fewest classes of a head for which "auto" may be Triton

reference, compiled, cuda = Backend(), Compiled(), Cuda()


def kernels(device: torch.device) -> Kernels:
    """Return the compiled backend of a device."""
    return cuda if device.type == "cuda" else compiled


def default_memory(device: torch.device) -> int:
    """Return the bytes that working buffers may take by default."""
    return kernels(device).memory


def choose(name: str, device: torch.device, dtype: torch.dtype) -> Backend:
    """Return the backend for tensors of a device and dtype; ``"triton"``, which is for heads, is ``"auto"`` here."""
    if name == "reference":
        return reference
    found = kernels(device)
    reason = found.unavailable(device, dtype)
    if reason and name == "compiled":
        raise BackendError(reason)
    return reference if reason else found


def choose_for_head(name: str, weight: Tensor) -> Backend:
    """Return the backend for a head with this weight.

    ``"triton"`` serves bfloat16 on a GPU. ``"auto"`` chooses it for many classes if the compiled kernels, which are
    about as fast, are not built.
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
