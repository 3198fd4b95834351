"""Bounds of C24 with all parameters, elementwise adaptive sharpness at interpolation, and Eq. 6 for every power."""

import math

import pytest
import torch
from torch import nn

import pyflatness as pf
from support import networks
from support.brute_force import network, one
from support.cases import INDICES, C, M
from support.grid import normal
from support.jacobian_truth import places
from support.residual import LOSS

X = normal(10, 6, M)
DATA = X, INDICES
CUT = [(X[:4], INDICES[:4]), (X[4:], INDICES[4:])]


def model(activation=nn.ReLU):
    return network(M, 6, 5, C, activation=activation)


def derivatives(net):
    """Of each sample the derivatives of all outputs in each parameter, {name: (n, C, …)}."""
    found = {name: [] for name, _ in net.named_parameters()}
    for x in X:
        rows = [torch.autograd.grad(f, [*net.parameters()], retain_graph=True) for f in net(x)]
        for position, name in enumerate(found):
            found[name].append(torch.stack([row[position] for row in rows]))
    return {name: torch.stack(each).detach() for name, each in found.items()}


def jacobians(net, name):
    """Of each sample x and J at the input of a layer."""
    at = [places(net, x.unsqueeze(0), [name])[name] for x in X]
    return torch.stack([x for x, _ in at]), torch.stack([jacobian for _, jacobian in at])


def adaptive(net):
    """(1/n) Σ_i Σ_j θ_j² |∂f_i/∂θ_j|²."""
    parameters = {name: w.detach() for name, w in net.named_parameters()}
    return sum(float((found * parameters[name]).square().sum()) for name, found in derivatives(net).items()) / len(X)


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
def test_adaptive_sharpness_at_interpolation(activation):
    net = model(activation)
    assert one("interpolation_adaptive_sharpness", net, LOSS, CUT).value == pytest.approx(adaptive(net), rel=1e-10)


def test_it_is_adaptive_sharpness_where_the_loss_is_zero():
    """Lemma E.2 at ε = 0, for a network with curvature: with Σ_i ½|f_i - y_i|² / n the two are one number."""
    net = model(nn.Tanh)
    targets = net(X).detach()

    def half(outputs, y):
        return (outputs - y).square().sum(dim=1).mean() / 2

    expected = one("adaptive_sharpness", net, half, (X, targets)).value
    assert one("interpolation_adaptive_sharpness", net, half, (X, targets)).value == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
def test_bounds_by_the_sharpness_of_all_parameters(activation):
    net = model(activation)
    S = sum(float(found.square().sum()) for found in derivatives(net).values()) / len(X)
    report = pf.measure(net, LOSS, CUT, measures=["mls_sharpness_bound", "mls", "nmls"])
    squares = 0.0
    for name in ("0", "2", "4"):
        x, _ = jacobians(net, name)
        ratios = torch.linalg.matrix_norm(net.get_submodule(name).weight, 2).detach() / x.norm(dim=1)
        expected = math.sqrt(float(ratios.square().mean()) * S)
        assert report[name, "mls_sharpness_bound"].value == pytest.approx(expected, rel=1e-10)
        assert report[name, "mls"].value <= expected
        squares += float(ratios.square().mean())
    assert report["mls_sharpness_bound"].value == pytest.approx(math.sqrt(squares * S), rel=1e-10)
    assert report["nmls"].value <= report["mls_sharpness_bound"].value
    bounds = pf.theory.bounds(net, LOSS, CUT, sharpness="all")
    assert report["0", "mls_sharpness_bound"].value == pytest.approx(bounds["0", "11"].right, rel=1e-12)
    assert report["mls_sharpness_bound"].value == pytest.approx(bounds["12"].right, rel=1e-12)


def test_sampling_of_other_measures_does_not_sample_it():
    found = pf.measure(model(), LOSS, DATA, measures=["mls_sharpness_bound", "trace"], probes=2)
    exact = pf.measure(model(), LOSS, DATA, measures="mls_sharpness_bound")
    assert found["mls_sharpness_bound"].value == exact["mls_sharpness_bound"].value


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
def test_proposition_e4(activation):
    net = model(activation)
    bounds, every = pf.theory.bounds(net, LOSS, CUT, adaptive=True), derivatives(net)
    for name in ("0", "2", "4"):
        weight = net.get_submodule(name).weight.detach()
        x, jacobian = jacobians(net, name)
        left = float((jacobian * x.unsqueeze(1)).square().sum()) / (len(X) * len(weight))
        own = float((every[f"{name}.weight"] * weight).square().sum()) / len(X)
        for equation, right in (("44, W", own), ("44", adaptive(net))):
            bound = bounds[name, equation]
            assert (bound.left, bound.right) == pytest.approx((left, right), rel=1e-10)
            assert bound.guaranteed
            assert bound.left <= bound.right
    with pytest.raises(pf.errors.InputError, match="equation '44'"):
        pf.theory.bounds(net, LOSS, DATA)["0", "44"]


