"""Promote half precision: it is computed and accumulated in float32, a chunk at a time.

Logits in bf16 step by 0.125 at 20.
"""

import contextlib
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


def promoted(tensor: Tensor) -> Tensor:
    """Return half precision as float32; anything else as it is."""
    return tensor.to(promoted_dtype(tensor.dtype))


def promoted_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that tensors of ``dtype`` are computed in."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def full_precision(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Return a context without autocast on the tensor's device: the user's is for the model alone."""
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else contextlib.nullcontext()


def squared_norms(matrix: Tensor, backend: ModuleType, memory: int) -> Tensor:
    """Return ``|row|²`` of an (n, m) matrix, (n,) float64; of half precision ``memory`` bytes at a time."""
    if promoted_dtype(matrix.dtype) == matrix.dtype:
        norms: Tensor = backend.row_dots(matrix, matrix)
        return norms
    chunks = map(promoted, matrix.split(max(1, memory // (4 * max(1, matrix.shape[1])))))
    return torch.cat([backend.row_dots(chunk, chunk) for chunk in chunks])
