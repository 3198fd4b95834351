"""Read off autograd's graph in which layers a sample's rows are where its outputs are, in dimension 0.

Where every operation behind a layer makes the rows of a sample of that sample's rows of what it takes, nothing that is
sent back from one sample reaches another's, and no cotangent has to be sent to see that. A sample has one row in
dimension 0, or several one after the other, as flattened tokens have. The operations are those of networks of images,
of feature vectors and of transformers; other layers are asked by cotangents, see :func:`.dry_run.narrow`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor
from torch.autograd.graph import Node

from . import graph
from .linearity import Calls, Users

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
    if not calls:
        return set()
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
        shape, rows = graph.shape(node, 0), graph.of(node.name()).rows
        of_rows, of_all, sizes = [], [], {}
        for place, (source, number) in enumerate(node.next_functions):
            if source is None:
                continue
            size = graph.shape(source, number)
            # Without a dimension for samples, or of length one there: the whole of it goes with each sample's row.
            repeats = len(size) == len(shape) - 1 and size[:1] not in ((), (1,))
            repeats |= len(size) == len(shape) and size[:1] == (1,)
            if repeats and rows == "pointwise" and shape[0] == samples > 1:
                of_all.append(source)
            else:
                of_rows.append(source)
                sizes[place] = size
        if rows and _keeps(node, shape, sizes, samples):
            kept.nodes.add(node)
            kept.of_all.update(of_all)
            kept.of_rows.update(of_rows)
            stack += of_rows
    return kept


def _keeps(node: Node, shape: Shape, inputs: Mapping[int, Shape], samples: int) -> bool:
    """Return whether each sample's rows of an operation's result are made of its rows of some inputs."""
    operation = graph.of(node.name())
    rows, alike, as_long = operation.rows, True, True
    for size in (shape, *inputs.values()):
        if not size or size[0] == 0 or size[0] % samples:
            return False
        alike, as_long = alike and len(size) == len(shape), as_long and size[0] == shape[0]
    if rows == "view":  # which leaves all elements in their order
        return True
    if not as_long:
        return False
    if rows == "pointwise":  # of inputs that are not broadcast along the rows
        return alike
    if rows == "pooling":  # of images with a dimension for samples
        return len(shape) == 2 + operation.space
    if rows == "attention":  # of queries, keys and values
        return len(shape) == 4 and inputs.keys() <= {0, 1, 2}
    if rows == "second":
        return [*inputs] == [1]
    if rows == "all" or [*inputs] == [0]:
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
