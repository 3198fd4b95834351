"""Sound requests that were refused: found by random networks, each held against the definition."""

import pytest
import torch
from torch import nn

import pyflatness as pf
from support import truth
from support.brute_force import all_parameters_hessian, one
from support.cases import INDICES, C
from support.grid import CROSS_ENTROPY, Net, normal


def whole_slice(net, x):
    """An assignment to all of a tensor by a slice, which torch's graph has as a copy."""
    h = net.conv(x)
    h[:, :1] *= 0.5
    return net.head(torch.relu(h).flatten(1))


def test_assignment_to_a_slice_that_is_the_whole():
    torch.manual_seed(0)
    model = Net(whole_slice, conv=nn.Conv1d(2, 1, 3), head=nn.Linear(4, C)).double().eval()
    inputs, targets = normal(0, 5, 2, 6), INDICES[:5]
    estimate = pf.relative_flatness(model, CROSS_ENTROPY, (inputs, targets), "conv")
    expected = truth.relative_flatness_of(
        truth.layer_hessian(model, CROSS_ENTROPY, inputs, targets, "conv"), truth.weight_of(model, "conv")
    )
    assert estimate.value == pytest.approx(expected, rel=1e-12)
    assert (estimate.method, estimate.exact) == ("ggn", True)


def attending(net, x):
    return net.head(net.attention(x, x, x)[0].mean(1))


@pytest.mark.parametrize("measure", ["sharpness", "adaptive_sharpness"])
def test_trainable_layers_that_are_never_called(measure):
    """Of attention's output projection alone: a Linear whose weight is used without calling it."""
    torch.manual_seed(0)
    model = Net(attending, attention=nn.MultiheadAttention(4, 1, batch_first=True), head=nn.Linear(4, C)).double()
    for name, parameter in model.eval().named_parameters():
        parameter.requires_grad_("out_proj" in name)
    inputs, targets = normal(0, 3, 2, 4), INDICES[:3]
    theta, hessian = all_parameters_hessian(model, CROSS_ENTROPY, inputs, targets)
    scale = theta.square() if measure == "adaptive_sharpness" else 1.0
    estimate = one(measure, model, CROSS_ENTROPY, (inputs, targets))
    assert estimate.value == pytest.approx(float((scale * hessian.diagonal()).sum()), rel=1e-10)
    assert estimate.exact
