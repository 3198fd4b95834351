"""Memory that layers share for what they make and forget."""

import pytest
import torch

from pyflatness.contractions import Geometry, LayerContraction, Workspace
from support.layer_cases import DTYPES


def test_the_memory_is_the_same_until_more_is_needed():
    workspace = Workspace(1000)
    first = workspace.take(torch.zeros(1), 10, 5)
    assert first.shape == (10, 5)
    assert first.dtype == torch.float32
    smaller = workspace.take(torch.zeros(1, dtype=torch.float64), 3, 4, 2)
    assert smaller.dtype == torch.float64
    assert smaller.data_ptr() == first.data_ptr()
    assert workspace.take(torch.zeros(1), 0, 7).shape == (0, 7)
    larger = workspace.take(torch.zeros(1), 250)
    assert workspace.take(torch.zeros(1), 1).data_ptr() == larger.data_ptr()
    beyond = workspace.take(torch.zeros(1), 251)
    assert beyond.shape == (251,)
    assert workspace.take(torch.zeros(1), 1).data_ptr() == larger.data_ptr() != beyond.data_ptr()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("limit", [0, 2**20])
@pytest.mark.parametrize("groups", [1, 3])
def test_layers_that_share_it_have_the_values_they_have_alone(engine, dtype, groups, limit):
    shared, geometry = Workspace(limit), Geometry(groups, (1, 2, 2))
    layers, alone = [], []
    for rows, channels in ((5, 2), (3, 4)):
        weight = torch.randn(groups, rows, channels * 4, dtype=dtype)
        inputs = torch.randn(4, groups * channels, 1, 4, 3, dtype=dtype)
        options = {"quantities": ("gram_weighted", "squares"), "memory": 2**20, "route": "gram"}
        made = (LayerContraction(weight, geometry, engine.module, workspace=w, **options) for w in (shared, None))
        together, apart = (one.at([inputs], 3) for one in made)
        layers.append((together, groups * rows))
        alone.append(apart)
    for number in range(3):
        for (layer, rows), apart in zip(layers, alone, strict=True):
            cotangent = torch.randn(4, rows, 1, 3, 2, dtype=dtype)
            if number == 1:
                cotangent = cotangent.contiguous(memory_format=torch.channels_last_3d)
            assert torch.equal(layer.of([cotangent]).values, apart.of([cotangent]).values)
