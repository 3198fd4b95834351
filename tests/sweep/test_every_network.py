"""One walk over every network, loss and layer of the grid: all values of a layer against dense matrices.

Each network is measured in several ways, and each way holds all the values that it gives against the same Hessian, or
Gauss-Newton matrix, by nested autograd: linear layers and convolutions, other kinds of layers, and normalisations.
"""

import dataclasses
import functools

import pytest
import torch
from torch import nn

import pyflatness as pf
from pyflatness.contractions.layer import ROUTES, LayerContraction
from support import grid, known_stderr, layer_kinds, truth
from support.cases import to
from support.combinations import ENGINES, every, in_turn
from support.grid import CURVATURES, batches
from support.networks import CASES, LAYERS, NETWORKS, networks_in_turn
from support.unchanged import assert_unchanged, snapshot

OTHERS = {f"layer: {name}": case for name, case in layer_kinds.CASES.items()}
ALL = CASES | OTHERS
SMOOTH = [name for name, case in ALL.items() if case.linear != {*case.layers}]  # whose GGN is another matrix
WAYS = [(name, "auto") for name in ALL] + [(name, "ggn") for name in SMOOTH]
EIGENVALUES = ("lambda_max", "relative_flatness_max")
PARTS = ("neuron_flatness", "neuron_flatness_rows")
OF_WEIGHTS = ("adaptive_sharpness", *PARTS, *(f"{measure}_max" for measure in PARTS))
OF_TRACES = ("relative_flatness", "trace", "relative_flatness_columns")
TOGETHER = (*OF_TRACES, *OF_WEIGHTS, *EIGENVALUES, "weight_norm", "scaled_trace", "relative_flatness_per_feature")


def check(report, case, layer, curvature, rel=1e-9, of_size=0.0):
    """Hold every value of a layer in a report against the dense matrix; in float32 errors may be ``of_size`` of it."""
    curved = curvature == "auto" and layer not in case.linear
    for measure in report.measures:
        estimate, value = report[layer, measure], grid.expected(case, layer, curvature)[measure]
        of_terms = (of_size or rel) if measure in EIGENVALUES else of_size
        off = 1e-12 + (2 if curved or (measure in EIGENVALUES and of_size) else 1) * of_terms * size_of(
            case, layer, curvature, measure
        )
        if isinstance(value, torch.Tensor):  # of neurons
            assert estimate.per_neuron.dtype == torch.float64
            torch.testing.assert_close(estimate.per_neuron, value, rtol=rel, atol=off)
            if measure.endswith("_max"):
                assert torch.equal(estimate.per_neuron, report[layer, measure.removesuffix("_max")].per_neuron)
                value = float(value.max())
            else:
                off += rel * float(value.abs().max())
                value = float(value.sum())
        relative = 0 if measure in EIGENVALUES else rel
        assert estimate.value == pytest.approx(value, rel=relative, abs=off), (layer, measure)
        if estimate.per_sample is not None:
            assert float(estimate.per_sample.mean()) == pytest.approx(value, rel=rel, abs=off), (layer, measure)
        of_data = measure != "weight_norm"
        exact = curvature == "auto" or (layer in case.linear and measure != "lambda_max") or not of_data
        samples = case.samples if of_data else 0
        assert (estimate.exact, estimate.stderr, estimate.samples) == (exact, None, samples), (layer, measure)
        if CASES.get(case.name) is case and measure in (*OF_TRACES, *EIGENVALUES):
            always = {"auto": "hessian", "ggn": "ggn"}[curvature]
            expected = always if measure == "lambda_max" else grid.method(case, layer, measure, curvature)
            assert estimate.method == expected, (layer, measure)
    for measure in {*report.measures} & {*PARTS, f"{PARTS[0]}_max", f"{PARTS[1]}_max", "trace"}:
        values = [report[each, measure].value for each in report.layers]
        total = max(values) if measure.endswith("_max") else sum(values)
        assert report[measure].value == pytest.approx(total, rel=1e-9, abs=1e-12)


