"""Weights of layers that the model uses outside of the layers too: named, and the network's value is not exact."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pyflatness as pf
from support import truth
from support.grid import Net, normal

LOSS, X, Y = nn.CrossEntropyLoss(), normal(0, 6, 4), torch.arange(6) % 4
OUTSIDE = {
    "linear": lambda net, h: F.linear(h, net.a.weight),
    "matmul": lambda net, h: h @ net.a.weight,
    "diagonal": lambda net, h: h * net.a.weight.diagonal(),
    "cat": lambda net, h: h @ torch.cat([net.a.weight, net.a.weight])[:4],
    "add": lambda net, h: net.b(h) + net.a.weight[0],
}
NOTHING = {
    "its dtype and device": lambda net, h: net.b(h.to(net.a.weight.dtype).to(net.a.weight.device)),
    "its type": lambda net, h: net.b(h.to(net.a.weight).type_as(net.a.weight)),
    "its shape": lambda net, h: net.b(h + torch.zeros_like(net.a.weight)[0] + net.a.weight.shape[0]),
    "a norm that is kept": lambda net, h: (setattr(net, "norm", net.a.weight.norm().item()), net.b(h))[1],
    "a second call": lambda net, h: net.b(net.a(h)),
}


def network(forward):
    torch.manual_seed(0)
    return Net(lambda net, x: forward(net, torch.relu(net.a(x))), a=nn.Linear(4, 4), b=nn.Linear(4, 4)).double()


@pytest.mark.parametrize("function", OUTSIDE)
def test_another_use_is_named_and_the_network_is_not_exact(function: str) -> None:
    net = network(OUTSIDE[function])
    report = pf.measure(net, LOSS, (X, Y), measures=["relative_flatness", "trace"])
    expected = truth.layer_hessian(net, LOSS, X, Y, "a")
    assert report["a", "trace"].value == pytest.approx(truth.trace_of(expected)), "through the layer's calls"
    said = f"weight used in {function} outside of the layer too: derivative through the layer's calls only"
    assert report["a", "trace"].notes == (said,)
    assert report.why_uncovered["a.weight"] == f"its weight is used in {function} outside of the layer too"
    assert report.uncovered["a.weight"] == pytest.approx(1 / 2 if "b" not in report.layers else 1 / 3, abs=0.2)
    assert not report["trace"].exact
    assert pf.relative_flatness(net, LOSS, (X, Y), "a").notes == (said,)


@pytest.mark.parametrize("function", OUTSIDE)
def test_verify_has_the_derivative_through_the_same_calls(function: str) -> None:
    result = pf.verify(network(OUTSIDE[function]), LOSS, (X, Y), "a")
    assert result, result


@pytest.mark.parametrize("what", NOTHING)
def test_what_has_no_derivative_or_is_the_layer_itself_is_no_other_use(what: str) -> None:
    report = pf.measure(network(NOTHING[what]), LOSS, (X, Y), measures="trace")
    assert report.uncovered == report.why_uncovered == {}
    assert report["trace"].exact
    assert not report["a", "trace"].notes


def test_hooks_of_the_users_and_copied_weights_are_no_other_use() -> None:
    net = network(lambda net, h: net.b(h))
    nn.utils.parametrizations.weight_norm(net.a)
    net.b.register_forward_pre_hook(lambda module, args: args[0] + 0 * module.weight.detach().sum())
    assert pf.measure(net, LOSS, (X, Y), measures="trace").uncovered == {}


@pytest.mark.parametrize("fails", [False, True])
def test_weights_are_where_they_were_also_after_an_error(fails: bool) -> None:
    def forward(net, h):
        if fails:
            raise ValueError("no")
        return F.linear(h, net.a.weight)

    net = network(forward)
    weight = net.a.weight
    with pytest.raises(pf.errors.InputError, match="ValueError: no") if fails else contextlib.nullcontext():
        pf.measure(net, LOSS, (X, Y), measures="trace")
    assert net.a.weight is weight
    assert not net.a._forward_hooks
    assert not net.a._forward_pre_hooks
