"""Adaptive sharpness and neuron flatness with their options; values of the grid: sweep/test_every_network.py."""

import pytest
import torch
from torch import nn

import pyflatness as pf
from pyflatness.measures import MEASURES
from pyflatness.options import Options
from pyflatness.plan import of_layer
from pyflatness.session import session
from support import grid, truth
from support.grid import batches
from support.networks import CASES, LAYERS

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
SUMS = ("adaptive_sharpness", "neuron_flatness", "neuron_flatness_rows")
LARGEST = ("neuron_flatness_max", "neuron_flatness_rows_max")
OF_DENSE = ("relative_flatness", "trace", *SUMS, *LARGEST)


@pytest.mark.soak
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_error_of_a_sampled_value(seed):
    """Of weights that differ in size, over many draws."""
    case = CASES["mlp Tanh"]
    expected = truth.adaptive_sharpness_of(grid.hessian(case, "2"), grid.weight_of(case, "2"))
    options = {"layers": "2", "measures": "adaptive_sharpness", "probes": 4_000, "seed": seed}
    estimate = pf.measure(case.build(), case.loss, (case.inputs, case.targets), **options)["2", "adaptive_sharpness"]
    assert estimate.stderr < 0.045 * abs(expected)
    assert abs(estimate.value - expected) <= 4 * estimate.stderr


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "layer"), [("mlp ReLU", "2"), ("mlp Tanh", "2"), ("cnn", LAYERS[0][1])])
def test_normalised_features_change_nothing(name, layer):
    """The features' factors and the columns' cancel in w ∘ M."""
    case = CASES[name]
    layer = layer if layer in case.layers else case.layers[0]
    measures = (*SUMS, *LARGEST, "normalized_sharpness")[: 5 if layer not in case.linear else 6]
    plain, scaled = (
        pf.measure(case.build(), case.loss, batches(case), layers=layer, measures=measures, normalize=how)
        for how in (None, "std")
    )
    for measure in measures:
        assert scaled[layer, measure].value == pytest.approx(plain[layer, measure].value, rel=1e-6)


def test_a_dense_convolution_of_a_single_class():
    model = nn.Sequential(nn.Conv1d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(9, 1)).double()
    data = torch.ones(4, 2, 5).double(), torch.zeros(4, dtype=torch.long)
    report = pf.measure(model, nn.CrossEntropyLoss(), data, layers="0", conv="affine", measures=OF_DENSE)
    assert [report["0", measure].value for measure in OF_DENSE] == [0.0] * len(OF_DENSE)
    assert report["0", "neuron_flatness"].per_neuron.shape == (10,)
    assert report["0", "neuron_flatness_rows"].per_neuron.shape == (9,)


@pytest.mark.parametrize(
    ("name", "measure"),
    [
        ("cnn", "normalized_sharpness"),
        ("cnn", "matrix_normalized_sharpness"),
        ("conv 2d, circular", "adaptive_sharpness"),
    ],
)
def test_not_of_a_dense_convolution(name, measure):
    case = CASES[name]
    convolution = next(layer for layer in case.layers if isinstance(case.build().get_submodule(layer), CONVOLUTIONS))
    options = {"layers": convolution, "conv": "affine"}
    with pytest.raises(pf.errors.NotYetError, match=f"layer '{convolution}': .*conv='filter' gives"):
        pf.measure(case.build(), case.loss, batches(case), measures=measure, **options)
    assert measure not in pf.measure(case.build(), case.loss, batches(case), **options).measures


@pytest.mark.parametrize("measure", [*SUMS[1:], *LARGEST, "normalized_sharpness"])
def test_not_sampled(measure):
    case = CASES["mlp ReLU"]
    with pytest.raises(pf.errors.InputError, match="has no sampled value: pass probes=None"):
        pf.measure(case.build(), case.loss, batches(case), measures=measure, probes=3)


def test_samples_that_are_left_out():
    for name in ("mlp ReLU", "mlp Tanh"):
        case = CASES[name]
        bad = torch.tensor([True, *[False] * (case.samples - 1)])
        inputs = torch.where(bad[:, None], torch.nan, case.inputs)
        measures = (*SUMS, *LARGEST)
        found = pf.measure(case.build(), case.loss, (inputs, case.targets), measures=measures, nan_policy="omit")
        expected = pf.measure(case.build(), case.loss, (case.inputs[~bad], case.targets[~bad]), measures=measures)
        for layer in case.layers:
            for measure in measures:
                assert found[layer, measure].value == pytest.approx(expected[layer, measure].value, rel=1e-9)
        whole = pf.measure(case.build(), case.loss, (inputs, case.targets), measures=measures, nan_policy="propagate")
        assert bool(whole["0", "neuron_flatness"].per_neuron.isnan().all())


def test_report_from_json():
    case = CASES["mlp ReLU"]
    report = pf.measure(case.build(), case.loss, batches(case), measures=(*SUMS, *LARGEST))
    again = pf.results.Report.from_json(report.to_json())
    assert again == report
    assert torch.equal(again["0", "neuron_flatness"].per_neuron, report["0", "neuron_flatness"].per_neuron)
    assert again["0", "adaptive_sharpness"].per_neuron is None


def test_one_layer_s_largest_is_the_layer_s():
    case = CASES["mlp ReLU"]
    report = pf.measure(case.build(), case.loss, batches(case), measures="neuron_flatness_max", layers="2")
    assert report.measures == ("neuron_flatness_max",)
    assert report["neuron_flatness_max"].value == report["2", "neuron_flatness_max"].value


def test_more_products_than_are_allowed():
    case = CASES["mlp Tanh"]
    with pytest.raises(
        pf.errors.InputError, match=r"layer '0': its exact Hessian value takes \d+ Hessian products, more than"
    ):
        pf.measure(case.build(), case.loss, batches(case), measures="neuron_flatness", max_passes=3)


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
def test_a_single_class(activation):
    """Cross-entropy is zero there, and nothing is sent backward."""
    model = nn.Sequential(nn.Linear(3, 4), activation(), nn.Linear(4, 1)).double()
    measures = [*SUMS, *LARGEST, "normalized_sharpness"]
    data = torch.ones(5, 3).double(), torch.zeros(5, dtype=torch.long)
    report = pf.measure(model, nn.CrossEntropyLoss(), data, measures=measures)
    assert [report[measure].value for measure in measures] == [0.0] * len(measures)
    assert report["0", "neuron_flatness"].per_neuron.tolist() == [0.0] * 3
    assert report["2", "neuron_flatness_rows"].per_neuron.tolist() == [0.0]


def test_one_measure_of_one_layer_is_the_report_s():
    """As ``pyflatness score`` asks for it."""
    case = CASES["mlp ReLU"]
    rows = [row for row in MEASURES if row.quantity or row.derive]
    names = [row.name for row in rows if row.normalize is None]
    report = pf.measure(case.build(), case.loss, batches(case), measures=names, layers="2")
    whole = pf.measure(case.build(), case.loss, batches(case), measures=names)
    for row in rows:
        if row.name in names:
            with session(case.build(), case.loss, batches(case), Options(), reads=row.reads) as task:
                measurement, name = of_layer(row, task, "2")
                found = measurement.estimates()[name, row.name]
            expected = whole[row.name] if row.of_network_alone else report["2", row.name]
            assert found.value == pytest.approx(expected.value, rel=1e-12)
