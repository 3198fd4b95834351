"""Weights of normalisations as diagonal layers, against dense Hessians and Gauss-Newton matrices in that parameter."""

import pytest
import torch

import pyflatness as pf
from support import grid, known_stderr, truth
from support.combinations import ENGINES, every
from support.norm_kinds import CASES

LAYERS = [(name, layer) for name, case in CASES.items() for layer in case.layers]
EQUAL = ("relative_flatness", "adaptive_sharpness", "neuron_flatness", "neuron_flatness_rows")
SUMS = (*EQUAL, "trace")


def approx(value, rel=1e-8):
    return pytest.approx(value, rel=rel, abs=1e-12)


def expected_of(case, layer, curvature="auto"):
    """γ, ∂²E/∂γ_s² and the whole block of the Hessian, or of the GGN, (m, m)."""
    weight = truth.weight_of(case.build(), layer).flatten()
    matrix = (grid.ggn if curvature == "ggn" else grid.hessian)(case, layer)[:, 0, :, 0]
    return weight, matrix.diagonal(), matrix


@pytest.mark.parametrize("curvature", ["auto", "ggn"])
@pytest.mark.parametrize("name", CASES)
def test_sums(name, curvature):
    """Relative flatness is Σ γ_s² ∂²E/∂γ_s², as other sums over single weights are; in cuts, by sample, by neuron."""
    case = CASES[name]
    options = {"curvature": curvature, "layers": [*case.layers], "measures": SUMS, "per_sample": True}
    reports = [pf.measure(case.build(), case.loss, grid.batches(case, size), **options) for size in (case.samples, 1)]
    for layer in case.layers:
        weight, diagonal, _ = expected_of(case, layer, curvature)
        each = weight.square() * diagonal
        for report in reports:
            for measure in SUMS:
                estimate, value = report[layer, measure], float((diagonal if measure == "trace" else each).sum())
                assert estimate.value == approx(value), (layer, measure)
                assert float(estimate.per_sample.mean()) == approx(value)
                assert estimate.exact == (curvature == "auto" or layer in case.linear)
            for measure in EQUAL[2:]:
                torch.testing.assert_close(report[layer, measure].per_neuron, each, rtol=1e-8, atol=1e-12)


@every(together=1, name=[*CASES], engine=ENGINES)
def test_every_backend_and_instruction_set(name, engine):
    case = CASES[name]
    options = {"layers": [*case.layers], "curvature": "ggn", "backend": engine.backend, "measures": SUMS}
    report = pf.measure(case.build(), case.loss, grid.batches(case), **options)
    for layer in case.layers:
        weight, diagonal, _ = expected_of(case, layer, "ggn")
        for measure in EQUAL:
            assert report[layer, measure].value == approx(float((weight.square() * diagonal).sum())), (layer, measure)


@pytest.mark.parametrize("name", CASES)
def test_of_the_whole_block(name):
    """Eigenvalues, block traces and what is made of them and of the norm."""
    case, measures = CASES[name], ["lambda_max", "relative_flatness_max", "scaled_trace", "weight_norm"]
    for curvature in ("auto", "ggn"):
        options = {"layers": [*case.layers], "curvature": curvature, "measures": measures}
        report = pf.measure(case.build(), case.loss, grid.batches(case), **options)
        for layer in case.layers:
            weight, diagonal, matrix = expected_of(case, layer, curvature)
            norm = float(weight.square().sum())
            assert report[layer, "lambda_max"].value == approx(float(torch.linalg.eigvalsh(matrix)[-1]), 1e-6)
            each = weight.square() * diagonal
            assert report[layer, "relative_flatness_max"].value == approx(float(each.sum()), 1e-6)
            assert report[layer, "scaled_trace"].value == approx(norm * float(diagonal.sum()))
            assert report[layer, "weight_norm"].value == approx(norm)
            found = pf.block_traces(case.build(), case.loss, grid.batches(case), layer, curvature=curvature)
            torch.testing.assert_close(found, torch.diag(diagonal), rtol=1e-8, atol=1e-12)


