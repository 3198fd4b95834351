"""``pf.verify``: that it agrees, by both kinds of truth, and that it would notice."""

import pytest
import torch
from rich import progress
from torch import nn

import pyflatness as pf
from pyflatness.verification import _difference
from support.cases import TOKEN_TARGETS, TOKENS, C, Pixels, Tokens, classifier
from support.grid import Net
from support.networks import CASES


@pytest.mark.parametrize("widths", [(6, 7, C), (6, 300, 20)])
def test_verify_agrees(widths):
    model = classifier(*widths)
    targets = torch.randint(widths[-1], (40,))
    loss = nn.CrossEntropyLoss(label_smoothing=0.1, weight=torch.rand(widths[-1]))
    result = pf.verify(model, loss, (torch.randn(40, 6), targets))
    assert result
    assert result.samples == 32
    assert result.method == ("definition" if widths[1] == 7 else "laplacian in the input")
    assert [check.path for check in result.checks] == [
        f"{backend}, {dtype}" for dtype in ("float32", "float64") for backend in ("compiled", "reference")
    ]
    assert "verdict: all paths agree" in repr(result)


@pytest.mark.parametrize("name", ["tokens", "pixels"])
def test_verify_by_the_laplacian_on_positions(name, monkeypatch):
    monkeypatch.setattr("pyflatness.verification._DEFINITION_ENTRIES", 0)
    if name == "tokens":
        result = pf.verify(Tokens(), nn.CrossEntropyLoss(), (TOKENS, TOKEN_TARGETS), "head")
    else:
        result = pf.verify(
            Pixels(), nn.CrossEntropyLoss(), (torch.randn(2, 2, 3, 2), torch.randint(C, (2, 3, 2))), "head"
        )
    assert result, result


def test_verify_knows_the_rounding_of_what_a_model_computes_in_float32():
    def normalised(net, x):
        h = net.body(x).float()
        return net.head((h * torch.rsqrt(h.square().mean(1, keepdim=True))).to(x.dtype))

    model = Net(normalised, body=nn.Linear(6, 7), head=nn.Linear(7, C)).double()
    result = pf.verify(model, nn.CrossEntropyLoss(), (torch.randn(9, 6).double(), torch.randint(C, (9,))), "body")
    assert result, result
    assert any(check.error > 1e-9 for check in result.checks)
    assert {check.tolerance for check in result.checks} == {1e-3}


def test_verify_takes_complex_weights():
    def spectral(net, x):
        return net.head(torch.fft.irfft(torch.fft.rfft(net.body(x)) @ net.spectrum, n=6))

    model = Net(spectral, body=nn.Linear(6, 6), head=nn.Linear(6, C))
    model.spectrum = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
    result = pf.verify(model, nn.CrossEntropyLoss(), (torch.randn(9, 6), torch.randint(C, (9,))), "body")
    assert result, result
    assert [check.path for check in result.checks][-1] == "reference, float64"


def test_verify_notices_a_wrong_value(monkeypatch):
    from pyflatness.contractions.backends import reference

    right = reference.softmax_variance
    monkeypatch.setattr(reference, "softmax_variance", lambda *args: 1.01 * right(*args))
    result = pf.verify(classifier(6, 7, C), nn.CrossEntropyLoss(), (torch.randn(9, 6), torch.randint(C, (9,))))
    assert not result
    assert "THE PATHS DISAGREE" in repr(result)


def test_verify_takes_this_use_of_a_tied_weight():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
            self.head.weight = self.body.weight

        def forward(self, x):
            return self.head(torch.tanh(self.body(x)))

    assert pf.verify(Tied(), nn.CrossEntropyLoss(), (torch.randn(9, 4), torch.randint(4, (9,))), "head")


def test_verify_cuts_samples_and_nothing_else():
    """A table beside the samples, of another length, stays whole."""
    model, x, y, table = nn.Linear(5, 3), torch.randn(40, 5), torch.randint(3, (40,)), torch.randn(50, 5)
    batch = {"x": x, "y": y, "table": table}
    forward = lambda net, part: (net(part["x"] + part["table"][-1]), part["y"])  # noqa: E731
    assert pf.verify(model, nn.CrossEntropyLoss(), [batch], samples=7, forward=forward).samples == 7


@pytest.mark.parametrize("name", ["residual", "conv 2d, grouped", "siamese", "weight norm", "mlp ReLU"])
def test_verify_layers_behind_which_there_is_a_network(name):
    case = CASES[name]
    for layer in case.layers:
        result = pf.verify(case.build(), case.loss, (case.inputs, case.targets), layer)
        assert result, result
        assert result.layer == layer
        assert len(result.checks) == 2


