"""What one call computes together: the default, ``"all"``, what is left out of them and why, and what is an error."""

import dataclasses
import json
import math

import pytest
import torch
from torch import nn

import pyflatness as pf
from pyflatness import measures, plan
from pyflatness.measures import MEASURES
from pyflatness.options import Options
from support import truth
from support.cases import TOKEN_TARGETS, TOKENS, Tokens
from support.networks import CASES

LOSS = nn.CrossEntropyLoss()
FLATNESS = ["relative_flatness", "trace"]
SCALED = ["scaled_trace", "largest_scaled_trace"]
NEURONS = ["neuron_flatness", "neuron_flatness_max", "neuron_flatness_rows", "neuron_flatness_rows_max"]
NORMALISED = ["matrix_normalized_sharpness", "matrix_normalized_sharpness_frobenius"]
ONE_SWEEP = [
    FLATNESS[0],
    "relative_flatness_per_feature",
    "relative_flatness_columns",
    FLATNESS[1],
    *SCALED,
    "adaptive_sharpness",
    *NEURONS,
    *NORMALISED,
    "weight_norm",
]
TWO_READS = ["relative_flatness_std", "lambda_max", "relative_flatness_max", "pac_bayes", "adaptive_sharpness_mc"]


def mlp(activation=nn.ReLU, widths=(5, 6, 4)):
    a, b, c = widths
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(a, b), activation(), nn.Linear(b, c)).double()


X, Y = torch.randn(12, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64), torch.arange(12) % 4


# --- the default ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp ReLU", "mlp Tanh", "cnn", "attention"])
def test_the_default_is_what_its_measures_are_by_name(name):
    case = CASES[name]
    data = list(zip(case.inputs.split(2), case.targets.split(2), strict=True))
    report = pf.measure(case.build(), case.loss, data, per_sample=True, measures="sweep")
    assert {*report.measures, *report.skipped} == {*ONE_SWEEP}
    for measure in report.measures:
        expected = pf.measure(case.build(), case.loss, data, measures=measure, per_sample=True)
        for layer in (*expected.layers, *(() if measure == "adaptive_sharpness" else ("",))):
            if (layer, measure) in report._estimates:
                found, alone = report[layer, measure], expected[layer, measure]
                assert found.value == pytest.approx(alone.value, rel=1e-9, abs=1e-13)
                assert (found.exact, found.method) == (alone.exact, alone.method)


def test_the_default_reads_the_data_once():
    report = pf.measure(mlp(), LOSS, iter([(X[:5], Y[:5]), (X[5:], Y[5:])]), measures="sweep")
    assert list(report.measures) == ONE_SWEEP
    for name in TWO_READS:
        with pytest.raises(pf.errors.InputError, match="iterator"):
            pf.measure(mlp(), LOSS, iter([(X, Y)]), measures=name)


def test_the_default_has_no_sum_for_a_network_s_adaptive_sharpness():
    report = pf.measure(mlp(), LOSS, (X, Y), measures="sweep")
    with pytest.raises(pf.errors.InputError, match="'adaptive_sharpness' has no value of the network"):
        report["adaptive_sharpness"]
    assert report["0", "adaptive_sharpness"].value > 0
    for names in ("adaptive_sharpness", "all"):
        assert pf.measure(mlp(), LOSS, (X, Y), measures=names)["adaptive_sharpness"].value > 0


@pytest.mark.parametrize(
    ("options", "left_out"),
    [
        ({}, []),
        ({"curvature": "ggn"}, []),
        ({"nan_policy": "omit"}, []),
        ({"probes": 3}, [SCALED[1], *NEURONS]),
        ({"probes": "adaptive"}, NEURONS),
        ({"normalize": "std"}, [ONE_SWEEP[1], *SCALED, *NORMALISED]),
        ({"normalize": "std", "probes": 3}, [ONE_SWEEP[1], *SCALED, *NORMALISED, *NEURONS]),
    ],
)
def test_options_that_leave_some_out_of_the_default(options, left_out):
    report = pf.measure(mlp(), LOSS, (X, Y), measures="sweep", **options)
    assert [name for name in ONE_SWEEP if name not in left_out] == list(report.measures)
    assert {*report.skipped} == {*left_out}
    for name in left_out:
        with pytest.raises(pf.errors.InputError, match=f"report: no value of '{name}': "):
            report[name]
        with pytest.raises((pf.errors.InputError, pf.errors.NotYetError)):
            pf.measure(mlp(), LOSS, (X, Y), measures=name, **options)


