"""Paths in front of what cotangents are sent through together: around it, and cut by a function without a gradient."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pyflatness as pf
from pyflatness.passes import tail
from support import truth


class Around(nn.Module):
    """A skip connection made by ``torch.addmm``, in front of a linear layer."""

    def __init__(self, activation):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.inner, self.last, self.activation = (
            nn.Linear(4, 3),
            nn.Linear(3, 6),
            nn.Linear(3, 4),
            activation,
        )
        self.register_buffer("mixing", torch.randn(6, 3))
        self.double().eval()

    def forward(self, x):
        h = self.first(x)
        return self.last(torch.addmm(h, self.activation(self.inner(h)), self.mixing))


@pytest.mark.parametrize("activation", [F.relu, F.leaky_relu])
def test_a_skip_connection_counts_once(activation):
    """Both summands are in front of the last operations, and one is in front of the other too."""
    model, x, y = Around(activation), torch.randn(8, 4).double(), torch.arange(8) % 4
    report = pf.measure(model, nn.CrossEntropyLoss(), (x, y), measures="trace", progress=False)
    for name in report.layers:
        expected = truth.trace_of(truth.layer_hessian(model, F.cross_entropy, x, y, name))
        assert report[name, "trace"].value == pytest.approx(expected, rel=1e-9), name


class Stop(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None


@pytest.mark.parametrize("size", [tail._SMALL, 0])
@pytest.mark.parametrize("pooled", [False, True])
def test_a_function_that_hands_no_gradient_on(pooled, size, monkeypatch):
    """It counts as a constant, as in torch: also where cotangents are taken from behind pooling."""

    class Cut(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.last = nn.Conv2d(2, 3, 2), nn.Linear(18 if pooled else 90, 6)

        def forward(self, x):
            h = self.conv(x).relu()
            return self.last(Stop.apply(F.max_pool2d(h, 2) if pooled else h).flatten(1))

    monkeypatch.setattr(tail, "_SMALL", size)
    model, x, y = Cut().double().eval(), torch.randn(8, 2, 7, 6).double(), torch.arange(8) % 6
    report = pf.measure(model, nn.CrossEntropyLoss(), (x, y), measures="trace", curvature="ggn", progress=False)
    expected = truth.trace_of(truth.layer_hessian(model, F.cross_entropy, x, y, "last"))
    assert report["conv", "trace"].value == 0
    assert report["last", "trace"].value == pytest.approx(expected, rel=1e-9)
