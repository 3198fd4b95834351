"""Random numbers in the forward pass: refused by all public calls where they matter, and only there."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pyflatness as pf
from support.public_calls import CALLS, batches

LOSS = nn.CrossEntropyLoss()
DATA = batches()
MESSAGE = r"draws random numbers in its forward pass: on the same batch, tuple \[\(5, 4\) float64, \(5,\) int64\]"


class Net(nn.Module):
    """A network of two layers with something between them."""

    def __init__(self, between=lambda net, h: h):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.between = nn.Linear(4, 6), nn.Linear(6, 3), between
        self.double().eval()

    def forward(self, x):
        return self.head(self.between(self, torch.relu(self.body(x))))


def noisy(net, h):
    return h + 1e-5 * torch.randn_like(h)


@pytest.mark.parametrize("name", CALLS)
def test_every_public_call_refuses_noise(name):
    with pytest.raises(pf.errors.InputError, match=MESSAGE):
        CALLS[name](Net(noisy), LOSS, DATA)
    CALLS[name](Net(), LOSS, DATA)


def test_reparameterize_refuses_noise():
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), Net(noisy).head).double()
    net[1].register_forward_hook(lambda module, args, h: noisy(module, h) if len(h) > 2 else None)
    with pytest.raises(pf.errors.InputError, match=MESSAGE):
        pf.reparameterize(net, {"0": 2.0}, DATA)


@pytest.mark.parametrize("name", ["relative_flatness", "relative_flatness, a layer", "generalization_gap"])
def test_dropout_that_asks_for_the_mode_is_refused_in_training_mode_only(name):
    net = Net(lambda net, h: F.dropout(h, 0.5, net.training))
    CALLS[name](net, LOSS, DATA)
    with pytest.raises(pf.errors.InputError, match=r"training mode: call model\.eval"):
        CALLS[name](net.train(), LOSS, DATA)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.attention(x, x, x)[0].mean(1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.head = nn.LSTM(4, 5, num_layers=2, dropout=0.5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])


@pytest.mark.parametrize("kind", [Attention, Recurrent])
def test_dropout_inside_of_torchs_own_modules(kind):
    net, data = kind(), (torch.randn(6, 3, 4, generator=torch.Generator().manual_seed(1)), torch.arange(6) % 3)
    with pytest.raises(pf.errors.InputError, match=r"training mode: call model\.eval"):
        pf.relative_flatness(net.train(), LOSS, data)
    assert pf.relative_flatness(net.eval(), LOSS, data).exact


@pytest.mark.parametrize("layer", ["head", "body"])
def test_noise_from_a_later_batch_on(layer):
    net = Net(lambda net, h: noisy(net, h) if len(h) == 2 else h)
    with pytest.raises(pf.errors.InputError, match=r"draws random numbers .*\(2, 4\)"):
        pf.relative_flatness(net, LOSS, DATA, layer)


def test_a_generator_of_the_models_own():
    def drawn(net, h):
        return h + torch.randn(h.shape, generator=net.generator, dtype=h.dtype)

    net = Net(drawn)
    net.generator = torch.Generator()
    with pytest.raises(pf.errors.InputError, match="draws random numbers"):
        pf.relative_flatness(net, LOSS, DATA)


def test_the_same_numbers_at_every_call_are_a_function():
    def fixed(net, h):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            return h * torch.rand(h.shape[1:], dtype=h.dtype)

    assert pf.verify(Net(fixed), LOSS, DATA, "body")


@pytest.mark.parametrize("name", CALLS)
def test_numbers_that_do_not_matter_change_nothing(name):
    def unused(net, h):
        return h + 0 * torch.rand(1)

    plain, drawn = (CALLS[name](Net(between), LOSS, DATA) for between in (lambda net, h: h, unused))
    assert str(drawn) == str(plain)


@pytest.mark.parametrize("draws", [False, True])
def test_a_wide_head_has_its_logits_compared(draws):
    torch.manual_seed(0)
    net = Net(noisy if draws else lambda net, h: h + 0 * torch.rand(1))
    net.head = nn.Linear(6, 1500).double()
    if draws:
        with pytest.raises(pf.errors.InputError, match="draws random numbers"):
            pf.relative_flatness(net, LOSS, DATA)
    else:
        assert pf.relative_flatness(net, LOSS, DATA).method == "head"


def test_a_wide_head_whose_model_draws_from_a_later_batch_on():
    net = Net(lambda net, h: noisy(net, h) if len(h) == 2 else h)
    net.head = nn.Linear(6, 1500).double()
    with pytest.raises(pf.errors.InputError, match="draws random numbers"):
        pf.relative_flatness(net, LOSS, DATA)