@functools.cache
def size_of(case, layer, curvature, measure):
    """Return how large the terms of a measure are, which rounding errors are relative to."""
    matrix, weight = CURVATURES[curvature](case, layer), grid.weight_of(case, layer)
    if measure in OF_TRACES:
        return float(matrix.abs().max())
    if measure == "relative_flatness_max":
        rows = torch.linalg.eigvalsh(torch.einsum("sjsk->sjk", matrix)).abs().amax(dim=1)
        return float(weight.square().sum(dim=1) @ rows)
    if measure == "lambda_max":
        return float(torch.linalg.eigvalsh(matrix.flatten(2).flatten(0, 1)).abs().max())
    return float((weight[:, :, None, None] * matrix * weight).abs().sum())


def measured(case, measures, size=2, **options):
    return pf.measure(case.build(), case.loss, batches(case, size), layers=[*case.layers], measures=measures, **options)


CUTS = {  # measures, samples in a batch (0: all), options
    "traces by sample": (OF_TRACES, 2, {"per_sample": True}),
    "flatness by sample": (OF_TRACES[:1], 1, {"per_sample": True}),  # another basis for it alone
    "trace": (OF_TRACES[1:2], 0, {}),
    "columns by sample": (OF_TRACES[2:], 2, {"per_sample": True}),
    "rows and columns": (OF_TRACES[::2], 1, {}),
    "of weights": (OF_WEIGHTS, 0, {}),
    "traces and of weights, by sample": ((*OF_TRACES, *OF_WEIGHTS), 1, {"per_sample": True}),
}


@pytest.mark.parametrize(("name", "curvature"), WAYS)
def test_every_value(name, curvature):
    """Together; the model is left as it was."""
    case, model = ALL[name], ALL[name].build()
    before = snapshot(model)
    report = pf.measure(model, case.loss, batches(case, case.samples), layers=[*case.layers], measures=TOGETHER,
        curvature=curvature)  # fmt: skip
    assert_unchanged(model, before)
    for layer in case.layers:
        check(report, case, layer, curvature)


@in_turn(6, ("name", "curvature", "cut"), [(*way, cut) for way in WAYS for cut in CUTS])  # of seven, each cut in turn
def test_every_value_alone_in_any_cut_and_by_sample(name, curvature, cut):
    case, (measures, size, options) = ALL[name], CUTS[cut]
    report = measured(case, measures, size or case.samples, curvature=curvature, **options)
    for layer in case.layers:
        check(report, case, layer, curvature)


@in_turn(6, "name", ALL)
def test_linear_layers_by_hessian_products_too(name):
    report = measured(ALL[name], OF_TRACES[:1], 2, curvature="hessian")
    for layer in report.layers:
        flatness = grid.expected(ALL[name], layer, "auto")["relative_flatness"]
        assert report[layer, "relative_flatness"].value == pytest.approx(flatness, rel=1e-9, abs=1e-12)
        assert report[layer, "relative_flatness"].exact


@in_turn(5, ("name", "curvature"), [way for way in WAYS if way[0] in CASES])
def test_rows_whose_blocks_do_not_fit(name, curvature, monkeypatch):
    """A sweep for each product; second derivatives in the weights where the GGN is another matrix."""
    monkeypatch.setattr("pyflatness.hessian.row_blocks.fit", lambda columns, budget: False)
    report = measured(CASES[name], "relative_flatness_max", curvature=curvature, memory=1)
    for layer in report.layers:
        check(report, CASES[name], layer, curvature)
        assert any("Lanczos" in note for note in report[layer, "relative_flatness_max"].notes)


def test_samples_that_cannot_be_told_apart():
    case = CASES["gathered tokens"]
    with pytest.raises(pf.errors.InputError, match=r"layer 'one': .* cannot be told apart by the"):
        pf.measure(case.build(), case.loss, (case.inputs, case.targets), layers=[*case.layers], curvature="ggn")


