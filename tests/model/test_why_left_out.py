"""Reasons that a report or an error has for weights that no layer has: each says what the model does with them."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pyflatness as pf
from support.grid import Net, normal

LOSS, Y = nn.CrossEntropyLoss(), torch.tensor([0, 2, 1])
WORDS, X = torch.tensor([[1, 4, 1, 0], [2, 2, 2, 5], [0, 6, 3, 4]]), normal(0, 3, 4)


def lookup(embed):
    return Net(lambda net, x: net.head(net.embed(x).relu().flatten(1)[:, :3]), embed=embed, head=nn.Linear(3, 3))


def relative(net, x):
    """Codes of pairs of positions, as T5 has them."""
    h, codes = net.embed(x), net.codes(torch.arange(4)[:, None] - torch.arange(4) + 3).permute(2, 0, 1)
    return net.head((torch.softmax(h @ h.mT + codes[0], 2) @ h).flatten(1))


def by_offsets(net, x):
    return net.head(net.embed(x.flatten(), torch.arange(len(x)) * x.shape[1]))


def shared():
    net = Net(lambda net, x: net.head(net.embed(x).relu().flatten(1)[:, :3]), shared=nn.Embedding(7, 3),
        embed=nn.Embedding(7, 3), head=nn.Linear(3, 3))  # fmt: skip
    net.embed.weight = net.shared.weight
    return net


def detached(net, x):
    return net.head(net.embed(x).relu().flatten(1)[:, :3]) + net.other(x[:, :3].double()).detach()


REASONS = {
    "max_norm": (lambda: lookup(nn.Embedding(7, 3, max_norm=1.0)), "embed.weight",
        "its Embedding changes its weight in its forward pass (max_norm=)"),
    "max_norm of bags": (lambda: lookup(nn.EmbeddingBag(7, 3, max_norm=1.0)), "embed.weight",
        "its EmbeddingBag changes its weight in its forward pass (max_norm=)"),
    "maxima": (lambda: lookup(nn.EmbeddingBag(7, 3, mode="max")), "embed.weight",
        "its EmbeddingBag takes maxima over its bags (mode='max')"),
    "offsets": (lambda: Net(by_offsets, embed=nn.EmbeddingBag(7, 3), head=nn.Linear(3, 3)), "embed.weight",
        "bags that are given by offsets=, and not as (n, tokens of a bag), cannot be told apart by sample"),
    "pairs of positions": (lambda: Net(relative, embed=nn.Embedding(7, 3), codes=nn.Embedding(7, 2),
        head=nn.Linear(12, 3)), "codes.weight",
        "what it looks up is of all samples, and cannot be told apart by sample"),
    "not called, shared": (shared, "shared.weight", "its module is not called, and its weight is that of embed too"),
    "not called": (lambda: Net(lambda net, x: net.head(net.embed(x).sum(1)), embed=nn.Embedding(7, 3),
        other=nn.Linear(3, 3), head=nn.Linear(3, 3)), "other.weight", "its module is not called"),
    "detached": (lambda: Net(detached, embed=nn.Embedding(7, 3), other=nn.Linear(3, 3), head=nn.Linear(3, 3)),
        "other.weight", "autograd has no path between what it gives and the outputs, which change with it"),
}  # fmt: skip


REFUSED = {  # what is said where the layer is named
    "max_norm": r"of type Embedding and changes its weight in its forward pass \(max_norm=\).*choose other layers",
    "max_norm of bags": "of type EmbeddingBag and changes its weight",
    "maxima": r"of type EmbeddingBag and takes maxima over its bags \(mode='max'\).*choose other layers",
    "offsets": "'embed' did not run .* offsets=, and not as .* cannot be told apart by sample",
}


@pytest.mark.parametrize("what", REASONS)
def test_the_reason_is_there(what):
    make, name, reason = REASONS[what]
    report = pf.measure(make().double(), LOSS, (WORDS, Y), measures="trace")
    assert report.why_uncovered == {name: reason}
    assert [*report.uncovered] == [name]
    assert not report["trace"].exact
    if what in REFUSED:
        assert report.layers == ("head",)
        with pytest.raises(pf.errors.InputError, match=REFUSED[what]):
            pf.measure(make().double(), LOSS, (WORDS, Y), layers="embed", measures="trace")
    assert reason in str(report).replace("\n", " ") or reason[:40] in str(report)


class FromData(nn.Linear):
    """A weight that is scaled by what comes in."""

    def forward(self, x):
        return F.linear(x, self.weight * x.detach().abs().mean(), self.bias)


class Halved(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight * 0.5, self.bias)


@pytest.mark.parametrize("samples", [1, 3])
def test_a_weight_that_depends_on_data_is_seen_with_one_sample_too(samples):
    torch.manual_seed(0)
    data = [(x[None], y[None]) for x, y in zip(X, Y, strict=True)][:samples]
    net = Net(lambda net, x: net.head(net.a(x).relu()), a=FromData(4, 4), head=nn.Linear(4, 3)).double()
    with pytest.raises(pf.errors.InputError, match="its weight is"):
        pf.measure(net, LOSS, data, layers="a", measures="trace")
    report = pf.measure(net, LOSS, data, measures="trace")
    assert report.layers == ("head",)
    assert "its weight is" in report.why_uncovered["a.weight"]
    net.a = Halved(4, 4).double()
    assert pf.measure(net, LOSS, data, measures="trace").layers == ("a", "head")


class InPlace(nn.Module):
    """A parameter that each forward pass clips; torch lets that be where it needs no gradient."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(4, 4, generator=torch.Generator().manual_seed(0)), requires_grad=False)

    def forward(self, x):
        return x @ self.table.clamp_(-1, 1)


def test_a_frozen_parameter_that_is_changed_in_place():
    net = Net(lambda net, x: net.head(net.a(x).relu()), a=InPlace(), head=nn.Linear(4, 3)).double()
    message = r"layer 'a.table': the forward pass changes its weight in place, by clamp_, .* out of place"
    with pytest.raises(pf.errors.InputError, match=message):
        pf.measure(net, LOSS, (X, Y), layers="a.table", measures="trace")
    report = pf.measure(net, LOSS, (X, Y), measures="trace")
    assert report.layers == ("head",)
    assert report.uncovered == {}, "it is not trained, and others are"
    report = pf.measure(net.requires_grad_(False), LOSS, (X, Y), measures="trace")
    assert report.why_uncovered["a.table"] == "the forward pass changes its weight in place, by clamp_"
    assert not report["trace"].exact
    assert not net.a.table.requires_grad
