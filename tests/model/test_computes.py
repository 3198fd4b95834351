"""Whether a layer's output is W φ + b of its input, looked at in a few rows."""

import pytest
import torch
from torch import nn

from pyflatness.model import layers

MODULES = {
    "linear": (nn.Linear(5, 4), (3, 5)),
    "sequence": (nn.Linear(5, 4, bias=False), (3, 7, 5)),
    "plain": (nn.Conv2d(2, 4, 3), (3, 2, 9, 7)),
    "one image": (nn.Conv2d(2, 4, 3), (1, 2, 3, 7)),
    "stride, padding, dilation, groups": (nn.Conv2d(4, 6, (3, 2), (2, 3), (2, 1), (2, 1), 2), (3, 4, 11, 9)),
    "reflected": (nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect"), (3, 2, 5, 5)),
    "same": (nn.Conv2d(2, 4, (4, 3), padding="same", dilation=(2, 1), bias=False), (3, 2, 9, 7)),
    "valid": (nn.Conv1d(2, 4, 3, padding="valid"), (3, 2, 9)),
    "1-D": (nn.Conv1d(2, 4, 3, 2, 1), (3, 2, 10)),
    "3-D": (nn.Conv3d(2, 4, 2, 2, 1), (3, 2, 5, 6, 7)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODULES)
@torch.no_grad()
def test_what_is_seen(name, dtype):
    module, shape = MODULES[name]
    inputs = torch.randn(shape).to(dtype)
    output = module.to(dtype)(inputs)
    assert layers.computes(module, inputs, output)
    assert not layers.computes(module, inputs, 1.5 * output)
    assert not layers.computes(module, inputs, output + 1)
    for place in (0, -1):
        changed = output.clone()
        changed[place].flatten()[place] += 1
        assert not layers.computes(module, inputs, changed)
    without = inputs.clone()
    without[0] = torch.nan  # is no proof of anything
    assert layers.computes(module, without, module(without))
