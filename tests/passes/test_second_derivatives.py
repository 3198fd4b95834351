"""First and second derivatives of BatchNorm that are written here, against finite differences and torch's own."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import pyflatness as pf
from pyflatness.passes import second_derivatives
from support.combinations import every

LOSS = nn.CrossEntropyLoss()
SHAPES = [(6, 3), (5, 3, 4), (4, 3, 2, 3), (4, 3, 1, 1)]


def _norm(shape, affine=True):
    torch.manual_seed(0)
    kind = nn.BatchNorm1d if len(shape) < 4 else nn.BatchNorm2d
    norm = kind(3, momentum=0.0, affine=affine).double()
    for values in (*norm.parameters(), norm.running_mean):
        nn.init.normal_(values)
    nn.init.uniform_(norm.running_var, 0.5, 2.0)
    return norm, (2 + torch.randn(shape).double()).requires_grad_()


@every(shape=[*SHAPES], training=[True, False], affine=[True, False])
def test_derivatives_are_those_of_finite_differences(shape, training, affine):
    norm, x = _norm(shape, affine)
    norm.train(training)
    expected = norm(x)
    second_derivatives.replace([norm])

    def outputs(x, *_):
        return torch.tanh(norm(x))

    found = norm(x)
    assert found.grad_fn.name() == "_DifferentiatedBackward"
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert torch.autograd.gradcheck(outputs, (x, *norm.parameters()))
    assert torch.autograd.gradgradcheck(outputs, (x, *norm.parameters()))


@pytest.mark.parametrize("training", [True, False])
def test_in_float32_far_from_zero_they_are_as_near_as_torchs(training):
    norm, x = _norm((64, 3, 5, 5))
    norm.train(training)
    off = {}
    for dtype in (torch.float64, torch.float32):
        for own in (False, True):
            each, z = copy.deepcopy(norm).to(dtype), (x.detach() + 30).to(dtype).requires_grad_()
            each.running_mean += 30
            second_derivatives.replace([each] if own else [])
            leaves = [z, *each.parameters()]
            first = torch.autograd.grad(torch.tanh(each(z)).square().sum(), leaves, create_graph=True)
            off[dtype, own] = torch.autograd.grad(sum(one.square().sum() for one in first), leaves)
    for truth, own, torchs in zip(
        off[torch.float64, False], off[torch.float32, True], off[torch.float32, False], strict=True
    ):
        assert (own - truth).norm() <= 2 * (torchs - truth).norm() + 1e-6 * truth.norm()


def _written_out(norm, x):
    """Return what a BatchNorm does, in operations that torch differentiates at any order."""
    others = [dim for dim in range(x.ndim) if dim != 1]
    shape = [-1 if dim == 1 else 1 for dim in range(x.ndim)]
    mean, variance = norm.running_mean.view(shape), norm.running_var.view(shape)
    if norm.training:
        mean = x.mean(others, keepdim=True)
        variance = (x - mean).square().mean(others, keepdim=True)
    normalised = (x - mean) / (variance + norm.eps).sqrt()
    return normalised * norm.weight.view(shape) + norm.bias.view(shape) if norm.affine else normalised


@every(shape=[*SHAPES], training=[True, False], affine=[True, False])
def test_third_derivatives_are_those_of_the_formula(shape, training, affine):
    """Those of torch's own function are refused by torch 2.14."""
    found = []
    for own in (False, True):
        norm, x = _norm(shape, affine)
        norm.train(training)
        second_derivatives.replace([norm] if own else [])
        value, leaves = torch.tanh(norm(x) if own else _written_out(norm, x)).sum(), [x, *norm.parameters()]
        for _ in range(3):
            gradients = torch.autograd.grad(value, leaves, create_graph=True)
            value = sum(one.square().sum() for one in gradients)
        found.append(gradients)
    for expected, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-8, atol=1e-10)


def test_what_torch_does_by_itself_stays_torchs():
    norm, x = _norm((6, 3))
    second_derivatives.replace([norm])
    assert norm(x.detach()).grad_fn.name() == "NativeBatchNormBackward0"  # the input has no history
    with torch.autocast("cpu", torch.bfloat16):
        assert norm.float()(x.float()).grad_fn.name() == "NativeBatchNormBackward0"
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        norm(x[:1].float())
    mapped = torch.func.vmap(norm.eval(), randomness="same")(x.float().unsqueeze(0))
    torch.testing.assert_close(mapped[0], norm(x.float()))


# --- in a penalty -----------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Two convolutions with BatchNorm, and a head; the second part by activation checkpointing, where it is wanted."""

    def __init__(self, checkpointed=False):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3)
        self.second = nn.Sequential(nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4, affine=False), nn.ReLU(inplace=True))
        self.head, self.checkpointed = nn.Linear(4, 3), checkpointed

    def forward(self, x):
        x = torch.relu_(self.norm(self.first(x)))
        x = checkpoint(self.second, x, use_reentrant=False) if self.checkpointed else self.second(x)
        return self.head(x.mean((2, 3)))


X, Y = torch.randn(6, 1, 5, 5, generator=torch.Generator().manual_seed(1)).double(), torch.arange(6) % 3


def _step(model, penalty):
    penalty._signs = lambda like: torch.ones_like(like)
    outputs = model(X)
    (LOSS(outputs, Y) + penalty(outputs, Y)).backward()
    return [values.grad for values in model.parameters()], [*model.buffers()]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_step_with_a_penalty_is_the_one_by_torchs_own(checkpointed, monkeypatch):
    found = Net(checkpointed).double()
    with pf.FlatnessPenalty(found, ["first", "second.0"], LOSS) as penalty:
        assert found.norm(found.first(X)).grad_fn.name() == "_DifferentiatedBackward"
        gradients, buffers = _step(found, penalty)
    expected = Net(checkpointed).double()
    monkeypatch.setattr(second_derivatives._Differentiated, "apply", None)
    with pf.FlatnessPenalty(expected, ["first", "second.0"], LOSS) as penalty:
        second_derivatives.put_back(penalty._norms)
        assert expected.norm(expected.first(X)).grad_fn.name() == "NativeBatchNormBackward0"
        for ours, torchs in zip((gradients, buffers), _step(expected, penalty), strict=True):
            torch.testing.assert_close([*ours], [*torchs], rtol=1e-9, atol=1e-12)


def test_a_model_with_a_penalty_is_measured_copied_and_pickled_as_without():
    model = Net().double()
    plain = pf.measure(model.eval(), LOSS, (X, Y)).to_dict()
    with pf.FlatnessPenalty(model, "first", LOSS):
        beside = pf.measure(model, LOSS, (X, Y)).to_dict()
        copied = copy.deepcopy(model.train())
        assert copied.norm.forward.args[0] is copied.norm
        assert pickle.loads(pickle.dumps(model.norm)).forward.args[1] is False
        copied(X)
        assert model.norm.num_batches_tracked == 0
        assert copied.norm.num_batches_tracked == 1
    assert beside == plain
    assert all("forward" not in module.__dict__ for module in model.modules())
    penalty = pf.FlatnessPenalty(model, "first", LOSS)
    assert "forward" in model.norm.__dict__
    del penalty
    assert "forward" not in model.norm.__dict__
