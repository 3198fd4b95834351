"""Nothing of the model, the data or the graphs stays alive when a public call is over, however often it is made."""

import gc

import pytest
import torch
from torch import nn

from support.public_calls import CALLS, batches, network

DATA = batches(samples=3, size=3)


def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets)


def tensors():
    gc.collect()
    return sum(issubclass(type(held), torch.Tensor) for held in gc.get_objects())


@pytest.mark.usefixtures("new_objects")
@pytest.mark.parametrize(("few", "more"), [(2, 2), pytest.param(5, 45, marks=pytest.mark.soak)])
@pytest.mark.parametrize("call", CALLS)
def test_many_calls_leave_no_more_tensors_than_few(call, few, more):
    net = network()
    for _ in range(few):
        CALLS[call](net, loss, DATA)
    before = tensors()
    for _ in range(more):
        CALLS[call](net, loss, DATA)
    assert tensors() <= before
