"""Find layers whose output goes through ReLU and max-pooling alone, and where in it the pooled elements come from.

A cotangent is zero there at all positions but those that pooling chose, a quarter of them for windows of 2 × 2. Taken
as it comes out of the pooling, with these positions, it is as much smaller, and the backward pass through pooling and
ReLU, which spreads it over all positions, is left out where no other layer is in front.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from .batch_layout import Layout
from .linearity import Users
from .runner import Run

_RELU, _POOLING = "ReluBackward0", "MaxPool2DWithIndicesBackward0"


@dataclass(frozen=True)
class Pooled:
    """Hold what is behind a layer.

    Attributes:
        edge: of what comes out of pooling, and of a ReLU that follows.
        elements: of a row, that come out of pooling.
        positions: returns (n, d, elements) int32: the position in the layer's output that each element comes from, -1
            for one that ReLU cuts off.
    """

    edge: GradientEdge
    elements: int
    positions: Callable[[], Tensor]


def behind(run: Run, name: str) -> Pooled | None:
    """Return what is behind a two-dimensional convolution; None if it is more than that, or the layer runs twice."""
    calls = run.calls(name)
    if len(calls) != 1 or run.layouts[name] != Layout() or calls[0].output.shape[:1] != (run.samples,):
        return None
    nodes = _chain(calls[0].edge.node, run.users)
    if not any(node.name() == _POOLING for node in nodes):
        return None
    elements = math.prod(nodes[-1]._input_metadata[0].shape[2:])
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
