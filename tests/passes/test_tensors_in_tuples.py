"""Tuples that torch asks before an operation, as libraries have them for a quantised weight and its scale."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pyflatness as pf


class _Scaled(NamedTuple):
    value: Tensor
    scale: Tensor

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        args = [arg.value * arg.scale if isinstance(arg, _Scaled) else arg for arg in args]
        return func(*args, **(kwargs or {}))

    def __add__(self, other):
        return _Scaled(self.value + other, self.scale)

    __radd__ = __add__


class _Layer(nn.Linear):
    def forward(self, x):
        return F.linear(x, _Scaled(self.weight, torch.ones((), dtype=x.dtype)), self.bias)


@pytest.mark.parametrize("call", [pf.measure, pf.importance])
def test_values_are_those_of_the_plain_layer(call):
    torch.manual_seed(0)
    x, y = torch.randn(5, 4, dtype=torch.float64), torch.arange(5) % 3
    plain = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    model = nn.Sequential(_Layer(4, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    model.load_state_dict(plain.state_dict())
    expected, found = (call(each, "cross_entropy", (x, y)) for each in (plain, model))
    if call is pf.importance:
        for name in ("0.weight", "2.weight"):
            torch.testing.assert_close(found[name], expected[name], rtol=1e-12, atol=0)
        return
    assert found["2", "relative_flatness"].value == pytest.approx(expected["2", "relative_flatness"].value, rel=1e-12)
    assert found["2", "relative_flatness"].exact
    if "0" in found.layers:
        value = expected["0", "relative_flatness"].value
        assert found["0", "relative_flatness"].value == pytest.approx(value, rel=1e-12)
    else:
        assert "0.weight" in found.uncovered
