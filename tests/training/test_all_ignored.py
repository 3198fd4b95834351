"""Where no target counts, penalties and metrics are what torch's loss is: NaN for a mean, 0 for a sum, no gradient."""

import math

import pytest
import torch
from torch import nn

import pyflatness as pf
from pyflatness.integrations.torchmetrics import RelativeFlatness
from support.cases import small as net
from support.combinations import every

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(3))
IGNORED = torch.full((6,), -100)


def of_head(model, loss, targets, normalize):
    return pf.flatness_penalty(model[:2](X), model[2].weight, model[2].bias, targets, loss=loss, normalize=normalize)


def of_layer(model, loss, targets, normalize):
    with pf.FlatnessPenalty(model, "0", loss, normalize=normalize) as penalty:
        return penalty(model(X), targets)


@every(penalty=[of_head, of_layer], normalize=[None, "std"], reduction=["mean", "sum"])
def test_penalties(penalty, normalize, reduction):
    model, loss = net(), nn.CrossEntropyLoss(reduction=reduction)
    risk = loss(model(X), IGNORED)
    found = penalty(model, loss, IGNORED, normalize)
    torch.testing.assert_close(found, risk, equal_nan=True)
    for own, expected in zip(*(_gradients(value, model) for value in (found, risk)), strict=True):
        assert not own.any()
        assert not expected.any()
    assert penalty(model, loss, torch.arange(6) % 3, normalize) > 0


def _gradients(value, model):
    return torch.autograd.grad(value, [*model.parameters()], allow_unused=True, materialize_grads=True)


@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")  # torch's own, 2.13
@pytest.mark.library_sums
@pytest.mark.parametrize("wide", [False, True])
def test_a_compiled_penalty(wide):
    features, weight = torch.randn(6, 4), torch.randn(1200 if wide else 3, 4, requires_grad=True)
    torch.compiler.reset()
    call = torch.compile(pf.flatness_penalty, backend="eager", fullgraph=True)
    found = call(features, weight, None, IGNORED)
    (gradient,) = torch.autograd.grad(found, weight)
    assert found.isnan()
    assert not gradient.any()


@pytest.mark.parametrize(("reduction", "expected"), [("mean", math.nan), ("sum", 0.0)])
def test_the_metric(reduction, expected):
    metric = RelativeFlatness(net()[2], loss=nn.CrossEntropyLoss(reduction=reduction))
    metric.update(torch.randn(6, 5), IGNORED)
    assert metric.compute().item() == pytest.approx(expected, nan_ok=True)
