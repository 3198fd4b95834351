"""``max_passes=``: how many backward passes or Hessian products an exact value may take."""

import re
import statistics

import pytest
import torch
from torch import nn

import pyflatness as pf

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
def test_many_passes_say_what_fewer_would_give(capsys, classes):
    """Once before a call and once in a report, in the value of one layer; not of sampled values, nor a head alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(250, 250), nn.ReLU(), nn.Linear(250, classes)).eval()
    data, note = (torch.randn(6, 250), torch.arange(6)), "101 backward passes a batch; rtol=0.01"
    found = [pf.relative_flatness(model, nn.CrossEntropyLoss(), data, "0", **how) for how in ({}, {"probes": 2})]
    found.append(pf.relative_flatness(model, nn.CrossEntropyLoss(), data))
    assert [note in repr(each) for each in found] == [classes == 102, False, False]
    capsys.readouterr()
    batches = [(data[0][:3], data[1][:3]), (data[0][3:], data[1][3:])]
    assert str(pf.measure(model, nn.CrossEntropyLoss(), batches)).count(note) == (classes == 102)
    said = capsys.readouterr().err
    assert said.count("101 backward passes a batch") == said.count("rtol=0.05") == (classes == 102)
    assert not said or re.search(r"columns of the loss's factor\), about \d+ min \d+ s for each 3 samples; rtol", said)
    pf.measure(model, nn.CrossEntropyLoss(), batches, progress=False)
    assert capsys.readouterr().err == ""


def test_many_hessian_products_say_what_they_take(capsys):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(150, 144), nn.Tanh(), nn.Linear(144, 3)).eval()
    data, layer = (torch.randn(20, 150), torch.randint(3, (20,))), {"layers": "0", "measures": "trace"}
    assert pf.measure(model, nn.CrossEntropyLoss(), data, **layer)["0", "trace"].exact
    said = capsys.readouterr().err
    assert re.search(r"layer '0': its exact Hessian value takes 144 Hessian products.*rtol=", said)
    assert "about" not in said  # they go through the graph at once, so that timing them would take as long as they do
    pf.measure(model, nn.CrossEntropyLoss(), data, **layer, rtol=0.05)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("tokens", "sampled"), [(5, False), (9, True)])
def test_a_language_model_without_options_is_measured_by_one_probe(capsys, tokens, sampled):
    """Of so many passes; an option that says what is wanted is followed, and the mean over seeds is the GGN's value."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=16, n_embd=4, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(config).double().eval()
    how = {"data": [{"input_ids": torch.randint(16, (3, tokens))}], "layers": "transformer.h.0.mlp.c_fc"}
    capsys.readouterr()
    found = pf.measure(model, **how)["trace"]
    said = capsys.readouterr().err
    assert ("by one probe" in said, found.exact, found.method == "ggn-sampled") == (sampled, not sampled, sampled)
    assert pf.measure(model, **how, max_passes=3000)["trace"].exact
    if sampled:
        ggn = pf.measure(model, **how, curvature="ggn")["trace"].value
        values = [pf.measure(model, **how, seed=seed)["trace"].value for seed in range(20)]
        assert abs(statistics.fmean(values) - ggn) < 4 * statistics.stdev(values) / 20**0.5
