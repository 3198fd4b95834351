"""Read torch's linear operations: which tensor is the weight, what it multiplies, and which kind of layer that is.

A product has an index for each dimension, as in einsum's ``"nqm,mhk->nqhk"``. Indices of the weight that are summed
over are its columns, and those that the result has are its rows. An index of weight, inputs and result numbers separate
matrices, which are groups of a 1 × 1 convolution. A matrix without an index for rows or columns has one of these, so
that a product entry by entry is one with many matrices of one entry.
"""

import math
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..kinds import LINEAR, Convolution, Embedding, Linear, PermutedLinear, TransposedConvolution, made

Transform = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LinearOperation:
    """Hold the parts of a linear operation."""

    weight: Tensor  # in the operation's shape
    inputs: Tensor  # in the form of inputs of a layer of this kind
    bias: Tensor | None  # added to each row of the output
    kind: Linear  # of a layer that does the same
    run: Callable[[Tensor, Tensor, Tensor | None], Tensor]  # (inputs, weight, bias) -> a layer's output
    rows: Transform = lambda weight: weight  # the weight -> a view of it in the form of a layer's weight
    back: Transform = lambda result: result  # a layer's output -> the operation's result


Found = LinearOperation | str  # an operation, or why it is not the one of a layer


_ONES, _NONE = (1,), (0,)


@dataclass(frozen=True)
class _IndexForm:
    """Bring a tensor of an operation into a layer's form, and back."""

    shape: Sequence[int]  # in the operation
    sizes: Sequence[int]  # of each index; further dimensions of the shape have size 1
    order: Sequence[int]  # of the indices in the layer's form
    form: Sequence[int]  # the shape in the layer

    def there(self, tensor: Tensor) -> Tensor:
        return tensor.reshape(self.sizes).permute(*self.order).reshape(self.form)

    def back(self, tensor: Tensor) -> Tensor:
        inverse = [self.order.index(place) for place in range(len(self.order))]
        return tensor.reshape([self.sizes[place] for place in self.order]).permute(*inverse).reshape(self.shape)


def matmul(kind: type[Tensor], left: Tensor, right: Tensor) -> Found | None:
    """Read ``left @ right``."""
    if min(left.ndim, right.ndim) < 2:
        return None
    if _is_several(left if isinstance(left, kind) else right):
        return _batched(kind, left, right, None, lambda left, right, bias: torch.matmul(left, right))
    if isinstance(left, kind):  # W X is (Xᵀ Wᵀ)ᵀ
        return LinearOperation(
            left,
            right.transpose(-2, -1),
            None,
            LINEAR,
            lambda inputs, weight, _: torch.matmul(weight, inputs.transpose(-2, -1)).transpose(-2, -1),
            back=_transposed,
        )
    return LinearOperation(
        right, left, None, LINEAR, lambda inputs, weight, _: torch.matmul(inputs, weight), _transposed
    )


