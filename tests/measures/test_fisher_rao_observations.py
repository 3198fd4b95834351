"""What one observation of the Fisher-Rao norm is for losses that are sums over outputs: a sample with all of them."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pyflatness as pf
from support.brute_force import X, network, one, products
from support.cases import CLASS_WEIGHTS, LABELS, PROBABILITIES, C, M
from support.grid import Net, normal

ELEMENTWISE = {
    "squared error": (nn.MSELoss, F.mse_loss, PROBABILITIES.double()),
    "binary": (nn.BCEWithLogitsLoss, F.binary_cross_entropy_with_logits, LABELS.double()),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_of_a_sum_it_is_that_of_the_same_loss_as_a_callable(name):
    module, function, y = ELEMENTWISE[name]
    model = network(M, 6, C)
    expected = math.sqrt(products(model, module(reduction="sum"), X, y).square().sum())

    def summed(outputs, targets):
        return function(outputs, targets, reduction="sum")

    assert one("fisher_rao", model, module(reduction="sum"), (X, y)).value == pytest.approx(expected, rel=1e-12)
    assert one("fisher_rao", model, summed, (X, y), reduction="sum").value == pytest.approx(expected, rel=1e-12)


def test_of_a_sum_with_weights():
    model, y = network(M, 6, C), LABELS.double()
    loss = nn.BCEWithLogitsLoss(CLASS_WEIGHTS.double(), pos_weight=CLASS_WEIGHTS.flip(0).double(), reduction="sum")
    expected = math.sqrt(products(model, loss, X, y).square().sum())
    assert one("fisher_rao", model, loss, [(X[:4], y[:4]), (X[4:], y[4:])]).value == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_all_dimensions_of_a_samples_outputs_are_one_observation(name, reduction):
    module, _, _ = ELEMENTWISE[name]
    loss, y = module(reduction=reduction), torch.rand(len(X), 2, 3, generator=torch.Generator().manual_seed(0)).double()
    model = Net(lambda net, x: net.b(torch.relu(net.a(x))).unflatten(1, (2, 3)), a=nn.Linear(M, 5), b=nn.Linear(5, 6))
    model = model.double()
    squares = products(model, loss, X, y).square()
    expected = math.sqrt(squares.mean() if reduction == "mean" else squares.sum())
    assert one("fisher_rao", model, loss, (X, y)).value == pytest.approx(expected, rel=1e-12)


def test_a_sample_with_nan_in_one_output_is_left_out():
    model, y = network(M, 6, C), PROBABILITIES.double().clone()
    y[2, 1] = torch.nan
    kept = [0, 1, 3, 4, 5]
    expected = math.sqrt(products(model, nn.MSELoss(reduction="sum"), X[kept], y[kept]).square().sum())
    found = one("fisher_rao", model, nn.MSELoss(reduction="sum"), (X, y), nan_policy="omit")
    assert found.value == pytest.approx(expected, rel=1e-12)
    assert (found.samples, found.omitted) == (5, 1)


def test_outputs_that_are_not_of_samples_are_refused():
    model = Net(lambda net, x: net.a(x)[:4], a=nn.Linear(M, C)).double()
    with pytest.raises(pf.errors.InputError, match="batch 0: its 4 loss terms cannot be told apart by its 6 samples"):
        one("fisher_rao", model, nn.MSELoss(), [(X, normal(3, 4, C))])
