"""Read off autograd's graph in which layers a sample's rows are where its outputs are, in dimension 0.

Where every operation behind a layer makes the rows of a sample of that sample's rows of what it takes, nothing that is
sent back from one sample reaches another's, and no cotangent has to be sent to see that. A sample has one row in
dimension 0, or several one after the other, as flattened tokens have. The operations are those of networks of images,
of feature vectors and of transformers; other layers are asked by cotangents, see :func:`.dry_run.narrow`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor
from torch.autograd.graph import Node

from .linearity import Calls, Users

# As autograd's graph names them: by which of their inputs a gradient may come, if all of these have each sample's rows.
_OF_FIRST = re.compile(
    r"(\w*Convolution|Mm|(?:Native|Cudnn|Miopen)BatchNorm|Native(?:Layer|Group)Norm|Softmax|LogSoftmax|"
    r"ConstantPadNd|Expand|Transpose|Permute|Slice|Select|Split|SplitWithSizes|Unbind)Backward\d+|(Mean|Sum)Backward1"
)
_OF_SECOND = re.compile(r"AddmmBackward\d+")
_OF_ALL = re.compile(r"(Cat|Stack|Bmm)Backward\d+")
_ATTENTION = re.compile(r"ScaledDotProduct\w+Backward\d+")
_VIEW = re.compile(r"(View|UnsafeView|ReshapeAlias|Squeeze|Unsqueeze)Backward\d+")
_POOLING = re.compile(r"(?:Adaptive)?(?:Max|Avg)Pool([23])D\w*Backward\d+")
_POINTWISE = re.compile(
    r"(Relu|LeakyRelu|PreluKernel|Elu|Gelu|Silu|Mish|Sigmoid|LogSigmoid|Tanh|Softplus|Hardtanh|Hardswish|Hardsigmoid|"
    r"Threshold|Clamp\w*|Abs|Neg|Exp|Pow|Sqrt|Rsqrt|Add|Sub|Mul|Div|MaskedFill|Where|Alias|Clone|ToCopy)Backward\d+"
)

Shape = tuple[int, ...]


@dataclass
class _Kept:
    """Hold the last operations of a graph that leave every sample's rows where they are, and what they take."""

    nodes: set[Node] = field(default_factory=set)  # these
    of_rows: set[Node] = field(default_factory=set)  # in front of them, of whose result they take each sample's rows
    of_all: set[Node] = field(default_factory=set)  # in front of them, whose result they take whole for each sample


def in_place(outputs: Tensor, users: Users, calls: Calls, samples: int) -> set[str]:
    """Return the layers of whose calls' outputs, and of all that is made of these, a sample's rows are in place."""
    kept, last = _keeping(outputs, users, samples), outputs.grad_fn
    of_rows = kept.of_rows - kept.of_all
    return {
        name
        for name, made in calls.items()
        if all(
            _has_rows(tuple(call.output.shape), samples)
            and (call.edge.node == last or call.edge.node in of_rows)
            and kept.nodes.issuperset(users.get(call.edge.node, ()))
            for call in made
        )
    }


def repeated(outputs: Tensor, users: Users, calls: Calls, samples: int) -> set[str]:
    """Return the layers whose calls' outputs, of one row or none, are used as if each sample had its own."""
    kept = _keeping(outputs, users, samples)
    of_all = kept.of_all - kept.of_rows
    return {
        name
        for name, made in calls.items()
        if all(call.edge.node in of_all and kept.nodes.issuperset(users.get(call.edge.node, ())) for call in made)
    }


