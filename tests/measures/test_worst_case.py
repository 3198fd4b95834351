"""Worst cases within a ball against the exact maximum of a quadratic loss, and of a box by its corners."""

import itertools

import pytest
import torch
from torch import nn

import pyflatness as pf


def _quadratic(at_minimum=True):
    """A linear model with squared error: its loss is a quadratic function of the weights, with these H and ∇E."""
    torch.manual_seed(0)
    model = nn.Linear(5, 1, bias=False).double()
    x = torch.randn(30, 5).double()
    y = x @ torch.randn(5, 1).double()
    hessian = 2 * x.T @ x / len(x)
    if at_minimum:
        model.weight.data = torch.linalg.lstsq(x, y).solution.T.contiguous()
    gradient = 2 * x.T @ (x @ model.weight.data.T - y) / len(x)
    return model, (x, y), hessian, gradient.flatten()


def _trust_region(hessian, gradient, rho):
    """The maximum of ⟨g, u⟩ + ½ ⟨u, H u⟩ for |u| ≤ ρ, H positive definite, by its Lagrange multiplier."""
    values, vectors = torch.linalg.eigh(hessian)
    g = vectors.T @ gradient
    low, high = float(values[-1]), float(values[-1]) + 1e3
    if float(g.abs().max()) < 1e-12:
        return 0.5 * rho**2 * float(values[-1])
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if (g / (middle - values)).norm() > rho else (low, middle)
    u = g / (high - values)
    return float(g @ u + 0.5 * (values * u * u).sum())


@pytest.mark.parametrize("at_minimum", [True, False])
@pytest.mark.parametrize("adaptive", [True, False])
def test_of_a_quadratic_loss_is_the_trust_region_maximum(at_minimum, adaptive):
    model, (x, y), hessian, gradient = _quadratic(at_minimum)
    scale = model.weight.detach().abs().flatten() if adaptive else torch.ones(5).double()
    batches = [(x[:13], y[:13]), (x[13:], y[13:])]
    found = pf.worst_case_sharpness(
        model, nn.MSELoss(), batches, rho=0.3, adaptive=adaptive, steps=60, starts=2, bound=True
    )
    expected = _trust_region(scale.unsqueeze(1) * hessian * scale, scale * gradient, 0.3)
    assert found.value == pytest.approx(expected, rel=1e-4)
    assert found.value <= expected * (1 + 1e-9)
    assert found.gradient_norm == pytest.approx(float((scale * gradient).norm()), abs=1e-10)
    top = float(torch.linalg.eigvalsh(scale.unsqueeze(1) * hessian * scale)[-1])
    assert found.bound == pytest.approx(0.3 * found.gradient_norm + 0.045 * top, rel=1e-6)
    assert found.value <= found.bound * (1 + 1e-9)
    assert found.samples == 30


@pytest.mark.parametrize("adaptive", [True, False])
def test_of_a_convex_loss_in_a_box_is_at_a_corner(adaptive):
    model, (x, y), hessian, gradient = _quadratic(at_minimum=False)
    scale = model.weight.detach().abs().flatten() if adaptive else torch.ones(5).double()
    corners = (torch.tensor(signs).double() * 0.2 * scale for signs in itertools.product((-1, 1), repeat=5))
    expected = max(float(gradient @ u + 0.5 * u @ hessian @ u) for u in corners)
    found = pf.worst_case_sharpness(
        model, nn.MSELoss(), (x, y), rho=0.2, norm="linf", adaptive=adaptive, steps=40, starts=8
    )
    assert found.value == pytest.approx(expected, rel=1e-9)
    assert len(found.starts) == 8
    assert float(found.starts.max()) == pytest.approx(found.value)


def test_keskar_is_in_percent_of_its_own_box():
    model, (x, y), hessian, gradient = _quadratic(at_minimum=False)
    scale = model.weight.detach().abs().flatten() + 1
    corners = (torch.tensor(signs).double() * 0.1 * scale for signs in itertools.product((-1, 1), repeat=5))
    rise = max(float(gradient @ u + 0.5 * u @ hessian @ u) for u in corners)
    found = pf.measures.keskar_sharpness(model, nn.MSELoss(), (x, y), rho=0.1, steps=40, starts=8)
    loss = nn.MSELoss()(model(x), y).item()
    assert found.loss == pytest.approx(loss)
    assert found.value == pytest.approx(100 * rise / (1 + loss), rel=1e-9)


