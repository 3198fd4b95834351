"""Compiled functions in a model, and backward hooks on modules: values are those of the same network without them."""

import pytest
import torch
from torch import nn

import pyflatness as pf
from support.combinations import in_turn
from support.public_calls import CALLS, batches

LOSS, DATA = nn.CrossEntropyLoss(), batches()


class Net(nn.Module):
    def __init__(self, act=torch.tanh):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.act = nn.Linear(4, 6), nn.Linear(6, 3), act
        self.double().eval()

    def forward(self, x):
        return self.head(self.act(self.body(x)))


def compiled_function():
    return Net(torch.compile(torch.tanh, backend="aot_eager"))


def compiled_forward():
    net = Net()
    net.forward = torch.compile(net.forward, backend="eager")
    return net


def hooked():
    """A network whose user changes gradients on their way."""
    net = Net()
    net.body.register_full_backward_hook(
        lambda module, inputs, outputs: (2 * inputs[0],) if inputs[0] is not None else None
    )
    net.head.register_full_backward_pre_hook(lambda module, outputs: (3 * outputs[0],))
    return net


def check(name, net):
    with torch.no_grad():
        net(DATA[0][0])  # what is compiled at the first call is compiled now
    assert str(CALLS[name](net, LOSS, DATA)) == str(CALLS[name](Net(), LOSS, DATA))


@in_turn(2, "name", CALLS)
def test_every_public_call_gives_of_a_hooked_network_what_it_gives_of_the_plain_one(name):
    check(name, hooked())


@in_turn(3, ("name", "made"), [
    (name, made) for name in CALLS for made in (compiled_function, compiled_forward)
    if (name, made) != ("verify", compiled_forward)  # a copy of it calls the original
])  # fmt: skip
def test_every_public_call_gives_the_same_of_a_compiled_one(name, made):
    check(name, made())


def test_hooks_are_there_again():
    net, heard = Net(), []
    net.body.register_full_backward_hook(lambda *args: heard.append(args[0]))
    net.head.register_full_backward_pre_hook(lambda *args: heard.append(args[0]))
    pf.measure(net, LOSS, DATA, measures="all")
    with pytest.raises(pf.errors.InputError):
        pf.measure(net, LOSS, DATA, layers="nowhere")
    assert heard == []
    LOSS(net(DATA[0][0].clone().requires_grad_()), DATA[0][1]).backward()
    assert heard == [net.head, net.body]
