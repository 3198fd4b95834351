"""λ_max and what is made of it, and maximal relative flatness; of every network: sweep/test_every_network.py."""

import pytest
import torch
from torch import nn

import pyflatness as pf
from pyflatness.losses.custom import CustomLoss
from support import grid, truth
from support.combinations import every, in_turn
from support.grid import batches
from support.networks import CASES, LAYERS

EIGENVALUES = ("lambda_max", "relative_flatness_max")


def largest(matrix):
    """λ_max, and the largest in magnitude."""
    size = matrix.shape[0] * matrix.shape[1] if matrix.ndim == 4 else len(matrix)
    values = torch.linalg.eigvalsh(matrix.reshape(size, size))
    return float(values[-1]), float(values.abs().max())


def of_rows(matrix, weight):
    """Σ_s |w_s|² λ_max(H_ss), and the same with the largest in magnitude."""
    values = torch.linalg.eigvalsh(torch.einsum("sjsk->sjk", matrix))
    norms = weight.square().sum(dim=1)
    return float(norms @ values[:, -1]), float(norms @ values.abs().amax(dim=1))


JOINT = ("mlp ReLU", "mlp Tanh", "custom loss, Tanh", "siamese", "recurrent", "gating", "checkpointed", "tied",
         "pruned", "weight norm", "attention", "log-softmax inside", "batch second", "unused output", "one sample",
         "cnn", "tokens, tied head")  # fmt: skip


@in_turn(2, "name", JOINT)
def test_the_network_is_the_joint_hessian(name):
    case = CASES[name]
    arguments = (case.loss, case.inputs, case.targets, case.layers)
    for curvature, matrix_of in (("auto", truth.joint_hessian), ("ggn", truth.joint_ggn)):
        matrix = matrix_of(case.build(), *arguments)
        options = {"layers": list(case.layers), "measures": "lambda_max", "curvature": curvature}
        report = pf.measure(case.build(), case.loss, batches(case), **options)
        expected, size = largest(matrix)
        assert report["lambda_max"].value == pytest.approx(expected, abs=1e-9 * size), curvature


@pytest.mark.parametrize("usual", [0, 10**6])
@pytest.mark.parametrize(("name", "layer"), [("mlp ReLU", "2"), ("custom loss, Tanh", "0"), ("tokens", "mix")])
def test_rows_by_products_and_written_out(name, layer, usual, monkeypatch):
    monkeypatch.setattr("pyflatness.hessian.row_blocks._USUAL", usual)
    case = CASES[name]
    report = pf.measure(case.build(), case.loss, batches(case), layers=layer, measures="relative_flatness_max")
    expected, size = of_rows(grid.hessian(case, layer), grid.weight_of(case, layer))
    assert report[layer, "relative_flatness_max"].value == pytest.approx(expected, abs=1e-9 * size)
    assert any("Lanczos" in note for note in report[layer, "relative_flatness_max"].notes) == (usual == 0)


@every(together=1, size=[1, 4, 6], options=[{"memory": 1}, {"memory": 3000}, {}])
def test_cuts_change_nothing(size, options):
    case = CASES["custom loss, Tanh"]
    report = pf.measure(case.build(), case.loss, batches(case, size), measures=EIGENVALUES, **options)
    for layer in case.layers:
        assert report[layer, "lambda_max"].value == pytest.approx(largest(grid.hessian(case, layer))[0], rel=1e-9)
        expected = of_rows(grid.hessian(case, layer), grid.weight_of(case, layer))[0]
        assert report[layer, "relative_flatness_max"].value == pytest.approx(expected, rel=1e-9)


NORMALISED = ("mlp ReLU", "mlp Tanh", "tokens, binary", "siamese, conv", "cnn", "grouped", "loss: custom, indefinite")


@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize(("name", "layer"), [(n, la) for n, la in LAYERS if n.startswith(NORMALISED)])
def test_normalised(name, layer, fits, monkeypatch):
    monkeypatch.setattr("pyflatness.hessian.row_blocks.fit", lambda columns, budget: fits)
    case = CASES[name]
    deviation = truth.layer_deviations(case.build(), layer, case.inputs)
    module = case.build().get_submodule(layer)
    matrix, weight = truth.scaled(module, grid.hessian(case, layer), deviation)
    report = pf.measure(case.build(), case.loss, batches(case), layers=layer, measures=EIGENVALUES, normalize="std")
    expected, size = largest(matrix)
    assert report[layer, "lambda_max"].value == pytest.approx(expected, abs=1e-8 * size)
    expected, size = of_rows(matrix, weight)
    assert report[layer, "relative_flatness_max"].value == pytest.approx(expected, abs=1e-8 * size)


# --- scaled with the weight's norm ------------------------------------------------------------------------------------

SCALED = {"scaled_lambda_max": "lambda_max", "scaled_trace": "trace"}


