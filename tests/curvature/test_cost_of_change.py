"""The cost of a change of weights against derivatives of the loss along it, by nested autograd in float64."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pyflatness as pf
from pyflatness.passes import linearity


class Tokens(nn.Module):
    """An embedding with padding, attention with packed projections, and a head over tokens."""

    def __init__(self, activation=F.relu):
        super().__init__()
        self.embed = nn.Embedding(7, 4, padding_idx=0)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.inner, self.head, self.activation = nn.Linear(4, 5), nn.Linear(5, 3), activation

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(self.activation(self.inner(x))).movedim(-1, 1)


class Twice(nn.Module):
    """A layer that is called twice, and one with a weight that is computed of others."""

    def __init__(self):
        super().__init__()
        self.shared, self.normed = nn.Linear(4, 4), nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))

    def forward(self, x):
        return self.normed(self.shared(self.shared(x).tanh()))


def _convolutions():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular"),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 6, 3, stride=2, dilation=2, groups=2, padding=2),
        nn.ReLU(),
        nn.ConvTranspose2d(6, 2, 2, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2 * 6 * 6, 3),
    )


def _bags():
    return nn.Sequential(nn.EmbeddingBag(6, 4, mode="mean"), nn.ReLU(), nn.Linear(4, 3))


def _images():
    return torch.randn(5, 2, 6, 6, dtype=torch.float64), torch.randint(3, (5,))


def _texts():
    targets = torch.randint(3, (5, 4))
    targets[0, 1:] = -100
    return torch.randint(7, (5, 4)), targets


NETWORKS = {
    "convolutions": (_convolutions, _images),
    "tokens": (Tokens, _texts),
    "tokens, smooth": (lambda: Tokens(F.gelu), _texts),
    "bags": (_bags, lambda: (torch.randint(6, (5, 3)), torch.randint(3, (5,)))),
    "twice": (Twice, lambda: (torch.randn(5, 4, dtype=torch.float64), torch.randint(3, (5,)))),
}


def _made(name):
    torch.manual_seed(1)
    network, data = NETWORKS[name]
    return network().double().eval(), data()


@contextlib.contextmanager
def _moved(model, changes, t):
    """The model with weights w + t Δ inside."""
    with contextlib.ExitStack() as stack:
        for name, change in changes.items():
            place, key = name.rpartition(".")[::2] if name.endswith("_weight") else (name, "weight")
            module = model.get_submodule(place)
            if key not in module._parameters or isinstance(module, nn.EmbeddingBag):
                old, moved = module.forward, module.weight.detach() + t * change  # torch's bags have one derivative
                stack.callback(setattr, module, "forward", old)
                if isinstance(module, nn.EmbeddingBag):
                    module.forward = lambda tokens, moved=moved: F.embedding(tokens, moved).mean(dim=1)
                else:  # parametrised
                    module.forward = lambda x, module=module, moved=moved: F.linear(x, moved, module.bias)
                continue
            parameter = module._parameters[key]
            stack.callback(module._parameters.__setitem__, key, parameter)
            module._parameters[key] = parameter.detach() + t * change
        yield


def _along(model, loss, data, changes):
    """First derivative, half the second, and the whole change of the loss along changes."""
    inputs, targets = data
    t = torch.zeros((), dtype=torch.float64, requires_grad=True)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        with _moved(model, changes, t):
            value = loss(model(inputs), targets)
            (first,) = torch.autograd.grad(value, t, create_graph=True)
            (second,) = torch.autograd.grad(first, t)
        with _moved(model, changes, 1.0):
            after = loss(model(inputs), targets)
    return first.item(), 0.5 * second.item(), (after - value).item()


@pytest.mark.parametrize("name", NETWORKS)
def test_is_half_the_second_derivative_along_the_change(name):
    model, (inputs, targets) = _made(name)
    loss = nn.CrossEntropyLoss(label_smoothing=0.1)
    generator = torch.Generator().manual_seed(2)
    layers = pf.measure(model, loss, (inputs, targets), measures="weight_norm").layers
    changes = {}
    for layer in layers:
        place, key = layer.rpartition(".")[::2] if layer.endswith("_weight") else (layer, "weight")
        shape = getattr(model.get_submodule(place), key).shape
        changes[layer] = 0.1 * torch.randn(shape, generator=generator, dtype=torch.float64)
    batches = [(inputs[:3], targets[:3]), (inputs[3:], targets[3:])]
    report = pf.cost_of_change(model, loss, batches, changes)
    assert set(report.layers) == set(layers)
    for layer in (*layers, ""):
        of = {layer: changes[layer]} if layer else changes
        if layer == "embed":  # a row of padding has no derivative
            of = {layer: changes[layer].index_fill(0, torch.tensor([0]), 0.0)}
        first, second, change = _along(model, loss, (inputs, targets), of if layer else _without_padding(changes))
        assert report[layer, "gradient_of_change"].value == pytest.approx(first, rel=1e-9, abs=1e-14)
        assert report[layer, "cost_of_change"].value == pytest.approx(second, rel=1e-9, abs=1e-14)
        assert report[layer, "cost_of_change"].exact
        if "embed" not in changes or layer not in ("embed", ""):
            assert report[layer, "loss_change"].value == pytest.approx(change, rel=1e-9, abs=1e-14)


def _without_padding(changes):
    return {
        layer: change.index_fill(0, torch.tensor([0]), 0.0) if layer == "embed" else change
        for layer, change in changes.items()
    }


def test_probes_of_the_ggn_do_not_ask_where_it_is_the_hessian(monkeypatch):
    """Which takes longer than they do; but where all columns are no more than the probes values may be exact."""
    model, data = _made("convolutions")
    changes = pf.changes.rounded(model, 4)
    exact = pf.cost_of_change(model, nn.CrossEntropyLoss(), data, changes, curvature="ggn", measured=False)
    assert exact["7", "cost_of_change"].exact
    options = {"curvature": "ggn", "measured": False}
    every = pf.cost_of_change(model, nn.CrossEntropyLoss(), data, changes, probes=2, **options)["7", "cost_of_change"]
    assert (every.value, every.method, every.exact) == (pytest.approx(exact["7", "cost_of_change"].value), "ggn", True)
    monkeypatch.delattr(linearity.Certificate, "extend")
    found = pf.cost_of_change(model, nn.CrossEntropyLoss(), data, changes, probes=1, **options)
    report = pf.measure(model, nn.CrossEntropyLoss(), data, curvature="ggn", probes=1)
    for sampled in found["7", "cost_of_change"], report["0", "relative_flatness"], report["relative_flatness"]:
        assert (sampled.method, sampled.exact) == ("ggn-sampled", False)
    assert (report["7", "relative_flatness"].method, report["7", "relative_flatness"].exact) == ("head", True)


def test_rows_cost_what_changing_each_alone_costs():
    model, (inputs, targets) = _made("convolutions")
    loss, (layer, change) = nn.CrossEntropyLoss(), pf.changes.rounded(model, 3, layers="2").popitem()
    found = pf.cost_of_change(model, loss, (inputs, targets), {layer: change}, measured=False)[layer, "cost_of_change"]
    assert found.method == "ggn"
    for row, value in enumerate(found.per_neuron):
        alone = torch.zeros_like(change)
        alone[row] = change[row]
        assert float(value) == pytest.approx(_along(model, loss, (inputs, targets), {layer: alone})[1], rel=1e-9)


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
def test_ggn_of_all_changes_together_is_the_dense_one(activation):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), activation(), nn.Linear(5, 3)).double().eval()
    inputs, targets, loss = torch.randn(6, 4).double(), torch.randint(3, (6,)), nn.CrossEntropyLoss()
    changes = pf.changes.pruned(model, 0.5)
    report = pf.cost_of_change(model, loss, (inputs, targets), changes, curvature="ggn", measured=False)
    t = torch.zeros((), dtype=torch.float64)

    def outputs(t):
        with _moved(model, changes, t):
            return model(inputs)

    moved, p = torch.autograd.functional.jacobian(outputs, t), model(inputs).detach().softmax(1)
    expected = ((p * moved.square()).sum(1) - (p * moved).sum(1).square()).mean() / 2
    assert report["cost_of_change"].value == pytest.approx(float(expected), rel=1e-10)
    assert not report["cost_of_change"].exact
    assert report["2", "cost_of_change"].exact
    assert report["0", "cost_of_change"].exact == (activation is nn.ReLU)


def test_many_terms_take_hessian_products_of_the_same_value():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 40)).double().eval()
    data, loss = (torch.randn(8, 4).double(), torch.randint(40, (8,))), nn.CrossEntropyLoss()
    changes = pf.changes.rounded(model, 3)
    report = pf.cost_of_change(model, loss, data, changes, measured=False)
    for layer in changes:
        assert report[layer, "cost_of_change"].method == "hessian"
        assert report[layer, "cost_of_change"].per_neuron is None
        expected = _along(model, loss, data, {layer: changes[layer]})[1]
        assert report[layer, "cost_of_change"].value == pytest.approx(expected, rel=1e-9)


def test_cost_by_trace_is_the_trace_times_the_mean_square():
    model, data = _made("convolutions")
    changes, loss = pf.changes.of_rank(model, 1), nn.CrossEntropyLoss()
    report = pf.cost_of_change(model, loss, data, changes, by_trace=True, measured=False)
    traces = pf.measure(model, loss, data, measures="trace")
    for layer, change in changes.items():
        expected = traces[layer, "trace"].value * change.square().sum() / change.numel()
        assert report[layer, "cost_by_trace"].value == pytest.approx(float(expected), rel=1e-12)
    assert report["cost_by_trace"].value == pytest.approx(sum(report[n, "cost_by_trace"].value for n in changes))


def test_omits_samples_with_nan_where_only_cotangents_are_sent():
    model, (inputs, targets) = _made("convolutions")
    spoilt = inputs.clone()
    spoilt[2, 0, 0, 0] = torch.nan
    changes = pf.changes.rounded(model, 3, layers="0")
    options = {"measured": False, "nan_policy": "omit"}
    found = pf.cost_of_change(model, nn.CrossEntropyLoss(), (spoilt, targets), changes, **options)
    kept = torch.tensor([0, 1, 3, 4])
    expected = pf.cost_of_change(model, nn.CrossEntropyLoss(), (inputs[kept], targets[kept]), changes, **options)
    assert found["0", "cost_of_change"].value == pytest.approx(expected["0", "cost_of_change"].value, rel=1e-12)
    assert found["0", "cost_of_change"].omitted == 1
    rows = [report["0", "cost_of_change"].per_neuron for report in (found, expected)]
    torch.testing.assert_close(*rows)


BAD = {
    "no mapping": (None, "mapping from names of layers"),
    "no layers": ({}, "mapping from names of layers"),
    "a pattern": ({"*": torch.ones(1)}, "'\\*' is not the name of one layer"),
    "another shape": ({"7": torch.ones(2, 2)}, r"weight's shape \(3, 72\).* got one of shape \(2, 2\)"),
    "a number": ({"7": 0.1}, "a tensor of the weight's shape"),
    "NaN": ({"7": torch.full((3, 72), torch.nan)}, "finite numbers"),
    "no such layer": ({"9": torch.ones(1)}, "'9'"),
}


@pytest.mark.parametrize("case", BAD)
def test_refuses_what_is_no_change(case):
    model, data = _made("convolutions")
    changes, message = BAD[case]
    with pytest.raises(pf.errors.InputError, match=message):
        pf.cost_of_change(model, nn.CrossEntropyLoss(), data, changes)


def test_refuses_adaptive_probes():
    model, data = _made("convolutions")
    with pytest.raises(pf.errors.InputError, match="a number of probes, or None"):
        pf.cost_of_change(model, nn.CrossEntropyLoss(), data, pf.changes.rounded(model), probes="adaptive")


def test_probes_lie_around_the_exact_value_and_few_columns_stay_exact():
    model, data = _made("tokens")
    changes, how = pf.changes.rounded(model, 3), {"curvature": "ggn", "measured": False}
    exact = pf.cost_of_change(model, nn.CrossEntropyLoss(), data, changes, **how)
    sampled = pf.cost_of_change(model, nn.CrossEntropyLoss(), data, changes, probes=6, **how)
    for layer in (*changes, ""):
        estimate, truth = sampled[layer, "predicted"], exact[layer, "predicted"]
        assert estimate.method == "ggn-sampled"
        assert abs(estimate - truth) < 4 * estimate.stderr < 4 * abs(truth)
        assert truth == pytest.approx(exact[layer, "gradient_of_change"] + exact[layer, "cost_of_change"], rel=1e-12)
    enough = pf.cost_of_change(model, nn.CrossEntropyLoss(), data, changes, probes=8, **how)  # 4 terms of 2 columns
    assert enough["predicted"].stderr is None
    assert enough["predicted"] == pytest.approx(exact["predicted"], rel=1e-12)
