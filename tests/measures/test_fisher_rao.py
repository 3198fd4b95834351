"""The Fisher-Rao norm against the gradients of single loss terms, by autograd in float64."""

import math
import warnings

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F

import pyflatness as pf
from support import networks
from support.brute_force import X, network, one, products
from support.cases import (
    CLASS_WEIGHTS,
    INDICES,
    LABELS,
    LOSSES,
    PROBABILITIES,
    TOKEN_TARGETS,
    TOKENS,
    C,
    M,
    N,
    Tokens,
    to,
)
from support.combinations import every, in_turn
from support.functions import Once, Squared
from support.grid import Net, normal
from support.residual import LOSS
from support.unchanged import assert_unchanged, snapshot


@every(
    together=1,
    loss=["cross-entropy", "label smoothing", "squared error", "binary", "custom", "huber"],
    activation=[nn.ReLU, nn.Tanh, nn.GELU],
)
def test_fisher_rao_by_brute_force(activation, loss):
    model = network(M, 6, 5, C, activation=activation)
    criterion, y = (to(torch.float64, part) for part in LOSSES[loss])
    expected = products(model, criterion, X, y).square().mean().sqrt()
    estimate = one("fisher_rao", model, criterion, [(X[:4], y[:4]), (X[4:], y[4:])])
    assert estimate.value == pytest.approx(float(expected), rel=1e-12)
    assert (estimate.exact, estimate.samples, estimate.method, estimate.stderr) == (True, N, "forward-mode", None)


def test_fisher_rao_weighs_terms_as_the_loss_does():
    model, weights = network(M, 6, C), torch.tensor([0.5, 2.0, 1.0, 3.0]).double()
    y = INDICES.clone()
    y[2] = -100
    plain, kept = products(model, nn.CrossEntropyLoss(), X, INDICES), y >= 0
    share = torch.where(kept, weights[INDICES], 0.0)
    expected = (share * plain.square()).sum() / share.sum()
    value = one("fisher_rao", model, nn.CrossEntropyLoss(weight=weights), (X, y)).value
    assert value == pytest.approx(math.sqrt(expected), rel=1e-12)
    summed = one("fisher_rao", model, nn.CrossEntropyLoss(weight=weights, reduction="sum"), (X, y)).value
    assert summed == pytest.approx(value * math.sqrt(share.sum()), rel=1e-12)


def test_fisher_rao_of_tokens_is_over_tokens():
    model = Tokens().double()
    terms = []
    for i, t in (TOKEN_TARGETS >= 0).nonzero().tolist():
        loss = F.cross_entropy(model(TOKENS[i : i + 1])[:, :, t], TOKEN_TARGETS[i : i + 1, t])
        gradients = torch.autograd.grad(loss, [*model.parameters()])
        terms.append(sum((g * p.detach()).sum() for g, p in zip(gradients, model.parameters(), strict=True)))
    value = one("fisher_rao", model, nn.CrossEntropyLoss(), (TOKENS, TOKEN_TARGETS)).value
    assert value == pytest.approx(float(torch.stack(terms).square().mean().sqrt()), rel=1e-12)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_fisher_rao_of_relu_layers_without_bias(depth):
    """K √E⟨∂ℓ/∂f, f⟩², for K weight layers."""
    model = network(M, *[6] * (depth - 1), C, bias=False)
    f = model(X).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(F.cross_entropy(f, INDICES, reduction="sum"), f)
    expected = depth * (gradient * f.detach()).sum(1).square().mean().sqrt()
    assert one("fisher_rao", model, nn.CrossEntropyLoss(), (X, INDICES)).value == pytest.approx(float(expected))


def test_fisher_rao_without_forward_mode():
    model, other = (Net(lambda net, x, f=f: net.b(f(net.a(x))), a=nn.Linear(M, 6), b=nn.Linear(6, C)).double()
        for f in (Squared.apply, torch.square))  # fmt: skip
    other.load_state_dict(model.state_dict())
    before = snapshot(model)
    value = one("fisher_rao", model, nn.CrossEntropyLoss(), [(X[:4], INDICES[:4]), (X[4:], INDICES[4:])]).value
    assert value == pytest.approx(one("fisher_rao", other, nn.CrossEntropyLoss(), (X, INDICES)).value, rel=1e-12)
    assert_unchanged(model, before)


@pytest.mark.parametrize("category", [DeprecationWarning, FutureWarning, UserWarning])
def test_what_torch_warns_of_when_it_makes_derivatives_in_forward_mode_does_not_reach_the_user(monkeypatch, category):
    """It scripts some of them, in whatever function of its, which only a process's first call does."""
    for name in ("make_dual", "unpack_dual"):
        function = getattr(forward_ad, name)

        def warning(*args, function=function):
            warnings.warn("`torch.jit.script` is deprecated. Please switch to `torch.compile`.", category, stacklevel=1)
            return function(*args)

        monkeypatch.setattr(forward_ad, name, warning)
    estimate = one("fisher_rao", network(M, C), nn.CrossEntropyLoss(), (X, INDICES))  # a warning is an error here
    assert estimate.method == "forward-mode"