def test_proposition_e4_is_reached():
    """One row and one column: J_jk² W_k² x² = (J W x)² with d = 1."""
    net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 2, bias=False)).double()
    found = pf.theory.bounds(net, nn.MSELoss(), (X[:, :1], torch.zeros(6, 2).double()), adaptive=True)["0", "44, W"]
    assert found.left == pytest.approx(found.right, rel=1e-12)


@pytest.mark.parametrize("sharpness", [None, "all"])
def test_equation_6_for_every_power(sharpness):
    net = model()
    bounds, every = pf.theory.bounds(net, LOSS, CUT, powers=[1, 3, 40], sharpness=sharpness), derivatives(net)
    chosen = [found for name, found in every.items() if sharpness == "all" or name.endswith("weight")]
    theta = sum(found.square().flatten(1).sum(dim=1) for found in chosen).sqrt()
    for name in ("0", "2", "4"):
        x, jacobian = jacobians(net, name)
        s, g = torch.linalg.svdvals(jacobian)[:, 0], every[f"{name}.weight"].flatten(1).norm(dim=1)
        factor = torch.linalg.matrix_norm(net.get_submodule(name).weight, 2).detach() / x.norm(dim=1).min()
        for power in (1, 3, 40):
            for equation, right in ((f"6, W, k = {power}", g), (f"6, k = {power}", theta)):
                bound = bounds[name, equation]
                sides = [float((part**power).mean().log()) for part in (s, factor * right)]
                assert bound.log
                assert [bound.left, bound.right] == pytest.approx(sides, rel=1e-9)
                assert bound.left <= bound.right
    again = pf.theory.bounds(net, LOSS, CUT, powers=[2], sharpness=sharpness)
    assert again["0", "6, k = 2"].right == pytest.approx(math.log(again["0", "6"].right), rel=1e-9)


def test_powers_that_do_not_fit():
    with pytest.raises(pf.errors.InputError, match="powers"):
        pf.theory.bounds(model(), LOSS, DATA, powers=[0])
    with pytest.raises(pf.errors.InputError, match="sharpness=None or 'all'"):
        pf.theory.bounds(model(), LOSS, DATA, powers=[3], sharpness=1e9)


@pytest.mark.parametrize("name", ["mlp Tanh", "cnn", "residual"])
def test_normalised_sensitivity_by_ascent(name):
    case = networks.CASES[name]
    data = case.inputs, case.targets
    exact = pf.representation(case.build(), case.loss, data, measures="normalized_mls", per_sample=True)
    found = pf.measures.mls_adversarial(case.build(), case.loss, data, steps=300, normalized=True, per_sample=True)
    torch.testing.assert_close(found.per_sample, exact["normalized_mls"].per_sample, rtol=2e-4, atol=0)
    assert found.value == pytest.approx(float(found.per_sample.mean()), rel=1e-12)
    few = pf.measure(case.build(), case.loss, data, measures="normalized_mls_adversarial")
    assert few["normalized_mls_adversarial"].value <= found.value * (1 + 1e-9)


def test_pac_bayes_from_the_initialisation():
    net, start = model(), network(M, 6, 5, C, seed=3)
    data = X, net(X).argmax(dim=1)
    found = pf.measures.pac_bayes(net, LOSS, data, initial=start)
    weights = {name: w.detach() for name, w in net.named_parameters() if w.ndim > 1}
    steps = torch.cat([(w - start.get_parameter(name)).detach().flatten() for name, w in weights.items()])
    rest = math.log(len(X) / found.sigma) + 10
    assert found.initial_bound == pytest.approx(float(steps.square().sum()) / (4 * found.sigma**2) + rest)
    sigma, square = found.magnitude.sigma, sum(float(w.square().sum()) for w in weights.values())
    terms = [
        math.log((1e-6 + (sigma**2 + 1) * square / len(steps)) / (1e-6 + sigma**2 * step**2)) for step in steps.tolist()
    ]
    assert found.magnitude_origin_bound == pytest.approx(sum(terms) / 4 + math.log(len(X) / sigma) + 10)
    scored = pf.measure(net, LOSS, data, measures="pac_bayes_magnitude")["pac_bayes_magnitude"]
    assert scored.value == found.magnitude.flatness == 1 / sigma**2
    without = pf.measures.pac_bayes(net, LOSS, data)
    assert (without.initial_bound, without.magnitude_origin_bound) == (None, None)


def test_the_gap_in_sums():
    """P19: 5 Σtest - Σtrain for five times as many training samples."""
    net = network(M, 6, C)
    x, y = normal(20, 20, M), torch.arange(20) % C
    found = pf.generalization_gap(net, nn.CrossEntropyLoss(), (x, y), (x[:4] + 1, y[:4]))
    total = nn.CrossEntropyLoss(reduction="sum")
    expected = 5 * total(net(x[:4] + 1), y[:4]) - total(net(x), y)
    assert found.summed_gap == pytest.approx(float(expected.detach()), rel=1e-12)
