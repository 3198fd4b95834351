"""Eigenvalue measures: what they refuse and say, what they leave alone, and models that are wrapped."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pyflatness as pf
from pyflatness.hessian import row_blocks
from support.combinations import every
from support.functions import Opaque, Relu, network
from support.grid import CASES, Net
from support.networks import mlp

CASE = CASES["mlp Tanh"]
LOSS, X, Y = CASE.loss, CASE.inputs, CASE.targets
MEASURES = ("lambda_max", "relative_flatness_max")


def spoiled(rows=(3,)):
    x = X.clone()
    x[list(rows)] = torch.nan
    return list(zip(x.split(2), Y.split(2), strict=True))


@every(policy=["raise", "omit", "propagate"], activation=[nn.ReLU, nn.Tanh], measure=[*MEASURES])
def test_nan(measure, activation, policy):
    with torch.random.fork_rng(), torch.no_grad():
        model = mlp(5, 6, 4, activation=activation).double().eval()
    if policy == "propagate":
        report = pf.measure(model, LOSS, spoiled(), measures=measure, nan_policy=policy)
        assert all(math.isnan(report[layer, measure].value) for layer in report.layers)
        assert not report["0", measure].exact
        return
    with pytest.raises(pf.errors.NonFiniteError, match=r"batch 1: .* leave them out of the data"):
        pf.measure(model, LOSS, spoiled(), measures=measure, nan_policy=policy)


def test_the_first_layer_with_nan_is_named():
    """Not any of them, as the order of a set of their names has it, which is another one in each process."""
    with torch.random.fork_rng(), torch.no_grad():
        model = mlp(5, *[6] * 12, 4).double().eval()
    with pytest.raises(pf.errors.NonFiniteError, match=r"gradients of layer '0'"):
        pf.measure(model, LOSS, spoiled(), measures="relative_flatness_max", nan_policy="omit")


@pytest.mark.parametrize("measure", MEASURES)
def test_non_finite_weights_are_named(measure):
    model = CASE.build()
    model[2].weight.data[0, 0] = torch.inf
    with pytest.raises(pf.errors.NonFiniteError, match=r"layer '2': its weight has 1 entries"):
        pf.measure(model, LOSS, (X, Y), measures=measure)


@pytest.mark.parametrize("measure", MEASURES)
def test_all_targets_ignored(measure):
    with pytest.raises(pf.errors.InputError, match="every one is ignored"):
        pf.measure(CASE.build(), LOSS, (X, torch.full_like(Y, -100)), measures=measure)


@pytest.mark.parametrize("measure", MEASURES)
def test_targets_that_do_not_fit(measure):
    with pytest.raises(pf.errors.InputError, match=r"batch 0: targets: class 7 does not exist"):
        pf.measure(CASE.build(), LOSS, (X, torch.full_like(Y, 7)), measures=measure)
    with pytest.raises(pf.errors.InputError, match=r"batch 0: targets: a tensor is wanted, got list"):
        pf.measure(CASE.build(), LOSS, [(X, Y.tolist())], measures=measure)


@pytest.mark.parametrize("measure", [*MEASURES, "scaled_trace", "scaled_lambda_max"])
def test_dense_convolutions_are_not_there_yet(measure):
    case = CASES["cnn"]
    with pytest.raises(pf.errors.NotYetError, match=r"layer '\w+': .*conv='affine'.* conv='filter' gives"):
        pf.measure(case.build(), case.loss, (case.inputs, case.targets), measures=measure, conv="affine")


@pytest.mark.parametrize("measure", ["scaled_trace", "largest_scaled_lambda_max"])
def test_scaled_measures_are_not_normalised(measure):
    model = CASES["mlp ReLU"].build()
    with pytest.raises(pf.errors.NotYetError, match="normalize='std' is not there for them"):
        pf.measure(model, LOSS, (X, Y), measures=measure, normalize="std")


@pytest.mark.parametrize("measure", MEASURES)
def test_iterators_are_refused(measure):
    with pytest.raises(pf.errors.InputError, match=r"can be read once, and \d+ reads are needed"):
        pf.measure(CASE.build(), LOSS, iter([(X, Y)]), measures=measure)


IMAGES = torch.randn(6, 4, 3, 3, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 3


@pytest.mark.parametrize("measure", MEASURES)
def test_operations_without_a_second_derivative(measure):
    net = network(F.hardsigmoid)
    with pytest.raises(pf.errors.InputError, match=r"layer 'body': an operation behind it has no second derivative"):
        pf.measure(net, nn.CrossEntropyLoss(), IMAGES, layers="body", measures=measure)
    with pytest.raises(pf.errors.InputError, match=r"no second derivative .* of the GGN too"):
        pf.measure(net, nn.CrossEntropyLoss(), IMAGES, layers="body", measures="lambda_max", curvature="ggn")


@pytest.mark.parametrize("measure", MEASURES)
def test_functions_that_torch_did_not_write(measure):
    options = {"layers": "body", "measures": measure}
    net, loss, bare = network(Relu.apply), nn.CrossEntropyLoss(), network(torch.square)
    with pytest.raises(pf.errors.InputError, match=r"behind layer 'body' is a function that torch did not write"):
        pf.measure(net, loss, IMAGES, **options)
    found = pf.measure(net, loss, IMAGES, curvature="hessian", **options)["body", measure]
    expected = pf.measure(bare, loss, IMAGES, curvature="hessian", **options)["body", measure]
    assert found.value == pytest.approx(expected.value, rel=1e-4)
    assert expected.exact
    assert not found.exact
    assert "taken as they are" in str(found)
    missing = r"layer 'body': the second derivative of a function behind it is missing"
    with pytest.raises(pf.errors.InputError, match=missing):
        pf.measure(network(Opaque.apply), loss, IMAGES, curvature="hessian", **options)


def test_more_products_than_are_reckoned_with_are_refused():
    net = nn.Sequential(nn.Conv2d(20, 20, 3), nn.Tanh(), nn.Flatten(), nn.Linear(180, 3)).eval()
    data = torch.randn(4, 20, 5, 5), torch.arange(4) % 3
    with pytest.raises(pf.errors.NotYetError, match=r"layer '0': .* need 3600 products, .* curvature='ggn'"):
        pf.measure(net, nn.CrossEntropyLoss(), data, measures="relative_flatness_max")
    assert not pf.measure(net, LOSS, data, measures="relative_flatness_max", curvature="ggn")["0", MEASURES[1]].exact


def test_curved_layers_that_fit_nowhere_are_refused(monkeypatch):
    monkeypatch.setattr("pyflatness.hessian.row_blocks.fit", lambda columns, budget: False)
    net = nn.Sequential(nn.Linear(60, 40), nn.Tanh(), nn.Linear(40, 3)).eval()
    data = torch.randn(4, 60), torch.arange(4) % 3
    with pytest.raises(pf.errors.NotYetError, match=r"layer '0': .* need 2400 products"):
        pf.measure(net, nn.CrossEntropyLoss(), data, measures="relative_flatness_max", memory=1)


def test_a_part_that_runs_out_of_memory_counts_once(monkeypatch):
    """Also where some of its signals were taken in already."""
    case = CASES["tokens"]
    options = {"layers": "mix", "measures": "relative_flatness_max"}
    data = case.inputs, case.targets
    expected = pf.measure(case.build(), case.loss, data, **options)["mix", "relative_flatness_max"].value
    add, calls = row_blocks.add_gradients, []

    def failing(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("not enough memory: you tried to allocate 1 bytes")
        add(*arguments)

    monkeypatch.setattr(row_blocks, "add_gradients", failing)
    found = pf.measure(case.build(), case.loss, data, **options)["mix", "relative_flatness_max"]
    assert found.value == pytest.approx(expected, rel=1e-12)
    assert found.samples == case.samples


def test_a_loader_that_writes_every_batch_into_the_same_tensors():
    case = CASES["mlp ReLU"]
    x, y = torch.empty_like(case.inputs[:2]), torch.empty_like(case.targets[:2])

    class Loader:
        def __iter__(self):
            for start in range(0, case.samples, 2):
                x.copy_(case.inputs[start : start + 2])
                y.copy_(case.targets[start : start + 2])
                yield x, y

    expected, found = (pf.measure(case.build(), LOSS, data, measures=MEASURES) for data in ((X, Y), Loader()))
    for layer in expected.layers:
        for measure in MEASURES:
            assert found[layer, measure].value == pytest.approx(expected[layer, measure].value, rel=1e-9)


def test_one_that_does_not_converge_says_so(monkeypatch):
    monkeypatch.setattr("pyflatness.numerics.lanczos.MAX_PRODUCTS", 2)
    report = pf.measure(CASE.build(), LOSS, (X, Y), measures=["lambda_max", "scaled_lambda_max"])
    for measure in report.measures:
        assert not report["0", measure].exact
        assert any("not converged" in note for note in report["0", measure].notes)


def test_seeds_and_repetition():
    one, same, other = (pf.measure(CASE.build(), LOSS, (X, Y), measures=MEASURES, seed=s) for s in (0, 0, 1))
    for layer in one.layers:
        for measure in MEASURES:
            assert one[layer, measure].value == same[layer, measure].value
            assert one[layer, measure].value == pytest.approx(other[layer, measure].value, rel=1e-9)


def test_transposed_weights():
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    first = conv1d(6, 5).double()
    model = nn.Sequential(first, nn.Tanh(), nn.Linear(6, 4).double()).eval()
    plain = nn.Sequential(nn.Linear(5, 6).double(), nn.Tanh(), model[2]).eval()
    with torch.no_grad():
        plain[0].weight.copy_(first.weight.t())
        plain[0].bias.copy_(first.bias)
    one, other = (pf.measure(net, LOSS, (X, Y), measures=MEASURES) for net in (model, plain))
    for layer in ("0", "2"):
        for measure in MEASURES:
            assert one[layer, measure].value == pytest.approx(other[layer, measure].value, rel=1e-9)
    assert one["lambda_max"].value == pytest.approx(other["lambda_max"].value, rel=1e-9)


def test_compiled_models_and_keyword_calls():
    def keywords(net, x):
        return net.b(input=torch.tanh(net.a(input=x)))

    model = Net(keywords, a=nn.Linear(5, 6).double(), b=nn.Linear(6, 4).double()).eval()
    plain = nn.Sequential(model.a, nn.Tanh(), model.b).eval()
    expected = pf.measure(plain, LOSS, (X, Y), measures=MEASURES)
    found = pf.measure(torch.compile(model, backend="eager"), LOSS, (X, Y), measures=MEASURES)
    for layer, other in (("a", "0"), ("b", "2")):
        for measure in MEASURES:
            assert found[layer, measure].value == pytest.approx(expected[other, measure].value, rel=1e-9)
