"""A layer scale, a vector that multiplies features entry by entry, is a layer where it is named."""

import pytest
import torch
from torch import nn

import pyflatness as pf
from support import weight_truth
from support.grid import Net, normal

LOSS, X, Y = nn.CrossEntropyLoss(), normal(0, 5, 3, 4), torch.arange(5) % 3


class Block(nn.Module):
    """A residual block with a layer scale, and a vector that is added."""

    def __init__(self):
        super().__init__()
        self.mix, self.gamma, self.shift = nn.Linear(4, 4), nn.Parameter(normal(1, 4)), nn.Parameter(normal(2, 4))

    def forward(self, x):
        return x + self.gamma * torch.relu(self.mix(x)) + self.shift


def network(activation=torch.relu):
    torch.manual_seed(0)
    return Net(lambda net, x: net.head(activation(net.block(x)).mean(1)), block=Block(), head=nn.Linear(4, 3)).double()


@pytest.mark.parametrize(("activation", "method"), [(torch.relu, "ggn"), (torch.tanh, "hessian")])
def test_values_are_those_of_the_dense_hessian(activation, method):
    model = network(activation)
    report = pf.measure(model, LOSS, (X, Y), layers="*.gamma", measures=["relative_flatness", "trace", "lambda_max"])
    hessian = weight_truth.hessian(model, lambda net: LOSS(net(X), Y), "block.gamma")
    gamma = model.block.gamma.detach()
    expected = {
        "relative_flatness": float(gamma.square() @ hessian.diagonal()),
        "trace": float(hessian.trace()),
        "lambda_max": float(torch.linalg.eigvalsh(hessian)[-1]),
    }
    for measure, value in expected.items():
        found = report["block.gamma", measure]
        assert (found.value, found.exact) == (pytest.approx(value, rel=1e-8), True), measure
    assert report["block.gamma", "trace"].method == method
    assert pf.verify(model, LOSS, (X, Y), "block.gamma")


def test_patterns_mean_it_where_they_mean_no_other_layer():
    for layers, expected in ((None, ("block.mix", "head")), ("block.*", ("block.mix",)), ("*amma", ("block.gamma",))):
        report = pf.measure(network(), LOSS, (X, Y), layers=layers, measures="trace")
        assert report.layers == expected
    with pytest.raises(pf.errors.InputError, match=r"'block.shift'.* its weight is used in .*add"):
        pf.measure(network(), LOSS, (X, Y), layers="block.shift")
