"""Describe tensors as the bindings take them: an address and how many elements may be reached from it.

What is at the address has to be the tensor's numbers: of one that is negated lazily (``c.conj().imag``) it is not. Such
a tensor is copied where kernels prepare what they are given (:func:`plain`, :func:`dense`, :func:`dense_rows`), and has
no address here.
"""

from torch import Tensor

from ..errors import BackendError
from .geometry import Geometry


def plain(tensor: Tensor) -> Tensor:
    """Return the tensor, copied only if it is negated lazily."""
    return tensor.resolve_neg()


def dense(tensor: Tensor) -> Tensor:
    """Return the tensor, copied only if it is not contiguous, or negated lazily."""
    return plain(tensor).contiguous()


def dense_rows(matrix: Tensor) -> Tensor:
    """Return the matrix, copied only if the elements of a row are not neighbours, or if it is negated lazily."""
    matrix = plain(matrix)
    dense = matrix.stride(1) == 1 and matrix.stride(0) >= matrix.shape[1]
    return matrix if dense and min(matrix.shape) > 0 else matrix.contiguous()


def array(tensor: Tensor) -> tuple[int, int]:
    """Return address and elements of a contiguous tensor."""
    if not tensor.is_contiguous():
        raise BackendError(f"a contiguous tensor is wanted, got strides {tensor.stride()}")
    return _address(tensor), tensor.numel()


def layer_sizes(inputs: Tensor, cotangent: Tensor | None, geometry: Geometry) -> tuple[tuple[int, ...], ...]:
    """Return the sizes of a layer as the binding takes them; a cotangent's positions are its own, which it checks."""
    (n, channels), size = inputs.shape[:2], tuple(inputs.shape[2:])
    groups, rows = geometry.groups, 1
    places: tuple[int, ...] = geometry.places(size)
    if cotangent is not None:
        rows, places = cotangent.shape[1] // groups, tuple(cotangent.shape[2:])
        if len(cotangent) != n:
            raise BackendError(f"inputs of {n} samples, cotangents of {len(cotangent)}")
    return (n, groups, channels // groups, rows), size, places, geometry.kernel, geometry.stride, geometry.dilation


def span(tensor: Tensor) -> tuple[int, int]:
    """Return address and elements from the first to the last of a tensor of any strides."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return _address(tensor), last + 1 if tensor.numel() else 0


def strided(matrix: Tensor) -> tuple[int, int]:
    """Return address and elements from the first to the last of a matrix whose rows are dense."""
    n, m = matrix.shape
    return _address(matrix), (n - 1) * matrix.stride(0) + m if n and m else 0


def _address(tensor: Tensor) -> int:
    if tensor.is_neg():
        raise BackendError("a tensor whose memory holds its numbers is wanted, got one that is negated lazily")
    return tensor.data_ptr()
