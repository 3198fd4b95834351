"""The sweep against dense Hessians and Gauss-Newton matrices: every network, loss and layer of the grid."""

import pytest
import torch
from torch import nn

import pyflatness as pf
from pyflatness.contractions.layer import ROUTES, LayerContraction
from support import grid, truth
from support.cases import to
from support.combinations import ENGINES, every
from support.networks import CASES, LAYERS, NETWORKS


def data_of(case, size):
    return list(zip(case.inputs.split(size), case.targets.split(size), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_ggn_of_every_layer(name):
    """κ, trace and their parts by sample, in one sweep and in any cut, are those of JᵀH_fJ."""
    case = CASES[name]
    model = case.build()
    for size in (case.samples, 2, 1):
        data = data_of(case, size)
        if name == "gathered tokens" and size == case.samples:
            with pytest.raises(pf.errors.InputError, match=r"layer 'one': .* cannot be told apart by the"):
                pf.measure(model, case.loss, data, layers=list(case.layers), curvature="ggn")
            continue
        report = pf.measure(
            model, case.loss, data, layers=list(case.layers), curvature="ggn", per_sample=True, measures="sweep"
        )
        for layer in case.layers:
            matrix, weight = grid.ggn(case, layer), truth.weight_of(model, layer)
            groups = grid.groups(case, layer)
            expected = {
                "relative_flatness": truth.relative_flatness_of(matrix, weight, groups),
                "trace": truth.trace_of(matrix),
            }
            for measure, value in expected.items():
                estimate = report[layer, measure]
                assert estimate.value == pytest.approx(value, rel=1e-9, abs=1e-12), (layer, measure, size)
                assert float(estimate.per_sample.mean()) == pytest.approx(value, rel=1e-9, abs=1e-12)
                assert (estimate.method, estimate.stderr) == (grid.method(case, layer, measure, "ggn"), None)
                assert estimate.samples == case.samples
                assert estimate.exact == (layer in case.linear), layer


@every(name=NETWORKS, route=ROUTES, engine=ENGINES)
def test_every_backend_instruction_set_and_route(name, route, engine, monkeypatch):
    monkeypatch.setattr(LayerContraction, "cheaper", lambda *_: route)
    case = CASES[name]
    data = data_of(case, 1 if name == "gathered tokens" else case.samples)
    report = pf.measure(
        case.build(),
        case.loss,
        data,
        layers=list(case.layers),
        curvature="ggn",
        backend=engine.backend,
        measures="sweep",
    )
    for layer in case.layers:
        flatness, trace = expected_of(case, layer, grid.ggn(case, layer))
        assert report[layer, "relative_flatness"].value == pytest.approx(flatness, rel=1e-9, abs=1e-12)
        assert report[layer, "trace"].value == pytest.approx(trace, rel=1e-9, abs=1e-12)
        assert report[layer, "trace"].backend == engine.backend


def expected_of(case, layer, matrix):
    weight, groups = truth.weight_of(case.build(), layer), grid.groups(case, layer)
    return truth.relative_flatness_of(matrix, weight, groups), truth.trace_of(matrix)


@pytest.mark.parametrize("name", CASES)
def test_hessian_of_every_layer(name):
    """Under "auto" every value is the Hessian's to rounding, whichever way it comes."""
    case = CASES[name]
    data = data_of(case, 1 if name == "gathered tokens" else 2)
    for measures in (None, "relative_flatness"):  # another basis for relative flatness alone
        report = pf.measure(case.build(), case.loss, data, layers=list(case.layers), measures=measures, per_sample=True)
        for layer in case.layers:
            flatness, trace = expected_of(case, layer, grid.hessian(case, layer))
            for measure, value in zip(report.measures, (flatness, trace), strict=False):
                estimate = report[layer, measure]
                assert estimate.value == pytest.approx(value, rel=1e-9, abs=1e-12), (layer, measure)
                assert float(estimate.per_sample.mean()) == pytest.approx(value, rel=1e-9, abs=1e-12)
                assert (estimate.method, estimate.stderr) == (grid.method(case, layer, measure), None)
                assert estimate.exact
    for layer in case.layers:
        estimate = pf.relative_flatness(case.build(), case.loss, data, layer, curvature="hessian")
        assert estimate.value == pytest.approx(
            expected_of(case, layer, grid.hessian(case, layer))[0], rel=1e-9, abs=1e-12
        )
        assert estimate.exact


@pytest.mark.parametrize("name", [name for name in CASES if "peaked" not in name])
def test_float32(name):
    """Against float64 on the same network; the forward and backward passes' own rounding is in it."""
    case = CASES[name]
    model, loss = case.build().float(), to(torch.float32, case.loss)
    inputs, targets = to(torch.float32, case.inputs), to(torch.float32, case.targets)
    size = 1 if name == "gathered tokens" else 2
    data = list(zip(inputs.split(size), targets.split(size), strict=True))
    report = pf.measure(model, loss, data, layers=list(case.layers), curvature="ggn", measures="sweep")
    for layer in case.layers:
        flatness, trace = expected_of(case, layer, grid.ggn(case, layer))
        largest = float(grid.ggn(case, layer).abs().max())
        assert report[layer, "relative_flatness"].value == pytest.approx(flatness, rel=1e-4, abs=1e-5 * largest)
        assert report[layer, "trace"].value == pytest.approx(trace, rel=1e-4, abs=1e-5 * largest)


@pytest.mark.parametrize(("name", "layer"), LAYERS)
def test_block_traces(name, layer):
    case = CASES[name]
    data = data_of(case, 1 if name == "gathered tokens" else 2)
    found = pf.block_traces(case.build(), case.loss, data, layer, curvature="ggn")
    expected = truth.block_traces(grid.ggn(case, layer), grid.groups(case, layer))
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-11 * float(expected.abs().max() + 1))


CONVOLUTIONS = [
    (name, layer)
    for name, layer in LAYERS
    if isinstance(CASES[name].build().get_submodule(layer), (nn.Conv1d, nn.Conv2d, nn.Conv3d))
    and name not in ("cnn", "cnn, one sample, channels last", "residual", "residual network")
]


@pytest.mark.parametrize(("name", "layer"), CONVOLUTIONS)
def test_affine_convolutions(name, layer):
    """The dense layer's own κ, trace and T, from the convolution."""
    case = CASES[name]
    dense, dense_name = truth.affine(case.build(), layer, case.inputs)
    matrix = truth.layer_ggn(dense, case.loss, case.inputs, case.targets, dense_name)
    options = {"curvature": "ggn", "conv": "affine"}
    report = pf.measure(case.build(), case.loss, data_of(case, 2), layers=layer, **options)
    flatness = truth.relative_flatness_of(matrix, truth.weight_of(dense, dense_name))
    assert report[layer, "relative_flatness"].value == pytest.approx(flatness, rel=1e-9, abs=1e-12)
    assert report[layer, "trace"].value == pytest.approx(truth.trace_of(matrix), rel=1e-9, abs=1e-12)
    if len(truth.weight_of(dense, dense_name)) < 200:
        traces = pf.block_traces(case.build(), case.loss, data_of(case, 2), layer, **options)
        torch.testing.assert_close(traces, truth.block_traces(matrix), rtol=1e-8, atol=1e-11)


# Where the loss ignores nothing, so that the deviations are over all rows.
NORMALISED = [
    (name, layer)
    for name, layer in LAYERS
    if not (CASES[name].targets == getattr(CASES[name].loss, "ignore_index", -100)).any()
]


@pytest.mark.parametrize(("name", "layer"), NORMALISED)
def test_normalised(name, layer):
    case = CASES[name]
    deviation = truth.layer_deviations(case.build(), layer, case.inputs)
    module = case.build().get_submodule(layer)
    groups = grid.groups(case, layer)
    expected = truth.relative_flatness_of(*truth.scaled(module, grid.ggn(case, layer), deviation), groups)
    data = data_of(case, 1 if name == "gathered tokens" else 2)
    report = pf.measure(case.build(), case.loss, data, layers=layer, curvature="ggn", measures="relative_flatness_std")
    assert report[layer, "relative_flatness_std"].value == pytest.approx(expected, rel=1e-8, abs=1e-12)
