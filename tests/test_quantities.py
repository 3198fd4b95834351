"""Adaptive sharpness, neuron flatness and the normalised measures: every network, loss and layer of the grid."""

import grid
import pytest
import torch
import truth
from cases import to
from networks import CASES
from torch import nn

import pyflatness as pf
from pyflatness.contractions.layer import ROUTES, WeightGradients

GRID = [(name, layer) for name, case in CASES.items() for layer in case.layers]
BENT = [(name, layer) for name, layer in GRID if layer not in CASES[name].linear]
SUMS = ("adaptive_sharpness", "neuron_flatness", "neuron_flatness_rows")
LARGEST = ("neuron_flatness_max", "neuron_flatness_rows_max")


def data_of(case, size=2):
    size = 1 if case is CASES["gathered tokens"] else size
    return list(zip(case.inputs.split(size), case.targets.split(size), strict=True))


def taps(case, layer):
    return torch.Size(getattr(case.build().get_submodule(layer), "kernel_size", (1,))).numel()


def check(report, case, layer, matrix, rel=1e-9, floor=1e-12):
    """All but the network's values and normalised sharpness, against a dense matrix of the layer."""
    weight = truth.weight_of(case.build(), layer)
    neurons = {
        "neuron_flatness": truth.columns_of(matrix, weight, grid.groups(case, layer), taps(case, layer)),
        "neuron_flatness_rows": truth.rows_of(matrix, weight),
    }
    adaptive = truth.adaptive_sharpness_of(matrix, weight)
    assert report[layer, "adaptive_sharpness"].value == pytest.approx(adaptive, rel=rel, abs=floor)
    for measure, expected in neurons.items():
        found = report[layer, measure]
        assert found.per_neuron.dtype == torch.float64
        torch.testing.assert_close(found.per_neuron, expected, rtol=rel, atol=floor)
        size = float(expected.abs().max())
        assert found.value == pytest.approx(float(expected.sum()), rel=rel, abs=floor + rel * size)
        largest = report[layer, f"{measure}_max"]
        assert largest.value == pytest.approx(float(expected.max()), rel=rel, abs=floor)
        assert torch.equal(largest.per_neuron, found.per_neuron)


@pytest.mark.parametrize("curvature", ["ggn", "auto"])
@pytest.mark.parametrize("name", CASES)
def test_every_layer(name, curvature):
    """In one sweep with the others, and in any cut."""
    case = CASES[name]
    truth_of = grid.ggn if curvature == "ggn" else grid.hessian
    for size in (case.samples, 1):
        measures = (*SUMS, *LARGEST, "relative_flatness", "trace")
        options = {"curvature": curvature, "per_sample": True, "measures": measures, "layers": list(case.layers)}
        report = pf.measure(case.build(), case.loss, data_of(case, size), **options)
        for layer in case.layers:
            matrix, weight = truth_of(case, layer), truth.weight_of(case.build(), layer)
            check(report, case, layer, matrix)
            flatness = truth.relative_flatness_of(matrix, weight, grid.groups(case, layer))
            assert report[layer, "relative_flatness"].value == pytest.approx(flatness, rel=1e-9, abs=1e-12)
            assert report[layer, "trace"].value == pytest.approx(truth.trace_of(matrix), rel=1e-9, abs=1e-12)
            for measure in SUMS:
                estimate = report[layer, measure]
                assert float(estimate.per_sample.mean()) == pytest.approx(estimate.value, rel=1e-9, abs=1e-12)
                assert estimate.exact == (curvature == "auto" or layer in case.linear)
        for measure in SUMS:
            total = sum(report[layer, measure].value for layer in case.layers)
            assert report[measure].value == pytest.approx(total, rel=1e-9, abs=1e-12)
        for measure in LARGEST:
            assert report[measure].value == max(report[layer, measure].value for layer in case.layers)
