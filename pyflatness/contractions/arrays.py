"""Tensors as the bindings of the kernels take them: an address and the number of elements from there on."""

import torch
from torch import Tensor

from ..errors import BackendError

SUFFIX = {torch.float32: "_f32", torch.float64: "_f64"}
"""What the name of a kernel ends in."""


def array(tensor: Tensor) -> tuple[int, int]:
    """A contiguous tensor."""
    if not tensor.is_contiguous():
        raise BackendError(f"a contiguous tensor is wanted, got strides {tensor.stride()}")
    return tensor.data_ptr(), tensor.numel()


def dense_rows(matrix: Tensor) -> Tensor:
    """The matrix, copied only if the elements of a row are not neighbours."""
    dense = matrix.stride(1) == 1 and matrix.stride(0) >= matrix.shape[1]
    return matrix if dense and min(matrix.shape) > 0 else matrix.contiguous()


def strided(matrix: Tensor) -> tuple[int, int]:
    """A matrix from :func:`dense_rows`."""
    n, m = matrix.shape
    return matrix.data_ptr(), (n - 1) * matrix.stride(0) + m if n and m else 0


def span(tensor: Tensor) -> tuple[int, int]:
    """A tensor of any strides: from its first to its last element."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), last + 1 if tensor.numel() else 0
