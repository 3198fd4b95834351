"""``max_passes=``: how many backward passes or Hessian products an exact value may take."""

import pytest
import torch
from torch import nn

import pyflatness as pf
from pyflatness import progress

LOSS = nn.CrossEntropyLoss()
TIME = r"and about \d+ min \d\d s for each 3 samples by the \S+ s that one took"


def network(activation: type[nn.Module] = nn.ReLU, classes: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), activation(), nn.Linear(5, classes)).double().eval()


def data(classes: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(3, 4, dtype=torch.float64), torch.arange(3) % classes


@pytest.mark.parametrize("call", [pf.relative_flatness, pf.block_traces])
def test_backward_passes_are_allowed_up_to_the_limit(call):
    five = call(network(), LOSS, data(), "0", max_passes=5)  # C - 1 columns
    torch.testing.assert_close(torch.as_tensor(five if call is pf.block_traces else five.value), expected(call))
    with pytest.raises(
        pf.errors.InputError, match=rf"takes 5 backward passes a batch .*, more than max_passes=4, {TIME}"
    ):
        call(network(), LOSS, data(), "0", max_passes=4)


def expected(call):
    found = call(network(), LOSS, data(), "0")
    return torch.as_tensor(found if call is pf.block_traces else found.value)


def test_more_than_the_default_where_it_is_allowed():
    """An exact value of 2,099 backward passes, against the definition by the head's formula."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2100).double().eval()
    x, y = torch.randn(2, 3, dtype=torch.float64), torch.tensor([0, 7])
    trace = {"layers": "", "measures": "trace", "progress": False}
    with pytest.raises(pf.errors.InputError, match=r"pass max_passes=2099 to take that time, or probes="):
        pf.measure(model, LOSS, (x, y), **trace)
    found = pf.measure(model, LOSS, (x, y), max_passes=2099, **trace)["trace"]
    p = torch.softmax(model(x).detach(), dim=1)
    traces = x.square().sum(dim=1) * (1 - p.square().sum(dim=1))  # Tr(diag(p) - p pᵀ) |φ|²
    assert found.value == pytest.approx(float(traces.mean()), rel=1e-10)
    assert found.exact


def test_hessian_products():
    message = rf"layer '0': its exact Hessian value takes 4 Hessian products .*, more than max_passes=3, {TIME}"
    with pytest.raises(pf.errors.InputError, match=message + ".* curvature='ggn'"):
        pf.relative_flatness(network(nn.Tanh), LOSS, data(), "0", max_passes=3)
    limited = pf.relative_flatness(network(nn.Tanh), LOSS, data(), "0", max_passes=5)
    assert limited.value == pf.relative_flatness(network(nn.Tanh), LOSS, data(), "0").value


def test_products_over_all_parameters():
    message = rf"takes \d+ Hessian products, one for every entry, more than max_passes=5, {TIME}"
    with pytest.raises(pf.errors.InputError, match=message):
        pf.measure(network(nn.Tanh), LOSS, data(), measures="sharpness", max_passes=5)


def test_jacobians():
    with pytest.raises(
        pf.errors.InputError, match=r"the 6 outputs of a sample .* more than max_passes=5; pass max_passes=6"
    ):
        pf.representation(network(), LOSS, data(), max_passes=5)
    assert pf.representation(network(), LOSS, data(), max_passes=6)["mls"].exact


@pytest.mark.parametrize("given", [0, -1, 2.5, True, "many"])
def test_limits_that_are_none(given):
    with pytest.raises(pf.errors.InputError, match=r"max_passes=.*: a number of passes is wanted, at least 1"):
        pf.measure(network(), LOSS, data(), max_passes=given)


@pytest.mark.parametrize("classes", [101, 102])
def test_many_passes_say_what_fewer_would_give(monkeypatch, capsys, classes):
    """Once in a report, in the value of one layer, beside the progress; not of sampled values, nor a head alone."""
    monkeypatch.setattr(progress, "_EVERY", 0.0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(250, 250), nn.ReLU(), nn.Linear(250, classes)).eval()
    data, note = (torch.randn(6, 250), torch.arange(6)), "101 backward passes a batch; rtol=0.01"
    found = [pf.relative_flatness(model, nn.CrossEntropyLoss(), data, "0", **how) for how in ({}, {"probes": 2})]
    found.append(pf.relative_flatness(model, nn.CrossEntropyLoss(), data))
    assert [note in repr(each) for each in found] == [classes == 102, False, False]
    capsys.readouterr()
    assert str(pf.measure(model, nn.CrossEntropyLoss(), data)).count(note) == (classes == 102)
    assert (f"batches: {note}" in capsys.readouterr().err) == (classes == 102)
