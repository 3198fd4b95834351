"""Micro-batches that send no cotangent: every target is ignored, or there is one class alone."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pyflatness as pf
from support import truth

X = torch.randn(16, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def network(classes):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, classes)).double().eval()


@pytest.mark.parametrize("options", [{}, {"probes": 3}, {"probes": "adaptive", "rtol": 1e-9}])
def test_a_batch_in_which_every_target_is_ignored(options):
    model, y = network(4), torch.arange(16) % 4
    y[:6] = -100
    data = [(X[:6], y[:6]), (X[6:], y[6:])]
    report = pf.measure(model, nn.CrossEntropyLoss(), data, measures="trace", progress=False, **options)
    for name in report.layers:
        found, expected = report[name, "trace"], truth.trace_of(truth.layer_hessian(model, F.cross_entropy, X, y, name))
        assert found.value == pytest.approx(expected, rel=1e-9 if found.stderr is None else 1), name


@pytest.mark.parametrize("options", [{}, {"probes": 3}, {"probes": "adaptive"}])
def test_one_class(options):
    y = torch.zeros(16, dtype=torch.int64)
    report = pf.measure(network(1), nn.CrossEntropyLoss(), (X, y), measures="trace", progress=False, **options)
    assert [report[name, "trace"].value for name in report.layers] == [0.0, 0.0]
