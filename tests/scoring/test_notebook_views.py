"""What a notebook shows of estimates, reports and scores, and figures that are drawn into given axes."""

import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

import pyflatness as pf
from pyflatness.scoring.units import Row

DATA = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3


@pytest.fixture
def report():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).eval()
    return pf.measure(model, nn.CrossEntropyLoss(), DATA, measures=["trace", "relative_flatness"])


def test_an_estimate_shows_its_interval_and_escapes_its_notes():
    shown = pf.results.Estimate(
        2.0, 0.1, 100, "ggn-sampled", False, "reference", dof=5.0, notes=("<b>tied",)
    )._repr_html_()
    assert "2.00 ± 0.10 [1.74, 2.26]" in shown
    assert "[1.74294, 2.25706]" in shown
    assert "&lt;b&gt;tied" in shown
    assert "<b>" not in shown
    assert ">yes<" in pf.results.Estimate(2.0, None, 100, "head", True, "reference")._repr_html_()


def test_a_report_shows_every_value(report):
    shown = report._repr_html_()
    for layer in ("0", "2"):
        assert f"{report[layer, 'trace'].value:.4g}" in shown
    assert "network" in shown


def test_scores_show_values_and_escape_names():
    rows = tuple(Row("<i>", "", f"m{place}", 1.5, exact=False, method="ggn", samples=3) for place in range(300))
    shown = pf.results.Scores(rows, 0)._repr_html_()
    assert "≈ 1.5" in shown
    assert "<i>" not in shown
    assert "and 100 more values" in shown


def test_figures_are_drawn_into_given_axes(report):
    several = [*Figure().subplots(len(report.plot()[1]), squeeze=False)[:, 0]]
    assert report.plot(axes=several) == (several[0].figure, several)
    with pytest.raises(pf.errors.InputError, match=r"axes: one for each of .* is wanted, got"):
        report.plot(axes=[*several, *several])
    mine = Figure().subplots()
    rows = tuple(Row(f"m{x}", "", "trace", float(x * x % 7), loss=float(x)) for x in range(6))
    _, axes = pf.results.Scores(rows, 0).plot("trace", axes=mine)
    assert axes is mine
    assert axes.get_xlabel() == "trace"