def _keeping(outputs: Tensor, users: Users, samples: int) -> _Kept:
    """Return the last operations, from the outputs on, that leave every sample's rows where they are."""
    kept = _Kept()
    stack = [outputs.grad_fn] if outputs.grad_fn is not None and _has_rows(tuple(outputs.shape), samples) else []
    while stack:
        node = stack.pop()
        if node in kept.nodes or node in kept.of_all or not kept.nodes.issuperset(users.get(node, ())):
            continue
        taken = {place: (source, number) for place, (source, number) in enumerate(node.next_functions) if source}
        sources = {place: source for place, (source, _) in taken.items()}
        shape, inputs = _shape(node, 0), {place: _shape(*each) for place, each in taken.items()}
        of_all = {place for place, size in inputs.items() if _is_of_all(node, size, shape, samples)}
        inputs = {place: size for place, size in inputs.items() if place not in of_all}
        if _keeps(node, shape, inputs, samples):
            kept.nodes.add(node)
            kept.of_all.update(sources[place] for place in of_all)
            kept.of_rows.update(sources[place] for place in inputs)
            stack += [sources[place] for place in inputs]
    return kept


def _is_of_all(node: Node, size: Shape, shape: Shape, samples: int) -> bool:
    """Return whether a pointwise operation takes the whole of an input of some size with each sample's row."""
    without = len(size) == len(shape) - 1 and size[:1] not in ((), (1,))  # a dimension for samples
    repeats = without or (len(size) == len(shape) and size[:1] == (1,))
    return repeats and shape[0] == samples > 1 and bool(_POINTWISE.fullmatch(node.name()))


def _keeps(node: Node, shape: Shape, inputs: Mapping[int, Shape], samples: int) -> bool:
    """Return whether each sample's rows of an operation's result are made of its rows of some inputs."""
    name = node.name()
    if not all(_has_rows(size, samples) for size in (shape, *inputs.values())):
        return False
    if _VIEW.fullmatch(name):  # which leaves all elements in their order
        return True
    if any(size[0] != shape[0] for size in inputs.values()):
        return False
    if _POINTWISE.fullmatch(name):  # of inputs that are not broadcast along the rows
        return all(len(size) == len(shape) for size in inputs.values())
    if pooling := _POOLING.fullmatch(name):  # of images with a dimension for samples
        return len(shape) == 2 + int(pooling[1])
    if _ATTENTION.fullmatch(name):  # of queries, keys and values
        return len(shape) == 4 and inputs.keys() <= {0, 1, 2}
    if _OF_SECOND.fullmatch(name):
        return [*inputs] == [1]
    if _OF_ALL.fullmatch(name) or (_OF_FIRST.fullmatch(name) and [*inputs] == [0]):
        return _is_within_rows(node, len(shape), max(map(len, inputs.values())))
    return False


def _is_within_rows(node: Node, ndim: int, of_inputs: int) -> bool:
    """Return whether an operation, by what is saved of it, neither mixes nor moves rows along dimension 0."""
    name, saved, most = node.name(), cast(Any, node), max(ndim, of_inputs)
    if name.startswith("Slice"):  # it has as many rows as before
        return True
    if name.startswith("Expand"):
        return ndim == of_inputs
    if name.startswith("ConstantPadNd"):
        return len(saved._saved_pad) < 2 * ndim
    if name.startswith("NativeLayerNorm"):
        return len(saved._saved_normalized_shape) < ndim
    if name.startswith("Permute"):
        return _dim(saved._saved_dims[0], most) == 0
    dims: Sequence[int] = [getattr(saved, key) for key in ("_saved_dim0", "_saved_dim1") if hasattr(saved, key)]
    if hasattr(saved, "_saved_dim"):
        dims = [saved._saved_dim] if isinstance(saved._saved_dim, int) else saved._saved_dim or [0]  # none: all of them
    return all(_dim(dim, most) != 0 for dim in dims) and not getattr(saved, "_saved_training", False)


def _dim(dim: int, ndim: int) -> int:
    """Return a dimension that is saved, negative ones as 2^64 more, counted from the front."""
    return (dim + ndim) % 2**64 % ndim


def _has_rows(shape: Shape, samples: int) -> bool:
    return len(shape) > 0 and shape[0] > 0 and shape[0] % samples == 0


def _shape(node: Node, number: int) -> Shape:
    """Return the shape of an operation's result."""
    entry: Any = node._input_metadata[number]
    return tuple(entry.shape)