def test_matrix_norms_are_the_largest_weight_and_the_root_of_their_squares():
    case = CASES["norms in a block"]
    names = ["matrix_normalized_sharpness", "matrix_normalized_sharpness_frobenius"]
    options = {"layers": [*case.layers], "measures": names, "curvature": "ggn"}
    report = pf.measure(case.build(), case.loss, grid.batches(case), **options)
    found = [expected_of(case, layer, "ggn") for layer in case.layers]
    roots = [float(diagonal.sum().sqrt()) for _, diagonal, _ in found]
    for name, order in zip(names, (float("inf"), 2), strict=True):
        norms = [float(torch.linalg.vector_norm(weight, order)) for weight, _, _ in found]
        assert report[name].value == approx(sum(norm * root for norm, root in zip(norms, roots, strict=True)))


@pytest.mark.parametrize("name", CASES)
def test_normalized_sharpness_is_twice_a_weight_times_the_root_of_its_curvature(name):
    """The minimum over a of H a + w²/a is 2 |w| √H, for each weight by itself."""
    case = CASES[name]
    options = {"layers": [*case.layers], "curvature": "ggn", "measures": "normalized_sharpness"}
    report = pf.measure(case.build(), case.loss, grid.batches(case), **options)
    for layer in case.layers:
        weight, diagonal, _ = expected_of(case, layer, "ggn")
        expected = float((2 * weight.abs() * diagonal.clamp_min(0).sqrt()).sum())
        assert report[layer, "normalized_sharpness"].value == approx(expected, 1e-6)


@pytest.mark.parametrize(("name", "layer"), LAYERS)
def test_normalised_features_change_nothing_but_what_drops_out(name, layer):
    """(γ_s σ_s)² ∂²E/∂(γ_s σ_s)² = γ_s² ∂²E/∂γ_s²."""
    case = CASES[name]
    deviation = truth.layer_deviations(case.build(), layer, case.inputs)
    matrix, weight = truth.scaled(case.build().get_submodule(layer), grid.hessian(case, layer), deviation)
    expected = truth.relative_flatness_of(matrix, weight, len(weight))
    report = pf.measure(case.build(), case.loss, grid.batches(case), layers=layer, measures="relative_flatness_std")
    assert report[layer, "relative_flatness_std"].value == approx(expected)


@every(together=1, name=[*CASES], probes=[60, "adaptive"])
def test_sampled(name, probes):
    case = CASES[name]
    measures = SUMS[:1] if probes == "adaptive" else ("relative_flatness", "trace", "adaptive_sharpness")
    data = [*grid.batches(case)] * (20 if probes == "adaptive" else 1)  # enough samples to know its error by
    options = {"layers": [*case.layers], "probes": probes, "seed": 1, "measures": measures}
    report = pf.measure(case.build(), case.loss, data, **options)
    for layer in case.linear if probes == "adaptive" else case.layers:
        weight, diagonal, _ = expected_of(case, layer)
        for measure in measures:
            expected = float((diagonal if measure == "trace" else weight.square() * diagonal).sum())
            estimate = report[layer, measure]
            off = 4 * known_stderr(estimate) + 1e-9 * abs(expected)
            assert abs(estimate.value - expected) <= off, (layer, measure)


@pytest.mark.parametrize(("name", "layer"), LAYERS)
def test_verified(name, layer):
    case = CASES[name]
    assert pf.verify(case.build(), case.loss, (case.inputs, case.targets), layer)


@pytest.mark.parametrize("name", CASES)
def test_the_users_model_is_left_as_it_was(name):
    case, model = CASES[name], CASES[name].build()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    pf.measure(model, case.loss, (case.inputs, case.targets), layers=[*case.layers], measures="trace")
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
