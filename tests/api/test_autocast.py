"""Calls inside ``torch.autocast``: values have its rounding, and say so."""

import pytest
import torch
from torch import nn

import pyflatness as pf

MEASURES = ["relative_flatness", "sharpness", "adaptive_sharpness", "interpolation_sharpness", "fisher_rao"]


def problem():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    return model, nn.CrossEntropyLoss(), (torch.randn(64, 8), torch.arange(64) % 4)


@pytest.mark.parametrize("measure", MEASURES)
def test_values_are_those_without_it_up_to_its_rounding(measure):
    model, loss, data = problem()
    exact = pf.measure(model, loss, data, measures=measure)[measure]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = pf.measure(model, loss, data, measures=measure)[measure]
    assert float(found) == pytest.approx(float(exact), rel=2e-2)
    assert any("autocast" in note for note in found.notes)
    assert not any("autocast" in note for note in exact.notes)


def test_a_head_says_so_too():
    model, loss, data = problem()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert any("bfloat16" in note for note in pf.relative_flatness(model, loss, data).notes)
    half = model.to(torch.bfloat16)
    assert pf.relative_flatness(half, loss, (data[0].to(torch.bfloat16), data[1])).notes == ()
