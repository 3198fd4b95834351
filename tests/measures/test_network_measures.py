"""Measures of a network's parameters that need no sweep, against their definitions by brute force in float64."""

import math

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import pyflatness as pf
from pyflatness.measures import MEASURES
from support.brute_force import X, all_parameters_hessian, network, one, products
from support.cases import INDICES, C, M, N
from support.combinations import in_soak
from support.grid import normal
from support.residual import LOSS
from support.unchanged import assert_unchanged, snapshot

# --- weight norm ------------------------------------------------------------------------------------------------------


def test_weight_norm_of_effective_weights():
    model = network(M, 6, 6, C)
    parametrizations.weight_norm(model[0])
    prune.l1_unstructured(model[2], "weight", amount=0.5)
    report = pf.measure(model, LOSS, (X, INDICES), measures="weight_norm")
    assert report.layers == ("0", "2", "4")
    for layer in report.layers:
        weight = model.get_submodule(layer).weight
        assert report[layer, "weight_norm"].value == pytest.approx(float(weight.detach().square().sum()), rel=1e-12)
    total = sum(report[layer, "weight_norm"].value for layer in report.layers)
    assert report["weight_norm"].value == pytest.approx(total, rel=1e-12)
    some = pf.measure(model, LOSS, (X, INDICES), measures="weight_norm", layers=["0", "4"])
    assert some["weight_norm"].value == pytest.approx(total - report["2", "weight_norm"].value, rel=1e-12)


def test_weight_norm_counts_a_shared_weight_once_and_reads_no_data():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    expected = sum(float(model[k].weight.detach().double().square().sum()) for k in (0, 2))

    def untouched():
        raise AssertionError
        yield

    estimate = one("weight_norm", model, LOSS, untouched())
    assert estimate.value == pytest.approx(expected, rel=1e-12)
    assert "no data read" in repr(estimate)


# --- adaptive sharpness by Monte Carlo --------------------------------------------------------------------------------


def test_adaptive_sharpness_mc_of_a_quadratic_risk_is_the_exact_sum():
    """Of a linear model under squared error L(θ + δ) has no terms beyond the second, at any ρ."""
    model, loss, y = network(M, C), nn.MSELoss(), normal(3, N, C)
    theta, hessian = all_parameters_hessian(model, loss, X, y)
    exact = float((theta.square() * hessian.diagonal()).sum())
    for rho in (0.1, 1.0):
        estimate = pf.measures.adaptive_sharpness_mc(model, loss, (X, y), rho=rho, probes=400)
        assert 0 < estimate.stderr < 0.1 * exact
        assert abs(estimate.value - exact) < 4 * estimate.stderr
        assert not estimate.exact


@pytest.mark.parametrize("activation", [nn.Tanh, *in_soak(nn.SiLU)])
def test_adaptive_sharpness_mc_of_small_noise(activation):
    model = network(M, 6, C, activation=activation)
    model[0].bias.requires_grad_(False)
    theta, hessian = all_parameters_hessian(model, LOSS, X, INDICES)
    exact = float((theta.square() * hessian.diagonal()).sum())
    estimate = pf.measures.adaptive_sharpness_mc(model, LOSS, (X, INDICES), rho=1e-3, probes=2000)
    assert estimate.stderr < 0.2 * abs(exact)
    assert abs(estimate.value - exact) < 4 * estimate.stderr


def test_adaptive_sharpness_mc_standard_error():
    """Over seeds the values scatter as their standard errors say."""
    model = network(M, 6, C)
    found = [pf.measures.adaptive_sharpness_mc(model, LOSS, (X, INDICES), probes=16, seed=seed) for seed in range(60)]
    spread = torch.tensor([e.value for e in found]).std()
    claimed = torch.tensor([e.stderr for e in found]).square().mean().sqrt()
    assert 0.7 < float(spread / claimed) < 1.4