def test_fisher_rao_of_a_recurrent_network():
    """Some of its kernels have no forward mode, depending on the dtype."""
    model = Net(lambda net, x: net.head(net.lstm(x)[0][:, -1]), lstm=nn.LSTM(4, 5, batch_first=True),
        head=nn.Linear(5, 3))  # fmt: skip
    data = torch.randn(6, 7, 4), torch.arange(6) % 3
    single = one("fisher_rao", model, LOSS, data).value
    model, data = model.double(), (data[0].double(), data[1])
    expected = products(model, LOSS, *data).square().mean().sqrt()
    assert one("fisher_rao", model, LOSS, data).value == pytest.approx(float(expected), rel=1e-12)
    assert single == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fisher_rao_in_half_precision(dtype):
    """The forward mode of LayerNorm overflows in float16 on inputs as small as embeddings are at first."""
    model = nn.Sequential(nn.Linear(M, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, C))
    with torch.no_grad():
        model[0].weight.mul_(0.02)
        model[0].bias.zero_()
    expected = one("fisher_rao", model, LOSS, (X.float(), INDICES)).value
    assert one("fisher_rao", model.to(dtype), LOSS, (X.to(dtype), INDICES)).value == pytest.approx(expected, rel=5e-2)


def test_fisher_rao_of_what_cannot_be_derived_says_so():
    model = Net(lambda net, x: net.b(Once.apply(net.a(x))), a=nn.Linear(M, 6), b=nn.Linear(6, C)).double()
    with pytest.raises(
        pf.errors.NotYetError, match="fisher_rao: the model has operations without derivatives in forward mode"
    ):
        one("fisher_rao", model, LOSS, (X, INDICES))


# --- the grid ---------------------------------------------------------------------------------------------------------

ONE_TERM = [
    name
    for name, case in networks.CASES.items()
    if isinstance(case.loss, nn.CrossEntropyLoss)
    and (case.loss.weight, case.loss.label_smoothing, case.loss.reduction) == (None, 0, "mean")
    and case.targets.shape == case.inputs.shape[:1]
    and not (case.targets == case.loss.ignore_index).any()
]


@in_turn(2, "name", ONE_TERM)
def test_fisher_rao_over_the_grid(name):
    """Per sample by autograd: ⟨θ, ∂ℓ_i/∂θ⟩ through the rows of sample i alone."""
    case = networks.CASES[name]
    model = case.build().requires_grad_(True)
    terms = F.cross_entropy(model(case.inputs), case.targets, reduction="none")
    found = []
    for term in terms:
        gradients = torch.autograd.grad(term, [*model.parameters()], retain_graph=True, allow_unused=True)
        pairs = zip(gradients, model.parameters(), strict=True)
        found.append(sum((g * p).sum() for g, p in pairs if g is not None))
    expected = float(torch.stack(found).detach().square().mean().sqrt())
    value = one("fisher_rao", model, case.loss, (case.inputs, case.targets)).value
    assert value == pytest.approx(expected, rel=1e-9)


# --- observations -----------------------------------------------------------------------------------------------------


ELEMENTWISE = {
    "squared error": (nn.MSELoss, F.mse_loss, PROBABILITIES.double()),
    "binary": (nn.BCEWithLogitsLoss, F.binary_cross_entropy_with_logits, LABELS.double()),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_of_a_sum_it_is_that_of_the_same_loss_as_a_callable(name):
    module, function, y = ELEMENTWISE[name]
    model = network(M, 6, C)
    expected = math.sqrt(products(model, module(reduction="sum"), X, y).square().sum())

    def summed(outputs, targets):
        return function(outputs, targets, reduction="sum")

    assert one("fisher_rao", model, module(reduction="sum"), (X, y)).value == pytest.approx(expected, rel=1e-12)
    assert one("fisher_rao", model, summed, (X, y), reduction="sum").value == pytest.approx(expected, rel=1e-12)


def test_of_a_sum_with_weights():
    model, y = network(M, 6, C), LABELS.double()
    loss = nn.BCEWithLogitsLoss(CLASS_WEIGHTS.double(), pos_weight=CLASS_WEIGHTS.flip(0).double(), reduction="sum")
    expected = math.sqrt(products(model, loss, X, y).square().sum())
    assert one("fisher_rao", model, loss, [(X[:4], y[:4]), (X[4:], y[4:])]).value == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_all_dimensions_of_a_samples_outputs_are_one_observation(name, reduction):
    module, _, _ = ELEMENTWISE[name]
    loss, y = module(reduction=reduction), torch.rand(len(X), 2, 3, generator=torch.Generator().manual_seed(0)).double()
    model = Net(lambda net, x: net.b(torch.relu(net.a(x))).unflatten(1, (2, 3)), a=nn.Linear(M, 5), b=nn.Linear(5, 6))
    model = model.double()
    squares = products(model, loss, X, y).square()
    expected = math.sqrt(squares.mean() if reduction == "mean" else squares.sum())
    assert one("fisher_rao", model, loss, (X, y)).value == pytest.approx(expected, rel=1e-12)


def test_a_sample_with_nan_in_one_output_is_left_out():
    model, y = network(M, 6, C), PROBABILITIES.double().clone()
    y[2, 1] = torch.nan
    kept = [0, 1, 3, 4, 5]
    expected = math.sqrt(products(model, nn.MSELoss(reduction="sum"), X[kept], y[kept]).square().sum())
    found = one("fisher_rao", model, nn.MSELoss(reduction="sum"), (X, y), nan_policy="omit")
    assert found.value == pytest.approx(expected, rel=1e-12)
    assert (found.samples, found.omitted) == (5, 1)


def test_outputs_that_are_not_of_samples_are_refused():
    model = Net(lambda net, x: net.a(x)[:4], a=nn.Linear(M, C)).double()
    with pytest.raises(pf.errors.InputError, match="batch 0: its 4 loss terms cannot be told apart by its 6 samples"):
        one("fisher_rao", model, nn.MSELoss(), [(X, normal(3, 4, C))])
