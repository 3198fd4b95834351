"""Activation checkpointing around the first layer: measures over all parameters are those of the plain network."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import pyflatness as pf
from support.brute_force import X, one
from support.cases import INDICES, C, M
from support.fuzzed.drawing import Checkpointed, Step
from support.unchanged import assert_unchanged, snapshot

LOSS = nn.CrossEntropyLoss()


def network(activation):
    torch.manual_seed(0)
    step = Step("first", lambda net, x: activation(net.first(x)), first=nn.Linear(M, 6))
    return nn.Sequential(Checkpointed(step), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, C)).double().eval()


@pytest.mark.parametrize("activation", [torch.relu, torch.tanh])
@pytest.mark.parametrize("measure", ["sharpness", "adaptive_sharpness", "interpolation_sharpness", "fisher_rao"])
def test_all_parameters(measure, activation):
    model = network(activation)
    before = snapshot(model)
    found = one(measure, model, LOSS, [(X[:4], INDICES[:4]), (X[4:], INDICES[4:])])
    assert_unchanged(model, before)
    model[0].on = False
    expected = one(measure, model, LOSS, (X, INDICES))
    assert found.value == pytest.approx(expected.value, rel=1e-12)
    assert found.exact


def test_weight_norm_inside_is_refused():
    """Torch leaves a mode, in which weight_norm is written out, while it runs a backward pass."""
    model = network(torch.tanh)
    parametrizations.weight_norm(model[0].step.first)
    before = snapshot(model)
    with pytest.raises(pf.errors.NotYetError, match=r"weight_norm .* switch checkpointing off"):
        one("sharpness", model, LOSS, (X, INDICES))
    assert_unchanged(model, before)


def view_in_place(net, x):
    h = net.first(x)
    h.view(h.shape).relu_()
    return h


def test_second_derivatives_that_checkpointing_does_not_have_are_refused():
    """Torch unpacks what an operation in place on a view has saved twice, and checkpointing gives it once."""
    step = Step("first", view_in_place, first=nn.Linear(M, 6))
    model = nn.Sequential(Checkpointed(step), nn.Tanh(), nn.Linear(6, C)).double().eval()
    before = snapshot(model)
    with pytest.raises(pf.errors.NotYetError, match="switch checkpointing off"):
        pf.relative_flatness(model, LOSS, (X, INDICES), "0.step.first")
    assert_unchanged(model, before)
    model[0].on = False
    assert pf.relative_flatness(model, LOSS, (X, INDICES), "0.step.first").exact
