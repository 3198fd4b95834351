"""Send several cotangents at once through the last operations of a model, if their gradients are small.

The cost of a backward pass is then mostly that of calling operations, and for convolutions of laying out their weights
again. By measurement (nine cotangents at once against one after the other, `torch.func.vmap`) it takes 0.45 to 0.96 of
the time of MLPs of 32 to 2,048 wide on 16 to 1,024 samples where no gradient has more than 128 KiB, and as long or
longer, up to 1.5, where some have. The last stages of ResNet-18 take 0.44 to 0.53 of it on 2 images, 0.73 to 0.8 on 8
and 1.0 to 1.2 on 32, where gradients have 1 to 4 MiB. Whole calls take 0.77 to 0.99 where those of images have at most
512 KiB, but LeNet5 with its pooling 0.86 on 2 images, 0.94 on 16, and 1.02 and 1.1 on 32 and 64. So the rule is 128
KiB, and 512 KiB for images that are not pooled.
"""

import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from .. import private
from . import backward, graph
from .linear_map import LinearMap
from .linearity import Users
from .recorder import or_zeros

_NODE = operator.itemgetter(0)  # of an edge
_SMALL, _SMALL_IMAGES = 128 * 2**10, 512 * 2**10  # bytes of a gradient


class Tail:
    """Hold the operations that several cotangents go through at once, and the edges in front of them.

    ``names`` are of the edges, all on a path to the outputs, that only these operations follow; ``bytes`` is the size
    of one cotangent's gradients.
    """

    def __init__(self, outputs: Tensor, users: Users, edges: Mapping[str, GradientEdge]) -> None:
        nodes = _small(outputs, users)
        self.names = [name for name, edge in edges.items() if nodes.keys() >= {*users.get(edge.node, (edge.node,))}]
        self._edges = [edges[name] for name in self.names]
        self._rest = {name: edge for name, edge in edges.items() if name not in self.names}
        sources = dict.fromkeys(itertools.chain(*nodes.values())) if self._rest else ()
        self._front = [GradientEdge(node, number) for node, number in sources if node not in nodes]
        wanted = [*self._edges, *self._front]

        # Not a method, as the graph would then be in a cycle and stay alive.
        def gradients(cotangent: Tensor) -> tuple[Tensor | None, ...]:
            return backward.gradients((outputs,), (cotangent,), wanted)

        self._send = LinearMap(gradients, known=True)
        self.bytes = sum([_size([(edge.node, edge.output_nr)])[0] for edge in wanted])

    def send(self, cotangents: Tensor) -> tuple[dict[str, Tensor], Iterator[dict[str, Tensor]]]:
        """Return gradients for cotangents (k, …), (k, …) by name, and for each cotangent those of other names."""
        found: Any = self._send(cotangents)
        split = len(self._edges)
        return dict(zip(self.names, found[:split], strict=True)), self._others(found[split:])

    def _others(self, front: Sequence[Tensor]) -> Iterator[dict[str, Tensor]]:
        for each in zip(*front, strict=True) if self._rest else ():
            found = backward.gradients(self._front, each, [*self._rest.values()])
            yield {name: or_zeros(one, edge) for (name, edge), one in zip(self._rest.items(), found, strict=True)}


def _small(outputs: Tensor, users: Users) -> dict[Node, list[tuple[Node, int]]]:
    """Return the last operations, up to the outputs, whose gradients are small and that take several at once.

    Each comes with its inputs that other operations compute, which inputs of the model are not. The input of all is one
    result: of several results one could be in front of another, and count twice.
    """
    nodes: dict[Node, list[tuple[Node, int]]] = {}
    stack, front, ended = [outputs.grad_fn], set[tuple[Node, int]](), 0
    while stack:
        node = stack.pop()
        name = "" if node is None else node.name()
        if node is None or node in nodes or not graph.of(name).at_once or not nodes.keys() >= {*users.get(node, ())}:
            continue
        sources = [(source, place) for source, place in node.next_functions if source and source.next_functions]
        size, images = _size([(node, 0), *sources])
        if size <= (_SMALL_IMAGES if images and name != graph.MAX_POOLING else _SMALL):
            nodes[node] = sources
            stack += map(_NODE, sources)
            front = {edge for edge in front if edge[0] != node}.union(sources)
            ended = len(nodes) if len(front) <= 1 else ended
    return dict(itertools.islice(nodes.items(), ended))


def _size(entries: Iterable[tuple[Node, int]]) -> tuple[int, bool]:
    """Return the bytes of the largest gradient at some results, and whether one is of images."""
    largest, images = 0, False
    for node, number in entries:
        entry: Any = private.results_of(node)[number]
        largest, images = max(largest, math.prod(entry.shape) * entry.dtype.itemsize), images or len(entry.shape) == 4
    return largest, images
