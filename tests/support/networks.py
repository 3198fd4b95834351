"""The grid of networks, losses and data for measures of any layer; see :mod:`support.grid` for what a case is."""

import itertools
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from support.cases import CLASS_WEIGHTS, INDICES, LOSSES, TOKEN_TARGETS, TOKENS, C, M, N
from support.combinations import in_turn
from support.convolutions import batch_norm
from support.grid import CASES, Net, add, classes, normal

# --- multi-layer perceptrons ------------------------------------------------------------------------------------------

X = normal(10, N, M)


def mlp(*widths, activation=nn.ReLU, last=1.0):
    """Linear layers with activations between; the weight and bias of the last one times ``last``."""
    parts = []
    for a, b in itertools.pairwise(widths):
        parts += [nn.Linear(a, b), activation()]
        parts[-2].weight.mul_(1.5)
    parts[-2].weight.mul_(last)
    parts[-2].bias.mul_(last)
    return nn.Sequential(*parts[:-1])


def deep(**options):
    return partial(mlp, M, 6, 5, C, **options)


for activation in (nn.ReLU, nn.LeakyReLU, nn.ReLU6, nn.Hardtanh, nn.PReLU):
    add(f"mlp {activation.__name__}", deep(activation=activation), X, INDICES, "0 2 4")
for activation in (nn.Tanh, nn.GELU, nn.ELU, nn.Hardswish, nn.SiLU):
    add(f"mlp {activation.__name__}", deep(activation=activation), X, INDICES, "0 2 4", curved="0 2")

add("peaked softmax", deep(last=8.0), X, INDICES, "0 2 4")
add("very peaked softmax", deep(last=24.0), X[[0, 1, 5]], INDICES[:3], "0 2 4")
add("peaked softmax, Tanh", deep(last=8.0, activation=nn.Tanh), X, INDICES, "0 2 4", curved="0 2")
add("one sample", deep(), X[:1], INDICES[:1], "0 2 4", seed=1)
add("one output", lambda: mlp(M, 6, 1), X, normal(11, N, 1), "0 2", loss=nn.MSELoss())
add("one output, Tanh", lambda: mlp(M, 6, 1, activation=nn.Tanh), X, normal(11, N, 1), "0 2", curved="0",
    loss=nn.MSELoss())  # fmt: skip
add("one output, squeezed", lambda: nn.Sequential(*mlp(M, 6, 1), nn.Flatten(0)), X, classes(12, N, of=2).double(),
    "0 2", loss=nn.BCEWithLogitsLoss())  # fmt: skip
add("one hidden unit", lambda: mlp(M, 1, C), X, INDICES, "0 2", seed=1)
add("one input", lambda: mlp(1, 6, C), X[:, :1], INDICES, "0 2")
add("no bias, more outputs than inputs", lambda: nn.Sequential(nn.Linear(3, 9, bias=False), nn.ReLU(),
    nn.Linear(9, C)), X[:, :3], INDICES, "0 2")  # fmt: skip
add("unused output", lambda: Net(lambda net, x: (net.side(x), net.head(x))[1], side=nn.Linear(M, 3),
    head=nn.Linear(M, C)), X, INDICES, "side head")  # fmt: skip
add("log-softmax inside", lambda: nn.Sequential(*mlp(M, 6, C), nn.LogSoftmax(1), nn.Hardtanh(-50, 50)), X, INDICES,
    "0 2", curved="0 2",
    loss=nn.NLLLoss())  # fmt: skip


def elu():
    """Straight at inputs above zero, and curved below."""
    net = mlp(M, 6, C, activation=nn.ELU)
    net[0].weight.abs_()
    net[0].bias.zero_()
    return net


add("curved at the last sample alone", elu, torch.cat([X[:-1].abs(), -X[-1:].abs()]), INDICES, "0 2", curved="0")


def of_loss(name):
    """The ReLU network under one of ``LOSSES``."""
    loss, targets = LOSSES[name]
    return add(f"loss: {name}", lambda: mlp(M, 6, C), X, targets, "0 2", loss=loss, convex="custom" not in name)


for name in LOSSES:
    of_loss(name)

add("custom loss, Tanh", deep(activation=nn.Tanh), X, LOSSES["custom"][1], "0 2 4", curved="0 2",
    loss=LOSSES["custom"][0], convex=False)  # fmt: skip
add("indefinite loss, Tanh", deep(activation=nn.Tanh), X, LOSSES["custom"][1], "0 2 4", curved="0 2",
    loss=LOSSES["custom, indefinite"][0], convex=False)  # fmt: skip


# --- tokens -----------------------------------------------------------------------------------------------------------

SEQUENCES = normal(30, 3, 4, 5)


