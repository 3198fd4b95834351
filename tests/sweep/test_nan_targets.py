"""Samples whose targets, outputs or loss are not numbers: one policy for every route, and one mask for both reads."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pyflatness as pf
from support.brute_force import network
from support.cases import LABELS, PROBABILITIES, C, M, N
from support.combinations import every
from support.grid import Net, normal

X = normal(10, N, M)
KEPT = [0, 1, 3, 4, 5]


def masked_error(outputs, targets):
    """A loss of its own that knows what to do about targets that are missing."""
    known = ~targets.isnan()
    return torch.where(known, (outputs - targets.nan_to_num()).pow(4), 0.0).sum() / len(outputs)


LOSSES = {
    "squared error": (nn.MSELoss(), PROBABILITIES.double()),
    "squared error sum": (nn.MSELoss(reduction="sum"), PROBABILITIES.double()),
    "binary": (nn.BCEWithLogitsLoss(), LABELS.double()),
    "probabilities": (nn.CrossEntropyLoss(), PROBABILITIES.double()),
    "custom": (lambda f, y: (f - y).square().mean(), PROBABILITIES.double()),
}
ROUTES = {  # (activation, layer, options)
    "head": (nn.ReLU, "2", {}),
    "factors": (nn.ReLU, "0", {}),
    "hessian": (nn.Tanh, "0", {}),
    "sampled factors": (nn.ReLU, "0", {"probes": 2}),
    "sampled hessian": (nn.Tanh, "0", {"probes": 2}),
    "groups": (nn.ReLU, "0", {"probes": "adaptive"}),
    "normalised head": (nn.ReLU, "2", {"normalize": "std"}),
    "normalised factors": (nn.ReLU, "0", {"normalize": "std"}),
    "normalised hessian": (nn.Tanh, "0", {"normalize": "std"}),
}
BAD = pytest.mark.parametrize("bad", [math.nan, math.inf])


def spoiled(targets, bad):
    targets = targets.clone()
    targets[2, 1] = bad
    return targets


def model_of(route):
    """With weights of the first layer that leave the spoiled sample with no active unit, on which NaN could travel."""
    activation, layer, options = ROUTES[route]
    model = network(M, 6, C, activation=activation)
    if activation is nn.ReLU and layer == "0":
        model[0].bias.data.fill_(-100)
        model[0].weight.data[0] = 60 * (X[0] - X[2])
    return model, layer, options


@BAD
@every(together=1, name=[*LOSSES], route=[*ROUTES])
def test_a_target_that_is_no_number(name, route, bad):
    loss, y = LOSSES[name]
    if route == "groups" and name == "custom":
        pytest.skip("signs of a custom loss's curvature are not known to be positive")
    model, layer, options = model_of(route)
    data = [(X[:4], spoiled(y, bad)[:4]), (X[4:], y[4:])]

    def value(policy, data=data, **more):
        return pf.relative_flatness(model, loss, data, layer, nan_policy=policy, **options, **more)

    with pytest.raises(pf.errors.NonFiniteError, match=r"batch 0: 1 of 4 .* NaN or infinity .*(targets|loss)"):
        value("raise")
    passed = value("propagate", per_sample=True)
    assert math.isnan(passed.value)
    assert passed.per_sample.isnan().tolist() == [i == 2 for i in range(N)]
    omitted = value("omit")
    assert (omitted.samples, omitted.omitted) == (N - 1, 1)
    if "probes" not in options:  # else its neighbours' signs go by their place in the data
        expected = value("raise", (X[KEPT], y[KEPT])).value
        assert omitted.value == pytest.approx(expected, rel=1e-9)
        assert abs(expected) > 1e-6


@BAD
def test_head_flatness(bad):
    weight = normal(2, C, M)
    for loss, y in (("mse_loss", PROBABILITIES), ("binary_cross_entropy_with_logits", LABELS)):
        y = y.double()
        for normalize in (None, "std"):
            options = {"loss": loss, "normalize": normalize}
            with pytest.raises(pf.errors.NonFiniteError, match="1 of 6 rows have NaN or infinity in the targets"):
                pf.head_flatness(X, weight, None, spoiled(y, bad), **options)
            found = pf.head_flatness(X, weight, None, spoiled(y, bad), nan_policy="omit", **options)
            expected = pf.head_flatness(X[KEPT], weight, None, y[KEPT], **options)
            assert found.value == pytest.approx(expected.value, rel=1e-12)
            assert math.isnan(pf.head_flatness(X, weight, None, spoiled(y, bad), nan_policy="propagate", **options))


@pytest.mark.parametrize("measure", ["lambda_max", "relative_flatness_max"])
@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_eigenvalues(measure, activation, reduction):
    model, loss, y = network(M, 6, C, activation=activation), nn.MSELoss(reduction=reduction), PROBABILITIES.double()
    for policy in ("raise", "omit"):
        with pytest.raises(pf.errors.NonFiniteError, match="targets"):
            pf.measure(model, loss, (X, spoiled(y, math.nan)), measures=[measure], nan_policy=policy)
    report = pf.measure(model, loss, (X, spoiled(y, math.nan)), measures=[measure], nan_policy="propagate")
    assert math.isnan(report["0", measure].value)


@pytest.mark.parametrize("measure", ["sharpness", "adaptive_sharpness", "fisher_rao"])
@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
def test_measures_of_all_parameters(measure, activation):
    model, y = network(M, 4, C, activation=activation), PROBABILITIES.double()

    def value(data, policy="raise"):
        return pf.measure(model, nn.MSELoss(), data, measures=[measure], nan_policy=policy)[measure]

    data = X, spoiled(y, math.nan)
    with pytest.raises(pf.errors.NonFiniteError):
        value(data)
    assert math.isnan(value(data, "propagate"))
    omitted = value(data, "omit")
    assert omitted.omitted == 1
    assert omitted.value == pytest.approx(value((X[KEPT], y[KEPT])).value, rel=1e-9)


@pytest.mark.parametrize("layer", ["0", "2"])
def test_block_traces(layer):
    model, loss, y = network(M, 6, C), nn.MSELoss(), PROBABILITIES.double()
    data = X, spoiled(y, math.nan)
    with pytest.raises(pf.errors.NonFiniteError):
        pf.block_traces(model, loss, data, layer)
    assert bool(pf.block_traces(model, loss, data, layer, nan_policy="propagate").isnan().all())
    found = pf.block_traces(model, loss, data, layer, nan_policy="omit", normalize="std")
    expected = pf.block_traces(model, loss, (X[KEPT], y[KEPT]), layer, normalize="std")
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("layer", ["0", "2"])
def test_outputs_that_are_no_numbers_behind_a_layer_that_is_fine(layer):
    """A constant of NaN behind a layer leaves squared error its curvature, and no loss."""
    model = Net(lambda net, x: net.body(x[:, :M]) + x[:, M:].sum(1, keepdim=True), body=network(M, 6, C)).double()
    x, y = torch.cat([X, torch.zeros(N, 1).double()], dim=1), PROBABILITIES.double()
    x[2, M] = torch.nan
    with pytest.raises(pf.errors.NonFiniteError, match="outputs"):
        pf.relative_flatness(model, nn.MSELoss(), (x, y), f"body.{layer}")
    found = pf.relative_flatness(model, nn.MSELoss(), (x, y), f"body.{layer}", nan_policy="omit", normalize="std")
    expected = pf.relative_flatness(model, nn.MSELoss(), (x[KEPT], y[KEPT]), f"body.{layer}", normalize="std")
    assert found.value == pytest.approx(expected.value, rel=1e-9)


@pytest.mark.parametrize("route", ["head", "factors", "hessian"])
def test_a_loss_of_its_own_may_take_nan_for_a_missing_target(route):
    activation, layer, _ = ROUTES[route]
    model, y = network(M, 6, C, activation=activation), spoiled(PROBABILITIES.double(), math.nan)
    found = pf.relative_flatness(model, masked_error, (X, y), layer)
    assert (found.samples, found.omitted) == (N, 0)
    known = (~y.isnan()).double()
    expected = pf.relative_flatness(
        model, lambda f, t: ((f - t[:, :C]).pow(4) * t[:, C:]).sum() / len(f),
        (X, torch.cat([y.nan_to_num(), known], dim=1)), layer,
    )  # fmt: skip
    assert found.value == pytest.approx(expected.value, rel=1e-12)


def test_classes_that_are_masked_are_no_reason_to_leave_samples_out():
    """Logits of minus infinity count in the values, so they count in the deviations."""
    mask = torch.tensor([0.0, 0.0, -math.inf, 0.0]).double()
    model = Net(lambda net, x: net.body(x) + mask, body=network(M, 6, C)).double()
    y = torch.tensor([0, 1, 3, 0, 1, 3])
    found = [
        pf.relative_flatness(model, F.cross_entropy, (X, y), "body.0", nan_policy=policy, normalize="std")
        for policy in ("raise", "omit")
    ]
    assert found[0].value == found[1].value > 0
    assert found[1].omitted == 0


def test_a_sample_found_bad_after_the_deviations_is_an_error():
    """Its inputs and outputs are numbers and its derivative is not: it cannot be taken out of the deviations again."""

    def forward(net, x):
        h = net.a(x)
        return net.b(torch.cat([h[:, :1].sub(h[:, :1].detach()).sqrt() if len(x) else h[:, :1], h[:, 1:]], dim=1))

    model = Net(forward, a=nn.Linear(M, 5), b=nn.Linear(5, C)).double()
    for options in ({"curvature": "ggn"}, {"curvature": "ggn", "probes": "adaptive"}):
        with pytest.raises(pf.errors.NonFiniteError, match="cannot leave them out of the deviations"):
            pf.relative_flatness(
                model, nn.CrossEntropyLoss(), (X, LABELS.argmax(1)), "a", nan_policy="omit", normalize="std", **options
            )  # fmt: skip


# --- naN of parts -----------------------------------------------------------------------------------------------------


OF_PARTS = ["neuron_flatness", "neuron_flatness_max", "neuron_flatness_rows_max", "normalized_sharpness"]


@every(name=[*OF_PARTS, "fisher_rao"], loss=[nn.BCEWithLogitsLoss(), nn.MSELoss()], bad=[math.nan, math.inf])
def test_targets_that_are_no_numbers(name, loss, bad):
    model = network(M, 6, C, activation=nn.ReLU)
    targets = (LABELS if isinstance(loss, nn.BCEWithLogitsLoss) else PROBABILITIES).double()

    def values(targets):
        data = list(zip(X.split(2), targets.split(2), strict=True))
        report = pf.measure(model, loss, data, measures=[name], nan_policy="propagate")
        return list(report.by_measure()[name].values())

    assert all(math.isfinite(estimate) for estimate in values(targets))
    targets = targets.clone()
    targets[2, 1] = bad
    for estimate in values(targets):
        assert math.isnan(estimate)
        assert estimate.per_neuron is None or bool(torch.as_tensor(estimate.per_neuron).isnan().all())
