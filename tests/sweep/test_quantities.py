"""Adaptive sharpness, neuron flatness and the normalised measures: every network, loss and layer of the grid."""

import pytest
import torch
from torch import nn

import pyflatness as pf
from pyflatness.contractions.layer import ROUTES, LayerContraction
from pyflatness.measures import MEASURES
from pyflatness.options import Options
from pyflatness.plan import of_layer
from pyflatness.session import session
from support import grid, known_stderr, truth
from support.cases import to
from support.combinations import ENGINES, every, in_soak
from support.grid import batches
from support.networks import CASES, LAYERS, NETWORKS, curvatures, networks_in_turn

BENT = [(name, layer) for name, layer in LAYERS if layer not in CASES[name].linear]
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
SUMS = ("adaptive_sharpness", "neuron_flatness", "neuron_flatness_rows")
LARGEST = ("neuron_flatness_max", "neuron_flatness_rows_max")


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


@curvatures()
def test_every_layer(name, curvature):
    """In one sweep with the others, and in any cut."""
    case = CASES[name]
    truth_of = grid.ggn if curvature == "ggn" else grid.hessian
    for size in (case.samples, 1):
        measures = (*SUMS, *LARGEST, "relative_flatness", "trace")
        options = {"curvature": curvature, "per_sample": True, "measures": measures, "layers": list(case.layers)}
        report = pf.measure(case.build(), case.loss, batches(case, size), **options)
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
        for measure in SUMS[1:]:  # the network's adaptive sharpness is over all parameters: measures/test_sharpness.py
            total = sum(report[layer, measure].value for layer in case.layers)
            assert report[measure].value == pytest.approx(total, rel=1e-9, abs=1e-12)
        for measure in LARGEST:
            assert report[measure].value == max(report[layer, measure].value for layer in case.layers)


