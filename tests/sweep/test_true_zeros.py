"""A relative error of a value that is zero: it ends, at an exact 0 or with what was measured."""

import math

import pytest
import torch
from torch import nn

import pyflatness as pf
from support.grid import Net

CLASSES, SAMPLES = 60, 240


def network(activation):
    torch.manual_seed(1)
    layers = [nn.Linear(20, 30), activation(), nn.Linear(30, 40), activation(), nn.Linear(40, CLASSES)]
    return nn.Sequential(*layers).double()


def data():
    return torch.randn(SAMPLES, 20, dtype=torch.float64), torch.arange(SAMPLES) % CLASSES


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
def test_a_weight_of_zeros_and_a_dead_layer(activation):
    """Relative flatness is zero of the first, and of whatever is behind a head of zeros everything."""
    for dead in (0, 4):
        model = network(activation)
        with torch.no_grad():
            model[dead].weight.zero_()
        found = pf.relative_flatness(model, nn.CrossEntropyLoss(), data(), "0", rtol=0.05)
        assert found.value == 0
        assert (found.stderr is None) == found.exact
        if not found.exact:  # probes were sent, and none of them found anything
            assert math.isnan(found.stderr)
            assert found.interval() is None
            assert "standard error unknown since every probe gave 0" in repr(found)


def product(net, x):
    """Half of a layer's outputs times the other half: a Hessian with a trace of zero, and probes that differ."""
    first, second = net.layer(x).chunk(2, dim=1)
    return (first * second).sum(dim=1, keepdim=True)


def test_a_trace_that_is_zero_is_exact_where_it_can_be_and_else_says_what_to_pass():
    torch.manual_seed(0)
    model, x = Net(product, layer=nn.Linear(60, 120, bias=False).double()), torch.randn(200, 60, dtype=torch.float64)
    given = (model, lambda outputs, _: outputs.mean(), (x, torch.zeros(200)))
    found = pf.measure(*given, measures=["trace"], rtol=0.05)["layer", "trace"]
    assert (found.value, found.exact) == (0, True)
    with pytest.raises(pf.errors.InputError, match=r"max_passes=16.*probes=k.* a value near zero"):
        pf.measure(*given, measures=["trace"], rtol=0.05, max_passes=16)
    found = pf.measure(*given, measures=["trace"], probes=8)["layer", "trace"]
    low, high = found.interval()
    assert low < 0 < high
