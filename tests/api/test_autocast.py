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


def after_a_step(call):
    """Return what a call returns in the autocast block of a step, behind that step, and in a block of its own."""
    model, loss, data = problem()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss(model(data[0]), data[1]).backward()
        optimiser.step()
        inside = call(model, loss, data)
        assert torch.is_autocast_cache_enabled()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return inside, call(model, loss, data)


@pytest.mark.parametrize(
    "call",
    [
        lambda *problem: pf.measure(*problem).to_dict(),
        lambda *problem: pf.track(*problem).record().reports["live"].to_dict(),
        lambda *problem: pf.track(*problem, budget=0.5).step().reports["live"].to_dict(),
        lambda model, loss, data: repr(pf.generalization_gap(model, loss, data, data).train),
        lambda *problem: pf.landscape(*problem, points=3).to_dict(),
        lambda *problem: pf.measure(*problem, measures="adaptive_sharpness_mc").to_dict(),
    ],
    ids=["measure", "record", "step", "generalization_gap", "landscape", "adaptive_sharpness_mc"],
)
def test_weights_after_a_step_are_measured_inside_of_its_block_too(call):
    """There torch keeps copies of the weights before the step, and uses them again in forward passes."""
    inside, expected = after_a_step(call)
    assert inside == expected


def test_outputs_that_were_rounded_before_they_are_made_float32_have_that_rounding():
    """So the models that accelerate prepares return them, with ``bf16=True``."""

    class Rounded(nn.Linear):
        def forward(self, x):
            noise = 2**-8 * (len(x) % 2)  # as a product in bfloat16 is off in batches of other sizes
            return (super().forward(x) * (1 + noise)).bfloat16().float()

    class Unrounded(Rounded):
        def forward(self, x):
            return super().forward(x) + 1e-5

    data = torch.randn(9, 8), torch.arange(9) % 4
    torch.manual_seed(0)
    assert pf.measure(Rounded(8, 4), nn.CrossEntropyLoss(), data)["", "trace"] > 0
    with pytest.raises(pf.errors.InputError, match="change with the batch"):
        pf.measure(Unrounded(8, 4), nn.CrossEntropyLoss(), data)
