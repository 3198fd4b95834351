"""What was received, from a user or from torch, as messages of errors need it."""

import torch
from torch import Tensor

from .errors import InputError

_OUT_OF_MEMORY = ("not enough memory", "can't allocate memory", "out of memory")
_NOT_TWICE = ("is not implemented", "once_differentiable", "differentiate twice")


def shown(value: object) -> str:
    """Return what was received as one short line, for a message."""
    line = " ".join(repr(value).split())
    return line if len(line) <= 80 else line[:79] + "…"


def check_tensor(what: str, tensor: object) -> Tensor:
    """Return a dense tensor with values in it.

    Raises:
        InputError: no tensor, or one that is sparse, nested, quantised or on the meta device.
    """
    if not isinstance(tensor, Tensor):
        raise InputError(f"{what}: a tensor is wanted, got {type(tensor).__name__}{_instead(tensor)}")
    if tensor.is_nested:
        raise InputError(f"{what}: a dense tensor is wanted, got a nested one; pad it, torch.nested.to_padded_tensor")
    if tensor.layout != torch.strided:
        raise InputError(f"{what}: a dense tensor is wanted, got layout {tensor.layout}; pass tensor.to_dense()")
    if tensor.is_quantized:
        raise InputError(f"{what}: a tensor of numbers is wanted, got {tensor.dtype}; pass tensor.dequantize()")
    if tensor.is_meta:
        raise InputError(f"{what}: {tuple(tensor.shape)} of {tensor.dtype} on the meta device has no values; load it")
    return tensor


def _instead(given: object) -> str:
    return "; pass torch.from_numpy(array)" if type(given).__module__ == "numpy" else ""


def is_out_of_memory(error: Exception) -> bool:
    """Return whether torch says that memory did not suffice."""
    return any(text in str(error) for text in _OUT_OF_MEMORY)


def lacks_a_second_derivative(error: Exception) -> bool:
    """Return whether torch says that an operation can be differentiated once only."""
    return any(text in str(error) for text in _NOT_TWICE)
