"""Sampled Hessian values of layers on tokens: the same probes of a sample, however the data are cut."""

import pytest
import torch
from torch import nn

import pyflatness as pf
from support.grid import Net


def tokens_forward():
    """A table of tokens, and what is not linear in it; from fewer positions than tokens to more."""

    def forward(net, x):
        return net.head(torch.tanh(net.layer(net.table(x).tanh())).mean(dim=1))

    return Net(forward, table=nn.Embedding(100, 6), layer=nn.Linear(6, 8), head=nn.Linear(8, 3))


@pytest.mark.parametrize("positions", [1, 12, 300])
@pytest.mark.parametrize("measure", ["relative_flatness", "adaptive_sharpness"])
def test_any_cut_gives_the_same_value(positions, measure):
    torch.manual_seed(0)
    model, loss = tokens_forward().double(), nn.CrossEntropyLoss()
    tokens = torch.randint(100, (24, positions))
    tokens[:8] %= 4  # of which a micro-batch has few
    classes = torch.randint(3, (24,))
    ask = {"layers": ["table", "layer"], "measures": [measure, "trace"], "probes": 2, "seed": 3}
    whole = pf.measure(model, loss, (tokens, classes), **ask)
    small = pf.measure(model, loss, (tokens, classes), **ask, memory=2**18)
    cut = pf.measure(model, loss, [*zip(tokens.split(4), classes.split(4), strict=True)], **ask)
    for layer, name, estimate in whole:
        for other in (small, cut):
            assert other[layer, name].value == pytest.approx(estimate.value, rel=1e-11)
            assert other[layer, name].stderr == pytest.approx(estimate.stderr, rel=1e-9)


def test_values_are_right_in_the_mean():
    torch.manual_seed(0)
    model, loss = tokens_forward().double(), nn.CrossEntropyLoss()
    data = torch.randint(100, (24, 12)), torch.randint(3, (24,))
    ask = {"layers": "table", "measures": ["relative_flatness", "adaptive_sharpness", "trace"]}
    exact, sampled = pf.measure(model, loss, data, **ask), pf.measure(model, loss, data, **ask, probes=200)
    for layer, name, estimate in exact:
        low, high = sampled[layer, name].interval(0.999)
        assert low < estimate.value < high
        assert high - low < abs(estimate.value)
