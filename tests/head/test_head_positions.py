"""Heads given as tensors: one loss term over several positions, and weights of a loss beside half precision."""

import math

import pytest
import torch
from torch.nn import functional as F

import pyflatness as pf
from support import truth
from support.cases import C, M
from support.grid import normal

P = 3
WEIGHT, BIAS = normal(0, C, M), normal(1, C)


def pooled(outputs, targets):
    """Cross-entropy of the mean over positions: the positions of a sample are coupled."""
    return F.cross_entropy(outputs.flatten(1, -2).mean(1), targets)


def by_position(outputs, targets):
    """A loss that is a sum over positions and outputs."""
    return (torch.tanh(outputs) - targets).pow(4).flatten(1).sum(1).mean()


LOSSES = {
    "pooled": (pooled, lambda n, shape: torch.arange(n) % C),
    "by position": (by_position, lambda n, shape: normal(5, n, *shape, C)),
}


def expected(loss, features, targets):
    hessian = truth.hessian(lambda w: loss(features @ w.t() + BIAS, targets), WEIGHT)
    blocks = torch.einsum("sjtj->st", hessian)
    return float((blocks * (WEIGHT @ WEIGHT.t())).sum())


@pytest.mark.parametrize("n", [1, 6])
@pytest.mark.parametrize("shape", [(P,), (2, 7), (1,)])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_its_own_over_several_positions(name, shape, n):
    loss, make = LOSSES[name]
    features, targets = normal(3, n, *shape, M), make(n, shape)
    found = pf.head_flatness(features, WEIGHT, BIAS, targets, loss=loss, per_sample=True)
    assert found.value == pytest.approx(expected(loss, features, targets), rel=1e-10)
    assert found.per_sample.tolist() == pytest.approx(
        [expected(loss, features[i : i + 1], targets[i : i + 1]) for i in range(n)], rel=1e-9
    )


@pytest.mark.parametrize("name", LOSSES)
def test_with_normalisation_and_a_sample_left_out(name):
    loss, make = LOSSES[name]
    features, targets = normal(3, 6, P, M), make(6, (P,))
    features[2, 1, 0] = math.nan
    kept = [0, 1, 3, 4, 5]
    found = pf.head_flatness(features, WEIGHT, BIAS, targets, loss=loss, normalize="std", nan_policy="omit")
    assert (found.samples, found.omitted) == (5, 1)
    scale = features[kept].flatten(0, 1).std(0, correction=0)
    rescaled = WEIGHT * scale

    def risk(w):
        return loss(features[kept] / scale @ w.t() + BIAS, targets[kept])

    blocks = torch.einsum("sjtj->st", truth.hessian(risk, rescaled))
    assert found.value == pytest.approx(float((blocks * (rescaled @ rescaled.t())).sum()), rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("option", ["weight", "pos_weight"])
def test_weights_of_binary_cross_entropy_beside_half_precision(option, dtype):
    """The weights are numbers of the loss, not of the features: they are not rounded to the features' dtype."""
    weights = torch.tensor([1.0039, 0.3331, 2.0078, 1.0039]).double()
    features, weight = normal(3, 40, M).to(dtype), WEIGHT.to(dtype)
    labels = (normal(4, 40, C) > 0).to(dtype)
    loss = torch.nn.BCEWithLogitsLoss(**{option: weights.float()})
    exact = torch.nn.BCEWithLogitsLoss(**{option: weights.float().double()})
    found = pf.head_flatness(features, weight, None, labels, loss=loss)
    truth_ = pf.head_flatness(features.double(), weight.double(), None, labels.double(), loss=exact)
    assert found.value == pytest.approx(truth_.value, rel=1e-5)