class Attention(nn.Module):
    """A causal transformer block with two heads and a language model's loss; or its attention alone."""

    def __init__(self, alone=False):
        super().__init__()
        self.alone, self.embed = alone, nn.Embedding(7, 6)
        self.ln1, self.ln2 = nn.LayerNorm(6), nn.LayerNorm(6)
        self.q, self.k, self.v, self.proj = (nn.Linear(6, 6) for _ in range(4))
        self.up, self.down, self.head = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, C)

    def forward(self, x):
        x = self.embed(x)
        x = x + 0.3 * torch.arange(x.shape[1], dtype=x.dtype)[:, None].sin()
        q, k, v = (part(self.ln1(x)).unflatten(2, (2, 3)).transpose(1, 2) for part in (self.q, self.k, self.v))
        h = F.scaled_dot_product_attention(3 * q, k, v, is_causal=True)
        x = x + self.proj(h.transpose(1, 2).flatten(2))
        if not self.alone:
            x = x + self.down(F.gelu(self.up(self.ln2(x))))
        return self.head(x).transpose(1, 2)


def mixing(net, x):
    """Tokens that see each other behind the layers, piecewise linear; outputs (n, C, T)."""
    h = F.relu(net.mix(net.embed(x)))
    h = F.relu(net.next(h + h.mean(1, keepdim=True)))
    return net.head(h + h.cumsum(1)).transpose(1, 2)


def mixer():
    return Net(mixing, embed=nn.Embedding(7, 6), mix=nn.Linear(6, 6), next=nn.Linear(6, 6), head=nn.Linear(6, C))


def tied_mixer():
    net = Net(mixing, embed=nn.Embedding(C, 6), mix=nn.Linear(6, 6), next=nn.Linear(6, 6), head=nn.Linear(6, C))
    net.head.weight = net.embed.weight
    return net


def batch_second(net, x):
    """(n, T, m), transposed to (T, n, m) for the layers."""
    h = F.relu(net.one(x.transpose(0, 1)))
    return net.head(F.relu(net.two(h + h.mean(0))).sum(0))


def flattened(net, x):
    """(n, T, m), with tokens among the samples of dimension 0 for the layers: (n·T, m)."""
    h = F.relu(net.one(x.flatten(0, 1))).unflatten(0, x.shape[:2])
    h = net.two((h + h.mean(1, keepdim=True)).flatten(0, 1)).unflatten(0, x.shape[:2])
    return net.head(F.relu(h).sum(1))


def flattened_batch_second(net, x):
    """(n, T, m), with samples running fastest in dimension 0 for the layers: (T·n, m)."""
    turned = x.transpose(0, 1)
    h = F.relu(net.one(turned.flatten(0, 1))).unflatten(0, turned.shape[:2])
    h = net.two((h + h.mean(0)).flatten(0, 1)).unflatten(0, turned.shape[:2])
    return net.head(F.relu(h).sum(0))


def windows(net, x):
    """(n, T, m), in windows of two tokens for the layers: (n·T/2, 2, m); a loss per token."""
    h = F.relu(net.one(x.reshape(-1, 2, x.shape[2])))
    h = F.relu(net.two(h + h.mean(1, keepdim=True))).view(*x.shape[:2], -1)
    return net.head(h + h.mean(1, keepdim=True)).transpose(1, 2)


def gathered(net, x):
    """The tokens whose first feature is positive alone go through the layers; the others are left out."""
    kept = x[..., 0] > 0
    h = torch.zeros(*x.shape[:2], 6, dtype=x.dtype).index_put((kept,), net.two(F.relu(net.one(x[kept]))))
    return net.head(F.relu(h).sum(1))


def three_layers(forward):
    return lambda: Net(forward, one=nn.Linear(5, 6), two=nn.Linear(6, 6), head=nn.Linear(6, C))


add("attention", Attention, TOKENS, TOKEN_TARGETS, "q k v proj up down head", curved="q k v proj up")
add("attention alone", lambda: Attention(alone=True), TOKENS, TOKEN_TARGETS, "q k v proj head", curved="q k",
    loss=nn.CrossEntropyLoss(label_smoothing=0.1))  # fmt: skip
add("tokens", mixer, TOKENS, TOKEN_TARGETS, "mix next head")
add("tokens, weighted sum", mixer, TOKENS, TOKEN_TARGETS, "mix next head",
    loss=nn.CrossEntropyLoss(weight=CLASS_WEIGHTS, reduction="sum"))  # fmt: skip
add("tokens, binary", mixer, TOKENS, classes(31, 3, C, 4, of=2).double(), "mix next head", loss=nn.BCEWithLogitsLoss())
add("tokens, tied head", tied_mixer, TOKENS % C, TOKEN_TARGETS, "mix next head")
add("batch second", three_layers(batch_second), SEQUENCES, INDICES[:3], "one two head")
add("flattened tokens", three_layers(flattened), SEQUENCES, INDICES[:3], "one two head")
add("flattened tokens, batch second", three_layers(flattened_batch_second), SEQUENCES, INDICES[:3], "one two head")
add("windows", three_layers(windows), SEQUENCES, TOKEN_TARGETS, "one two head")
add("gathered tokens", three_layers(gathered), SEQUENCES, INDICES[:3], "one two head")


# --- layers called several times, and what a model may do with its weights --------------------------------------------

PAIRS, SIGNALS = normal(40, 5, 2, M), normal(41, 4, 2, 2, 6)


