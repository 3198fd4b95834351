"""Find work that the graph around a layer saves: wᵀ δ from the backward pass itself, and pooling behind the layer.

The gradient in a layer's input is wᵀ δ, carried through the layer, plus what arrives by other paths. Without other
paths it gives |R M|² = |wᵀ M|² without another product: the norm is the same for any R with RᵀR = w wᵀ.

If only ReLU and max-pooling follow a layer, its cotangent is zero except at the positions that pooling chose, a quarter
of them for windows of 2 × 2. The gradient in the pooling's output, with these positions, is smaller by that factor, and
the backward pass through pooling and ReLU, which spreads it over all positions, is skipped if no other layer is in
front.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from .. import private
from . import graph
from .batch_layout import Layout
from .linearity import Users
from .runner import Run


def carried_edge(run: Run, name: str, dtype: torch.dtype) -> GradientEdge | None:
    """Return the edge at which wᵀ δ of a pointwise layer arrives and nothing else; None if there is none."""
    calls = run.calls(name)
    if len(calls) != 1 or calls[0].input_edge is None or calls[0].inputs._backward_hooks:
        return None
    (call,), found = calls, calls[0].input_edge
    if not call.inputs.dtype == call.output.dtype == dtype:
        return None
    node, number = call.edge.node, call.edge.output_nr
    while node != found.node:
        sources = [(source, place) for source, place in node.next_functions if source is not None]
        if len(sources) != 1 or not graph.of(node.name()).of_layer:
            return None
        ((node, number),) = sources
        if len(run.users.get(node, ())) != 1:
            return None
    return found if number == found.output_nr else None


_RELU, _POOLING = "ReluBackward0", graph.MAX_POOLING


@dataclass(frozen=True)
class Pooled:
    """Hold the max-pooling behind a layer."""

    edge: GradientEdge  # of the output of pooling, or of a ReLU that follows it
    elements: int  # of a channel, in the output of pooling
    positions: Callable[[], Tensor]  # (n, d, elements) int32, in the layer's output; -1 where ReLU is 0


def pooled_behind(run: Run, name: str) -> Pooled | None:
    """Return the pooling behind a two-dimensional convolution; None if other operations follow, or it runs twice."""
    calls = run.calls(name)
    if len(calls) != 1 or run.layouts[name] != Layout() or calls[0].output.shape[:1] != (run.samples,):
        return None
    nodes = _chain(calls[0].edge.node, run.users)
    if not any(node.name() == _POOLING for node in nodes):
        return None
    elements = math.prod(private.results_of(nodes[-1])[0].shape[2:])
    return Pooled(GradientEdge(nodes[-1], 0), elements, lambda: _positions(nodes))


def _chain(node: Node, users: Users) -> list[Node]:
    """Return the operations behind a node, each the only user of the one before: ReLUs and at most one pooling."""
    chain: list[Node] = []
    pooled = False
    while len(users.get(node, ())) == 1:
        (node,) = users[node]
        if node.name() != _RELU and (pooled or node.name() != _POOLING):
            break
        pooled |= node.name() == _POOLING
        chain.append(node)
    return chain


def _positions(nodes: list[Node]) -> Tensor:
    (pooling,) = (node for node in nodes if node.name() == _POOLING)
    found: Tensor = pooling._saved_result1.flatten(2)  # type: ignore[attr-defined]
    positions = found.int()
    for node in nodes:
        if node.name() == _RELU:
            result = node._saved_result.flatten(2)  # type: ignore[attr-defined]
            pooled = result.gather(2, found) if nodes.index(node) < nodes.index(pooling) else result
            positions.masked_fill_(pooled <= 0, -1)
    return positions
