"""Sensitivity by gradient ascent against the largest singular value."""

import math

import pytest
import torch
from torch import nn

import pyflatness as pf
from support import networks
from support.brute_force import network
from support.cases import INDICES, C, M
from support.grid import normal
from support.residual import LOSS
from support.unchanged import assert_unchanged, snapshot

X = normal(10, 6, M)


@pytest.mark.parametrize("name", ["mlp ReLU", "mlp Tanh", "cnn", "residual", "siamese", "layer norm", "one output"])
def test_it_finds_the_largest_singular_value(name):
    case = networks.CASES[name]
    data = case.inputs, case.targets
    exact = pf.representation(case.build(), case.loss, data, measures="mls", per_sample=True)["mls"]
    found = pf.measures.mls_adversarial(case.build(), case.loss, data, steps=300, per_sample=True)
    torch.testing.assert_close(found.per_sample, exact.per_sample, rtol=1e-4, atol=0)
    assert (found.per_sample <= exact.per_sample * (1 + 1e-6)).all()
    assert (found.exact, found.method, found.stderr) == (False, "ascent", None)


def test_more_steps_do_not_lose():
    model = network(M, 6, C, activation=nn.Tanh)
    values = [pf.measures.mls_adversarial(model, LOSS, (X, INDICES), steps=steps).value for steps in (1, 3, 10, 100)]
    assert values == sorted(values)
    same = pf.measure(model, LOSS, (X, INDICES), measures="mls_adversarial", seed=5)["mls_adversarial"]
    assert same.value == pf.measures.mls_adversarial(model, LOSS, (X, INDICES), seed=5).value


def test_a_finite_radius_is_another_quantity():
    model = network(M, 6, C, activation=nn.Tanh)
    small, large = (pf.measures.mls_adversarial(model, LOSS, (X, INDICES), rho=r, steps=100).value for r in (1e-6, 2.0))
    assert small != pytest.approx(large, rel=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_precisions(dtype):
    exact = pf.measures.mls_adversarial(network(M, 6, C), LOSS, (X, INDICES), steps=100).value
    found = pf.measures.mls_adversarial(network(M, 6, C).to(dtype), LOSS, (X.to(dtype), INDICES), steps=100).value
    assert found == pytest.approx(exact, rel=2e-3 if dtype == torch.float32 else 0.2)


def test_inputs_of_zero_and_outputs_that_do_not_change():
    model = network(M, 6, C)
    assert pf.measures.mls_adversarial(model, LOSS, (0 * X, INDICES)).value > 0
    model[2].weight.data.zero_()
    assert pf.measures.mls_adversarial(model, LOSS, (X, INDICES)).value == 0


@pytest.mark.parametrize("policy", ["raise", "omit", "propagate"])
def test_nan(policy):
    model, x = network(M, 6, C), X.clone()
    x[2] = torch.nan
    if policy == "raise":
        with pytest.raises(pf.errors.NonFiniteError, match="batch 0: 1 of 6 samples"):
            pf.measures.mls_adversarial(model, LOSS, (x, INDICES))
        return
    found = pf.measures.mls_adversarial(model, LOSS, (x, INDICES), nan_policy=policy)
    assert math.isnan(found.value) == (policy == "propagate")
    assert found.omitted == (policy == "omit")


def test_no_trace_is_left():
    model = network(M, 6, C)
    LOSS(model(X), INDICES).backward()
    inputs, before = X.clone(), snapshot(model)
    pf.measures.mls_adversarial(model, LOSS, (X, INDICES))
    assert_unchanged(model, before)
    assert torch.equal(inputs, X)