@every(together=1, name=NETWORKS, route=ROUTES, engine=ENGINES)
def test_every_backend_instruction_set_and_route(name, route, engine, monkeypatch):
    monkeypatch.setattr(LayerContraction, "gram_is_cheaper", lambda *_: route == "gram")
    for measures in (OF_TRACES, OF_TRACES[2:], OF_WEIGHTS, (*OF_TRACES, *OF_WEIGHTS)):
        check_backend(CASES[name], measures, engine)


@every(together=1, case=OTHERS, route=ROUTES, engine=ENGINES)
def test_every_backend_and_route_of_other_layers(case, route, engine, monkeypatch):
    monkeypatch.setattr(LayerContraction, "gram_is_cheaper", lambda *_: route == "gram")
    check_backend(case, (*OF_TRACES, *OF_WEIGHTS), engine)


def check_backend(case, measures, engine):
    report = measured(case, measures, case.samples, curvature="ggn", backend=engine.backend)
    for layer in case.layers:
        check(report, case, layer, "ggn")
        assert {report[layer, measure].backend for measure in measures} == {engine.backend}


@in_turn(5, ("name", "curvature", "measures"), [
    (*way, measures) for way in WAYS if "peaked" not in way[0] and way[0] in CASES
    for measures in (OF_TRACES, (*OF_TRACES, *OF_WEIGHTS, *EIGENVALUES))
])  # fmt: skip
def test_float32(name, curvature, measures):
    """Against float64 on the same network; the forward and backward passes' own rounding is in it."""
    case = CASES[name]
    data = [(to(torch.float32, x), to(torch.float32, y)) for x, y in batches(case)]
    model, loss = case.build().float(), to(torch.float32, case.loss)
    report = pf.measure(model, loss, data, layers=[*case.layers], curvature=curvature, measures=measures)
    for layer in case.layers:
        check(report, case, layer, curvature, rel=1e-4, of_size=1e-5)


@in_turn(4, ("name", "curvature"), [*WAYS, *((name, "ggn") for name in ALL if name not in SMOOTH)])
def test_block_traces(name, curvature):
    case = ALL[name]
    for layer in case.layers:
        if curvature == "auto" and name in CASES and layer in case.linear:
            continue  # by Gauss-Newton
        found = pf.block_traces(case.build(), case.loss, batches(case), layer, curvature=curvature)
        expected = truth.block_traces(CURVATURES[curvature](case, layer), grid.groups(case, layer))
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-11 * float(expected.abs().max() + 1))


def ignores(case):
    """Whether the loss leaves out some rows, so that the deviations are not over all of them."""
    return bool((case.targets == getattr(case.loss, "ignore_index", -100)).any())


@in_turn(4, ("name", "curvature"), [way for way in WAYS if not ignores(ALL[way[0]])])
def test_normalised(name, curvature):
    """All layers by one report, and one of them by a call of its own."""
    case = ALL[name]
    report = measured(case, "relative_flatness_std", curvature=curvature)
    for number, layer in enumerate(case.layers):
        deviation = truth.layer_deviations(case.build(), layer, case.inputs)
        module, groups = grid.network(case).get_submodule(layer), grid.groups(case, layer)
        matrix, weight = truth.scaled(module, CURVATURES[curvature](case, layer), deviation)
        expected = pytest.approx(truth.relative_flatness_of(matrix, weight, groups), rel=1e-8, abs=1e-12)
        assert report[layer, "relative_flatness_std"].value == expected
        if number == 0:
            options = {"curvature": curvature, "normalize": "std"}
            assert pf.relative_flatness(case.build(), case.loss, batches(case), layer, **options).value == expected


@networks_in_turn(8)
def test_sampled_values(name):
    """Within four standard errors of the truth, whether by factors or by Hessian products."""
    check_sampled(CASES[name], (*OF_TRACES, "adaptive_sharpness"), 200)