@pytest.mark.parametrize("name", ["mlp ReLU", "mlp Tanh", "cnn", "siamese", "weight norm", "tied"])
def test_scaled(name):
    case = CASES[name]
    model = case.build()
    measures = [*SCALED.values(), *SCALED, *(f"largest_{measure}" for measure in SCALED)]
    report = pf.measure(model, case.loss, batches(case), layers=list(case.layers), measures=measures, per_sample=True)
    for measure, base in SCALED.items():
        values = []
        for layer in report.layers:
            norm = float(truth.weight_of(model, layer).square().sum())
            values.append(report[layer, measure].value)
            assert values[-1] == pytest.approx(norm * report[layer, base].value, rel=1e-12)
            assert report[layer, measure].exact
        assert report[measure].value == pytest.approx(sum(values))
        assert report[f"largest_{measure}"].value == max(values)
        assert report.layers[values.index(max(values))] in report[f"largest_{measure}"].notes[0]
    assert float(report["scaled_trace"].per_sample.mean()) == pytest.approx(report["scaled_trace"].value)


def test_scaled_sampled_values():
    case = CASES["mlp Tanh"]
    measures = ["trace", "scaled_trace"]
    report = pf.measure(case.build(), case.loss, batches(case), measures=measures, probes=4, per_sample=True)
    for layer in report.layers:
        norm = float(grid.weight_of(case, layer).square().sum())
        base, estimate = report[layer, "trace"], report[layer, "scaled_trace"]
        assert (base.stderr is None) == (layer == report.layers[-1])  # the head's trace is exact
        stderr = None if base.stderr is None else norm * base.stderr
        assert (estimate.value, estimate.stderr) == pytest.approx((norm * base.value, stderr))
        assert estimate.method == base.method
        assert float(estimate.per_sample.mean()) == pytest.approx(estimate.value)
    assert report["scaled_trace"].stderr == pytest.approx(
        sum(report[layer, "scaled_trace"].stderr or 0.0 for layer in report.layers)
    )
    with pytest.raises(pf.errors.InputError, match="the largest of several is too large in the mean"):
        pf.measure(case.build(), case.loss, batches(case), measures="largest_scaled_trace", probes=4)


def test_what_follows_costs_nothing_more_and_shows_no_base():
    case = CASES["mlp ReLU"]
    calls = {}
    for measures in (
        "lambda_max",
        ["lambda_max", "scaled_lambda_max", "largest_scaled_lambda_max"],
        "scaled_lambda_max",
    ):
        model = case.build()
        counted = []
        model.register_forward_hook(lambda *_, counted=counted: counted.append(1))
        report = pf.measure(model, case.loss, batches(case), measures=measures)
        calls[str(measures)] = len(counted)
    assert len(set(calls.values())) == 1
    assert report.measures == ("scaled_lambda_max",)
    with pytest.raises(pf.errors.InputError, match="no measure 'lambda_max'"):
        report["lambda_max"]
    report = pf.measure(case.build(), case.loss, batches(case), measures=["trace", "largest_scaled_trace"])
    with pytest.raises(pf.errors.InputError, match=r"has no value of layer '2'"):
        report["2", "largest_scaled_trace"]


def test_layers_rescaled_against_each_other():
    """What Table 1 calls invariant does not move, and λ_max does."""
    case = CASES["mlp ReLU"]
    model, other = case.build(), case.build()
    with torch.no_grad():
        other[0].weight.mul_(3)
        other[0].bias.mul_(3)
        other[2].weight.div_(3)
    measures = [*SCALED, *(f"largest_{measure}" for measure in SCALED), "relative_flatness_max", "lambda_max"]
    before, after = (pf.measure(net, case.loss, batches(case), measures=measures) for net in (model, other))
    for layer in before.layers:
        for measure in (*SCALED, "relative_flatness_max"):
            assert after[layer, measure].value == pytest.approx(before[layer, measure].value, rel=1e-9)
    for measure in measures[:4]:
        assert after[measure].value == pytest.approx(before[measure].value, rel=1e-9)
    assert after["0", "lambda_max"].value == pytest.approx(before["0", "lambda_max"].value / 9)


WEIGHTS = torch.tensor([1.0, 0.5, 2.0, 0.0], dtype=torch.float64)
LABELS, SHARES = torch.arange(9) % 4, torch.rand(9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
TARGETS = {
    "ignored": (nn.CrossEntropyLoss(ignore_index=2, label_smoothing=0.1, reduction="sum"), LABELS),
    "class weights, one negative": (nn.CrossEntropyLoss(WEIGHTS - 0.75, reduction="sum"), LABELS),
    "probabilities": (nn.CrossEntropyLoss(WEIGHTS, label_smoothing=0.2), SHARES / SHARES.sum(1, keepdim=True)),
    "a loss of the user's": (lambda f, y: f.log_softmax(1)[torch.arange(len(y)), y].square().mean(), LABELS),
}


@pytest.mark.parametrize("name", TARGETS)
def test_products_with_the_ggn(name, monkeypatch):
    monkeypatch.delattr(CustomLoss, "factors")  # the eigenvectors of a Hessian for every sample
    loss, targets = TARGETS[name]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double().eval()
    inputs = torch.randn(9, 3, dtype=torch.float64)
    values = torch.linalg.eigvalsh(truth.joint_ggn(model, loss, inputs, targets, ["0", "2"])).flip(0)
    found = pf.spectrum(model, loss, (inputs, targets), layers=["0", "2"], k=3, curvature="ggn")
    torch.testing.assert_close(found.eigenvalues, values[:3], rtol=0, atol=1e-8 * float(values.abs().max()))
