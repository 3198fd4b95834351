"""Random graphs in batches, and a small network of messages for them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn


@dataclass
class Graphs:
    """Hold several graphs as one, as libraries of graph networks do."""

    nodes: Tensor
    edges: Tensor  # (2, edges), from which node to which
    graph: Tensor  # of each node
    targets: Tensor

    @classmethod
    def random(cls, size: int, generator: torch.Generator) -> "Graphs":
        """Return one graph of so many nodes."""
        edges = torch.randint(size, (2, 2 * size), generator=generator)
        nodes = torch.randn(size, 4, generator=generator, dtype=torch.float64)
        return cls(nodes, edges, torch.zeros(size, dtype=torch.long), torch.randint(3, (1,), generator=generator))

    @classmethod
    def joined(cls, graphs: "Sequence[Graphs]") -> "Graphs":
        """Return graphs side by side."""
        starts = torch.tensor([0, *(len(one.nodes) for one in graphs)]).cumsum(0)
        return cls(
            torch.cat([one.nodes for one in graphs]),
            torch.cat([one.edges + start for one, start in zip(graphs, starts, strict=False)], dim=1),
            torch.cat([one.graph + place for place, one in enumerate(graphs)]),
            torch.cat([one.targets for one in graphs]),
        )

    def shuffled(self, generator: torch.Generator) -> "Graphs":
        """Return the same graphs with nodes and edges in another order."""
        order = torch.randperm(len(self.nodes), generator=generator)
        edges = order.argsort()[self.edges][:, torch.randperm(self.edges.shape[1], generator=generator)]
        return replace(self, nodes=self.nodes[order], edges=edges, graph=self.graph[order])


class Messages(nn.Module):
    """Two rounds of messages along edges, whose sums update nodes, and a head on the sum of a graph's nodes."""

    def __init__(self, activation: Callable[[Tensor], Tensor] = torch.tanh, *, mixing: bool = False) -> None:
        super().__init__()
        self.encode, self.message = nn.Linear(4, 5), nn.Linear(10, 5)
        self.update, self.head = nn.Linear(10, 5), nn.Linear(5, 3)
        self._activation, self._mixing = activation, mixing
        self.double()

    def forward(self, graphs: Graphs) -> Tensor:
        """Return the logits of each graph."""
        hidden, (source, target) = self._activation(self.encode(graphs.nodes)), graphs.edges
        for _ in range(2):
            messages = self._activation(self.message(torch.cat([hidden[source], hidden[target]], dim=1)))
            received = torch.zeros_like(hidden).index_add(0, target, messages)
            hidden = self._activation(self.update(torch.cat([hidden, received], dim=1)))
            if self._mixing:
                hidden = hidden + 1e-3 * hidden.mean(dim=0)
        pooled = hidden.new_zeros(len(graphs.targets), hidden.shape[1]).index_add(0, graphs.graph, hidden)
        return self.head(pooled)


class Atoms(Messages):
    """The same, of which a node's features are looked up by its kind."""

    def __init__(self, activation: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__(activation)
        self.kinds = nn.Embedding(6, 4).double()

    def forward(self, graphs: Graphs) -> Tensor:
        """Return the logits of each graph."""
        return super().forward(replace(graphs, nodes=self.kinds((2 * graphs.nodes[:, 0].abs()).long().clamp_max(5))))


def called(model: nn.Module, graphs: Graphs) -> tuple[Tensor, Tensor]:
    """Serve as ``forward=``."""
    return model(graphs), graphs.targets