def test_verify_hidden_layers_by_the_laplacian(monkeypatch):
    monkeypatch.setattr("pyflatness.verification._DEFINITION_ENTRIES", 0)
    result = pf.verify(classifier(6, 7, C), nn.CrossEntropyLoss(), (torch.randn(9, 6), torch.randint(C, (9,))), "0")
    assert result, result
    assert result.method == "laplacian in the input"
    case = CASES["residual"]
    with pytest.raises(pf.errors.InputError, match="several positions in a sample; verify a smaller layer"):
        pf.verify(case.build(), case.loss, (case.inputs, case.targets), case.layers[0])


def test_verify_says_what_a_long_truth_costs():
    model, data = classifier(6, 7, C), (torch.randn(9, 6), torch.randint(C, (9,)))
    message = (
        r"layer '2' of 28 weights: the truth of 5 samples takes 28 backward passes, about .* s, more than seconds=0; "
        r"pass fewer samples=, a smaller layer of the same kind, or seconds=None"
    )
    with pytest.raises(pf.errors.InputError, match=message):
        pf.verify(model, nn.CrossEntropyLoss(), data, samples=5, seconds=0)
    assert pf.verify(model, nn.CrossEntropyLoss(), data, samples=5, seconds=None)


def test_verify_says_what_a_long_laplacian_costs(monkeypatch):
    monkeypatch.setattr("pyflatness.verification._DEFINITION_ENTRIES", 0)
    model, data = classifier(6, 7, C), (torch.randn(9, 6), torch.randint(C, (9,)))
    with pytest.raises(
        pf.errors.InputError, match=r"layer '0' of 42 weights: the truth of 9 samples takes 6 backward passes"
    ):
        pf.verify(model, nn.CrossEntropyLoss(), data, "0", seconds=0)


def test_verify_has_a_bar(monkeypatch):
    shown = []

    class Shown(progress.Progress):
        def add_task(self, description, total=None, **options):
            shown.append((description, total))
            return super().add_task(description, total=total, **options)

    monkeypatch.setattr(progress, "Progress", Shown)
    model, data = classifier(6, 7, C), (torch.randn(9, 6), torch.randint(C, (9,)))
    pf.verify(model, nn.CrossEntropyLoss(), data, progress=False)
    assert shown == []
    pf.verify(model, nn.CrossEntropyLoss(), data, progress=True)
    assert ("backward passes", 7 * C) in shown


@pytest.mark.parametrize("seconds", [-1, "1 min", float("nan"), True])
def test_verify_takes_seconds(seconds):
    with pytest.raises(pf.errors.InputError, match=r"seconds=.*: a number of seconds"):
        pf.verify(classifier(6, C), nn.CrossEntropyLoss(), (torch.randn(9, 6), torch.randint(C, (9,))), seconds=seconds)


class Surrogate(nn.Module):
    """Compute a sine whose gradients are those of tanh."""

    def forward(self, x):
        return x.tanh() + (x.sin() - x.tanh()).detach()


class Hooked(nn.Module):
    """Compute a sine, with a hook on its node of autograd's graph, which no watch sees, that halves gradients."""

    def forward(self, x):
        result = x.sin()
        if result.grad_fn is not None:
            result.grad_fn.register_hook(lambda inputs, outputs: tuple(gradient / 2 for gradient in inputs))
        return result


def differences(middle):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), middle, nn.Linear(6, 3)).double().eval()
    found = pf.verify(model, nn.CrossEntropyLoss(), (torch.randn(9, 5).double(), torch.arange(9) % 3), "0")
    assert all(check.ok for check in found.checks)
    return found


def test_the_loss_itself_changes_as_its_derivatives_say():
    found = differences(nn.Tanh())
    assert found
    assert len(found.differences) == 2
    for difference in found.differences:
        assert difference.value == pytest.approx(difference.autograd, rel=1e-3)
        assert difference.bound < 1e-3 * abs(difference.value)


@pytest.mark.parametrize("middle", [Surrogate, Hooked])
def test_gradients_that_are_not_those_of_the_function(middle):
    found = differences(middle())
    assert not found
    assert all(difference.bound is not None and not difference.ok for difference in found.differences)
    assert "ALL PATHS AGREE, BUT THE GRADIENTS THAT THE MODEL DEFINES ARE NOT THOSE OF ITS LOSS" in repr(found)


def test_a_kink_nearby_is_told():
    weight = torch.zeros(3, dtype=torch.float64)
    found = _difference(weight, torch.ones_like(weight), lambda: weight.abs().sum(), 0.0, 1.0)
    assert found.bound is None
    assert found.ok
    assert "kink nearby" in str(found)
    assert not weight.any()