@every(together=1, case=OTHERS, probes=[60, "adaptive"])
def test_sampled_values_of_other_layers(case, probes):
    check_sampled(case, OF_TRACES[:1] if probes == "adaptive" else (*OF_TRACES, "adaptive_sharpness"), probes)


def check_sampled(case, measures, probes):
    """Of all samples at once; adaptively of many more, to know the error by."""
    times, size = (60, 60 * case.samples) if probes == "adaptive" else (1, case.samples)
    inputs, targets = (part.repeat(times, *(1,) * (part.ndim - 1)) for part in (case.inputs, case.targets))
    data = batches(dataclasses.replace(case, inputs=inputs, targets=targets), size)
    options = {"layers": [*case.layers], "probes": probes, "seed": 1, "measures": measures}
    report = pf.measure(case.build(), case.loss, data, **options)
    for layer in case.linear if probes == "adaptive" else case.layers:
        for measure in measures:
            estimate, value = report[layer, measure], grid.expected(case, layer, "auto")[measure]
            assert abs(estimate.value - value) <= 4 * known_stderr(estimate) + 1e-9 * abs(value) + 1e-14, layer
            if probes != "adaptive":
                method, sampled = grid.method(case, layer, measure), estimate.stderr is not None
                assert estimate.exact is not sampled, (layer, measure)
                assert estimate.method.endswith("-sampled") is sampled, (layer, measure)
                if case.name in CASES:
                    assert estimate.method.removesuffix("-sampled") == method, (layer, measure)


@networks_in_turn(5)
def test_a_sampled_value_alone_and_in_cuts(name):
    if name == "curved at the last sample alone":  # a part without that sample goes another way
        return
    options = {"probes": 16, "seed": 1}
    beside = measured(CASES[name], ("trace", "adaptive_sharpness"), 2, **options)
    alone = measured(CASES[name], "adaptive_sharpness", 1, **options)
    for layer in alone.layers:
        expected = pytest.approx(beside[layer, "adaptive_sharpness"].value, rel=1e-6, abs=1e-12)
        assert alone[layer, "adaptive_sharpness"].value == expected, layer


@in_turn(2, ("name", "layer"), [(name, layer) for name, case in OTHERS.items() for layer in case.layers])
def test_verified(name, layer):
    assert pf.verify(OTHERS[name].build(), OTHERS[name].loss, (OTHERS[name].inputs, OTHERS[name].targets), layer)


# --- convolutions as one dense matrix ---------------------------------------------------------------------------------

CONVOLUTIONS = (*truth.CONVOLUTIONS, *truth.TRANSPOSED)
LARGE = ("cnn", "cnn, one sample, channels last", "residual")  # for a Hessian of the dense matrix
DENSE = {
    f"{name}, {layer}": (ALL[name], layer)
    for name, layer in [*LAYERS, *((name, "up") for name in OTHERS if name.startswith("layer: transposed"))]
    if name not in LARGE and not name.endswith(("own output", "told"))
    if isinstance(grid.network(ALL[name]).get_submodule(layer), CONVOLUTIONS)
}
OPTIONS = {
    "plain": {},
    "ggn": {"curvature": "ggn"},
    "reference": {"curvature": "ggn", "backend": "reference"},
    "std": {"normalize": "std"},
}