def test_negative_traces_leave_their_roots_out():
    def loss(f, y):
        return torch.cos(3 * f).sum(dim=1).mean() + 3 * f.sum(dim=1).mean()

    model = mlp()
    with torch.no_grad():
        model[2].weight.mul_(0.01)
        model[2].bias.zero_()
    report = pf.measure(model, loss, (X, Y), measures="sweep")
    assert report["2", "trace"].value < 0
    assert {*report.skipped} == {*NORMALISED}
    assert "of which there is no root" in report.skipped["matrix_normalized_sharpness"]


# --- all --------------------------------------------------------------------------------------------------------------


def test_all_of_a_network_to_which_all_apply():
    report = pf.measure(mlp(), LOSS, (X, Y), measures="all")
    assert report.measures == tuple(row.name for row in MEASURES)
    assert not report.skipped


def test_all_says_what_does_not_apply_and_why():
    report = pf.measure(mlp(nn.Tanh), nn.MSELoss(), (X, torch.randn(12, 4).double()), measures="all")
    assert {*report.skipped} == {"normalized_sharpness", "pac_bayes", "pac_bayes_magnitude"}
    assert "has no lower bound" in report.skipped["normalized_sharpness"]
    assert "an accuracy needs classes" in report.skipped["pac_bayes"]
    assert len(report.measures) == len(MEASURES) - 3
    for name in report.skipped:
        with pytest.raises(pf.errors.InputError):
            pf.measure(mlp(nn.Tanh), nn.MSELoss(), (X, torch.randn(12, 4).double()), measures=name)


def test_all_of_a_model_of_tokens():
    torch.manual_seed(0)
    report = pf.measure(Tokens().double(), LOSS, (TOKENS, TOKEN_TARGETS), measures="all", curvature="ggn")
    assert "tokens have no derivative" in report.skipped["mls_adversarial"]
    assert report["mix", "mls"].value > 0
    assert "mls_adversarial" not in report.measures


def replace(monkeypatch, name, **changed):
    rows = [dataclasses.replace(row, **changed) if row.name == name else row for row in MEASURES]
    monkeypatch.setattr(measures, "MEASURES", tuple(rows))


def test_derived_measures_go_with_their_bases(monkeypatch):
    def refuses(task):
        raise pf.errors.NotYetError("not for this one")

    replace(monkeypatch, "lambda_max", compute=refuses)
    report = pf.measure(mlp(), LOSS, (X, Y), measures="all")
    assert set(report.skipped) == {"lambda_max", "scaled_lambda_max", "largest_scaled_lambda_max"}
    assert set(report.skipped.values()) == {"not for this one"}
    with pytest.raises(pf.errors.NotYetError, match="not for this one"):
        pf.measure(mlp(), LOSS, (X, Y), measures="scaled_lambda_max")


# --- the network's value beside its layers' ---------------------------------------------------------------------------


def test_layers_whose_network_is_too_dear():
    """The layers have theirs, whoever asks, and the report says what is missing."""
    model, whole = mlp(nn.Tanh, (5, 50, 4)), r"of the network: .* Hessian products"
    for names in ("adaptive_sharpness", "all"):
        report = pf.measure(model, LOSS, (X, Y), layers="0", measures=names, max_passes=60)
        matrix = truth.layer_hessian(model, LOSS, X, Y, "0")
        expected = truth.adaptive_sharpness_of(matrix, truth.weight_of(model, "0"))
        assert report["0", "adaptive_sharpness"].value == pytest.approx(expected, rel=1e-9)
        assert "adaptive_sharpness" in report.measures
        with pytest.raises(pf.errors.InputError, match=whole):
            report["adaptive_sharpness"]
        again = pf.results.Report.from_json(report.to_json())
        assert again == report
        assert again.skipped == report.skipped


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [None, "all"])
def test_errors_of_everything_are_errors(names):
    with pytest.raises(pf.errors.NonFiniteError, match="batch 0: 1 of 12"):
        pf.measure(mlp(), LOSS, (torch.where(torch.arange(12)[:, None] == 3, torch.nan, X), Y), measures=names)
    with pytest.raises(pf.errors.InputError, match="training mode"):
        pf.measure(nn.Sequential(*mlp(), nn.Dropout()), LOSS, (X, Y), measures=names)
    with pytest.raises(pf.errors.InputError, match="targets"):
        pf.measure(mlp(), LOSS, (X, Y + 100), measures=names)
    with pytest.raises(pf.errors.InputError, match="nothing in the model matches"):
        pf.measure(mlp(), LOSS, (X, Y), layers="9", measures=names)


