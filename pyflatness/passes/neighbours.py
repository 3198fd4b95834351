"""Find what the graph around a layer spares: wᵀ δ that a backward pass makes on its way, and pooling behind it.

The gradient in a layer's input is wᵀ δ, carried through the layer, and what comes by other ways. Where there are none,
|R M|² = |wᵀ M|² is had from it without another product: it is the same for any R with RᵀR = w wᵀ.

Behind ReLU and max-pooling alone a cotangent is zero at all positions but those that pooling chose, a quarter of them
for windows of 2 × 2. Taken as it comes out of the pooling, with these positions, it is as much smaller, and the
backward pass through pooling and ReLU, which spreads it over all positions, is left out where no other layer is in
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
    """Return where wᵀ δ of a pointwise layer with weights of a dtype arrives, alone; None if it does so nowhere."""
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
    """Hold what is behind a layer."""

    edge: GradientEdge  # of what comes out of pooling, and of a ReLU that follows
    elements: int  # of a row, that come out of pooling
    positions: Callable[[], Tensor]  # (n, d, elements) int32, of each in the layer's output; -1 if ReLU cuts it off


def pooled_behind(run: Run, name: str) -> Pooled | None:
    """Return what is behind a two-dimensional convolution; None if it is more than that, or the layer runs twice."""
    calls = run.calls(name)
    if len(calls) != 1 or run.layouts[name] != Layout() or calls[0].output.shape[:1] != (run.samples,):
        return None
    nodes = _chain(calls[0].edge.node, run.users)
    if not any(node.name() == _POOLING for node in nodes):
        return None
    elements = math.prod(private.results_of(nodes[-1])[0].shape[2:])
    return Pooled(GradientEdge(nodes[-1], 0), elements, lambda: _positions(nodes))


def _chain(node: Node, users: Users) -> list[Node]:
    """Return the operations behind one, each the only user of what is in front of it, up to one pooling and a ReLU."""
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