@every(together=1, name=NETWORKS, route=ROUTES, engine=ENGINES)  # in pairs: test_layers.py
def test_every_backend_instruction_set_and_route(name, route, engine, monkeypatch):
    monkeypatch.setattr(LayerContraction, "cheaper", lambda *_: route)
    case = CASES[name]
    options = {"curvature": "ggn", "backend": engine.backend, "layers": list(case.layers)}
    for measures in ((*SUMS, *LARGEST), ("relative_flatness", *SUMS, *LARGEST)):
        report = pf.measure(case.build(), case.loss, batches(case, case.samples), measures=measures, **options)
        for layer in case.layers:
            check(report, case, layer, grid.ggn(case, layer))
            if "relative_flatness" in measures:
                matrix, weight = grid.ggn(case, layer), truth.weight_of(case.build(), layer)
                flatness = truth.relative_flatness_of(matrix, weight, grid.groups(case, layer))
                assert report[layer, "relative_flatness"].value == pytest.approx(flatness, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", [name for name in CASES if "peaked" not in name])
def test_float32(name):
    case = CASES[name]
    model, loss = case.build().float(), to(torch.float32, case.loss)
    data = [(to(torch.float32, x), to(torch.float32, y)) for x, y in batches(case)]
    measures = (*SUMS, *LARGEST)
    report = pf.measure(model, loss, data, layers=list(case.layers), curvature="ggn", measures=measures)
    for layer in case.layers:
        weight = truth.weight_of(case.build(), layer)
        weighted = (weight[:, :, None, None] * grid.ggn(case, layer) * weight).abs()
        check(report, case, layer, grid.ggn(case, layer), rel=2e-4, floor=1e-5 * float(weighted.sum()))


@networks_in_turn(5)
def test_sampled(name):
    """Within four standard errors of the truth, whether by factors or by Hessian products; beside the others."""
    case = CASES[name]
    options = {"layers": list(case.layers), "probes": 200, "seed": 1}
    report = pf.measure(case.build(), case.loss, batches(case), measures=("trace", "adaptive_sharpness"), **options)
    for layer in case.layers:
        expected = truth.adaptive_sharpness_of(grid.hessian(case, layer), truth.weight_of(case.build(), layer))
        estimate = report[layer, "adaptive_sharpness"]
        assert abs(estimate.value - expected) <= 4 * known_stderr(estimate) + 1e-9 * abs(expected) + 1e-14, layer
    if name == "curved at the last sample alone":  # a part without that sample goes another way
        return
    alone = pf.measure(case.build(), case.loss, batches(case, 1), measures="adaptive_sharpness", **options)
    for layer in case.layers:
        estimate = report[layer, "adaptive_sharpness"]
        assert alone[layer, "adaptive_sharpness"].value == pytest.approx(estimate.value, rel=1e-6, abs=1e-12), layer


@pytest.mark.parametrize("seed", [0, *in_soak(1, 2)])
def test_error_of_a_sampled_value(seed):
    """Of weights that differ in size, over many draws."""
    case = CASES["mlp Tanh"]
    expected = truth.adaptive_sharpness_of(grid.hessian(case, "2"), truth.weight_of(case.build(), "2"))
    options = {"layers": "2", "measures": "adaptive_sharpness", "probes": 20_000, "seed": seed}
    estimate = pf.measure(case.build(), case.loss, (case.inputs, case.targets), **options)["2", "adaptive_sharpness"]
    assert estimate.stderr < 0.02 * abs(expected)
    assert abs(estimate.value - expected) <= 4 * estimate.stderr


def test_hand_example():
    """Of the formula sheet: two samples, cross-entropy."""
    model = nn.Linear(2, 2, bias=False).double()
    model.weight.data.copy_(torch.tensor([[1.0, 0.0], [0.0, 2.0]]))
    data = torch.tensor([[1.0, 0.0], [1.0, 1.0]]).double(), torch.tensor([0, 1])
    measures = ["adaptive_sharpness", "neuron_flatness", "neuron_flatness_rows", "neuron_flatness_max"]
    report = pf.measure(model, nn.CrossEntropyLoss(), data, measures=measures)
    for measure in measures[1:3]:
        assert report["", measure].per_neuron.tolist() == pytest.approx([0.196612, 0.393224], abs=1e-6)
        assert report[measure].value == pytest.approx(0.589836, abs=1e-6)
    assert report["adaptive_sharpness"].value == pytest.approx(0.589836, abs=1e-6)
    assert report["neuron_flatness_max"].value == pytest.approx(0.393224, abs=1e-6)


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


LARGE = ("cnn", "cnn, one sample, channels last", "residual", "residual network")  # for a Hessian of the dense matrix
DENSE = {
    f"{name}, {layer}": (name, layer)
    for name, layer in LAYERS
    if name not in LARGE and isinstance(CASES[name].build().get_submodule(layer), CONVOLUTIONS)
}
OF_DENSE = ("relative_flatness", "trace", *SUMS, *LARGEST)


OPTIONS = {"plain": {}, "ggn": {"curvature": "ggn"}, "reference": {"backend": "reference"}, "std": {"normalize": "std"}}


@every(together=1, convolution=DENSE, options=OPTIONS)
def test_dense_convolutions(convolution, options):
    """Rows are output pixels and columns input pixels, against the layer as a Linear."""
    name, layer = convolution
    case = CASES[name]
    dense, dense_name = truth.affine(case.build(), layer, case.inputs)
    repeats = case.build().get_submodule(layer).padding_mode != "zeros"
    measures = tuple(measure for measure in OF_DENSE if not (repeats and measure == "adaptive_sharpness"))
    matrix_of = truth.layer_ggn if options.get("curvature") == "ggn" else truth.layer_hessian
    matrix = matrix_of(dense, case.loss, case.inputs, case.targets, dense_name)
    weight = truth.weight_of(dense, dense_name)
    options = {"layers": layer, "conv": "affine", "measures": measures, "per_sample": True, **options}
    report = pf.measure(case.build(), case.loss, batches(case), **options)
    columns, rows = truth.columns_of(matrix, weight), truth.rows_of(matrix, weight)
    for measure, expected in (("neuron_flatness", columns), ("neuron_flatness_rows", rows)):
        floor = 1e-12 + 1e-9 * float(expected.abs().max())
        torch.testing.assert_close(report[layer, measure].per_neuron, expected, rtol=1e-9, atol=floor)
        assert report[layer, f"{measure}_max"].value == pytest.approx(float(expected.max()), rel=1e-9, abs=floor)
    for measure in measures[2:-2]:
        estimate = report[layer, measure]
        assert float(estimate.per_sample.mean()) == pytest.approx(estimate.value, rel=1e-9, abs=1e-12)
    if not repeats:
        expected = truth.adaptive_sharpness_of(matrix, weight)
        assert report[layer, "adaptive_sharpness"].value == pytest.approx(expected, rel=1e-9, abs=1e-12)


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


@pytest.mark.parametrize("options", [{"probes": 3}, {"target_stderr": 0.1}])
@pytest.mark.parametrize("measure", [*SUMS[1:], *LARGEST, "normalized_sharpness"])
def test_not_sampled(measure, options):
    case = CASES["mlp ReLU"]
    with pytest.raises(pf.errors.InputError, match="has no sampled value: pass probes=None"):
        pf.measure(case.build(), case.loss, batches(case), measures=measure, **options)


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
