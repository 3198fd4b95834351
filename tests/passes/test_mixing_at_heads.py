"""A model that mixes samples in front of its head has no value over a data set, from whichever batch on."""

import pytest
import torch
from torch import nn

import pyflatness as pf
from support.grid import Net, normal

X, Y = normal(1, 64, 5), torch.arange(64) % 3
LOSS = nn.CrossEntropyLoss()
CUT = [(x, y) for x, y in zip(X.split(8), Y.split(8), strict=True)]
MIX = {
    "centred": lambda h: h - h.mean(0),
    "what came before": lambda h: h.cumsum(0),
    "what comes after": lambda h: h.flip(0).cumsum(0).flip(0),
}


def network(forward):
    torch.manual_seed(0)
    net = Net(forward, front=nn.Linear(5, 6), head=nn.Linear(6, 3)).double()
    net.mixes = False
    return net


def mixing_from(start, mix):
    """Samples are mixed from a batch on that holds a large value."""

    def forward(net, x):
        h = torch.relu(net.front(x))
        net.mixes |= bool((x > 50).any())
        return net.head(mix(h) if net.mixes else h)

    return network(forward), [
        (x + 100 * (number >= start) * (torch.arange(5) == 0), y) for number, (x, y) in enumerate(CUT)
    ]


@pytest.mark.parametrize("start", range(8))
@pytest.mark.parametrize("mix", MIX)
def test_samples_mixed_in_front_of_a_head_are_refused(mix, start):
    net, data = mixing_from(start, MIX[mix])
    with pytest.raises(pf.errors.InputError, match=r"(features|outputs) for the same samples change"):
        pf.relative_flatness(net, LOSS, data)


@pytest.mark.parametrize("mix", MIX)
def test_a_single_batch_is_enough(mix):
    net, data = mixing_from(0, MIX[mix])
    with pytest.raises(pf.errors.InputError, match=r"(features|outputs) for the same samples change"):
        pf.relative_flatness(net, LOSS, data[:1])


def test_a_shuffled_loader_is_looked_at_too():
    net, _ = mixing_from(0, MIX["centred"])
    net.mixes = True
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=64, shuffle=True)
    with pytest.raises(pf.errors.InputError, match=r"(features|outputs) for the same samples change"):
        pf.relative_flatness(net, LOSS, loader)


def test_tokens_have_their_own_places():
    """Samples are told apart where each has several rows; mixing within a sample is none."""

    def forward(net, x):
        h = torch.relu(net.front(x))
        return net.head(h + h.mean(1, keepdim=True)).transpose(1, 2)

    x, y = normal(2, 6, 4, 5), torch.arange(24).view(6, 4) % 3
    whole = pf.relative_flatness(network(forward), LOSS, (x, y))
    cut = pf.relative_flatness(network(forward), LOSS, [(a, b) for a, b in zip(x.split(2), y.split(2), strict=True)])
    assert whole.method == "head"
    assert float(whole) == pytest.approx(float(cut), rel=1e-12)


@pytest.mark.parametrize(("loader", "looked_at"), [(list, 2), (iter, 7)], ids=["a list", "an iterator"])
def test_a_head_has_few_batches_looked_at(loader, looked_at):
    """The model runs on two samples of the second batch and the last one, or of some at doubling distances."""
    sizes = []

    def forward(net, x):
        sizes.append(len(x))
        return net.head(torch.relu(net.front(x)))

    data = [(x, y) for x, y in zip(normal(3, 1280, 5).split(10), (torch.arange(1280) % 3).split(10), strict=True)]
    pf.relative_flatness(network(forward), LOSS, loader(data))
    assert sizes.count(10) == 128
    assert sizes.count(1) == 1
    assert sizes.count(2) == looked_at  # batches 1, 2, 4, …, 64 of an iterator