@pytest.mark.parametrize("error", [RuntimeError, ValueError, KeyError, ZeroDivisionError])
def test_programming_errors_are_errors(error, monkeypatch):
    def broken(task):
        raise error("broken")

    replace(monkeypatch, "fisher_rao", of_network=broken)
    with pytest.raises(error, match="broken"):
        pf.measure(mlp(), LOSS, (X, Y), measures="all")


def test_nan_of_one_measure_is_an_error(monkeypatch):
    def not_finite(task):
        raise pf.errors.NonFiniteError("in a derivative")

    replace(monkeypatch, "fisher_rao", of_network=not_finite)
    with pytest.raises(pf.errors.NonFiniteError, match="in a derivative"):
        pf.measure(mlp(), LOSS, (X, Y), measures="all")


# --- reports ----------------------------------------------------------------------------------------------------------


def test_reasons_in_a_report(tmp_path):
    report = pf.measure(mlp(), LOSS, (X, Y), probes=3, measures="sweep")
    path = tmp_path / "report.json"
    text = report.to_json(path)
    assert json.loads(text)["skipped"] == report.skipped
    for again in (pf.results.Report.from_json(path), pf.results.Report.from_dict(report.to_dict())):
        assert again == report
        assert (again.skipped, again.measures, str(again)) == (report.skipped, report.measures, str(report))
    assert "skipped" not in pf.measure(mlp(), LOSS, (X, Y), measures="sweep").to_dict()
    (line,) = [line for line in str(report).splitlines() if line.startswith("skipped neuron_flatness, ")]
    assert "has no sampled value" in line
    assert {*report.to_frame()["measure"]} == {*report.measures}
    pytest.importorskip("matplotlib")
    report.plot(tmp_path / "profile.png")


def test_wide_reports_are_several_tables():
    report = pf.measure(mlp(), LOSS, (X, Y), measures="all")
    lines = str(report).splitlines()
    headers = [line.split()[1:-1] for line in lines if line.startswith(" layer")]  # the last column is "exact"
    tables = [words[:-2] if words[-2:] == ["value", "of"] else words for words in headers]
    assert [name for table in tables for name in table] == list(report.measures)
    assert max(map(len, lines)) < 150
    assert len([line for line in lines if line.startswith(" network")]) == len(tables) > 3


def test_products_of_one_sweep_are_shared(hessian_products):
    """Behind a curved layer: those of the diagonal tell all."""
    for names, products in ((FLATNESS, 6), (None, 6), ("relative_flatness", 5), (["neuron_flatness_rows"], 6)):
        hessian_products.clear()
        pf.measure(mlp(nn.Tanh), LOSS, (X, Y), layers="0", measures=names)
        assert sum(directions for directions, _ in hessian_products) == products


def test_how_often_data_are_read():
    for row in MEASURES:
        if row.compute is not None or row.quantity is not None:
            assert plan.plan([row], Options()).reads == row.reads


def test_measures_of_nothing():
    with pytest.raises(pf.errors.InputError, match="at least one name is wanted"):
        pf.measure(mlp(), LOSS, (X, Y), measures=[])


def test_a_model_that_is_a_layer_keeps_its_own_adaptive_sharpness():
    model = nn.Linear(4, 3).double()
    data = torch.randn(6, 4).double(), torch.arange(6) % 3
    report = pf.measure(model, nn.CrossEntropyLoss(), data, measures="sweep")
    assert "adaptive_sharpness" in report.measures
    assert not report.skipped


@pytest.mark.parametrize("policy", ["omit", "propagate"])
def test_all_measures_beside_a_sample_of_nan(policy):
    spoiled = X.clone()
    spoiled[3] = torch.nan
    report = pf.measure(mlp(), LOSS, (spoiled, Y), measures="all", nan_policy=policy)
    assert {"pac_bayes", "normalized_sharpness"} & report.skipped.keys()
    for measure in ("relative_flatness", "trace", "mls", "nmls", "volume", "local_dimension"):
        assert math.isnan(report[measure].value) == (policy == "propagate"), measure


def test_sampled_values_have_no_largest():
    report = pf.measure(mlp(nn.Tanh), LOSS, (X, Y), probes=3, measures="sweep")
    assert "largest of several" in report.skipped["largest_scaled_trace"]
    report = pf.measure(mlp(), LOSS, (X, Y), measures=["trace", "adaptive_sharpness"], probes="adaptive", rtol=0.1)
    assert "takes probes=k" in report.skipped["adaptive_sharpness"]
    with pytest.raises(pf.errors.InputError, match="takes probes=k"):
        pf.measure(mlp(), LOSS, (X, Y), measures="sharpness", probes="adaptive")
