"""Values that missed the relative standard error that was asked for."""

import pytest
import torch
from torch import nn

import pyflatness as pf
from pyflatness.measures.layer_values import missed


@pytest.mark.parametrize("stderr", [None, 0.05, 0.052])
def test_values_that_reached_it_say_nothing(stderr):
    assert missed(-1.0, stderr, 0.05) == ()
    assert missed(-1.0, 0.3, None) == ()


def test_the_note_says_by_how_much_and_what_would_reach_it():
    (note,) = missed(-2.0, 0.4, 0.05)
    assert "rtol=0.05 was missed: the standard error is 0.2 of the value; rtol=0.013 aims at" in note
    (note,) = missed(0.0, 0.4, 0.05)
    assert "the value is 0, with a standard error of 0.4" in note


def test_every_layer_that_missed_it_is_named_behind_the_table_and_in_the_log(caplog):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 10)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 3
    data = torch.randn(64, 20).double(), torch.arange(64) % 10
    some = 0
    for seed in range(3):
        caplog.clear()
        report = pf.measure(model, nn.CrossEntropyLoss(), data, measures="trace", rtol=0.05, seed=seed)
        for layer, _, estimate in report:
            error = 0.0 if estimate.stderr is None else estimate.stderr / abs(estimate.value)
            said = any(note.startswith("rtol=0.05 was missed") for note in estimate.notes)
            assert said == (error > 1.05 * 0.05)
            assert (f"{layer or 'network'}: rtol=0.05 was missed" in str(report)) == said
            name = repr(layer) if layer else "the network"
            assert (f"trace of {name}: rtol=0.05 was missed" in caplog.text) == said
            some += said
    assert some
