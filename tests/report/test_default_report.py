"""The report by default: one table of 100 columns; its rows, also as CSV; what a network's value is of."""

import csv
import math
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

import pyflatness as pf
from pyflatness.messages import from_cell
from support.cases import classifier

X, Y = torch.randn(12, 5, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3
LOSS = nn.CrossEntropyLoss()


def test_relative_flatness_and_trace_by_default():
    model = classifier(5, 6, 4, 3)
    report, sweep = pf.measure(model, LOSS, (X, Y)), pf.measure(model, LOSS, (X, Y), measures="sweep")
    assert report.measures == ("relative_flatness", "trace")
    assert len(sweep.measures) > 8
    for layer, measure, estimate in report:
        assert sweep[layer, measure] == estimate


def test_sets_of_measures_leave_out_what_cannot_be_had():
    report = pf.measure(classifier(5, 6, 3), LOSS, (X, Y), measures="sweep", probes=2)
    assert "neuron_flatness" in report.skipped
    with pytest.raises(
        pf.errors.InputError, match=r"'sweeps' does not exist; did you mean sweep\?.* 'all' stand for several"
    ):
        pf.measure(classifier(5, 3), LOSS, (X, Y), measures="sweeps")


@pytest.mark.parametrize("length", [1, 30, 90])
@pytest.mark.parametrize("probes", [None, 2, 64])
@pytest.mark.parametrize("scale", [1.0, 1e-4])
def test_one_table_with_names_in_one_piece(length, probes, scale):
    model = classifier(5, 6, 4, 3)
    named = nn.Module()
    for place, (_, module) in enumerate(model.named_children()):
        named.add_module(f"{place}" + "n" * length, module)
    named.forward = lambda x: model(x)
    report = pf.measure(named, lambda f, y: scale * LOSS(f, y), (X, Y), curvature="ggn", probes=probes)
    assert any(len(layer) > length for layer in report.layers)
    lines = str(report).splitlines()
    table = [line for line in lines if line.startswith(" ")]
    assert max(map(len, table)) <= max(100, length + 92)
    assert len([line for line in lines if line.split()[:1] == ["layer"]]) == 1
    assert lines[0].split() == ["layer", "relative_flatness", "trace", "value", "of", "exact"]
    assert [line.split()[0] for line in table if line[1:2].isdigit()] == [*report.layers]  # whole, a row for each
    assert "…" not in str(report)


def test_rows_and_their_number():
    report = pf.measure(classifier(5, 6, 3), LOSS, (X, Y), measures=["trace", "fisher_rao"])
    assert [(layer, measure) for layer, measure, _ in report] == [
        ("0", "trace"),
        ("2", "trace"),
        ("", "trace"),
        ("", "fisher_rao"),
    ]
    assert len(report) == 4
    assert all(report[layer, measure] is estimate for layer, measure, estimate in report)


def test_csv_has_every_bit(tmp_path):
    report = pf.measure(classifier(5, 6, 3), LOSS, (X, Y), measures=["trace", "adaptive_sharpness_mc"], per_sample=True)
    odd = replace(report["0", "trace"], value=math.nan, notes=("=1+1", "second, with a comma"))
    report = replace(report, _estimates={**report._estimates, ("0", "trace"): odd})
    report.to_csv(tmp_path / "report.csv")
    with (tmp_path / "report.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(report)
    for row, (layer, measure, estimate) in zip(rows, report, strict=True):
        assert (row["layer"], row["measure"]) == (layer, measure)
        assert float(row["value"]) == estimate.value or math.isnan(estimate.value)
        assert row["stderr"] == ("" if estimate.stderr is None else repr(estimate.stderr))
        assert row["exact"] == str(estimate.exact)
        assert from_cell(row["notes"]) == "; ".join(estimate.notes)
    assert not rows[0]["notes"].startswith("=")
    assert "per_sample" not in rows[0]


def test_what_a_network_s_value_is_of():
    model = classifier(5, 6, 4, 3)
    names = ["trace", "lambda_max", "fisher_rao"]
    report = pf.measure(model, LOSS, (X, Y), measures=names)
    assert report.network_of == {
        "trace": "the sum over layers",
        "lambda_max": "of the layers' joint Hessian",
        "fisher_rao": "of the whole model",
    }
    for measure, what in report.network_of.items():
        assert f"network, {what}: {measure}" in str(report).splitlines()
        part = pf.measure(model, LOSS, (X, Y), measures=measure, layers="0")
        same = part[measure].value == pytest.approx(report[measure].value, rel=1e-6)
        assert same == (what == "of the whole model")
    sums = pf.measure(model, LOSS, (X, Y), measures="sweep")
    for measure, what in sums.network_of.items():
        if what.startswith("the sum over layers") and any((layer, measure) in sums._estimates for layer in sums.layers):
            assert sums[measure].value == pytest.approx(sum(sums[layer, measure].value for layer in sums.layers))
    assert "network, " not in str(pf.measure(model, LOSS, (X, Y)))
    assert pf.results.Report.from_json(report.to_json()).network_of == report.network_of


def test_the_largest_is_what_the_largest_layer_has():
    report = pf.measure(classifier(5, 6, 4, 3), LOSS, (X, Y), measures="sweep")
    named = [measure for measure, what in report.network_of.items() if what == "the largest of the layers"]
    assert {"neuron_flatness_max", "neuron_flatness_rows_max", "largest_scaled_trace"} <= {*named}
    for measure in named:
        of_layers = measure.removeprefix("largest_")
        assert report[measure].value == pytest.approx(max(report[layer, of_layers].value for layer in report.layers))


def points(lines):
    """The places of the points in the first column of numbers, where there is one."""
    return {re.search(r" {2}-?\d+(\.)\d", line).start(1) for line in lines}


def test_points_are_below_each_other_and_many_layers_are_rows_of_blocks():
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)) for _ in range(21)))
    for place, block in enumerate(blocks):
        block[0].weight.data *= 9.0 if place % 2 else 0.7
    model = nn.Sequential(blocks, nn.Linear(5, 3)).double()
    names = ["relative_flatness", "trace", "neuron_flatness_max"]
    report = pf.measure(model, LOSS, (X.double(), Y), measures=names)
    lines = str(report).splitlines()
    rows = {line.split()[0]: line for line in lines if line.startswith(" ")}
    assert [*rows][2:] == [*(f"0.{place}.*" for place in range(21)), "1", "network"]
    assert len(points([*rows.values()][2:])) == 1
    cells = rows["0.3.*"].split()
    both = [[report[f"0.3.{place}", name].value for place in (0, 1)] for name in names]
    assert cells[1] == "(2)"
    assert [float(cell) for cell in cells[2:5]] == pytest.approx([sum(both[0]), sum(both[1]), max(both[2])], rel=1e-3)
    assert "of neuron_flatness_max the largest; report.top()" in " ".join(lines)
    sampled = pf.measure(model, LOSS, (X.double(), Y), measures="trace", probes=2, curvature="ggn")
    errors = sum(sampled[f"0.3.{place}", "trace"].stderr for place in (0, 1))
    assert sampled._folded()["0.3.* (2)"]["trace"].stderr == pytest.approx(errors)
