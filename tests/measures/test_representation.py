"""Measures of the representation against full Jacobians and ``svdvals`` in float64."""

import math

import pytest
import torch
from torch import nn

import pyflatness as pf
from support import jacobian_truth, networks
from support.brute_force import network
from support.cases import INDICES, C, M
from support.combinations import every, in_turn
from support.grid import Net, normal
from support.residual import LOSS
from support.unchanged import assert_unchanged, snapshot

X = normal(10, 6, M)
OF_PLACES = ("mls", "normalized_mls", "input_invariant_mls", "log_volume", "volume", "local_dimension")
UNREADABLE = {"gathered tokens"}  # rows cannot be told apart by sample in a batch


@in_turn(2, "name", [name for name in networks.CASES if name not in UNREADABLE and "loss:" not in name])
def test_brute_force_over_the_grid(name):
    case = networks.CASES[name]
    model = case.build().requires_grad_(True)
    truth = jacobian_truth.of_data(model, case.inputs, case.layers)
    batches = [(case.inputs[:2], case.targets[:2]), (case.inputs[2:], case.targets[2:])]
    batches = [batch for batch in batches if len(batch[0])]
    report = pf.representation(model, case.loss, batches, layers=[*case.layers], per_sample=True)
    assert report.layers == tuple(layer for layer in report.layers if layer in case.layers)
    for (place, measure), expected in truth.items():
        if measure == "volume" and not place:
            continue
        estimate = report[place, measure] if place else report[measure]
        torch.testing.assert_close(estimate.per_sample, expected.double(), rtol=1e-8, atol=1e-12)
        assert estimate.value == pytest.approx(float(expected.mean()), rel=1e-8, abs=1e-12)
        assert (estimate.exact, estimate.method, estimate.stderr) == (True, "jacobian", None)
    for network_measure, of_layer in (("nmls", "mls"), ("volume", "volume")):
        expected = sum(truth[layer, of_layer].mean() for layer in case.layers)
        assert report[network_measure].value == pytest.approx(float(expected), rel=1e-8, abs=1e-12)


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
def test_by_the_functional_jacobian(activation):
    model = network(M, 6, 5, C, activation=activation)
    report = pf.measure(model, LOSS, (X, INDICES), measures="mls")
    h = X
    for place, part in enumerate(model):
        if isinstance(part, nn.Linear):
            rest = model[place:]
            jacobians = [torch.autograd.functional.jacobian(rest, row) for row in h]
            expected = torch.stack([torch.linalg.svdvals(j)[0] for j in jacobians]).mean()
            assert report[str(place), "mls"].value == pytest.approx(float(expected), rel=1e-10)
        h = part(h)
    assert report["mls"].value == pytest.approx(report["0", "mls"].value, rel=1e-12)


def spectral(values, inputs=9):
    """A linear layer with these singular values."""
    outputs = len(values)
    left, right = torch.linalg.qr(normal(0, outputs, outputs)).Q, torch.linalg.qr(normal(1, inputs, outputs)).Q
    layer = nn.Linear(inputs, outputs).double()
    layer.weight.data.copy_(left @ torch.diag(values) @ right.t())
    return nn.Sequential(layer)


@pytest.mark.parametrize("outputs", [2, 7, 33])
def test_log_volume_of_singular_values_over_twelve_decades(outputs):
    values = torch.logspace(2, -10, outputs, dtype=torch.float64)
    data = normal(3, 5, outputs + 2), torch.zeros(5, dtype=torch.long)
    report = pf.representation(spectral(values, outputs + 2), LOSS, data)
    assert report["log_volume"].value == pytest.approx(float(values.log().sum()), abs=1e-2)
    assert report["mls"].value == pytest.approx(100, rel=1e-12)
    for top in (1, 2):
        found = pf.representation(spectral(values, outputs + 2), LOSS, data, top=top)["log_volume"].value
        assert found == pytest.approx(float(values[:top].log().sum()), abs=1e-2)


