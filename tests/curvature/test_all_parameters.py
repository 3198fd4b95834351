"""Hessians in all parameters of models whose graph torch makes in a way of its own, against written-out networks."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import pyflatness as pf
from support import truth
from support.combinations import every

LOSS = nn.CrossEntropyLoss()


def _data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(12, 4, generator=generator).double(), torch.randint(3, (12,), generator=generator)


def _dense(model, outputs):
    """The Hessian of the loss in all parameters, of outputs that are a function of them by name."""
    inputs, targets = _data()
    own = dict(model.named_parameters())
    sizes = [w.numel() for w in own.values()]

    def value(flat):
        parts = zip(own.items(), flat.split(sizes), strict=True)
        return LOSS(outputs({name: part.view_as(w) for (name, w), part in parts}, inputs), targets)

    return truth.hessian(value, torch.cat([w.detach().flatten() for w in own.values()]))


class Direct(nn.Module):
    """A layer that calls the function behind weight_norm itself."""

    def __init__(self):
        super().__init__()
        self.g, self.v, self.b = nn.Parameter(torch.rand(3, 1)), nn.Parameter(torch.randn(3, 5)), torch.zeros(3)

    def forward(self, x):
        return x @ torch._weight_norm(self.v, self.g, 0).T


def _older(layer):
    with pytest.warns(FutureWarning, match="weight_norm"):
        return nn.utils.weight_norm(layer)


# A layer with its names of g and v.
NORMED = {
    "parametrised": (
        lambda: parametrizations.weight_norm(nn.Linear(5, 3, bias=False)),
        ("parametrizations.weight.original0", "parametrizations.weight.original1"),
    ),
    "by a hook": (lambda: _older(nn.Linear(5, 3, bias=False)), ("weight_g", "weight_v")),
    "called directly": (Direct, ("g", "v")),
}


def _normed(name):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), NORMED[name][0]()).double().eval()


@pytest.mark.parametrize("name", NORMED)
def test_weight_norm_has_its_second_derivatives(name):
    model, (of_size, of_direction) = _normed(name), NORMED[name][1]

    def outputs(w, x):
        g, v = w[f"2.{of_size}"], w[f"2.{of_direction}"]
        return (x @ w["0.weight"].T + w["0.bias"]).tanh() @ (g * v / v.norm(dim=1, keepdim=True)).T

    values = torch.linalg.eigvalsh(_dense(model, outputs)).flip(0)
    found = pf.spectrum(model, LOSS, _data(), k=2, which="both")
    assert found.converged
    torch.testing.assert_close(found.eigenvalues, values[[0, 1, -2, -1]], rtol=0, atol=1e-9)
    bounded = pf.worst_case_sharpness(model, LOSS, _data(), rho=0.1, steps=1, bound=True)
    top = (bounded.bound - 0.1 * bounded.gradient_norm) / 0.005
    assert top == pytest.approx(float(values[0]), rel=1e-6)


class Checkpointed(nn.Module):
    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.head, self.how = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3), how

    def _inner(self, x):
        return self.b(self.a(x).tanh()).tanh()

    def forward(self, x):
        if self.how is None:
            return self.head(self._inner(x))
        return self.head(checkpoint(self._inner, x, use_reentrant=self.how))


@pytest.mark.parametrize("curvature", ["auto", "ggn"])
def test_checkpointing_changes_no_eigenvalue(curvature):
    options = {"k": 3, "which": "both", "curvature": curvature}
    plain, found = (pf.spectrum(Checkpointed(how).double().eval(), LOSS, _data(), **options) for how in (None, False))
    assert found.converged
    torch.testing.assert_close(found.eigenvalues, plain.eigenvalues, rtol=0, atol=1e-12)
    bounds = [
        pf.worst_case_sharpness(Checkpointed(how).double().eval(), LOSS, _data(), bound=True) for how in (None, False)
    ]
    assert bounds[1].bound == pytest.approx(bounds[0].bound, rel=1e-12)
    assert bounds[1].value == pytest.approx(bounds[0].value, rel=1e-12)


CALLS = {
    "spectrum": lambda model: pf.spectrum(model, LOSS, _data()),
    "worst case": lambda model: pf.worst_case_sharpness(model, LOSS, _data()),
    "Keskar's": lambda model: pf.measures.keskar_sharpness(model, LOSS, _data()),
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@every(together=1, first=[True, False], name=[*CALLS])
def test_reentrant_checkpointing_is_no_silent_zero(name, first):
    model = Checkpointed(True).double().eval()
    model = model if first else nn.Sequential(nn.Linear(4, 4), model).double().eval()
    with pytest.raises(pf.errors.InputError, match=r"reentrant activation checkpointing.* pass use_reentrant=False"):
        CALLS[name](model)


def test_checkpointed_weight_norm_is_refused_by_name():
    inner = _normed("parametrised")

    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    with pytest.raises(pf.errors.NotYetError, match=r"weight_norm.* switch checkpointing off"):
        pf.spectrum(Again().double().eval(), LOSS, _data())
