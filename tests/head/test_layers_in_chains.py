"""A layer in an nn.Sequential with parameters behind it: it is no head, so that no sample is run to find that out."""

import pytest
import torch
from torch import nn

import pyflatness as pf
from pyflatness.model import layers
from support import truth

LOSS = nn.CrossEntropyLoss()
X, Y = torch.randn(40, 4, generator=torch.Generator().manual_seed(0)).double(), torch.arange(40) % 3


class Backwards(nn.Sequential):
    """Call its parts from the last to the first."""

    def forward(self, x):
        for part in reversed(self):
            x = part(x)
        return x


class FirstAlone(nn.Module):
    """Call the first part of a chain alone: it is the head."""

    def __init__(self):
        super().__init__()
        self.chain = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3))

    def forward(self, x):
        return self.chain[0](x)


def chain():
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(5, 6), nn.Tanh())
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), inner, nn.Linear(6, 3), nn.Identity()).double()


@pytest.mark.parametrize(("name", "sizes"), [("0", [2, 40]), ("2.0", [2, 40]), ("3", [1, 40])])
def test_the_samples_that_go_through_the_model(name, sizes):
    model, seen = chain(), []
    model.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    estimate = pf.relative_flatness(model, LOSS, (X, Y), name)
    assert seen == sizes
    assert float(estimate) == pytest.approx(truth.of_model(model, LOSS, X, Y, name), rel=1e-10)


def test_which_layers_feed_another():
    model = chain()
    assert [name for name, _ in model.named_modules() if name and layers.feeds_another(model, name)] == [
        *("0", "1", "2", "2.0", "2.1")
    ]
    assert not layers.feeds_another(Backwards(nn.Linear(3, 4), nn.Linear(4, 3)), "0")
    assert not layers.feeds_another(nn.Linear(3, 4), "")


@pytest.mark.parametrize("options", [{}, {"rtol": 0.01}])
def test_a_head_that_is_called_without_its_chain(options):
    model = FirstAlone().double()
    estimate = pf.relative_flatness(model, LOSS, (X, Y), "chain.0", **options)
    assert estimate.method == "head"
    assert float(estimate) == pytest.approx(
        truth.of_model(model, LOSS, X, Y, "chain.0"), rel=options.get("rtol", 1e-10)
    )