def test_log_volume_of_rows_of_different_sizes_is_good_to_the_last_digits():
    model = nn.Sequential(nn.Linear(9, 4, bias=False)).double()
    rows = torch.linalg.qr(normal(1, 9, 4)).Q.t()
    scales = torch.tensor([1.0, 1e-4, 1e-8, 1e-12], dtype=torch.float64)
    model[0].weight.data.copy_(scales[:, None] * rows)
    value = pf.representation(model, LOSS, (normal(3, 5, 9), INDICES[:5]))["log_volume"].value
    assert value == pytest.approx(float(scales.log().sum()), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_volumes_of_lower_rank(dtype):
    wide, narrow = network(M, 2, C).to(dtype), network(2, 6, C).to(dtype)
    for model, x in ((wide, X), (narrow, X[:, :2])):
        report = pf.representation(model, LOSS, (x.to(dtype), INDICES), per_sample=True)
        assert report["log_volume"].value == -math.inf
        assert report["0", "volume"].value == 0
        assert "6 of 6 samples have a J of lower rank" in str(report)
        assert report["mls"].value > 0
        assert math.isfinite(report["2", "log_volume"].value) == (model is narrow)
        below = pf.representation(model, LOSS, (x.to(dtype), INDICES), top=1)["log_volume"]
        logs = pf.representation(model, LOSS, (x.to(dtype), INDICES), per_sample=True)["mls"].per_sample.log()
        assert below.value == pytest.approx(float(logs.mean()), rel=1e-6)


def test_a_network_that_ignores_its_input():
    model = network(M, 6, C)
    model[2].weight.data.zero_()
    report = pf.representation(model, LOSS, (X, INDICES))
    assert [report[name].value for name in ("mls", "nmls", "normalized_mls", "volume", "local_dimension")] == [0] * 5
    assert report["log_volume"].value == -math.inf


@pytest.mark.parametrize("top", [1, 2, 3, 9])
def test_top(top):
    model = network(M, 6, C, activation=nn.Tanh)
    truth = jacobian_truth.of_data(model, X, ["0", "2"], top=min(top, C))
    report = pf.representation(model, LOSS, (X, INDICES), top=top)
    for name in ("0", "2"):
        for measure in ("log_volume", "volume", "mls"):
            assert report[name, measure].value == pytest.approx(float(truth[name, measure].mean()), rel=1e-9)


def test_tokens_have_no_derivative():
    """Two layers take one embedding: the derivative in it goes through both, whichever is chosen."""

    def forward(net, x):
        h = net.embed(x).mean(1)
        return net.head(torch.tanh(net.one(h)) * net.two(h))

    model = Net(forward, embed=nn.Embedding(7, 6), one=nn.Linear(6, 5), two=nn.Linear(6, 5), head=nn.Linear(5, C))
    data = torch.arange(12).view(6, 2) % 7, INDICES
    whole = pf.representation(model.double(), LOSS, data)
    alone = pf.representation(model, LOSS, data, layers="one")
    expected = jacobian_truth.of_data(model, data[0], ["one", "two"])["one", "mls"].mean()
    for value in (whole["one", "mls"], whole["two", "mls"], alone["one", "mls"]):
        assert value.value == pytest.approx(float(expected), rel=1e-12)
    with pytest.raises(pf.errors.InputError, match="'mls' has no value of the network"):
        whole["mls"]
    assert "no floating-point tensor among a batch's inputs): layers only" in str(whole)


def test_inputs_that_are_changed_in_place():
    """A model writes to its input, and to a layer's behind the layer."""

    def forward(net, x):
        x.sub_(0.5).mul_(2.0)
        h = net.one(x)
        out = net.two(h)
        h.mul_(0.0)
        return net.head(torch.tanh(out) + x)

    def plain(net, x):
        x = 2 * (x - 0.5)
        return net.head(torch.tanh(net.two(net.one(x))) + x)

    model = Net(forward, one=nn.Linear(M, 6), two=nn.Linear(6, M), head=nn.Linear(M, C)).double()
    other = Net(plain, one=model.one, two=model.two, head=model.head)
    found, expected = (pf.representation(net, LOSS, (X.clone(), INDICES)) for net in (model, other))
    for layer in ("one", "two", "head"):
        for name in OF_PLACES:
            assert found[layer, name].value == pytest.approx(expected[layer, name].value, rel=1e-12)
    assert found["mls"].value == pytest.approx(expected["mls"].value, rel=1e-12)


def test_values_do_not_depend_on_batches_or_memory():
    case = networks.CASES["cnn"]
    model = case.build()
    whole = pf.representation(model, case.loss, (case.inputs, case.targets))
    cut = pf.representation(
        model, case.loss, [(x[None], y[None]) for x, y in zip(case.inputs, case.targets, strict=True)]
    )
    small = pf.representation(model, case.loss, (case.inputs, case.targets), memory=1)
    for measure in whole.measures:
        for report in (cut, small):
            assert report[measure].value == pytest.approx(whole[measure].value, rel=1e-10)


def test_jacobians_are_cut_to_the_memory():
    """J of so wide an input takes most of the memory, whether a layer has that input or not."""
    width, outputs, n, memory = 4096, 32, 64, 2**23
    head = nn.Sequential(nn.AdaptiveAvgPool1d(8), nn.Flatten(), nn.Linear(8, outputs))
    model, sizes = head.double(), []
    model.register_forward_hook(lambda net, args, out: sizes.append(len(out)))
    data = normal(5, n, 1, width), torch.zeros(n, dtype=torch.long)
    report = pf.representation(model, LOSS, data, memory=memory, measures="mls")
    assert max(sizes) * outputs * width * 8 <= 1.1 * memory
    assert report["mls"].value == pytest.approx(pf.representation(model, LOSS, data, measures="mls")["mls"].value)


def test_single_precision_and_the_reference_backend():
    case = networks.CASES["cnn"]
    data = case.inputs, case.targets
    exact = pf.representation(case.build(), case.loss, data)
    reference = pf.representation(case.build(), case.loss, data, backend="reference")
    single = pf.representation(case.build().float(), case.loss, (case.inputs.float(), case.targets))
    for measure in exact.measures:
        assert reference[measure].value == pytest.approx(exact[measure].value, rel=1e-10)
        assert single[measure].value == pytest.approx(exact[measure].value, rel=1e-4)
    assert reference["mls"].backend == "reference"


def test_measure_knows_them_by_name_in_one_sweep():
    model, passes = network(M, 6, C), []
    names = [*OF_PLACES, "nmls"]
    handle = model[0].register_forward_hook(lambda *_: passes.append(1))
    found = pf.measure(model, LOSS, iter([(X, INDICES)]), measures=names)  # an iterator is read once
    together = len(passes)
    pf.measure(model, LOSS, (X, INDICES), measures="mls")
    assert len(passes) == 2 * together
    handle.remove()
    same = pf.representation(model, LOSS, (X, INDICES))
    for name in names:
        assert found[name].value == same[name].value


@pytest.mark.parametrize("policy", ["raise", "omit", "propagate"])
def test_nan(policy):
    model, x = network(M, 6, C), X.clone()
    x[2, 1] = torch.nan
    call = {"nan_policy": policy, "per_sample": True}
    if policy == "raise":
        with pytest.raises(
            pf.errors.NonFiniteError, match=r"batch 0: 1 of 6 samples have NaN .* of the model's input, layer '0'"
        ):
            pf.representation(model, LOSS, (x, INDICES), **call)
        return
    report = pf.representation(model, LOSS, (x, INDICES), **call)
    if policy == "propagate":
        assert math.isnan(report["0", "normalized_mls"].value)
        assert report["0", "normalized_mls"].per_sample.isnan().tolist() == [False, False, True, False, False, False]
        return
    kept = [0, 1, 3, 4, 5]
    expected = pf.representation(model, LOSS, (X[kept], INDICES[kept]))
    for name in expected.measures:
        assert report[name].value == pytest.approx(expected[name].value, rel=1e-12)
        assert (report[name].samples, report[name].omitted) == (5, 1)
        assert report[name].per_sample.isnan().sum() == 1
    with pytest.raises(pf.errors.NonFiniteError, match="all 6 samples"):
        pf.representation(model, LOSS, (x * torch.nan, INDICES), nan_policy="omit")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top": 0}, "top=0: a number of singular values"),
        ({"measures": "trace"}, "'trace' is no measure of Jacobians"),
        ({"layers": "9"}, "nothing in the model matches '9'"),
        ({"nan_policy": "skip"}, "nan_policy='skip' does not exist"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(pf.errors.InputError, match=message):
        pf.representation(network(M, 6, C), LOSS, (X, INDICES), **options)


def test_outputs_of_several_lengths():
    """A token's logits each: longer sequences have more outputs."""
    case = networks.CASES["tokens"]
    batches = [(case.inputs, case.targets), (case.inputs[:, :2], case.targets[:, :2])]
    report = pf.representation(case.build(), case.loss, batches, measures="nmls")
    halves = [pf.representation(case.build(), case.loss, [batch], measures="nmls")["nmls"].value for batch in batches]
    assert report["nmls"].value == pytest.approx(sum(halves) / 2, rel=1e-10)
    with pytest.raises(pf.errors.InputError, match="bounds: samples of"):
        pf.theory.bounds(case.build(), case.loss, batches)


def test_hooks_go_with_an_error():
    model, x = network(M, 6, C), X.clone()
    x[2, 1] = torch.nan
    before = snapshot(model)
    with pytest.raises(pf.errors.NonFiniteError) as caught:
        pf.representation(model, LOSS, [(X, INDICES), (x, INDICES)])
    assert_unchanged(model, before)
    assert "batch 1" in str(caught.value)


def test_too_many_outputs():
    model = nn.Sequential(nn.Linear(M, 3000))
    with pytest.raises(
        pf.errors.InputError,
        match=r"3000 outputs of a sample take as many .* more than max_passes=2048; .* mls_adversarial",
    ):
        pf.representation(model, LOSS, (X.float(), INDICES))


@every(together=1, name=["cnn", "attention", "pruned", "weight norm", "checkpointed"], stop=[False, True])
def test_no_trace_is_left(name, stop):
    case = networks.CASES[name]
    model = case.build().requires_grad_(True)
    case.loss(model(case.inputs), case.targets).backward()
    inputs, before = case.inputs.clone(), snapshot(model)

    def forward(net, batch):
        if stop:
            raise KeyboardInterrupt
        return net(batch[0]), batch[1]

    try:
        pf.representation(model, case.loss, (case.inputs, case.targets), forward=forward)
    except KeyboardInterrupt:
        assert stop
    assert_unchanged(model, before)
    assert torch.equal(inputs, case.inputs)
    assert not case.inputs.requires_grad


def test_grad_modes_and_dict_batches():
    model = network(M, 6, C)
    expected = pf.representation(model, LOSS, (X, INDICES))["mls"].value
    with torch.inference_mode():
        assert pf.representation(model, LOSS, (X.clone(), INDICES))["mls"].value == pytest.approx(expected)
    batches = [{"input": X[:4], "labels": INDICES[:4]}, {"input": X[4:], "labels": INDICES[4:]}]
    assert pf.representation(model, LOSS, batches)["mls"].value == pytest.approx(expected)
    one = nn.Linear(M, C).double()
    norm = torch.linalg.matrix_norm(one.weight.detach(), 2)
    assert pf.representation(one, LOSS, (X, INDICES))["nmls"].value == pytest.approx(float(norm))


def test_data_with_gradients_of_their_own():
    model = network(M, 6, C)
    expected = pf.representation(model, LOSS, (X, INDICES))["mls"].value
    x = X.clone().requires_grad_()
    for data in ((x, INDICES), [(2 * x / 2, INDICES)]):
        assert pf.representation(model, LOSS, data)["mls"].value == pytest.approx(expected, rel=1e-12)
    assert x.grad is None
