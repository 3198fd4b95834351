"""The penalty of a head is the head's relative flatness, and its derivatives are those of nested autograd."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pyflatness as pf
from support.combinations import every

N, M, D = 7, 5, 3
WEIGHTS = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
IGNORING = torch.tensor([0, 1, -100, 2, 0, -100, 1])
VALUES = torch.linspace(0, 1, N * D, dtype=torch.float64).view(N, D)
LOSSES = {
    "cross-entropy": (nn.CrossEntropyLoss(), IGNORING),
    "sum": (nn.CrossEntropyLoss(reduction="sum"), IGNORING),
    "class weights": (nn.CrossEntropyLoss(WEIGHTS, label_smoothing=0.1), IGNORING),
    "probabilities": (nn.CrossEntropyLoss(WEIGHTS), VALUES.softmax(1)),
    "squared error": (nn.MSELoss(), VALUES),
    "binary": (nn.BCEWithLogitsLoss(), VALUES),
    "binary, weighted": (nn.BCEWithLogitsLoss(WEIGHTS, pos_weight=WEIGHTS + 1), VALUES),
}


def head(n=N, m=M, d=D, *, bias=True, dtype=torch.float64):
    draw = torch.Generator().manual_seed(n + m + d)
    shapes = [(n, m), (d, m), (d,)][: 2 + bias]
    return [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def by_definition(loss, features, weight, bias, targets):
    """Σ_ss' ⟨w_s, w_s'⟩ Tr(H_ss') by nested autograd, with a graph."""
    (d, m), held = weight.shape, weight

    def risk(w):
        return loss(F.linear(features, w, bias).flatten(0, -2), targets)

    blocks = torch.autograd.functional.hessian(risk, held, create_graph=True).view(d, m, d, m)
    return ((weight @ weight.t()) * blocks.diagonal(dim1=1, dim2=3).sum(dim=2)).sum()


@every(together=1, bias=[True, False], name=[*LOSSES])
def test_value_and_gradients_are_those_of_the_definition(name, bias):
    loss, targets = LOSSES[name]
    given = head(bias=bias)
    found = pf.flatness_penalty(*given, targets=targets, loss=loss)
    expected = by_definition(loss, *given[:2], given[2] if bias else None, targets)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    wanted = torch.autograd.grad(expected, given, allow_unused=True, materialize_grads=True)
    torch.testing.assert_close(
        torch.autograd.grad(found, given, allow_unused=True, materialize_grads=True), wanted, rtol=1e-10, atol=1e-12
    )


@every(together=1, name=[*LOSSES], normalize=[None, "std"])
def test_first_and_second_derivatives(name, normalize):
    loss, targets = LOSSES[name]

    def penalty(*given):
        return pf.flatness_penalty(*given, targets=targets, loss=loss, normalize=normalize)

    given = head()
    value = pf.head_flatness(*given, targets=targets, loss=loss, normalize=normalize).value
    assert penalty(*given).item() == pytest.approx(value, rel=1e-12)
    assert torch.autograd.gradcheck(penalty, given)
    assert torch.autograd.gradgradcheck(penalty, given)


@pytest.mark.parametrize(("n", "m", "d"), [(1, 4, 3), (4, 1, 3), (3, 2, 70), (2, 3, 64), (4, 3, 1)])
def test_sizes(n, m, d):
    given = head(n, m, d)
    assert pf.flatness_penalty(*given).item() == pytest.approx(pf.head_flatness(*given).value, rel=1e-12, abs=1e-15)
    assert torch.autograd.gradcheck(pf.flatness_penalty, given)
    assert torch.autograd.gradgradcheck(pf.flatness_penalty, given)


@pytest.mark.parametrize("d", [10, 300])
@pytest.mark.parametrize("margin", [0.0, 5.0, 12.0, 25.0])
def test_peaked_and_flat_softmax_in_float32(d, margin):
    """A common row and bias of 100 move no probability; gradients are those in float64, of the rounded numbers."""
    features, weight, bias = head(6, 8, d, dtype=torch.float32)
    bias = (100 + margin * F.one_hot(torch.tensor(1), d)).float()
    weight = (0.01 * weight.detach() + 100).requires_grad_()
    bias.requires_grad_()
    exact = [t.detach().double().requires_grad_() for t in (features, weight, bias)]
    found, expected = pf.flatness_penalty(features, weight, bias), pf.flatness_penalty(*exact)
    assert found.item() == pytest.approx(expected.item(), rel=1e-4)
    gradients = zip(
        torch.autograd.grad(found, (features, weight, bias)), torch.autograd.grad(expected, exact), strict=True
    )
    for one, other in gradients:
        assert (one - other).norm() <= 1e-4 * other.norm()


def test_masked_classes_have_no_part_in_it():
    features, weight, _ = head(4, 5, 6)
    mask = torch.zeros(6, dtype=torch.float64)
    mask[2:] = -math.inf
    found, expected = pf.flatness_penalty(features, weight, mask), pf.flatness_penalty(features, weight[:2])
    torch.testing.assert_close(found, expected)
    for one, other in zip(
        torch.autograd.grad(found, (features, weight)), torch.autograd.grad(expected, (features, weight)), strict=True
    ):
        torch.testing.assert_close(one, other)


def test_positions_are_terms():
    features, weight, bias = head()
    tokens = features.detach().view(1, N, 1, M).expand(2, N, 1, M).clone().requires_grad_()
    targets = IGNORING.view(1, N, 1).expand(2, N, 1)
    found = pf.flatness_penalty(tokens, weight, bias, targets)
    expected = pf.flatness_penalty(features, weight, bias, IGNORING)
    torch.testing.assert_close(found, expected)
    (of_tokens,), (of_rows,) = torch.autograd.grad(found, tokens), torch.autograd.grad(expected, features)
    torch.testing.assert_close(of_tokens.sum(dim=(0, 2)), of_rows)


@pytest.mark.parametrize("normalize", [None, "std"])
def test_ignored_rows_may_hold_anything_and_get_no_gradient(normalize):
    given = head()
    expected = pf.flatness_penalty(*given, IGNORING, normalize=normalize)
    broken = given[0].detach().clone()
    broken[IGNORING == -100] = torch.nan
    broken.requires_grad_()
    found = pf.flatness_penalty(broken, *given[1:], IGNORING, normalize=normalize)
    assert found.item() == expected.item()
    gradient, of_weight = torch.autograd.grad(found, (broken, given[1]))
    assert torch.equal(gradient[IGNORING == -100], torch.zeros(2, M, dtype=torch.float64))
    torch.testing.assert_close(of_weight, torch.autograd.grad(expected, given[1])[0])


@pytest.mark.parametrize("loss", ["cross_entropy", "mse_loss", "binary_cross_entropy_with_logits"])
def test_nan_in_features_is_nan_in_the_value_and_in_gradients(loss):
    features, weight, bias = head()
    broken = features.detach().clone()
    broken[2, 1] = torch.nan
    broken.requires_grad_()
    found = pf.flatness_penalty(broken, weight, bias, loss=loss)
    gradient, of_weight = torch.autograd.grad(found, (broken, weight))
    assert found.isnan()
    assert gradient[2].isnan().any()
    assert of_weight.isnan().any()


def test_constant_and_empty_features_when_normalised():
    features, weight, bias = head()
    features = torch.cat([features.detach()[:, :3], torch.full((N, 1), -2.0), torch.zeros(N, 1)], dim=1).double()
    features.requires_grad_()
    found = pf.flatness_penalty(features, weight, bias, normalize="std")
    assert found.item() == pytest.approx(pf.head_flatness(features, weight, bias, normalize="std").value, rel=1e-12)
    gradients = torch.autograd.grad(found, (features, weight, bias))
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"features": torch.zeros(0, M).double()}, r"no samples in \(0, 5\)"),
        ({"features": torch.zeros(N, M + 1).double()}, r"features \(7, 6\) do not fit weight \(3, 5\)"),
        ({"features": torch.zeros(N, M)}, "features are torch.float32"),
        ({"bias": torch.zeros(4).double()}, "bias has 4 entries for 3 rows"),
        ({"bias": torch.arange(4)}, r"bias: got torch.int64; .* \(features, weight, bias, targets\)"),
        ({"targets": torch.full((N,), 3)}, "class 3 does not exist among 3 classes"),
        ({"targets": IGNORING[:4]}, r"class indices of shape \(7,\) are wanted .* got \(4,\)"),
        ({"loss": "l1_loss"}, "loss='l1_loss' is not known"),
        ({"loss": F.l1_loss}, "a callable has no formula at a head"),
        ({"normalize": "variance"}, "normalize='variance' does not exist; choose one of None, 'std'"),
    ],
)
def test_errors_name_what_was_received(changed, match):
    features, weight, bias = head()
    given = {"features": features, "weight": weight, "bias": bias, "targets": None, **changed}
    with pytest.raises(pf.errors.InputError, match=match):
        pf.flatness_penalty(**given)
