"""Read from autograd's graph which layers keep a sample's rows where its outputs are, in dimension 0.

If every operation behind a layer computes a sample's rows from the same sample's rows of its inputs, no gradient of one
sample reaches another's rows, and no cotangent has to be sent to see that. A sample has one row in dimension 0, or
several one after the other, as flattened tokens have. The operations are those of networks on images and feature
vectors and of transformers; other layers are tested with cotangents, see :func:`.dry_run.narrow`.

In a batch that is not cut, such as one of graphs, a sample may have any rows, and operations move them by an index.
There the numbers of the outputs' samples are passed from row to row, through the same operations and by these indices.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import Node

from .. import private
from . import graph
from .linearity import Calls, Users

Shape = tuple[int, ...]
_NOTHING = torch.empty(0, dtype=torch.int64, device="cpu")


@dataclass
class _Kept:
    """Hold the last operations of a graph that leave every sample's rows in place, and the sources of their inputs."""

    nodes: set[Node] = field(default_factory=set)  # these operations
    of_rows: set[Node] = field(default_factory=set)  # in front of them, whose results they use row by row
    of_all: set[Node] = field(default_factory=set)  # in front of them, whose results they use whole for each sample


def in_place(outputs: Tensor, users: Users, calls: Calls, samples: int) -> set[str]:
    """Return the layers for which a sample's rows stay in place, from the outputs of all calls to the model's."""
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
    """Return the layers whose outputs have one row, or no dimension for samples, and serve every sample whole."""
    if not calls:
        return set()
    kept = _keeping(outputs, users, samples)
    of_all = kept.of_all - kept.of_rows
    return {
        name
        for name, made in calls.items()
        if all(call.edge.node in of_all and kept.nodes.issuperset(users.get(call.edge.node, ())) for call in made)
    }


def owners(outputs: Tensor, users: Users, calls: Calls, samples: int) -> dict[str, list[Tensor]]:
    """Return the sample of each row of the layers' outputs, (r,) int64 for each call; −1 for a row that is not used.

    A layer is left out if the graph does not show its samples, or if a row belongs to several.
    """
    pending = {node: len(several) for node, several in users.items()}
    last = outputs.grad_fn
    found: dict[Node, Tensor | None] = {}  # None: not known
    stack = [] if last is None or len(outputs) != samples else [last]
    if last is not None:
        found[last] = torch.arange(samples, device=outputs.device)
    while stack:
        node = stack.pop()  # all users of its result have been visited
        own = found[node]
        own = None if own is None or graph.shape(node, 0)[:1] != own.shape else own
        of_sources = {} if own is None else _owners_of_sources(node, own, users)
        for place, (source, number) in enumerate(node.next_functions):
            if source is None or source not in users:
                continue
            before, now = found.get(source, _NOTHING), of_sources.get(place) if number == 0 else None
            if now is not None and graph.shape(source, number)[:1] != now.shape:  # it was broadcast
                now = None
            found[source] = now if before is _NOTHING else _both(before, now)
            pending[source] -= 1
            if pending[source] == 0:
                stack.append(source)
    shown = {name: [found.get(call.edge.node) for call in made] for name, made in calls.items()}
    known = {name: [part for part in parts if part is not None] for name, parts in shown.items()}
    return {name: parts for name, parts in known.items() if len(parts) == len(calls[name])}


def _owners_of_sources(node: Node, own: Tensor, users: Users) -> dict[int, Tensor]:
    """Return the samples of the rows of a node's inputs, by place, from the samples of its result's rows."""
    sizes = {
        place: graph.shape(source, number)
        for place, (source, number) in enumerate(node.next_functions)
        if source is not None and source in users
    }
    operation, shape = graph.of(node.name()), graph.shape(node, 0)
    if operation.moves:
        index = _index(node)
        if index is None:
            return {}
        if operation.moves == "to":
            return {place: own[index] if place else own for place in sizes}
        moved = own.new_full(sizes[0][:1], -1)
        known = own >= 0
        moved[index[known]] = own[known]
        return {0: moved} if moved[index[known]].equal(own[known]) else {}  # otherwise a row belongs to several samples
    if operation.rows == "view":
        ((place, size),) = sizes.items()
        if 0 in (len(size), *size):
            return {}
        if size[0] % len(own) == 0:
            return {place: own.repeat_interleave(size[0] // len(own))}
        of_row = own.view(size[0], -1) if len(own) % size[0] == 0 else None
        return {} if of_row is None or not of_row.eq(of_row[:, :1]).all() else {place: of_row[:, 0]}
    alike = {place: size for place, size in sizes.items() if len(size) == len(shape) and size[0] == len(own)}
    inputs = alike if operation.rows == "pointwise" else sizes
    if operation.rows and _keeps(node, shape, inputs, 1):
        return dict.fromkeys(inputs, own)
    return {}


def _index(node: Node) -> Tensor | None:
    """Return the index (r,) by which an operation moves rows in dimension 0; None for another index."""
    saved = cast(Any, node)
    if hasattr(saved, "_saved_indices"):
        index, *others = saved._saved_indices
        if any(other is not None for other in others):
            return None
    elif saved._saved_dim == 0:
        index = saved._saved_index
        if index.ndim > 1:  # of each element
            rows = index.flatten(1)
            index = rows[:, 0] if rows.eq(rows[:, :1]).all() else None
    else:
        return None
    if index is not None and index.dtype in (torch.bool, torch.uint8):  # a mask
        index = index.nonzero().flatten() if index.ndim == 1 else None
    return index if index is not None and index.ndim == 1 else None


def _both(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Return the samples of rows that two operations use; None if they are unknown or contradict each other."""
    if one is None or other is None or len(one) != len(other):
        return None
    united = torch.where(one < 0, other, one)
    return united if united.equal(torch.where(other < 0, one, other)) else None


def _keeping(outputs: Tensor, users: Users, samples: int) -> _Kept:
    """Return the last operations, up to the outputs, that leave every sample's rows in place."""
    kept = _Kept()
    stack = [outputs.grad_fn] if outputs.grad_fn is not None and _has_rows(tuple(outputs.shape), samples) else []
    while stack:
        node = stack.pop()
        if node in kept.nodes or node in kept.of_all or not kept.nodes.issuperset(users.get(node, ())):
            continue
        shape, rows = tuple(private.results_of(node)[0].shape), graph.of(node.name()).rows
        of_rows, of_all, sizes = [], [], {}
        for place, (source, number) in enumerate(node.next_functions):
            if source is None or source not in users:
                continue
            size = tuple(private.results_of(source)[number].shape)
            # An input without a dimension for samples, or of length 1 there, is combined whole with each sample's row.
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
    """Return whether a sample's rows of an operation's result depend on its own rows of some inputs alone."""
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
    """Return whether the arguments saved for an operation show that it does not mix or move rows of dimension 0."""
    name, saved, most = node.name(), cast(Any, node), max(ndim, of_inputs)
    if name.startswith("Slice"):  # it has as many rows as its input
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
        dims = [saved._saved_dim] if isinstance(saved._saved_dim, int) else saved._saved_dim or [0]  # None: all of them
    return all(_dim(dim, most) != 0 for dim in dims) and not getattr(saved, "_saved_training", False)


def _dim(dim: int, ndim: int) -> int:
    """Return a saved dimension, counted from the front; torch saves a negative one plus 2^64."""
    return (dim + ndim) % 2**64 % ndim


def _has_rows(shape: Shape, samples: int) -> bool:
    return len(shape) > 0 and shape[0] > 0 and shape[0] % samples == 0
