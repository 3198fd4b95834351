"""Hessian products through convolutions, whose second derivatives are written here, against torch's own."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import pyflatness as pf
from pyflatness.passes import second_derivatives
from support.brute_force import all_parameters_hessian

LOSS = nn.CrossEntropyLoss()

KINDS = {
    "1d": (nn.Conv1d(2, 3, 3, stride=2, padding=1), (2, 9)),
    "2d": (nn.Conv2d(2, 4, (3, 2), stride=(1, 2), padding=(2, 1), dilation=(2, 1)), (2, 6, 7)),
    "grouped": (nn.Conv2d(4, 6, 3, groups=2), (4, 5, 5)),
    "depthwise": (nn.Conv2d(3, 3, 3, padding=1, groups=3, bias=False), (3, 5, 5)),
    "3d": (nn.Conv3d(2, 3, 2, bias=False), (2, 3, 3, 4)),
    "reflected": (nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), (2, 5, 5)),
    "same": (nn.Conv2d(2, 3, 3, padding="same"), (2, 5, 5)),
}


class Net(nn.Module):
    """Two convolutions behind each other, the first of a kind, and a head."""

    def __init__(self, first, shape, around=lambda module, x: module(x)):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.around = copy.deepcopy(first), around
        inside = self.first(torch.zeros(1, *shape))
        self.second = type(first)(inside.shape[1], 3, 2)
        self.head = nn.Linear(3, 3)

    def forward(self, x):
        x = torch.tanh(self.around(self.first, x))
        return self.head(torch.tanh(self.second(x)).flatten(2).mean(2))


def _data(shape):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4, *shape, generator=generator).double(), torch.randint(3, (4,), generator=generator)


@pytest.mark.parametrize("name", KINDS)
def test_eigenvalues_are_those_of_the_dense_hessian(name):
    model, data = Net(*KINDS[name]).double().eval(), _data(KINDS[name][1])
    found = pf.spectrum(model, LOSS, data, k=3, which="both")
    values = torch.linalg.eigvalsh(all_parameters_hessian(model, LOSS, *data)[1]).flip(0)
    torch.testing.assert_close(found.eigenvalues, torch.cat([values[:3], values[-3:]]), rtol=0, atol=1e-7)
    assert all("_conv_forward" not in module.__dict__ for module in model.modules())


def test_a_stride_that_was_set_to_a_number():
    model, data = Net(*KINDS["2d"]).double().eval(), _data(KINDS["2d"][1])
    model.first.stride, model.second.padding = 1, 1
    found = pf.spectrum(model, LOSS, data, k=2)
    values = torch.linalg.eigvalsh(all_parameters_hessian(model, LOSS, *data)[1]).flip(0)
    torch.testing.assert_close(found.eigenvalues, values[:2], rtol=0, atol=1e-7)


def test_without_some_of_the_parameters():
    model, data = Net(*KINDS["2d"]).double().eval(), _data(KINDS["2d"][1])
    model.first.weight.requires_grad_(False)
    model.second.bias.requires_grad_(False)
    names = {name for name, w in model.named_parameters() if w.requires_grad}
    found = pf.spectrum(model, LOSS, data, k=2)
    values = torch.linalg.eigvalsh(all_parameters_hessian(model, LOSS, *data, names)[1]).flip(0)
    torch.testing.assert_close(found.eigenvalues, values[:2], rtol=0, atol=1e-7)


def test_ggn():
    model, data = Net(*KINDS["2d"]).double().eval(), _data(KINDS["2d"][1])
    found = pf.spectrum(model, LOSS, data, k=2, curvature="ggn")
    flat = torch.cat([w.detach().flatten() for w in model.parameters()])

    def outputs(flat):
        parts = zip(model.named_parameters(), flat.split([w.numel() for w in model.parameters()]), strict=True)
        return torch.func.functional_call(model, {n: p.view_as(w) for (n, w), p in parts}, (data[0],))

    jacobian = torch.autograd.functional.jacobian(outputs, flat)
    p = outputs(flat).detach().softmax(1)
    factors = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
    matrix = torch.einsum("nap,nab,nbq->pq", jacobian, factors, jacobian) / 4
    torch.testing.assert_close(found.eigenvalues, torch.linalg.eigvalsh(matrix).flip(0)[:2], rtol=0, atol=1e-7)


def _in_half(module, x):
    with torch.autocast("cpu", torch.bfloat16):
        return module(x.float()).double()


AROUND = {
    "checkpointed": lambda module, x: checkpoint(module, x, use_reentrant=False),
    "vmap": lambda module, x: torch.func.vmap(module)(x),
    "unbatched": lambda module, x: torch.stack([module(each) for each in x]),
}


@pytest.mark.parametrize("name", AROUND)
def test_the_same_around_a_convolution(name):
    data = _data(KINDS["2d"][1])
    plain = pf.spectrum(Net(*KINDS["2d"]).double().eval(), LOSS, data, k=2)
    found = pf.spectrum(Net(*KINDS["2d"], AROUND[name]).double().eval(), LOSS, data, k=2)
    torch.testing.assert_close(found.eigenvalues, plain.eigenvalues, rtol=0, atol=1e-7)


def test_autocast_goes_on_as_it_was(monkeypatch):
    model, data = Net(*KINDS["2d"], _in_half).eval(), _data(KINDS["2d"][1])
    model.second.double(), model.head.double()
    found = pf.spectrum(model, LOSS, data, k=1, tolerance=1e-2)
    monkeypatch.setattr(second_derivatives, "replace", lambda modules: None)
    expected = pf.spectrum(model, LOSS, data, k=1, tolerance=1e-2)
    torch.testing.assert_close(found.eigenvalues, expected.eigenvalues, rtol=1e-2, atol=0)


def test_the_model_is_as_it_was_after_an_error():
    model, data = Net(*KINDS["2d"]).double().eval(), _data(KINDS["2d"][1])
    with pytest.raises(pf.errors.NonFiniteError):
        pf.spectrum(model, LOSS, (data[0] * torch.nan, data[1]), k=1)

    def failing(module, arguments):
        if "_conv_forward" in module.__dict__:
            raise RuntimeError("stop")

    model.first.register_forward_pre_hook(failing)
    with pytest.raises(pf.errors.InputError, match="stop"):
        pf.spectrum(model, LOSS, data, k=1)
    assert all("_conv_forward" not in module.__dict__ for module in model.modules())
