"""Reports: what is read back is what was written, tables with values of the network alone, frames and figures."""

import dataclasses
import json
import math
import sys

import pytest
import torch
from torch import nn

import pyflatness as pf
from pyflatness.report.intervals import shown
from support.cases import classifier

X, Y = torch.randn(12, 5, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3
LOSS = nn.CrossEntropyLoss()
NAMES = ["relative_flatness", "trace", "weight_norm", "fisher_rao"]


@pytest.fixture
def report():
    return pf.measure(classifier(5, 6, 4, 3), LOSS, (X, Y), measures=NAMES, per_sample=True)


def test_json_and_back(report, tmp_path):
    path = tmp_path / "report.json"
    text = report.to_json(path)
    for other in (
        pf.results.Report.from_json(text),
        pf.results.Report.from_json(path),
        pf.results.Report.from_json(str(path)),
    ):
        assert other == report
        assert (other.layers, other.measures) == (report.layers, report.measures)
        assert str(other) == str(report)
        assert torch.equal(other["2", "trace"].per_sample, report["2", "trace"].per_sample)
    assert pf.results.Report.from_dict(json.loads(text)) == pf.results.Report.from_dict(report.to_dict()) == report


def test_estimates_and_back(report):
    estimate = report["2", "trace"]
    assert pf.results.Estimate.from_dict(estimate.to_dict()) == estimate
    bare = {"value": math.nan, "stderr": math.inf, "samples": 3, "method": "head", "exact": True, "backend": "compiled"}
    odd = pf.results.Estimate.from_dict(bare)
    assert odd == pf.results.Estimate.from_dict(json.loads(json.dumps(odd.to_dict())))
    assert odd.notes == ()
    assert odd != dataclasses.replace(odd, samples=4)
    assert odd != 3
    assert report != odd


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: pf.results.Estimate.from_dict({"value": 1.0}),
            r"missing or unknown: \['backend', 'exact', 'method'.*'stderr'\]",
        ),
        (lambda: pf.results.Estimate.from_dict([1.0]), "missing or unknown: .*'value'"),
        (lambda: pf.results.Report.from_dict([]), "measure -> layer -> estimate"),
        (lambda: pf.results.Report.from_dict({"trace": 3}), "measure -> layer -> estimate"),
        (lambda: pf.results.Report.from_dict({"trace": {"0": {"values": 3}}}), "missing or unknown: .*'values'"),
        (lambda: pf.results.Report.from_json("nowhere.json"), "JSON text, or the path .* No such file"),
        (lambda: pf.results.Report.from_json("{"), "JSON text, or the path"),
    ],
)
def test_what_is_no_report(make, message):
    with pytest.raises(pf.errors.InputError, match=message):
        make()


def test_a_table_with_values_of_the_network_alone(report):
    lines = str(report).splitlines()
    rows = {line.split()[0]: line for line in lines}
    assert rows["0"].split()[4] == "–"
    cells = [float(cell) for cell in rows["network"].split()[1:5]]
    assert cells == pytest.approx([report[name].value for name in NAMES], rel=5e-4)
    assert len({line.index("yes") for line in lines if "yes" in line}) == 1
    assert any(line.startswith("12 samples") for line in lines)
    alone = pf.measure(classifier(5, 6, 3), LOSS, (X, Y), measures=["fisher_rao", "adaptive_sharpness_mc"])
    assert alone.layers == ()
    text = str(alone)
    assert f"{alone['fisher_rao'].value:.4g}" in text
    sampled = alone["adaptive_sharpness_mc"]
    assert shown(sampled.value, sampled.interval()) in text
    assert "[95 % intervals]" in text
    assert "intervals" not in str(report)
    assert "network: adaptive_sharpness_mc: ρ = 0.1" in text
    with pytest.raises(pf.errors.InputError, match=r"no layer '0'"):
        alone["0", "fisher_rao"]
    with pytest.raises(pf.errors.InputError, match="'fisher_rao' has no value of layer '2'"):
        report["2", "fisher_rao"]


def test_a_frame(report):
    frame = report.to_frame()
    assert len(frame) == 3 * 4 + 1
    cell = frame[(frame["layer"] == "2") & (frame["measure"] == "trace")]
    assert cell["value"].item() == report["2", "trace"].value
    assert cell["method"].item() == "ggn"
    table = frame.pivot(index="layer", columns="measure", values="value")
    assert table.loc["", "fisher_rao"] == report["fisher_rao"].value
    assert "per_sample" in frame
    assert "per_sample" not in pf.measure(classifier(5, 3), LOSS, (X, Y), measures="sweep").to_frame()


def test_a_figure(report, tmp_path):
    pytest.importorskip("matplotlib")
    figure, axes = report.plot(tmp_path / "profile.png")
    assert (tmp_path / "profile.png").stat().st_size > 1000
    assert [text.get_text() for text in axes[-1].get_xticklabels()] == ["0", "2", "4"]
    assert [axis.get_ylabel() for axis in axes] == NAMES[:3]
    for axis, name in zip(axes, NAMES, strict=False):
        drawn = axis.containers[0].lines[0].get_ydata()
        assert list(drawn) == [report[layer, name].value for layer in report.layers]
        assert axis.get_yscale() == "log"
        assert figure is axis.figure
    with pytest.raises(pf.errors.InputError, match="fisher_rao has values of the network alone"):
        pf.measure(classifier(5, 3), LOSS, (X, Y), measures="fisher_rao").plot()


@pytest.mark.parametrize(("extra", "call"), [("pandas", "to_frame"), ("matplotlib", "plot")])
def test_without_extras(report, extra, call, monkeypatch):
    for name in [*sys.modules]:
        if name.split(".")[0] == extra:
            monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, extra, None)
    with pytest.raises(pf.errors.MissingExtraError, match=f"needs {extra}: pip install 'pyflatness"):
        getattr(report, call)()


def test_the_values_of_a_layer_and_the_layers_with_the_largest_ones():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).double().eval()
    data = torch.randn(12, 4).double(), torch.arange(12) % 3
    found = pf.measure(model, nn.CrossEntropyLoss(), data, measures=["fisher_rao", "relative_flatness", "trace"])
    assert found["2"] == {name: found["2", name] for name in ("relative_flatness", "trace")}
    by_layer = {layer: found[layer, "trace"].value for layer in found.layers}
    top = found.top(2, "trace")
    assert [*top.layers] == sorted(by_layer, key=by_layer.__getitem__, reverse=True)[:2]
    assert [*top] == [(layer, name, found[layer, name]) for name in found.measures[1:] for layer in top.layers]
    assert str(top).splitlines()[2].split()[0] == top.layers[0]
    assert found.top().layers == found.top(3, "relative_flatness").layers  # the first with values of layers
    with pytest.raises(pf.errors.InputError, match="count: a number of layers from 1 on is wanted, got 0"):
        found.top(0)
    missing = dataclasses.replace(found["2", "trace"], value=math.nan)
    with pytest.raises(pf.errors.InputError, match="'trace' is NaN in all layers"):
        pf.results.Report(("2",), ("trace",), {("2", "trace"): missing}).top()
    assert [*pf.layers(model)] == [*found.layers]
    with pytest.raises(pf.errors.InputError, match="'fisher_rao' has no values of layers here; of relative_flatness"):
        found.top(measure="fisher_rao")
    with pytest.raises(pf.errors.InputError, match="no measure '7'; there are fisher_rao"):
        found["7"]
