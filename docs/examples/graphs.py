"""
Graphs, whose samples have different sizes
==========================================

In a batch of graphs the rows of a layer are nodes, or edges, and a sample has as many of
them as its graph has. Such a batch is an object of a library's own, and it goes through
the model whole. This example writes a small network that passes messages along edges,
trains it to say whether a graph has a triangle, and measures each of its layers.
"""

# %%
# Graphs in a batch
# -----------------
#
# A batch holds the nodes of all its graphs one after another, the edges between them, and
# which graph each node belongs to. Libraries of graph networks have such a class.

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import pyflatness as pf


@dataclass
class Graphs:
    """Hold several graphs as one."""

    nodes: Tensor  # (N, 1), the number of each node's neighbours
    edges: Tensor  # (2, E), from which node to which
    graph: Tensor  # (N,), of each node
    labels: Tensor  # (n,), whether each graph has a triangle


def one_graph(generator: torch.Generator) -> tuple[Tensor, int]:
    """Return the adjacency matrix of a random graph, and whether it has a triangle."""
    size = int(torch.randint(4, 9, (), generator=generator))
    upper = (torch.rand(size, size, generator=generator) < 1.6 / size).triu(1).float()
    adjacency = upper + upper.T
    triangles = (adjacency @ adjacency @ adjacency).diagonal().sum()
    return adjacency, int(triangles > 0)


def batch(graphs: list[tuple[Tensor, int]]) -> Graphs:
    """Return graphs side by side."""
    sizes = torch.tensor([len(adjacency) for adjacency, _ in graphs])
    whole = torch.block_diag(*[adjacency for adjacency, _ in graphs])
    graph = torch.arange(len(graphs)).repeat_interleave(sizes)
    labels = torch.tensor([label for _, label in graphs])
    return Graphs(whole.sum(dim=1, keepdim=True), whole.nonzero().T, graph, labels)


generator = torch.Generator().manual_seed(0)
graphs = [one_graph(generator) for _ in range(512)]
batches = [batch(graphs[start : start + 32]) for start in range(0, len(graphs), 32)]

# %%
# A network of messages
# ---------------------
#
# A node sends a message along each of its edges, and is updated by the sum of those that
# it receives. A graph's features are the sum over its nodes.


class MessagePassing(nn.Module):
    """Three rounds of messages, and a head on the sum of each graph's nodes."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.encode = nn.Linear(1, width)
        self.message = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(3))
        self.update = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(3))
        self.head = nn.Linear(width, 2)

    def forward(self, graphs: Graphs) -> Tensor:
        """Return the logits of each graph, (n, 2)."""
        hidden, (source, target) = self.encode(graphs.nodes).relu(), graphs.edges
        for message, update in zip(self.message, self.update, strict=True):
            sent = message(torch.cat([hidden[source], hidden[target]], dim=1)).relu()
            received = torch.zeros_like(hidden).index_add(0, target, sent)
            hidden = update(torch.cat([hidden, received], dim=1)).relu()
        features = hidden.new_zeros(len(graphs.labels), hidden.shape[1])
        logits: Tensor = self.head(features.index_add(0, graphs.graph, hidden))
        return logits


torch.manual_seed(0)
model = MessagePassing()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
loss = nn.CrossEntropyLoss()
for _ in range(10):
    for some in batches:
        optimizer.zero_grad()
        loss(model(some), some.labels).backward()
        optimizer.step()
model.eval()

# %%
# Measure each layer
# ------------------
#
# ``forward=`` says how a batch goes through the model, and where its targets are. The
# samples are those of the outputs. Nothing says which rows of a layer belong to which
# graph: that is found out by what comes back to each row from the outputs.


def forward(model: nn.Module, graphs: Graphs) -> tuple[Tensor, Tensor]:
    """Return the outputs and targets of a batch."""
    return model(graphs), graphs.labels


measured = batches[:2]
report = pf.measure(model, loss, measured, forward=forward, progress=False)
print(report)

# %%
# The values are those of one graph a batch, up to rounding:

alone = [batch([one]) for one in graphs[:64]]
one_by_one = pf.measure(model, loss, alone, forward=forward, progress=False)
for layer in report.layers:
    together, apart = (
        report[layer, "relative_flatness"],
        one_by_one[layer, "relative_flatness"],
    )
    print(f"{layer:10} {together.value:.6f} {apart.value:.6f}")
