"""Read off autograd's graph in which layers a sample's rows are where its outputs are, in dimension 0.

Where every operation behind a layer makes row i of its result of row i of what it takes, nothing that is sent back from
one sample reaches another's rows, and no cotangent has to be sent to see that. The operations are those of networks of
images and of feature vectors; other layers are asked by cotangents, see :func:`.dry_run.narrow`.
"""

import re
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from .linearity import Calls, Users

# As autograd's graph names them: by which of their inputs a gradient may come, if all of them have a row a sample.
_OF_FIRST = re.compile(
    r"(\w*Convolution|Mm|(?:Native|Cudnn|Miopen)BatchNorm|View|UnsafeView|ReshapeAlias|Slice|ConstantPadNd)Backward\d+|"
    r"(Mean|Sum)Backward1"
)
_OF_SECOND = re.compile(r"AddmmBackward\d+")
_POOLING = re.compile(r"(?:Adaptive)?(?:Max|Avg)Pool([23])D\w*Backward\d+")
_POINTWISE = re.compile(
    r"(Relu|LeakyRelu|PreluKernel|Elu|Gelu|Silu|Mish|Sigmoid|LogSigmoid|Tanh|Softplus|Hardtanh|Hardswish|Hardsigmoid|"
    r"Threshold|Clamp\w*|Abs|Neg|Exp|Pow|Sqrt|Add|Sub|Mul|Div|Alias|Clone|ToCopy)Backward\d+"
)


def in_place(outputs: Tensor, users: Users, calls: Calls, samples: int) -> set[str]:
    """Return the layers of whose calls' outputs, and of all that is made of these, row i is of sample i."""
    nodes, last = _keeping(outputs, users, samples), outputs.grad_fn
    return {
        name
        for name, made in calls.items()
        if all(
            call.output.shape[:1] == (samples,)
            and (call.edge.node == last or call.edge.node in users)
            and nodes.issuperset(users.get(call.edge.node, ()))
            for call in made
        )
    }


def _keeping(outputs: Tensor, users: Users, samples: int) -> set[Node]:
    """Return the last operations, from the outputs on, that leave every sample's rows where they are."""
    nodes: set[Node] = set()
    stack = [outputs.grad_fn] if outputs.shape[:1] == (samples,) else []
    while stack:
        node = stack.pop()
        if node is not None and nodes.issuperset(users.get(node, ())) and _keeps(node, samples):
            nodes.add(node)
            stack += [source for source, _ in node.next_functions]
    return nodes


def _keeps(node: Node, samples: int) -> bool:
    """Return whether row i of an operation's result is made of row i of each input that has a gradient."""
    name, shape = node.name(), _shape(node, 0)
    inputs = {
        place: _shape(source, number)
        for place, (source, number) in enumerate(node.next_functions)
        if source is not None
    }
    if any(size[:1] != (samples,) for size in (shape, *inputs.values())):
        return False
    if _POINTWISE.fullmatch(name):  # of inputs that are not broadcast
        return all(size == shape for size in inputs.values())
    if pooling := _POOLING.fullmatch(name):  # of images with a dimension for samples
        return len(shape) == 2 + int(pooling[1])
    if _OF_SECOND.fullmatch(name):
        return [*inputs] == [1]
    return bool(_OF_FIRST.fullmatch(name)) and [*inputs] == [0] and _is_within_rows(node, len(inputs[0]))


def _is_within_rows(node: Node, ndim: int) -> bool:
    """Return whether an operation on one tensor neither sums nor shifts along dimension 0, by what is saved of it."""
    saved: Any = node
    if node.name().startswith(("Mean", "Sum")):
        dims: Sequence[int] = saved._saved_dim or (0,)  # none: all of them
        return all((dim + ndim) % 2**64 % ndim != 0 for dim in dims)  # negative ones are saved as 2^64 more
    if node.name().startswith("ConstantPadNd"):
        return len(saved._saved_pad) < 2 * ndim
    return not getattr(saved, "_saved_training", False)


def _shape(node: Node, number: int) -> tuple[int, ...]:
    """Return the shape of an operation's result."""
    entry: Any = node._input_metadata[number]
    return tuple(entry.shape)
