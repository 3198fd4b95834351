"""Choose a backend, a module with the functions of :mod:`.reference`, by its name."""

import importlib
from types import ModuleType
from typing import Literal, get_args

import torch
from torch import Tensor

from ..errors import BackendError
from . import compiled, cuda, reference
from .precision import promoted_dtype

NAMES = ("auto", "compiled", "triton", "reference")
_TRITON = f"{__package__}.triton_head"  # imported where it is asked for: Triton takes its time

Work = Literal["heads", "layers", "eigenvalues"]
"""What a backend is chosen for; ``"auto"`` takes the kernels on CUDA for those works only in which they are faster."""

WORKS: tuple[Work, ...] = get_args(Work)


def choose(name: str, device: torch.device, dtype: torch.dtype, work: Work) -> ModuleType:
    """Return the backend for tensors of a device and dtype; ``"auto"`` takes the compiled one where it can run.

    On CUDA it does so for the works in ``cuda.AUTOMATIC``. ``"triton"`` is for heads alone, see
    :func:`choose_for_head`, and the same as ``"auto"`` here.

    Raises:
        BackendError: ``"compiled"`` asked for and unable to run.
    """
    if name == "reference":
        return reference
    kernels = cuda if device.type == "cuda" else compiled
    reason = kernels.unavailable(device, dtype)
    if reason and name == "compiled":
        raise BackendError(reason)
    slower = name != "compiled" and kernels is cuda and work not in cuda.AUTOMATIC
    return reference if reason or slower else kernels


def choose_for_head(name: str, weight: Tensor) -> ModuleType:
    """Return the backend for a head with this weight; ``"triton"`` is one for half precision on a GPU.

    Raises:
        BackendError: see :func:`choose`; or ``"triton"`` asked for without a GPU or without Triton.
    """
    if name == "triton":
        if not weight.is_cuda:
            raise BackendError(f'backend="triton" runs on a GPU, the weight is on {weight.device}; pass backend="auto"')
        try:
            triton_head = importlib.import_module(_TRITON)
        except ImportError as error:
            hint = "pip install 'pyflatness[triton]'"
            raise BackendError(f'backend="triton" needs Triton: {hint} ({error})') from error
        if triton_head.multiplies(weight, weight):
            return triton_head
    return choose(name, weight.device, promoted_dtype(weight.dtype), "heads")


def choose_for_few(name: str, device: torch.device, dtype: torch.dtype, work: Work) -> tuple[ModuleType, torch.device]:
    """Return the backend for small things, and where they go: the CPU has kernels where a device has none.

    Raises:
        BackendError: see :func:`choose`.
    """
    backend, cpu = choose(name, device, dtype, work), torch.device("cpu")
    return (choose(name, cpu, dtype, work), cpu) if backend is reference else (backend, device)


def describe(backend: ModuleType) -> str:
    """Return the name that results carry: ``"compiled"``, ``"triton"`` or ``"reference"``."""
    return "reference" if backend is reference else "triton" if backend.__name__ == _TRITON else "compiled"
