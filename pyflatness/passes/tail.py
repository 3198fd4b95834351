"""Send several cotangents at once through the last operations of a model, where these are small.

There a backward pass is mostly the cost of calling operations. By measurement (MLPs of 32 to 2,048 wide, 16 to 1,024
samples, nine cotangents at once against one after the other, `torch.func.vmap`) it takes 0.45 to 0.96 of the time where
no gradient has more than 128 KiB, and as long or longer, up to 1.5, where some have; so that is the rule. Convolutions
gain nothing at any size.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from .. import interrupts
from .linearity import Users
from .recorder import or_zeros

_SMALL = 128 * 2**10  # bytes of a gradient
_OPERATIONS = {"AddmmBackward0", "MmBackward0", "ReluBackward0", "ViewBackward0", "UnsafeViewBackward0"}


class Tail:
    """Hold the operations that several cotangents go through at once, and what is in front of them.

    Args:
        outputs: of the model, with their graph.
        users: of the graph's nodes.
        edges: by name, where gradients are wanted; all of them on a path to the outputs.

    Attributes:
        names: of the edges that are reached by these operations alone; none if there is nothing to gain.
    """

    def __init__(self, outputs: Tensor, users: Users, edges: Mapping[str, GradientEdge]) -> None:
        self._outputs, nodes = outputs, _small(outputs, users)
        self.names = [name for name, edge in edges.items() if nodes.keys() >= {*users.get(edge.node, (edge.node,))}]
        self._edges = [edges[name] for name in self.names]
        self._rest = {name: edge for name, edge in edges.items() if name not in self.names}
        sources = dict.fromkeys(source for node in nodes for source in node.next_functions if self._rest)
        self._front = [GradientEdge(node, number) for node, number in sources if node and node not in nodes]

    def send(self, cotangents: Tensor) -> tuple[dict[str, Tensor], Iterator[dict[str, Tensor]]]:
        """Return gradients of cotangents (k, …), (k, …) by name, and for one after the other those of other names.

        Raises:
            RuntimeError: a hook of the user's does not take several at once.
        """
        interrupts.check()

        def gradients(cotangent: Tensor) -> tuple[Tensor, ...]:
            return torch.autograd.grad(self._outputs, [*self._edges, *self._front], cotangent, retain_graph=True)

        found = torch.func.vmap(gradients)(cotangents)
        split = len(self._edges)
        return dict(zip(self.names, found[:split], strict=True)), self._others(found[split:])

    def _others(self, front: tuple[Tensor, ...]) -> Iterator[dict[str, Tensor]]:
        edges: Any = self._front  # torch's annotation knows tensors alone
        for each in zip(*front, strict=True) if self._rest else ():
            interrupts.check()
            found = torch.autograd.grad(edges, [*self._rest.values()], each, retain_graph=True, allow_unused=True)
            yield {name: or_zeros(one, edge) for (name, edge), one in zip(self._rest.items(), found, strict=True)}


def _small(outputs: Tensor, users: Users) -> dict[Node, None]:
    """Return the last operations, from the outputs on, whose gradients are small and that take several at once.

    They are a chain: an operation on two results of the graph (`torch.addmm(h, f(h), w)`) ends it, since of what is in
    front of it one could be in front of the other, whose gradient would be counted twice.
    """
    nodes: dict[Node, None] = {}
    stack = [outputs.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node.name() not in _OPERATIONS or not nodes.keys() >= {*users.get(node, ())}:
            continue
        sources = [(source, number) for source, number in node.next_functions if source is not None]
        if len(sources) <= 1 and all(_bytes(source, number) <= _SMALL for source, number in [(node, 0), *sources]):
            nodes[node] = None
            stack += [source for source, _ in sources]
    return nodes


def _bytes(node: Node, number: int) -> int:
    """Return the size of the gradient that goes into a node."""
    entry: Any = node._input_metadata[number]
    size: int = math.prod(entry.shape) * entry.dtype.itemsize
    return size
