"""Normalised and matrix-normalised sharpness: closed forms, a general minimiser, dense Hessians of the grid."""

import pytest
import torch
from torch import nn

import pyflatness as pf
from pyflatness.measures import normalized_sharpness
from pyflatness.measures.normalized_sharpness import minimised
from support import grid, truth
from support.combinations import ENGINES, every, in_turn
from support.grid import batches, normal
from support.minimiser import brute_force
from support.networks import CASES, LAYERS, networks_in_turn


def bound(curvature, weight):
    """2 Σ |w| √H: of each term alone."""
    return float(2 * (weight.abs() * curvature.sqrt()).sum())


# --- the minimum ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("d", "m"), [(1, 1), (1, 7), (7, 1), (4, 6), (30, 20)])
def test_rank_one(d, m):
    """Where √(w²/H) is of rank one all terms reach their own minima at once."""
    h, g, p, q = normal(1, d, 1).square(), normal(2, 1, m).square(), normal(3, d, 1).square(), normal(4, 1, m).square()
    curvature, weight = h * g, (p * q).sqrt()
    found = minimised(curvature, weight)
    assert found.value == pytest.approx(bound(curvature, weight), rel=1e-12)
    assert found.gradient <= normalized_sharpness.TOLERANCE
    scaled = minimised(curvature * 1e-12, weight * 1e6)
    assert scaled.value == pytest.approx(found.value, rel=1e-12)


@every(together=1, size=[(2, 2), (4, 6), (20, 9)], seed=range(5))
def test_against_a_general_minimiser(size, seed):
    d, m = size
    curvature, weight = normal(seed, d, m).square(), normal(seed + 50, d, m)
    found = minimised(curvature, weight)
    assert found.gradient <= normalized_sharpness.TOLERANCE
    assert found.value == pytest.approx(brute_force(curvature, weight), rel=1e-9)
    assert bound(curvature, weight) <= found.value <= float(curvature.sum() + weight.square().sum())


def test_rescaling_changes_nothing():
    curvature, weight = normal(7, 5, 4).square(), normal(8, 5, 4)
    factor = normal(9, 5, 1).exp() * normal(10, 1, 4).exp()
    other = minimised(curvature / factor.square(), weight * factor)
    assert other.value == pytest.approx(minimised(curvature, weight).value, rel=1e-10)


def test_rows_and_columns_that_vanish():
    """Their terms go to zero at no cost, and that may take other rows and columns with it."""
    curvature, weight = normal(11, 4, 5).square(), normal(12, 4, 5)
    expected = minimised(curvature[:3, 1:], weight[:3, 1:]).value
    curvature[3], weight[:, 0] = 0, 0
    assert minimised(curvature, weight).value == pytest.approx(expected, rel=1e-10)
    alone = torch.tensor([[1.0, 0.0]]).double()
    assert minimised(alone, alone.flip(1)).value == 0
    assert minimised(torch.zeros_like(alone), alone).value == 0


def test_a_minimum_at_infinity_is_said(monkeypatch):
    """Of H a₁b₁ + a₁b₂ + w²/(a₂b₁) + …, with terms that can be made as small as one likes, but not at once."""
    curvature = torch.tensor([[1.0, 1.0], [0.0, 1.0]]).double()
    weight = torch.tensor([[1.0, 1.0], [1.0, 1.0]]).double()
    monkeypatch.setattr(normalized_sharpness, "STEPS", 3)
    value, note = normalized_sharpness.of_layer("x", weight[None], curvature[None])
    assert "stopped at a relative gradient of" in note
    assert value >= bound(curvature, weight)


# --- of layers --------------------------------------------------------------------------------------------------------


def expected_of(case, layer, matrix):
    """By the general minimiser, group by group; None if it has no lower bound."""
    weight, diagonal = grid.weight_of(case, layer), truth.diagonal_of(matrix)
    rounding = 1e-13 * float(diagonal.abs().max())
    if bool((diagonal < -rounding).any()):
        return None
    groups = grid.groups(case, layer)
    pairs = zip(diagonal.clamp_min(0).chunk(groups), weight.chunk(groups), strict=True)
    return sum(brute_force(h, w) for h, w in pairs)


@in_turn(5, ("name", "layer", "curvature"), [(*place, curvature) for place in LAYERS for curvature in ("ggn", "auto")])
def test_every_layer(name, layer, curvature):
    case = CASES[name]
    matrix = (grid.ggn if curvature == "ggn" else grid.hessian)(case, layer)
    expected = expected_of(case, layer, matrix)
    options = {"layers": layer, "measures": "normalized_sharpness", "curvature": curvature}
    data = batches(case, 1 if curvature == "ggn" else case.samples)
    if expected is None:
        with pytest.raises(pf.errors.InputError, match=f"layer '{layer}': .* negative .* no lower bound"):
            pf.measure(case.build(), case.loss, data, **options)
        return
    estimate = pf.measure(case.build(), case.loss, data, **options)[layer, "normalized_sharpness"]
    stopped = [note for note in estimate.notes if "relative gradient" in note]
    assert estimate.value == pytest.approx(expected, rel=1e-4 if stopped else 1e-9, abs=1e-12)
    assert estimate.exact == ((curvature == "auto" or layer in case.linear) and not stopped)


