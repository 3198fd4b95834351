"""Layers of other kinds than linear ones and convolutions, against dense Hessians and Gauss-Newton matrices."""

import pytest
import torch

import pyflatness as pf
from pyflatness.contractions.layer import ROUTES, LayerContraction
from support import grid, known_stderr, truth
from support.combinations import ENGINES, every
from support.layer_kinds import CASES

LAYERS = [(name, layer) for name, case in CASES.items() for layer in case.layers]
SUMS = ("relative_flatness", "trace", "adaptive_sharpness", "neuron_flatness", "neuron_flatness_rows")
ROWS = ("relative_flatness_max", "lambda_max")


CURVED = [(name, "ggn") for name, case in CASES.items() if case.linear != {*case.layers}]  # where it is another value


def approx(value):
    return pytest.approx(value, rel=1e-8, abs=1e-12)


def matrix_of(case, layer, curvature):
    return (grid.ggn if curvature == "ggn" else grid.hessian)(case, layer)


def expected_of(case, layer, matrix):
    module = case.build().get_submodule(layer)
    weight, groups = truth.weight_of(case.build(), layer), grid.groups(case, layer)
    taps = torch.Size(getattr(module, "kernel_size", ())).numel()
    columns, rows = truth.columns_of(matrix, weight, groups, taps), truth.rows_of(matrix, weight)
    return {
        "relative_flatness": truth.relative_flatness_of(matrix, weight, groups),
        "trace": truth.trace_of(matrix),
        "adaptive_sharpness": truth.adaptive_sharpness_of(matrix, weight),
        "neuron_flatness": float(columns.sum()),
        "neuron_flatness_rows": float(rows.sum()),
    }, {"neuron_flatness": columns, "neuron_flatness_rows": rows}


@pytest.mark.parametrize(("name", "curvature"), [(name, "auto") for name in CASES] + CURVED)
def test_sums(name, curvature):
    """Together in one sweep, alone, by sample, and in cuts."""
    case = CASES[name]
    options = {"curvature": curvature, "layers": [*case.layers]}
    reports = [
        pf.measure(case.build(), case.loss, grid.batches(case, size), measures=SUMS, per_sample=True, **options)
        for size in (case.samples, 1)
    ]
    alone = [pf.measure(case.build(), case.loss, grid.batches(case), measures=one, **options) for one in SUMS[:2]]
    for layer in case.layers:
        expected, by_neuron = expected_of(case, layer, matrix_of(case, layer, curvature))
        for report in reports:
            for measure, value in expected.items():
                estimate = report[layer, measure]
                assert estimate.value == approx(value), (layer, measure)
                assert float(estimate.per_sample.mean()) == approx(value)
                assert estimate.exact == (curvature == "auto" or layer in case.linear)
            for measure, neurons in by_neuron.items():
                torch.testing.assert_close(report[layer, measure].per_neuron, neurons, rtol=1e-8, atol=1e-12)
        for report, measure in zip(alone, SUMS, strict=False):
            assert report[layer, measure].value == approx(expected[measure])


@every(together=1, name=[*CASES], route=ROUTES, engine=ENGINES)
def test_every_backend_instruction_set_and_route(name, route, engine, monkeypatch):
    monkeypatch.setattr(LayerContraction, "cheaper", lambda *_: route)
    case = CASES[name]
    options = {"layers": [*case.layers], "curvature": "ggn", "backend": engine.backend}
    report = pf.measure(case.build(), case.loss, grid.batches(case), measures=SUMS, **options)
    for layer in case.layers:
        for measure, value in expected_of(case, layer, grid.ggn(case, layer))[0].items():
            assert report[layer, measure].value == approx(value), (layer, measure)


