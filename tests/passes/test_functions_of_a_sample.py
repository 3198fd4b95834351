"""A model that is no function of a sample is refused by all public calls, wherever its outputs come from."""

import random

import numpy as np
import pytest
import torch
from torch import nn

import pyflatness as pf
from support.combinations import every
from support.public_calls import CALLS, batches

LOSS = nn.CrossEntropyLoss()
DATA = batches()
DRAWS, CHANGES = "draws random numbers in its forward pass", "for the same samples change with the batch"


class Net(nn.Module):
    """A network of two layers with something done to its input first."""

    def __init__(self, first):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.first, self.count = nn.Linear(4, 6), nn.Linear(6, 3), first, 0
        self.private, self.of_numpy = [torch.Generator().manual_seed(3)], np.random.default_rng(0)
        self.double().eval()

    def forward(self, x):
        return self.head(torch.relu(self.body(self.first(self, x))))


def generators():
    name, keys, *others = np.random.get_state()  # noqa: NPY002, this is what is tested
    return random.getstate(), name, keys.tobytes(), others


def counted(net, x):
    net.count += 1
    return x + 0.1 * net.count


KINDS = {
    "Python's random": (lambda net, x: x * (1 + 1e-4 * random.random()), DRAWS),
    "NumPy's random": (lambda net, x: x + 1e-4 * torch.from_numpy(np.random.randn(*x.shape)), DRAWS),  # noqa: NPY002
    "a generator of NumPy's": (lambda net, x: x + torch.from_numpy(net.of_numpy.standard_normal(x.shape)), CHANGES),
    "a generator in a list": (lambda net, x: x + torch.randn(x.shape, generator=net.private[0]), CHANGES),
    "calls that are counted": (counted, "its outputs depend on the calls before: it keeps 'count'|" + CHANGES),
    "the batch's mean": (lambda net, x: x - x.mean(0), "mixes samples|cannot be told apart"),
    "the place in the batch": (lambda net, x: x + torch.arange(len(x)).unsqueeze(1), CHANGES),
}


@every(together=1, call=[*CALLS], kind=[*KINDS])
def test_every_public_call_refuses(call, kind):
    first, message = KINDS[kind]
    if (call, kind) == ("spectrum", "calls that are counted"):
        pytest.skip("parameters are exchanged in each of its passes, and attributes put back: all have the same count")
    net = Net(first)
    before = generators()
    with pytest.raises(pf.errors.InputError, match=message):
        CALLS[call](net, LOSS, DATA)
    assert generators() == before


@pytest.mark.parametrize("samples", [2, 12, 40])
def test_what_a_layer_has_by_a_sample_s_place_is_seen_in_one_batch(samples):
    net, data = Net(KINDS["the place in the batch"][0]), batches(samples, size=samples)
    with pytest.raises(pf.errors.InputError, match=CHANGES):
        pf.relative_flatness(net, LOSS, data, "body")


def test_batches_that_cannot_be_cut_are_taken_as_they_are():
    def whole(model, batch):
        assert len(batch[0]) == 12, "all samples or none"
        return model(batch[0]), batch[1]

    net, data = Net(lambda net, x: x), batches(size=12)
    for name in ("fisher_rao", "adaptive_sharpness_mc", "generalization_gap"):
        with_check, without = CALLS[name](net, LOSS, data), CALLS[name](net, LOSS, data, forward=whole)
        assert repr(with_check) == repr(without)