def siamese(net, x):
    a, b = F.relu(net.encoder(x[:, 0])).flatten(1), F.relu(net.encoder(x[:, 1])).flatten(1)
    return net.head(F.relu(net.join(torch.cat([(a - b).abs(), a + b], dim=1))))


def product(net, x):
    """Linear in neither call's share of the weight alone: their product is quadratic in it."""
    return net.head(net.encoder(x[:, 0]) * net.encoder(x[:, 1]))


def recurrent(net, x):
    h = net.first(x)
    for _ in range(3):
        h = F.relu(net.cell(h))
    return net.head(h)


def over_time(net, x):
    h = torch.zeros(len(x), 6, dtype=x.dtype)
    for t in range(x.shape[1]):
        h = F.relu(net.cell(torch.cat([x[:, t], h], dim=1)))
    return net.head(h)


def gated(net, x):
    return net.head(F.relu(net.value(x) * net.gate(x)))


def checkpointed(net, x):
    h = F.relu(net.first(x))
    h = h + checkpoint(lambda h: F.relu(net.inner(h)), h, use_reentrant=False)
    return net.head(checkpoint(lambda h: torch.tanh(net.last(h)), h, use_reentrant=False))


def normed():
    net = mlp(M, 6, 5, C)
    for i in (0, 2):
        parametrizations.weight_norm(net[i])
    net[0].parametrizations.weight.original0.mul_(1.3)
    return net


def normed_convolution():
    conv = parametrizations.weight_norm(nn.Conv2d(2, 3, 3, padding=1))
    conv.parametrizations.weight.original0.mul_(1.3)
    return nn.Sequential(
        conv, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), parametrizations.spectral_norm(nn.Linear(6, C))
    )


def pruned():
    net = mlp(M, 6, 5, C).double()
    prune.l1_unstructured(net[2], "weight", amount=0.4)
    return net


def tied():
    net = Net(lambda net, x: net.head(F.relu(net.b(F.relu(net.a(x))))), a=nn.Linear(M, M), b=nn.Linear(M, M),
        head=nn.Linear(M, C))  # fmt: skip
    net.b.weight = net.a.weight
    return net


def frozen(*kept):
    net = mlp(M, 6, 5, C)
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(name in kept)
    return net


add("siamese", lambda: Net(siamese, encoder=nn.Linear(M, 4), join=nn.Linear(8, 5), head=nn.Linear(5, C)), PAIRS,
    INDICES[:5], "encoder join head")  # fmt: skip
add("siamese, convolution", lambda: Net(siamese, encoder=nn.Conv1d(2, 3, 3, padding=1), join=nn.Linear(36, 4),
    head=nn.Linear(4, C)), SIGNALS, INDICES[:4], "encoder join head")  # fmt: skip
add("siamese, product", lambda: Net(product, encoder=nn.Linear(M, 4), head=nn.Linear(4, C)), PAIRS, INDICES[:5],
    "encoder head", curved="encoder")  # fmt: skip
add("recurrent", lambda: Net(recurrent, first=nn.Linear(M, 6), cell=nn.Linear(6, 6), head=nn.Linear(6, C)), X, INDICES,
    "first cell head", curved="cell")  # fmt: skip
add("recurrent over time", lambda: Net(over_time, cell=nn.Linear(11, 6), head=nn.Linear(6, C)), SEQUENCES, INDICES[:3],
    "cell head", curved="cell")  # fmt: skip
add("gating", lambda: Net(gated, value=nn.Linear(M, 6), gate=nn.Linear(M, 6), head=nn.Linear(6, C)), X, INDICES,
    "value gate head")  # fmt: skip
add("batch norm of vectors", lambda: nn.Sequential(nn.Linear(M, 6), batch_norm(6, 1), nn.ReLU(True), nn.Linear(6, C)),
    X, INDICES, "0 3")  # fmt: skip
add("layer norm", lambda: nn.Sequential(nn.Linear(M, 6), nn.LayerNorm(6), nn.ReLU(True), nn.Linear(6, C)), X, INDICES,
    "0 3", curved="0")  # fmt: skip
add("weight norm", normed, X, INDICES, "0 2 4")
add("weight norm of a convolution, spectral norm", normed_convolution, normal(42, 3, 2, 4, 3), INDICES[:3], "0 4")
add("pruned", pruned, X, INDICES, "0 2 4")
add("tied", tied, X, INDICES, "a b head")
add("frozen", frozen, X, INDICES, "0 2 4")
add("frozen but the head", lambda: frozen("4.weight", "4.bias"), X, INDICES, "0 2 4")
add("checkpointed", lambda: Net(checkpointed, first=nn.Linear(M, 6), inner=nn.Linear(6, 6), last=nn.Linear(6, 4),
    head=nn.Linear(4, C)), X, INDICES, "first inner last head", curved="first inner last")  # fmt: skip

LAYERS = [(name, layer) for name, case in CASES.items() for layer in case.layers]

NETWORKS = [name for name in CASES if not name.startswith("loss:")]  # those that differ by more than a loss


def networks_in_turn(every: int) -> pytest.MarkDecorator:
    """Return a mark that runs a test with the ``name`` of one network in ``every``; of the others in the soak run."""
    return in_turn(every, "name", CASES)
