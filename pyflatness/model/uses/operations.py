"""Read torch's linear operations: which tensor is the weight, what it multiplies, and which kind of layer that is."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..kinds import Convolution, Embedding, TransposedConvolution
from . import products
from .operation import LINEAR, Found, Operation

_kind_of_convolution = functools.lru_cache(maxsize=1024)(Convolution)
_kind_of_embedding = functools.lru_cache(maxsize=1024)(Embedding)
_kind_of_transposed_convolution = functools.lru_cache(maxsize=1024)(TransposedConvolution)


def read(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], weight: type[Tensor]) -> Found | None:
    """Return what a function of torch does, if that is a linear operation with a weight of this class.

    Of one that is not, return why, or None where there is nothing more to say than its name.
    """
    reader = _READERS.get(func)
    given = [part for several in (*args, *kwargs.values()) for part in each_of(several) if isinstance(part, weight)]
    if reader is None or len(given) != 1:
        return None
    try:
        found = reader(weight, *args, **kwargs)
    except (TypeError, ValueError, RuntimeError):  # called in another way; an error of the caller's comes again
        return None
    return found if not isinstance(found, Operation) or found.weight is given[0] else None


def each_of(argument: Any) -> Sequence[Any]:
    """Return the parts of a list or tuple, or an argument itself."""
    return argument if isinstance(argument, (list, tuple)) else (argument,)


def _linear(_: type[Tensor], input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Operation:  # noqa: A002
    return Operation(weight, input, bias, LINEAR, F.linear)


def _convolution(function: Callable[..., Tensor], space: int) -> Callable[..., Operation]:
    def read(
        _: type[Tensor],
        input: Tensor,  # noqa: A002
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Operation:
        sizes = _each(stride, space), padding if isinstance(padding, str) else _each(padding, space)
        kind = _kind_of_convolution(tuple(weight.shape[2:]), *sizes, _each(dilation, space), groups, "zeros")

        def run(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return function(inputs, weight, bias, stride, padding, dilation, groups)

        return Operation(weight, input, bias, kind, run)

    return read


def _transposed_convolution(function: Callable[..., Tensor], space: int) -> Callable[..., Operation]:
    def read(
        _: type[Tensor],
        input: Tensor,  # noqa: A002
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Operation:
        sizes = (_each(size, space) for size in (stride, padding, output_padding, dilation))
        kind = _kind_of_transposed_convolution(tuple(weight.shape[2:]), *sizes, groups)

        def run(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return function(inputs, weight, bias, stride, padding, output_padding, groups, dilation)

        return Operation(weight, input, bias, kind, run)

    return read


def _embedding(
    _: type[Tensor],
    input: Tensor,  # noqa: A002
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    *rest: Any,
    **options: Any,
) -> Operation | None:
    if max_norm is not None:
        return None
    padding = padding_idx + len(weight) if padding_idx is not None and padding_idx < 0 else padding_idx

    def run(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.embedding(inputs, weight, padding_idx, max_norm, *rest, **options)

    return Operation(weight, input, None, _kind_of_embedding(padding), run)


def _each(size: Any, space: int) -> tuple[int, ...]:
    sizes = (size,) if isinstance(size, int) else tuple(size)
    return sizes * space if len(sizes) == 1 else sizes


_READERS: dict[Any, Callable[..., Found | None]] = {
    F.linear: _linear,
    torch.matmul: products.matmul,
    Tensor.matmul: products.matmul,
    Tensor.__matmul__: products.matmul,
    Tensor.__rmatmul__: products.rmatmul,
    torch.mm: products.matmul,
    Tensor.mm: products.matmul,
    torch.bmm: products.matmul,
    Tensor.bmm: products.matmul,
    torch.addmm: products.addmm,
    Tensor.addmm: products.addmm,
    torch.baddbmm: products.baddbmm,
    Tensor.baddbmm: products.baddbmm,
    torch.einsum: products.einsum,
    torch.tensordot: products.tensordot,
    F.embedding: _embedding,
    F.conv1d: _convolution(F.conv1d, 1),
    F.conv2d: _convolution(F.conv2d, 2),
    F.conv3d: _convolution(F.conv3d, 3),
    F.conv_transpose1d: _transposed_convolution(F.conv_transpose1d, 1),
    F.conv_transpose2d: _transposed_convolution(F.conv_transpose2d, 2),
    F.conv_transpose3d: _transposed_convolution(F.conv_transpose3d, 3),
}
