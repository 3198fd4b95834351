"""Read torch's linear operations: which tensor is the weight, what it multiplies, and which kind of layer that is."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..kinds import Convolution, Embedding, Linear, TransposedConvolution

Transform = Callable[[Tensor], Tensor]
LINEAR = Linear()
_kind_of_convolution = functools.lru_cache(maxsize=1024)(Convolution)
_kind_of_embedding = functools.lru_cache(maxsize=1024)(Embedding)
_kind_of_transposed_convolution = functools.lru_cache(maxsize=1024)(TransposedConvolution)


@dataclass(frozen=True)
class Operation:
    """Hold a linear operation, taken apart.

    Attributes:
        weight: as the operation has it.
        inputs: in the form that layers of the kind take.
        bias: what is added to each row of the output, or None.
        kind: of a layer that does the same.
        run: (inputs, weight, bias) -> the operation's result, in the form of such a layer's output.
        rows: the weight -> a view of it with a row of the output to a row, as layers of the kind keep theirs.
        back: the result in this form -> as the operation gives it.
    """

    weight: Tensor
    inputs: Tensor
    bias: Tensor | None
    kind: Linear
    run: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    rows: Transform = lambda weight: weight
    back: Transform = lambda result: result


def read(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], weight: type[Tensor]) -> Operation | None:
    """Return what a function of torch does, if that is a linear operation with a weight of this class; else None."""
    reader = _READERS.get(func)
    given = [part for several in (*args, *kwargs.values()) for part in each_of(several) if isinstance(part, weight)]
    if reader is None or len(given) != 1:
        return None
    try:
        operation = reader(weight, *args, **kwargs)
    except (TypeError, ValueError, RuntimeError):  # called in another way; an error of the caller's comes again
        return None
    return operation if operation is not None and operation.weight is given[0] else None


def each_of(argument: Any) -> Sequence[Any]:
    """Return the parts of a list or tuple, or an argument itself."""
    return argument if isinstance(argument, (list, tuple)) else (argument,)


def _transposed(weight: Tensor) -> Tensor:
    return weight.transpose(-2, -1)


def _linear(_: type[Tensor], input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Operation:  # noqa: A002
    return Operation(weight, input, bias, LINEAR, F.linear)


def _matmul(kind: type[Tensor], left: Tensor, right: Tensor) -> Operation | None:
    if min(left.ndim, right.ndim) < 2:
        return None
    if isinstance(left, kind):  # W X is (Xᵀ Wᵀ)ᵀ
        return Operation(
            left,
            right.transpose(-2, -1),
            None,
            LINEAR,
            lambda inputs, weight, _: torch.matmul(weight, inputs.transpose(-2, -1)).transpose(-2, -1),
            back=_transposed,
        )
    return Operation(right, left, None, LINEAR, lambda inputs, weight, _: torch.matmul(inputs, weight), _transposed)


def _rmatmul(kind: type[Tensor], right: Tensor, left: Tensor) -> Operation | None:
    return _matmul(kind, left, right)


def _addmm(
    kind: type[Tensor],
    input: Tensor,  # noqa: A002
    mat1: Tensor,
    mat2: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Operation | None:
    if isinstance(mat1, kind) or input.ndim != 1 or beta != 1 or alpha != 1:
        return None
    return Operation(
        mat2,
        mat1,
        input,
        LINEAR,
        lambda inputs, weight, bias: inputs @ weight if bias is None else torch.addmm(bias, inputs, weight),
        _transposed,
    )


def _einsum(kind: type[Tensor], equation: str, *operands: Any) -> Operation | None:
    """Read a product of two tensors that is summed over one index, last of the inputs in a layer's form."""
    if len(operands) == 1:
        (operands,) = operands
    left, _, result = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(operands) != 2 or len(terms) != 2 or not result or "." in equation:
        return None
    place = int(isinstance(operands[1], kind))
    of_weight, of_inputs = terms[place], terms[1 - place]
    row = [index for index in of_weight if index in result and index not in of_inputs]
    column = [index for index in of_weight if index in of_inputs and index not in result]
    kept = [index for index in result if index not in of_weight]
    if len(of_weight) != 2 or len(row) != 1 or len(column) != 1 or sorted(kept + column) != sorted(of_inputs):
        return None
    forth = [of_inputs.index(index) for index in (*kept, *column)]
    back = [(*kept, *row).index(index) for index in result]

    def run(inputs: Tensor, weight: Tensor, _: Tensor | None) -> Tensor:
        pair = [inputs.permute(_inverse(forth)), weight]
        outputs: Tensor = torch.einsum(equation, *(pair if place else reversed(pair)))
        return outputs.permute(_inverse(back))

    rows = (lambda weight: weight) if of_weight.index(row[0]) == 0 else _transposed
    inputs = operands[1 - place].permute(forth)
    return Operation(operands[place], inputs, None, LINEAR, run, rows, lambda outputs: outputs.permute(back))


def _inverse(order: Sequence[int]) -> list[int]:
    return [order.index(place) for place in range(len(order))]


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


_READERS: dict[Any, Callable[..., Operation | None]] = {
    F.linear: _linear,
    torch.matmul: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
    Tensor.__rmatmul__: _rmatmul,
    torch.mm: _matmul,
    Tensor.mm: _matmul,
    torch.bmm: _matmul,
    Tensor.bmm: _matmul,
    torch.addmm: _addmm,
    Tensor.addmm: _addmm,
    torch.einsum: _einsum,
    F.embedding: _embedding,
    F.conv1d: _convolution(F.conv1d, 1),
    F.conv2d: _convolution(F.conv2d, 2),
    F.conv3d: _convolution(F.conv3d, 3),
    F.conv_transpose1d: _transposed_convolution(F.conv_transpose1d, 1),
    F.conv_transpose2d: _transposed_convolution(F.conv_transpose2d, 2),
    F.conv_transpose3d: _transposed_convolution(F.conv_transpose3d, 3),
}
