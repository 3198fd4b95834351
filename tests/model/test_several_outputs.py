"""Models that return more than one tensor: it is clear which one is meant, or the loss takes all, or it is an error."""

import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pyflatness as pf
from support import truth
from support.public_calls import CALLS, batches

LOSS = nn.CrossEntropyLoss()
DATA = batches()
X, Y = (torch.cat(parts) for parts in zip(*DATA, strict=True))
WAY_OUT = r"returns a tuple with several tensors, \(\d+, 3\), \(\d+, 2\), and the loss takes one; pass forward="


class Heads(nn.Module):
    """A body with two heads; what is returned of both is ``give``."""

    def __init__(self, give=lambda first, second: (first, second), activation=torch.relu):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(6, 2)
        self.scale = nn.Parameter(torch.ones(3))
        self.give, self.activation = give, activation
        self.double().eval()

    def forward(self, x):
        h = self.activation(self.body(x))
        return self.give(self.first(h), self.second(h))


def both(outputs, y):
    """A loss that takes all outputs, and mixes them."""
    first, second = outputs
    return F.cross_entropy(first, y) + (second.square().sum(1) * first.sin().sum(1)).mean()


@pytest.mark.parametrize("name", CALLS)
def test_a_loss_of_one_tensor_asks_which_one_is_meant(name):
    with pytest.raises(pf.errors.InputError, match=WAY_OUT):
        CALLS[name](Heads(), LOSS, DATA)


def test_the_output_that_forward_returns():
    def second(model, batch):
        return model(batch[0])[1], batch[1] % 2

    found = pf.relative_flatness(Heads(), LOSS, DATA, "second", forward=second)
    expected = truth.of_model(Heads(lambda first, second: second), LOSS, X, Y % 2, "second")
    assert found.method == "head"
    assert found.value == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("activation", [torch.relu, torch.tanh])
@pytest.mark.parametrize("layer", ["body", "first", "second"])
def test_a_callable_gets_all_outputs(layer, activation):
    net = Heads(activation=activation)
    expected = truth.of_model(net, both, X, Y, layer)
    for data in (DATA, (X, Y)):
        found = pf.relative_flatness(net, both, data, layer)
        assert found.exact
        assert found.value == pytest.approx(expected, rel=1e-10)
    assert pf.verify(net, both, DATA, layer, samples=5)


@pytest.mark.parametrize(
    ("give", "loss"),
    [
        (lambda first, second: [second, first], lambda f, y: both(f[::-1], y)),
        (lambda first, second: {"a": first, "b": (second,)}, lambda f, y: both((f["a"], f["b"][0]), y)),
        (lambda first, second: (first, second.unflatten(1, (1, 2))), lambda f, y: both((f[0], f[1][:, 0]), y)),
        (lambda first, second: (first[:, 0], second), lambda f, y: (f[0].sin() * f[1].exp().sum(1)).mean()),
    ],
)
def test_outputs_of_any_structure(give, loss):
    net = Heads(give)
    expected = truth.of_model(net, loss, X, Y, "body")
    assert pf.relative_flatness(net, loss, DATA, "body").value == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("name", [name for name in CALLS if name not in ("pac_bayes", "pac_bayes_magnitude", "verify")])
def test_every_public_call_takes_such_a_loss(name):
    CALLS[name](Heads(), both, DATA)


def test_there_is_no_accuracy_of_several_outputs():
    assert pf.generalization_gap(Heads(), both, DATA, DATA).train.accuracy is None
    with pytest.raises(pf.errors.InputError, match="several outputs, and an accuracy is of one"):
        pf.measures.pac_bayes(Heads(), both, DATA)


def test_a_callable_that_takes_one_tensor_is_told_of_the_others():
    with pytest.raises(pf.errors.InputError, match=r"returns several outputs, and a callable gets them all.*forward="):
        pf.relative_flatness(Heads(), lambda f, y: F.cross_entropy(f, y), DATA)


@pytest.mark.parametrize(
    "give",
    [
        lambda first, second: (first,),
        lambda first, second: (first, None),
        lambda first, second: (first, second.argmax(1)),
        lambda first, second: [first, {"cache": second}],
        lambda first, second: (first, ((second, second),)),
        lambda first, second: types.SimpleNamespace(logits=first, hidden=second),
        lambda first, second: {"logits": first, "hidden": second},
    ],
)
@pytest.mark.parametrize("loss", [LOSS, lambda f, y: F.cross_entropy(f, y)], ids=["module", "callable"])
def test_what_is_clear_is_taken(give, loss):
    expected = truth.of_model(Heads(lambda first, second: first), LOSS, X, Y, "first")
    assert pf.relative_flatness(Heads(give), loss, DATA, "first").value == pytest.approx(expected, rel=1e-12)


def test_a_parameter_beside_the_logits_is_no_output():
    net = Heads()
    net.give = lambda first, second: (first, net.scale)
    assert pf.relative_flatness(net, LOSS, DATA, "first").method == "head"


@pytest.mark.parametrize(
    "give",
    [
        lambda first, second: (first, second.sum()),
        lambda first, second: (first, second[1:]),
        lambda first, second: {"a": first, "b": second.argmax(1)},
        lambda first, second: {},
    ],
)
def test_outputs_that_are_not_of_samples(give):
    with pytest.raises(pf.errors.InputError, match="pass forward="):
        pf.relative_flatness(Heads(give), both, DATA)


def test_outputs_whose_shapes_change():
    def give(first, second):
        return (first, second) if len(first) == 5 else (first, second[:, :1])

    with pytest.raises(pf.errors.InputError, match="other shapes"):
        pf.relative_flatness(Heads(give), both, DATA, "body")