def test_groups_have_maxima_of_their_own():
    model, (x, y), _, _ = _quadratic(at_minimum=False)
    options = {"rho": 0.1, "steps": 60, "starts": 2}
    found = pf.worst_case_sharpness(model, nn.MSELoss(), [(x[:20], y[:20]), (x[20:], y[20:])], m=8, **options)
    cuts = [(0, 8), (8, 16), (16, 20), (20, 28), (28, 30)]
    alone = [pf.worst_case_sharpness(model, nn.MSELoss(), (x[a:b], y[a:b]), **options) for a, b in cuts]
    assert found.groups == 5
    expected = sum((b - a) * each.value for (a, b), each in zip(cuts, alone, strict=True)) / 30
    assert found.value == pytest.approx(expected, rel=1e-9)
    assert found.value > pf.worst_case_sharpness(model, nn.MSELoss(), (x, y), **options).value


def test_adaptive_value_does_not_see_rescalings_and_normalised_logits_no_scale():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double().eval()
    data, loss = (torch.randn(20, 4).double(), torch.randint(3, (20,))), nn.CrossEntropyLoss()
    other = pf.reparameterize(model, {"0": 3.0}, data)
    options = {"rho": 0.1, "steps": 30}
    one, two = (pf.worst_case_sharpness(each, loss, data, adaptive=True, **options) for each in (model, other))
    assert two.value == pytest.approx(one.value, rel=1e-6)
    for part in model[2].parameters():
        part.data *= 5
    scaled = pf.worst_case_sharpness(model, loss, data, adaptive=True, normalize_logits=True, **options)
    for part in model[2].parameters():
        part.data /= 5
    plain = pf.worst_case_sharpness(model, loss, data, adaptive=True, normalize_logits=True, **options)
    assert scaled.value == pytest.approx(plain.value, rel=1e-6)


def test_critical_sharpness_of_gradient_steps_on_a_quadratic_loss():
    model, (x, y), hessian, gradient = _quadratic(at_minimum=False)
    for start in (1e-3, 1e3):
        found = pf.measures.critical_sharpness(
            model, nn.MSELoss(), [(x[:7], y[:7]), (x[7:], y[7:])], {"weight": -gradient.view(1, 5)}, start=start
        )
        expected = float(gradient @ hessian @ gradient / gradient.square().sum())
        assert found.value == pytest.approx(expected, rel=1e-5)
    assert found.samples == 30


def test_critical_sharpness_takes_a_step_of_a_layer_by_its_name():
    model, data, _, gradient = _quadratic(at_minimum=False)
    by_layer, by_parameter = (
        pf.measures.critical_sharpness(model, nn.MSELoss(), data, {name: -gradient.view(1, 5)})
        for name in ("", "weight")
    )
    assert by_layer.value == by_parameter.value


def test_critical_sharpness_refuses_steps_that_are_none():
    model, data, _, gradient = _quadratic(at_minimum=False)
    cases = {
        "rises along it from the start": {"weight": gradient.view(1, 5)},
        "it is zero": {"weight": torch.zeros(1, 5)},
        "no parameter 'bias'": {"bias": torch.zeros(1)},
        r"shape \(1, 5\) are wanted": {"weight": torch.zeros(5)},
        "a mapping from names": {},
    }
    for message, step in cases.items():
        with pytest.raises(pf.errors.InputError, match=message):
            pf.measures.critical_sharpness(model, nn.MSELoss(), data, step)


BAD = {
    "norm": ({"norm": "l1"}, "'l2', 'linf'"),
    "rho": ({"rho": 0}, "rho=0"),
    "steps": ({"steps": 0}, "steps=0"),
    "m": ({"m": 0}, "m=0"),
    "bound": ({"norm": "linf", "bound": True}, "bound=True is for norm='l2'"),
    "logits": ({"normalize_logits": 1}, "normalize_logits=1"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_options_are_refused(case):
    model, data, _, _ = _quadratic()
    options, message = BAD[case]
    with pytest.raises(pf.errors.InputError, match=message):
        pf.worst_case_sharpness(model, nn.MSELoss(), data, **options)


def test_a_loss_of_nan_is_an_error():
    model, (x, y), _, _ = _quadratic()
    x[3, 2] = torch.nan
    with pytest.raises(pf.errors.NonFiniteError, match="the loss at the model's weights is nan"):
        pf.worst_case_sharpness(model, nn.MSELoss(), (x, y))