@pytest.mark.parametrize(("name", "layer"), LAYERS)
def test_block_traces(name, layer):
    case = CASES[name]
    for curvature in ("auto", "ggn"):
        found = pf.block_traces(case.build(), case.loss, grid.batches(case), layer, curvature=curvature)
        expected = truth.block_traces(matrix_of(case, layer, curvature), grid.groups(case, layer))
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_eigenvalues(name):
    """λ_max of a layer's block, and Σ |w_s|² λ_max(H_ss) of its rows."""
    case = CASES[name]
    for curvature in ("auto", "ggn"):
        options = {"layers": [*case.layers], "curvature": curvature}
        report = pf.measure(case.build(), case.loss, grid.batches(case), measures=ROWS, **options)
        for layer in case.layers:
            matrix, weight = matrix_of(case, layer, curvature), truth.weight_of(case.build(), layer)
            top = torch.linalg.eigvalsh(matrix.flatten(2).flatten(0, 1))[-1]
            rows = torch.linalg.eigvalsh(torch.einsum("sjsk->sjk", matrix))[:, -1]
            assert report[layer, "lambda_max"].value == pytest.approx(float(top), rel=1e-6)
            largest = float((weight.square().sum(1) * rows).sum())
            assert report[layer, "relative_flatness_max"].value == pytest.approx(largest, rel=1e-6)


@pytest.mark.parametrize(("name", "layer"), LAYERS)
def test_normalised(name, layer):
    case = CASES[name]
    module, deviation = case.build().get_submodule(layer), truth.layer_deviations(case.build(), layer, case.inputs)
    matrix, weight = truth.scaled(module, grid.hessian(case, layer), deviation)
    expected = truth.relative_flatness_of(matrix, weight, grid.groups(case, layer))
    report = pf.measure(case.build(), case.loss, grid.batches(case), layers=layer, measures="relative_flatness_std")
    assert report[layer, "relative_flatness_std"].value == approx(expected)


@pytest.mark.parametrize(
    "name", [name for name in CASES if "transposed" in name and not name.endswith(("own output", "told"))]
)
def test_dense_matrix_of_a_transposed_convolution(name):
    case, layer = CASES[name], "up"
    dense, dense_name = truth.affine(case.build(), layer, case.inputs)
    matrix = truth.layer_ggn(dense, case.loss, case.inputs, case.targets, dense_name)
    weight = truth.weight_of(dense, dense_name)
    options = {"layers": layer, "conv": "affine", "curvature": "ggn"}
    report = pf.measure(case.build(), case.loss, grid.batches(case), measures=SUMS[:3], **options)
    assert report[layer, "relative_flatness"].value == approx(truth.relative_flatness_of(matrix, weight))
    assert report[layer, "trace"].value == approx(truth.trace_of(matrix))
    assert report[layer, "adaptive_sharpness"].value == approx(truth.adaptive_sharpness_of(matrix, weight))


@every(together=1, name=[*CASES], probes=[60, "adaptive"])
def test_sampled(name, probes):
    case = CASES[name]
    measures = SUMS[:2] if probes == "adaptive" else SUMS[:3]
    options = {"layers": [*case.layers], "probes": probes, "seed": 1}
    data = [*grid.batches(case)] * (20 if probes == "adaptive" else 1)  # enough samples to know its error by
    report = pf.measure(case.build(), case.loss, data, measures=measures, **options)
    for layer in case.linear if probes == "adaptive" else case.layers:
        expected = expected_of(case, layer, grid.hessian(case, layer))[0]
        for measure in measures:
            estimate = report[layer, measure]
            off = 4 * known_stderr(estimate) + 1e-9 * abs(expected[measure])
            assert abs(estimate.value - expected[measure]) <= off, (layer, measure)


@pytest.mark.parametrize(("name", "layer"), LAYERS)
def test_verified(name, layer):
    case = CASES[name]
    assert pf.verify(case.build(), case.loss, (case.inputs, case.targets), layer)


@pytest.mark.parametrize("name", CASES)
def test_the_users_model_is_left_as_it_was(name):
    case, model = CASES[name], CASES[name].build()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    pf.measure(model, case.loss, (case.inputs, case.targets), measures="trace")
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
