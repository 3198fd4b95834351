"""A model may change its inputs in place: values are those of one that does not, and the user's data stay."""

import pytest
import torch
from torch import nn

import pyflatness as pf
from support.combinations import every
from support.grid import Net, normal
from support.public_calls import CALLS

LOSS = nn.CrossEntropyLoss()
SAID = "the model changes its inputs in place, so that it was given copies of them"


def subtracted(x):
    x -= 1
    return x.mul_(2)


def past_the_count(x):
    x.data.sub_(1)
    x.numpy()[...] *= 2
    return x


CHANGES = {"in place": subtracted, "past torch's count of changes": past_the_count}


class Named(dict):
    """A mapping of the user's."""


def tensor(x):
    return x


def network(change, take=tensor):
    torch.manual_seed(0)
    parts = {"body": nn.Linear(4, 6), "act": nn.ReLU(), "head": nn.Linear(6, 3)}
    return Net(lambda net, x: net.head(net.act(net.body(change(take(x))))), **parts).double()


def data(samples, give=tensor, size=5):
    x, y = normal(3, samples, 4), torch.arange(samples) % 3
    return [(give(a), b) for a, b in zip(x.split(size), y.split(size), strict=True)]


HELD = {
    "a tensor": (tensor, tensor),
    "a tuple": (lambda x: (x, x + 1), lambda x: x[0]),
    "a mapping": (lambda x: Named(x=x), lambda x: x["x"]),
    "a list in a mapping": (lambda x: {"x": [x]}, lambda x: x["x"][0]),
}


@every(change=[*CHANGES], held=[*HELD], samples=[1, 2, 11])
def test_values_are_those_of_a_model_that_changes_nothing(change, held, samples):
    give, take = HELD[held]
    batches = data(samples, give)
    for layer in (None, "body"):
        estimate = pf.relative_flatness(network(CHANGES[change], take), LOSS, batches, layer)
        expected = pf.relative_flatness(network(lambda x: (x - 1) * 2, take), LOSS, batches, layer)
        assert (estimate.value, estimate.exact) == (expected.value, True)
        assert SAID in estimate.notes
        assert not expected.notes
    assert all(
        torch.equal(take(x), take(before)) for (x, _), (before, _) in zip(batches, data(samples, give), strict=True)
    )


@pytest.mark.parametrize("call", CALLS)
def test_no_public_call_changes_the_data(call):
    batches = data(6)
    found = repr(CALLS[call](network(subtracted), LOSS, batches))
    assert all(torch.equal(x, before) for (x, _), (before, _) in zip(batches, data(6), strict=True))
    if call not in ("track", "verify"):
        expected = repr(CALLS[call](network(lambda x: (x - 1) * 2), LOSS, batches))
        assert found.replace(f", {SAID}", "").split("\n")[0] == expected.split("\n")[0]


def test_a_change_that_begins_at_a_later_batch_is_said():
    def forward(net, x):
        return net.head(torch.relu(net.body(x.sub_(1) if bool((x > 50).any()) else x)))

    net, batches = network(tensor), data(10)
    net.run = forward
    batches[1][0][2, 1] = 100
    with pytest.raises(pf.errors.InputError, match=r"changes its inputs in place on .* have it work on a copy"):
        pf.relative_flatness(net, LOSS, batches, "body")
