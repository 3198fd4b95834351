"""A small residual network with its data, and how reports of it are compared."""

import pytest
import torch
from torch import nn

LOSS = nn.CrossEntropyLoss()
GENERATOR = torch.Generator().manual_seed(5)
X, Y = torch.randn(20, 3, 8, 8, generator=GENERATOR), torch.arange(20) % 4


class Block(nn.Module):
    """A residual block with in-place operations and eval BatchNorm."""

    def __init__(self, width):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x):
        out = torch.relu_(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        out += x
        return torch.relu_(out)


def residual():
    torch.manual_seed(0)
    stem = [nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(inplace=True)]
    net = nn.Sequential(
        *stem, Block(6), nn.MaxPool2d(2), Block(6), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4)
    )
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return net.eval()


def values(report):
    return {
        (layer, measure): estimate.value
        for measure, held in report.by_measure().items()
        for layer, estimate in held.items()
    }


def assert_same(report, other, rel=1e-5):
    assert values(report).keys() == values(other).keys()
    for key, value in values(report).items():
        assert values(other)[key] == pytest.approx(value, rel=rel), key
