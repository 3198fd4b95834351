"""What a model decides by the values of a whole batch changes with the cut into batches, and is refused."""

import pytest
import torch
from torch import nn

import pyflatness as pf
from support.combinations import every
from support.grid import Net, normal
from support.public_calls import CALLS

LOSS = nn.CrossEntropyLoss()
CHANGE = "for the same samples change with the batch they are in"
X, Y = normal(3, 24, 4), torch.arange(24) % 3
DECIDED = {
    "a branch": lambda h: 2 * h if h.mean() > 0 else 0.5 * h,
    "a product": lambda h: h * (1 + (h.mean() > 0)),
    "for each feature": lambda h: h * (1 + (h.mean(0) > 0)),
    "a number": lambda h: h * (1 + int((10 * h.mean()).round())),
    "an index": lambda h: h * torch.tensor([1.0, 3.0], dtype=h.dtype)[(h.mean() > 0).long()],
    "the largest sample": lambda h: h * (1 + h.norm(dim=1).argmax()),
    "a shape": lambda h: h * (1 + len(h.mean(0).relu().nonzero())),
    "by NumPy": lambda h: h * (1 + float(h.detach().numpy().mean() > 0)),
}
BY_SAMPLE = {
    "a product": lambda h: h * (1 + (h.mean(1, keepdim=True) > 0)),
    "a route": lambda h: torch.cat([h, -h, 2 * h], 1).view(-1, 3, 6)[torch.arange(len(h)), h[:, :3].argmax(1)],
    "a check": lambda h: h if bool(h.isfinite().all()) else h.nan_to_num(),
    "a loop over samples": lambda h: torch.stack([row if row.sum() > 0 else 2 * row for row in h]),
}


def network(decide, seed=0, classes=3):
    torch.manual_seed(seed)
    parts = {"body": nn.Linear(4, 6), "head": nn.Linear(6, classes)}
    return Net(lambda net, x: net.head(torch.tanh(decide(net.body(x)))), **parts).double()


def cut(size):
    return list(zip(X.split(size), Y.split(size), strict=True))


@every(together=1, way=[*DECIDED], layer=["body", None])
def test_a_value_is_that_of_single_samples_or_none(way, layer):
    refused = 0
    for seed in range(5):
        net = network(DECIDED[way], seed)
        expected = pf.relative_flatness(net, LOSS, cut(1), layer, curvature="ggn").value
        for size in (24, 5):
            try:
                found = pf.relative_flatness(net, LOSS, cut(size), layer, curvature="ggn").value
            except pf.errors.InputError:
                refused += 1
            else:
                assert found == pytest.approx(expected, rel=1e-9)
    assert refused


@every(together=1, way=[*BY_SAMPLE], layer=["body", None])
def test_what_is_decided_for_each_sample_by_itself_does_no_harm(way, layer):
    net = network(BY_SAMPLE[way])
    whole, single = (pf.relative_flatness(net, LOSS, cut(size), layer, curvature="ggn") for size in (24, 1))
    assert whole.value == pytest.approx(single.value, rel=1e-9)
    assert whole.notes == single.notes


@pytest.mark.parametrize("call", CALLS)
def test_every_public_call_refuses(call):
    """The batch of six has another sign than five of its samples."""
    decide, x = (lambda h: 2 * h if h.mean() > 0 else 0.5 * h), -X[:6].abs()
    net = network(decide)
    with torch.no_grad():
        net.body.weight.abs_()
        net.body.bias.zero_()
        x[4] *= -100
    with pytest.raises(pf.errors.InputError, match=CHANGE):
        CALLS[call](net, LOSS, [(x, Y[:6])])


def test_in_front_of_a_head_of_many_classes_too():
    net = network(DECIDED["a branch"], classes=1500)
    with pytest.raises(pf.errors.InputError, match=CHANGE):
        pf.relative_flatness(net, LOSS, (X, Y))


def test_a_later_batch_may_be_the_first_that_decides_otherwise():
    net = network(lambda h: 2 * h if h.mean() > 0 else 0.5 * h)
    with torch.no_grad():
        net.body.weight.abs_()
        net.body.bias.zero_()
    batches = [(x.abs(), y) for x, y in cut(4)]
    pf.relative_flatness(net, LOSS, batches, "body")
    batches[4][0][1:] *= -0.01
    with pytest.raises(pf.errors.InputError, match=CHANGE):
        pf.relative_flatness(net, LOSS, batches, "body")