@every(together=1, convolution=DENSE, options=OPTIONS)
def test_dense_convolutions(convolution, options):
    """Rows are output pixels and columns input pixels, against the layer as a Linear."""
    case, layer = convolution
    dense, dense_name = truth.affine(case.build(), layer, case.inputs)
    repeats = grid.network(case).get_submodule(layer).padding_mode != "zeros"
    measures = tuple(measure for measure in (*OF_TRACES, *OF_WEIGHTS) if not (repeats and measure == OF_WEIGHTS[0]))
    matrix_of = truth.layer_ggn if options.get("curvature") == "ggn" else truth.layer_hessian
    matrix = matrix_of(dense, case.loss, case.inputs, case.targets, dense_name)
    weight = truth.weight_of(dense, dense_name)
    options = {"layers": layer, "conv": "affine", **options}
    report = pf.measure(case.build(), case.loss, batches(case), measures=measures, per_sample=True, **options)
    expected = grid.values_of(matrix, weight)
    for measure in measures:
        if options.get("normalize") and measure in OF_TRACES:
            continue  # of the normalised features
        estimate, value = report[layer, measure], expected[measure]
        if isinstance(value, torch.Tensor):
            floor = 1e-12 + 1e-9 * float(value.abs().max())
            torch.testing.assert_close(estimate.per_neuron, value, rtol=1e-9, atol=floor)
            value = float(value.max() if measure.endswith("_max") else value.sum())
        size = float(matrix.abs().max())
        assert estimate.value == pytest.approx(value, rel=1e-9, abs=1e-12 + 1e-9 * size), measure
        if not measure.endswith("_max"):
            assert float(estimate.per_sample.mean()) == pytest.approx(estimate.value, rel=1e-9, abs=1e-12)
    if len(weight) < 200 and not options.get("normalize"):
        traces = pf.block_traces(case.build(), case.loss, batches(case), **options | {"layer": options.pop("layers")})
        torch.testing.assert_close(traces, truth.block_traces(matrix), rtol=1e-8, atol=1e-11)


# --- in closed form ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in OTHERS if " norm" in name])
def test_normalized_sharpness_of_a_norm_is_twice_a_weight_times_the_root_of_its_curvature(name):
    """The minimum over a of H a + w²/a is 2 |w| √H, for each weight by itself."""
    case = OTHERS[name]
    report = measured(case, "normalized_sharpness", curvature="ggn")
    for layer in case.layers:
        weight, diagonal = grid.weight_of(case, layer), truth.diagonal_of(grid.ggn(case, layer))
        expected = float((2 * weight.abs() * diagonal.clamp_min(0).sqrt()).sum())
        assert report[layer, "normalized_sharpness"].value == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_matrix_norms_of_a_norm_are_its_largest_weight_and_the_root_of_their_squares():
    case = layer_kinds.CASES["norms in a block"]
    names = ["matrix_normalized_sharpness", "matrix_normalized_sharpness_frobenius"]
    report = measured(case, names, curvature="ggn")
    for name, order in zip(names, (float("inf"), 2), strict=True):
        expected = sum(
            float(torch.linalg.vector_norm(grid.weight_of(case, layer), order))
            * truth.trace_of(grid.ggn(case, layer)) ** 0.5
            for layer in case.layers
        )
        assert report[name].value == pytest.approx(expected, rel=1e-8)


def test_hand_example():
    """Of the formula sheet: two samples, cross-entropy."""
    model = nn.Linear(2, 2, bias=False).double()
    model.weight.data.copy_(torch.tensor([[1.0, 0.0], [0.0, 2.0]]))
    data = torch.tensor([[1.0, 0.0], [1.0, 1.0]]).double(), torch.tensor([0, 1])
    report = pf.measure(model, nn.CrossEntropyLoss(), data, measures="all")
    for measure in PARTS:
        assert report["", measure].per_neuron.tolist() == pytest.approx([0.196612, 0.393224], abs=1e-6)
        assert report[measure].value == pytest.approx(0.589836, abs=1e-6)
    assert report["adaptive_sharpness"].value == pytest.approx(0.589836, abs=1e-6)
    assert report["neuron_flatness_max"].value == pytest.approx(0.393224, abs=1e-6)
    assert report["lambda_max"].value == pytest.approx(0.514737, abs=5e-7)
    assert report["", "relative_flatness_max"].value == pytest.approx(1.286842, abs=5e-7)
    assert report["scaled_lambda_max"].value == pytest.approx(5 * report["lambda_max"].value)
    assert report["scaled_trace"].value == pytest.approx(5 * 0.589836, abs=5e-6)
