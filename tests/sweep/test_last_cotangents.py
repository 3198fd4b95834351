"""Cotangents that go through small layers at once, where the last are fewer: they count in sums of neurons too."""

import pytest
import torch
from torch import nn

import pyflatness as pf
from support import truth

LOSS = nn.CrossEntropyLoss()


@pytest.mark.parametrize("backend", ["compiled", "reference"])
@pytest.mark.parametrize("classes", [3, 17, 18, 40])
def test_per_neuron_sums_of_all_cotangents(classes, backend):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, classes)).double().eval()
    x, y = torch.randn(7, 5, dtype=torch.float64), torch.randint(classes, (7,))
    names = ["neuron_flatness", "neuron_flatness_rows", "adaptive_sharpness"]
    report = pf.measure(model, LOSS, (x, y), measures=names, backend=backend, progress=False)
    for layer in ("0", "2"):
        matrix, weight = truth.layer_hessian(model, LOSS, x, y, layer), truth.weight_of(model, layer)
        columns, rows = truth.columns_of(matrix, weight), truth.rows_of(matrix, weight)
        torch.testing.assert_close(
            report[layer, "neuron_flatness"].per_neuron, columns.flatten(), rtol=1e-9, atol=1e-12
        )
        torch.testing.assert_close(
            report[layer, "neuron_flatness_rows"].per_neuron, rows.flatten(), rtol=1e-9, atol=1e-12
        )
        expected = truth.adaptive_sharpness_of(matrix, weight)
        assert float(report[layer, "adaptive_sharpness"]) == pytest.approx(expected, rel=1e-9)