def addmm(
    kind: type[Tensor],
    input: Tensor,  # noqa: A002
    mat1: Tensor,
    mat2: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Found | None:
    """Read ``input + mat1 @ mat2``, ``input`` a bias."""
    if isinstance(mat1, kind) or input.ndim != 1 or beta != 1 or alpha != 1:
        return "of other than inputs, a weight and its bias"
    return LinearOperation(
        mat2,
        mat1,
        input,
        LINEAR,
        lambda inputs, weight, bias: inputs @ weight if bias is None else torch.addmm(bias, inputs, weight),
        _transposed,
    )


def baddbmm(
    kind: type[Tensor],
    input: Tensor,  # noqa: A002
    batch1: Tensor,
    batch2: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Found | None:
    """Read ``input + batch1 @ batch2``, ``input`` a bias, or a bias for each matrix."""
    groups, outputs = (len(batch2), batch2.shape[-1]) if _is_several(batch2) else (1, batch2.shape[-1])
    of_groups = input.shape == (groups, 1, outputs) if groups > 1 else input.numel() == outputs == input.shape[-1]
    if isinstance(batch1, kind) or not of_groups or beta != 1 or alpha != 1:
        return "of other than inputs, a weight and its bias"

    def run(left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
        return torch.bmm(left, right) if bias is None else torch.baddbmm(bias.view(input.shape), left, right)

    if groups > 1:
        return _batched(kind, batch1, batch2, input.reshape(-1), run)
    return LinearOperation(batch2, batch1, input.reshape(-1), LINEAR, run, _transposed)


def einsum(kind: type[Tensor], equation: Any, *operands: Any) -> Found | None:
    """Read a product of two tensors."""
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        (operands,) = operands
    if not isinstance(equation, str) or len(operands) != 2:
        return f"of {len(operands)} tensors" if isinstance(equation, str) else None
    left, arrow, result = equation.replace(" ", "").partition("->")
    terms, place = left.split(","), int(isinstance(operands[1], kind))
    weight, inputs = operands[place], operands[1 - place]
    of_weight, of_inputs, of_result = terms[place], terms[1 - place], result if arrow else _implicit(left)
    if "." in of_weight:
        return "with an ellipsis for the weight"
    unused = [index for index in string.ascii_letters if index not in equation]
    of_rest = "".join(unused[: inputs.ndim - len(of_inputs.replace("...", ""))])
    of_inputs, of_result = (term.replace("...", of_rest) for term in (of_inputs, of_result))
    sizes = dict(zip(of_inputs, inputs.shape, strict=True)) | dict(zip(of_weight, weight.shape, strict=True))

    def run(first: Tensor, second: Tensor, _: Tensor | None) -> Tensor:
        outputs: Tensor = torch.einsum(equation, first, second)
        return outputs

    return _product(place, weight, inputs, (of_weight, of_inputs, of_result), sizes, run)


def tensordot(kind: type[Tensor], a: Tensor, b: Tensor, dims: Any = 2, out: Tensor | None = None) -> Found | None:
    """Read a product over the last dimensions of one tensor and the first of the other, or over given dimensions."""
    if out is not None:
        return None
    over_a, over_b = ([*range(a.ndim - dims, a.ndim)], [*range(dims)]) if isinstance(dims, int) else dims
    of_a, of_b = [*string.ascii_lowercase[: a.ndim]], [*string.ascii_uppercase[: b.ndim]]
    for first, second in zip(over_a, over_b, strict=True):
        of_b[second] = of_a[first]
    of_result = "".join(index for index in of_a + of_b if (index in of_a) != (index in of_b))
    place = int(isinstance(b, kind))
    weight, inputs, of_weight, of_inputs = (b, a, of_b, of_a) if place else (a, b, of_a, of_b)
    sizes = dict(zip(of_inputs, inputs.shape, strict=True)) | dict(zip(of_weight, weight.shape, strict=True))
    terms = "".join(of_weight), "".join(of_inputs), of_result
    return _product(place, weight, inputs, terms, sizes, lambda a, b, _: torch.tensordot(a, b, dims))


def mul(
    kind: type[Tensor],
    input: Any,  # noqa: A002
    other: Any,
    bias: Tensor | None = None,
    run: Callable[..., Tensor] = lambda first, second, _: first * second,
) -> Found | None:
    """Read a product entry by entry, to which a ``bias`` of the weight's shape may be added."""
    if not isinstance(input, Tensor) or not isinstance(other, Tensor):
        return None
    place = int(isinstance(other, kind))
    weight, inputs = (other, input) if place else (input, other)
    shape, terms, sizes = torch.broadcast_shapes(weight.shape, inputs.shape), ["", "", ""], {}
    for index, back in zip(string.ascii_letters, range(len(shape)), strict=False):
        of_each = [part.shape[-1 - back] if back < part.ndim else 1 for part in (weight, inputs)]
        for term, size in enumerate((*of_each, max(of_each))):
            terms[term] = index * (size > 1) + terms[term]
        sizes[index] = max(of_each)
    if not {*terms[1]} - {*terms[0]}:
        return "with what has no dimension for samples"
    of_weight, of_inputs, of_result = terms
    return _product(place, weight, inputs, (of_weight, of_inputs, of_result), sizes, run, bias, shape)


def addcmul(
    kind: type[Tensor],
    input: Tensor,  # noqa: A002
    tensor1: Tensor,
    tensor2: Tensor,
    *,
    value: float = 1,
) -> Found | None:
    """Read ``input + tensor1 * tensor2``, ``input`` a bias for each entry of the weight."""
    weight = tensor2 if isinstance(tensor2, kind) else tensor1
    if input.shape != weight.shape or isinstance(input, kind) or value != 1:
        return "of other than inputs, a weight and its bias"

    def run(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        return a * b if bias is None else torch.addcmul(bias.view(input.shape), a, b)

    return mul(kind, tensor1, tensor2, input.reshape(-1), run)


def _batched(kind: type[Tensor], left: Tensor, right: Tensor, bias: Tensor | None, run: Callable[..., Tensor]) -> Found:
    """Read a product of batches of matrices whose weight has several matrices."""
    place, count = int(isinstance(right, kind)), max(left.ndim, right.ndim) - 2
    weight, inputs = (right, left) if place else (left, right)
    of_weight, of_inputs = ("bc", "ab") if place else ("ab", "bc")
    sizes = {"a": left.shape[-2], "b": left.shape[-1], "c": right.shape[-1]}
    for back in range(count):  # from the last dimension of the batch on
        index = string.ascii_uppercase[back]
        several, of_samples = (part.shape[-3 - back] if back < part.ndim - 2 else 0 for part in (weight, inputs))
        sizes[index] = max(several, of_samples)
        of_weight = index + of_weight if several > 1 else of_weight
        of_inputs = index + of_inputs if of_samples > 1 or (of_samples and several <= 1) else of_inputs
    batch = [index for index in reversed(string.ascii_uppercase[:count]) if index in of_weight + of_inputs]
    shape = (*torch.broadcast_shapes(left.shape[:-2], right.shape[:-2]), left.shape[-2], right.shape[-1])
    return _product(place, weight, inputs, (of_weight, of_inputs, "".join(batch) + "ac"), sizes, run, bias, shape)


def _product(
    place: int,
    weight: Tensor,
    inputs: Tensor,
    terms: tuple[str, str, str],
    sizes: Mapping[str, int],
    run: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    bias: Tensor | None = None,
    shape: Sequence[int] | None = None,
) -> Found:
    """Read a product by the indices of weight, inputs and result, ``terms``; a dimension of size 1 may have no index.

    ``place`` is the weight's number among the operands, and ``shape`` the result's if some dimension has no index.
    """
    of_weight, of_inputs, of_result = terms
    groups = [index for index in of_weight if index in of_inputs and index in of_result]
    rows = [index for index in of_weight if index in of_result and index not in of_inputs]
    columns = [index for index in of_weight if index in of_inputs and index not in of_result]
    kept = [index for index in of_result if index not in of_weight]
    parts = (
        (of_weight, groups + rows + columns),
        (of_inputs, groups + columns + kept),
        (of_result, groups + rows + kept),
    )
    several = rows and columns
    if not (several or groups) or any(sorted(term) != sorted(found) for term, found in parts):
        return "over other indices than those of a layer"
    found = _kept(of_weight, sizes, groups, rows, columns)
    if found is None:
        return "of several matrices that are not one behind the other"
    kind, view = found

    def form(shape: Sequence[int], term: str, last: Sequence[str]) -> _IndexForm:
        features = math.prod(sizes[index] for index in [*groups, *last])
        front = [sizes[index] for index in kept]
        of_layer = (math.prod(front), features, 1) if groups else (*front, features)
        return _IndexForm(shape, [sizes[i] for i in term], [term.index(i) for i in (*kept, *groups, *last)], of_layer)

    of_outputs = form([sizes[index] for index in of_result] if shape is None else shape, of_result, rows)
    given = form(inputs.shape, of_inputs, columns)

    def layer(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        pair = (given.back(inputs), weight) if place else (weight, given.back(inputs))
        return of_outputs.there(run(*pair, bias))

    def back(result: Tensor) -> Tensor:
        return of_outputs.back(result).contiguous()  # the model may view it, since torch's products are contiguous

    return LinearOperation(weight, given.there(inputs), bias, kind, layer, view, back)


def _kept(
    of_weight: str, sizes: Mapping[str, int], groups: list[str], rows: list[str], columns: list[str]
) -> tuple[Linear, Transform] | None:
    """Return the kind of a layer with such a weight, and the weight's view in it; None if there is none."""
    order, shape = [*of_weight], tuple(sizes[index] for index in of_weight)
    count, d, m = (math.prod(sizes[index] for index in some) for some in (groups, rows, columns))
    if groups and order == groups + rows + columns:
        kind = made(Convolution, _ONES, _ONES, _NONE, _ONES, count, "zeros")
        return kind, lambda weight: weight.reshape(count * d, m, 1)
    if groups and order == groups + columns + rows:
        kind = made(TransposedConvolution, _ONES, _ONES, _NONE, _NONE, _ONES, count)
        return kind, lambda weight: weight.reshape(count * m, d, 1)
    if groups:
        return None
    if order == rows + columns:
        return LINEAR, lambda weight: weight if weight.shape == (d, m) else weight.reshape(d, m)
    if order == columns + rows:
        return LINEAR, lambda weight: weight.reshape(m, d).t()
    return made(PermutedLinear, shape, tuple(map(order.index, rows))), lambda weight: weight.reshape(shape)


def _implicit(terms: str) -> str:
    """Return the indices of the result if an equation has no arrow: the ellipsis, and those that occur once."""
    single = sorted(index for index in {*terms} if index.isalpha() and terms.count(index) == 1)
    return ("..." if "..." in terms else "") + "".join(single)


def _is_several(weight: Tensor) -> bool:
    """Return whether a weight is several matrices, and not one that is expanded."""
    return any(size > 1 and stride for size, stride in zip(weight.shape[:-2], weight.stride()[:-2], strict=True))


def _transposed(weight: Tensor) -> Tensor:
    return weight.transpose(-2, -1)


def read(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], weight: type[Tensor]) -> Found | None:
    """Return a function's linear operation with one weight of class ``weight``, or why there is none, or None."""
    reader = _READERS.get(func)
    given = [part for several in (*args, *kwargs.values()) for part in each_of(several) if isinstance(part, weight)]
    if reader is None or len(given) != 1:
        return None
    try:
        found = reader(weight, *args, **kwargs)
    except (TypeError, ValueError, RuntimeError):  # an unknown signature, or an error, which the call itself will raise
        return None
    return found if not isinstance(found, LinearOperation) or found.weight is given[0] else None


def each_of(argument: Any) -> Sequence[Any]:
    """Return the parts of a list or tuple, or an argument itself."""
    return argument if isinstance(argument, (list, tuple)) else (argument,)


def _linear(_: type[Tensor], input: Tensor, weight: Tensor, bias: Tensor | None = None) -> LinearOperation:  # noqa: A002
    return LinearOperation(weight, input, bias, LINEAR, F.linear)


def _convolution(function: Callable[..., Tensor], space: int) -> Callable[..., LinearOperation]:
    def read(
        _: type[Tensor],
        input: Tensor,  # noqa: A002
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> LinearOperation:
        sizes = _each(stride, space), padding if isinstance(padding, str) else _each(padding, space)
        kind = made(Convolution, tuple(weight.shape[2:]), *sizes, _each(dilation, space), groups, "zeros")

        def run(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return function(inputs, weight, bias, stride, padding, dilation, groups)

        return LinearOperation(weight, input, bias, kind, run)

    return read


def _transposed_convolution(function: Callable[..., Tensor], space: int) -> Callable[..., LinearOperation]:
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
    ) -> LinearOperation:
        sizes = (_each(size, space) for size in (stride, padding, output_padding, dilation))
        kind = made(TransposedConvolution, tuple(weight.shape[2:]), *sizes, groups)

        def run(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return function(inputs, weight, bias, stride, padding, output_padding, groups, dilation)

        return LinearOperation(weight, input, bias, kind, run)

    return read


def _embedding(
    _: type[Tensor],
    input: Tensor,  # noqa: A002
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    *rest: Any,
    **options: Any,
) -> LinearOperation | None:
    if max_norm is not None:
        return None
    padding = padding_idx + len(weight) if padding_idx is not None and padding_idx < 0 else padding_idx

    def run(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.embedding(inputs, weight, padding_idx, max_norm, *rest, **options)

    return LinearOperation(weight, input, None, made(Embedding, padding), run)


def _each(size: Any, space: int) -> tuple[int, ...]:
    sizes = (size,) if isinstance(size, int) else tuple(size)
    return sizes * space if len(sizes) == 1 else sizes


_READERS: dict[Any, Callable[..., Found | None]] = {
    F.linear: _linear,
    torch.matmul: matmul,
    Tensor.matmul: matmul,
    Tensor.__matmul__: matmul,
    Tensor.__rmatmul__: lambda kind, right, left: matmul(kind, left, right),
    torch.mm: matmul,
    Tensor.mm: matmul,
    torch.bmm: matmul,
    Tensor.bmm: matmul,
    torch.addmm: addmm,
    Tensor.addmm: addmm,
    torch.baddbmm: baddbmm,
    Tensor.baddbmm: baddbmm,
    torch.mul: mul,
    Tensor.mul: mul,
    Tensor.__mul__: mul,
    Tensor.__rmul__: mul,
    torch.addcmul: addcmul,
    Tensor.addcmul: addcmul,
    torch.einsum: einsum,
    torch.tensordot: tensordot,
    F.embedding: _embedding,
    F.conv1d: _convolution(F.conv1d, 1),
    F.conv2d: _convolution(F.conv2d, 2),
    F.conv3d: _convolution(F.conv3d, 3),
    F.conv_transpose1d: _transposed_convolution(F.conv_transpose1d, 1),
    F.conv_transpose2d: _transposed_convolution(F.conv_transpose2d, 2),
    F.conv_transpose3d: _transposed_convolution(F.conv_transpose3d, 3),
}