@every(together=1, name=["cnn", "mlp ReLU", "tokens", "siamese"], engine=ENGINES)
def test_every_backend_and_memory(name, engine):
    case = CASES[name]
    options = {"measures": "normalized_sharpness", "curvature": "ggn", "layers": list(case.layers)}
    plain = pf.measure(case.build(), case.loss, batches(case), **options)
    found = pf.measure(case.build(), case.loss, batches(case), backend=engine.backend, memory=1, **options)
    for layer in case.layers:
        value = plain[layer, "normalized_sharpness"].value
        assert found[layer, "normalized_sharpness"].value == pytest.approx(value, rel=1e-9)
    total = sum(plain[layer, "normalized_sharpness"].value for layer in case.layers)
    assert plain["normalized_sharpness"].value == pytest.approx(total)


def test_samples_cannot_be_left_out():
    case = CASES["mlp ReLU"]
    with pytest.raises(pf.errors.InputError, match="nan_policy='omit' can leave none"):
        pf.measure(case.build(), case.loss, batches(case), measures="normalized_sharpness", nan_policy="omit")
    inputs = case.inputs.clone()
    inputs[0] = torch.nan
    options = {"measures": "normalized_sharpness", "nan_policy": "propagate"}
    found = pf.measure(case.build(), case.loss, (inputs, case.targets), **options)
    assert found["normalized_sharpness"].value != found["normalized_sharpness"].value


# --- matrix-normalised ------------------------------------------------------------------------------------------------

MATRIX = ("matrix_normalized_sharpness", "matrix_normalized_sharpness_frobenius")


def norms(case, layer):
    parts = grid.weight_of(case, layer).chunk(grid.groups(case, layer))
    return max(float(torch.linalg.svdvals(part)[0]) for part in parts), float(torch.cat(parts).norm())


@networks_in_turn(4)
def test_matrix_normalised(name):
    case = CASES[name]
    traces = {layer: truth.trace_of(grid.hessian(case, layer)) for layer in case.layers}
    options = {"layers": list(case.layers), "measures": MATRIX}
    if min(traces.values()) < 0:
        with pytest.raises(pf.errors.InputError, match="of which there is no root"):
            pf.measure(case.build(), case.loss, batches(case), **options)
        return
    report = pf.measure(case.build(), case.loss, iter(batches(case)), **options)
    for place, measure in enumerate(MATRIX):
        expected = sum(norms(case, layer)[place] * traces[layer] ** 0.5 for layer in case.layers)
        assert report[measure].value == pytest.approx(expected, rel=1e-9)
        assert report[measure].exact
        with pytest.raises(pf.errors.InputError, match="no layer"):
            report[case.layers[0], measure]


def test_matrix_normalised_shares_the_traces():
    """Read once: an iterator will do; and a trace that was asked for is in the report."""
    case = CASES["mlp ReLU"]
    report = pf.measure(case.build(), case.loss, iter(batches(case)), measures=["trace", *MATRIX])
    assert report.measures == ("trace", *MATRIX)
    alone = pf.measure(case.build(), case.loss, iter(batches(case)), measures=MATRIX[0])
    assert alone.measures == MATRIX[:1]
    assert alone[MATRIX[0]].value == report[MATRIX[0]].value


def test_matrix_normalised_sampled():
    case = CASES["mlp Tanh"]
    options = {"measures": MATRIX, "layers": "2", "curvature": "ggn"}
    exact, found = (pf.measure(case.build(), case.loss, batches(case, 6), **options, **how)
                    for how in ({}, {"probes": 500}))  # fmt: skip
    for measure in MATRIX:
        assert 0 < found[measure].stderr < 0.1 * exact[measure].value
        assert abs(found[measure].value - exact[measure].value) <= 4 * found[measure].stderr
        assert not found[measure].exact


def test_matrix_normalised_is_of_the_weights_as_they_are():
    case = CASES["mlp ReLU"]
    with pytest.raises(pf.errors.NotYetError, match="normalize='std' is not there"):
        pf.measure(case.build(), case.loss, batches(case), measures=MATRIX, normalize="std")


def test_a_model_that_is_a_layer():
    model = nn.Linear(3, 2).double()
    data = normal(1, 5, 3), torch.arange(5) % 2
    report = pf.measure(model, nn.CrossEntropyLoss(), data, measures=[*MATRIX, "trace", "normalized_sharpness"])
    trace = report["trace"].value
    assert report[MATRIX[1]].value == pytest.approx(float(model.weight.detach().norm()) * trace**0.5)
    assert report["normalized_sharpness"].exact