def test_adaptive_sharpness_mc_options():
    model, data = network(M, 6, C), (X, INDICES)
    value = pf.measures.adaptive_sharpness_mc(model, LOSS, data, probes=4, seed=3)
    assert pf.measures.adaptive_sharpness_mc(model, LOSS, data, probes=4, seed=3).value == value.value
    assert pf.measures.adaptive_sharpness_mc(model, LOSS, data, probes=4, seed=4).value != value.value
    bare = pf.measures.adaptive_sharpness_mc(model, LOSS, data, probes=4, seed=3, scaled=False)
    assert bare.value == pytest.approx(value.value * 0.1**2 / 2, rel=1e-12)
    assert bare.stderr == pytest.approx(value.stderr * 0.1**2 / 2, rel=1e-12)
    default = one("adaptive_sharpness_mc", model, LOSS, data, seed=3)
    assert default.value == pf.measures.adaptive_sharpness_mc(model, LOSS, data, seed=3).value
    cut = pf.measures.adaptive_sharpness_mc(model, LOSS, [(X[:5], INDICES[:5]), (X[5:], INDICES[5:])], probes=4, seed=3)
    assert cut.value == pytest.approx(value.value, rel=1e-9)


def test_adaptive_sharpness_mc_may_propagate_nan():
    estimate = pf.measures.adaptive_sharpness_mc(
        network(M, 6, C), LOSS, (X * torch.nan, INDICES), nan_policy="propagate"
    )
    assert math.isnan(estimate.value)


def test_frozen_models_have_no_trainable_parameters():
    model = network(M, 6, C).requires_grad_(False)
    with pytest.raises(pf.errors.InputError, match="none of its parameters requires gradients"):
        one("adaptive_sharpness_mc", model, LOSS, (X, INDICES))
    assert one("fisher_rao", model, LOSS, (X, INDICES)).value > 0


# --- parametrised and old-style weights -------------------------------------------------------------------------------


class Sine(nn.Module):
    def forward(self, w):
        return w.sin()


@pytest.mark.parametrize(
    "how",
    [
        lambda layer: nn.utils.parametrize.register_parametrization(layer, "weight", Sine()),
        lambda layer: prune.l1_unstructured(layer, "weight", amount=0.3),
    ],
)
def test_weights_that_are_made_from_others_move_and_come_back(how):
    model = network(M, 6, C, activation=nn.Tanh)
    how(model[0])
    before, weight = snapshot(model), model[0].weight.detach().clone()
    theta, hessian = all_parameters_hessian(model, LOSS, X, INDICES)
    expected = float((theta.square() * hessian.diagonal()).sum())
    estimate = pf.measures.adaptive_sharpness_mc(model, LOSS, (X, INDICES), rho=1e-3, probes=600)
    assert abs(estimate.value - expected) < 4 * estimate.stderr
    slope = products(model, LOSS, X, INDICES).square().mean().sqrt()
    assert one("fisher_rao", model, LOSS, (X, INDICES)).value == pytest.approx(float(slope), rel=1e-10)
    assert torch.equal(model[0].weight, weight)
    assert_unchanged(model, before)


# --- all of them ------------------------------------------------------------------------------------------------------


def test_all_measures_at_once():
    model = network(M, 6, C)
    report = pf.measure(model, LOSS, (X, INDICES), measures="all")
    assert report.measures == tuple(measure.name for measure in MEASURES)
    facts = report.to_dict()
    for measure in MEASURES:
        places = {"layer" if layer else "network" for layer in facts[measure.name]}
        assert places == set(measure.granularity.split(", "))


@pytest.mark.parametrize(
    "measure", ["sharpness", "adaptive_sharpness", "adaptive_sharpness_mc", "fisher_rao", "pac_bayes"]
)
def test_a_module_of_two_names_is_left_as_it_was(measure):
    torch.manual_seed(0)
    shared, own = nn.Linear(4, 4), nn.Linear(4, 4)
    x, y = torch.randn(20, 4), torch.arange(20) % 3
    head = nn.Linear(4, 3)
    model = nn.Sequential(shared, nn.ReLU(), shared, nn.ReLU(), own, nn.ReLU(), shared, nn.ReLU(), head).eval()
    own.weight = shared.weight  # tied too
    parameters, before = dict(model.named_parameters()), model(x)
    found = pf.measure(model, nn.CrossEntropyLoss(), (x, y), measures=measure)
    assert math.isfinite(found[measure].value)
    assert {name: id(value) for name, value in model.named_parameters()} == {k: id(v) for k, v in parameters.items()}
    assert torch.equal(model(x), before)
