"""``benchmarks/plain_torch.py``: the plain version gives the values that pyflatness does."""

import pytest
import torch
from torch import nn

import pyflatness as pf


def test_the_plain_version_gives_the_values_of_measure(benchmark_modules):
    plain_torch = benchmark_modules("plain_torch")
    torch.manual_seed(0)
    body = [nn.Conv2d(2, 4, 3, padding=1, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(36, 5), nn.ReLU()]
    model = nn.Sequential(*body, nn.Linear(5, 4)).eval()
    x, y = torch.randn(6, 2, 5, 5), torch.arange(6) % 4
    ours = pf.measure(model, nn.CrossEntropyLoss(), (x, y), measures=plain_torch.MEASURES)
    plain = plain_torch.measure(model, x)
    plain_torch.check(ours, plain)
    flatness, trace = plain["0"]
    with pytest.raises(AssertionError, match="trace of layer '0'"):
        plain_torch.check(ours, {"0": (flatness, 1.00001 * trace)})
