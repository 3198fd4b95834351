"""Outputs and targets that no measure can be taken of: what is said of them, the same by every call."""

import pytest
import torch
from torch import nn

import pyflatness as pf
from support import doors
from support.doors import LOSS, Returning, X, Y
from support.unchanged import assert_unchanged, snapshot

CALLS = {  # by Hessian products, of a layer, by gradients, and by forward passes alone
    "spectrum": doors.ON_MODELS["spectrum"],
    "relative_flatness": lambda *args: pf.relative_flatness(*args, layer="0"),
    "keskar_sharpness": doors.ON_MODELS["keskar_sharpness"],
    "adaptive_sharpness_mc": doors.ON_MODELS["adaptive_sharpness_mc"],
}


def refused(name, match, model, loss, data, error=pf.errors.InputError):
    before = snapshot(model)
    with pytest.raises(error, match=match):
        CALLS[name](model, loss, data)
    assert_unchanged(model, before)


TARGETS = {
    "a column": (LOSS, Y[:, None], r"batch 0: targets: class indices of shape \(12,\) .* pass targets.reshape\(12,\)"),
    "one-hot": (LOSS, torch.eye(3)[Y].long(), r"got \(12, 3\); where they are one-hot, pass targets.argmax\(1\)"),
    "fewer": (LOSS, Y[:5], r"got \(5,\); pass one class for each sample"),
    "above": (LOSS, Y + 1, "class 3 does not exist among 3 classes, which are numbered from 0 to 2"),
    "float": (LOSS, Y.float(), r"class indices must be int64, got torch.float32; convert with .long\(\)"),
    "classes for values": (
        nn.MSELoss(),
        Y,
        r"outputs' shape \(12, 3\) is wanted, got \(12,\) in a batch of 12 samples; .* F.one_hot\(targets, classes\)",
    ),
    "flat": (nn.MSELoss(), torch.zeros(36), r"got \(36,\) in a batch of 12 samples; pass targets.reshape\(-1, 3\)"),
    "whole numbers": (nn.BCEWithLogitsLoss(), torch.ones(12, 3).long(), r"got torch.int64; convert with .double\(\)"),
}


@pytest.mark.parametrize("name", CALLS)
def test_targets(name):
    for loss, targets, match in TARGETS.values():
        refused(name, match, doors.net(), loss, [(X, targets)])


@pytest.mark.parametrize("name", CALLS)
def test_a_loss_that_is_a_number(name):
    match = r"a scalar tensor is wanted .*; return the tensor itself, without .item\(\)"
    refused(name, match, doors.net(), lambda f, y: LOSS(f, y).item(), (X, Y))


@pytest.mark.parametrize("name", ["spectrum", "keskar_sharpness"])
def test_outputs_without_a_graph(name):
    match = r"model: autograd has no path from its outputs back to its weights \(detach"
    refused(name, match, Returning(lambda z: z.detach()), LOSS, (X, Y))


@pytest.mark.parametrize("call", [doors.ON_MODELS["verify"], lambda *a: pf.measure(*a, measures="fisher_rao")])
def test_outputs_without_a_graph_of_others(call):
    with pytest.raises(pf.errors.InputError, match="autograd has no path from its outputs back to its weights"):
        call(Returning(lambda z: z.detach()), LOSS, (X, Y))


@pytest.mark.parametrize("name", ["relative_flatness", "verify", "mls_adversarial", "representation"])
def test_outputs_of_whole_numbers(name):
    with pytest.raises(
        pf.errors.InputError, match=r"torch.int64, which has no derivative; .* the logits in front of argmax"
    ):
        doors.ON_MODELS[name](Returning(lambda z: z.argmax(1)), LOSS, (X, Y))


@pytest.mark.parametrize("name", ["relative_flatness", "verify", "mls_adversarial", "representation", "spectrum"])
def test_outputs_with_classes_first(name):
    match = r"does not hold \d+ samples in dimension 0; have the model \(or forward=\) return outputs with the samples"
    with pytest.raises(pf.errors.InputError, match=match):
        doors.ON_MODELS[name](Returning(lambda z: z.t()), LOSS, (X, Y))


@pytest.mark.parametrize(
    "name", ["adaptive_sharpness_mc", "feature_robustness", "matrix_robustness", "generalization_bound"]
)
def test_nan_that_cannot_be_left_out(name):
    with pytest.raises(
        pf.errors.NonFiniteError, match=r"batch 0: the loss of the model.* is nan; no sample can be left out"
    ):
        doors.ON_MODELS[name](doors.net(), LOSS, (X * torch.nan, Y))


def test_classes_of_other_whole_numbers_are_verified_too():
    assert pf.verify(doors.net(), LOSS, (X, Y.int()))


class TwoInputs(nn.Module):
    """A network that may be given a second input."""

    def __init__(self, other):
        super().__init__()
        self.inner, self.forward = doors.net(), {"needed": self.both, "none": self.one_or_both, "any": self.any}[other]

    def both(self, x, other):
        return self.inner(x + other)

    def one_or_both(self, x, other=None):
        return self.inner(x if other is None else x + other)

    def any(self, *inputs):
        return self.inner(sum(inputs))


@pytest.mark.parametrize("name", doors.ON_MODELS)
def test_of_longer_batches_the_first_two_items_count(name):
    """Numbers of samples, names and weights that a data set gives beside inputs and targets are ignored."""
    call, numbers = doors.ON_MODELS[name], torch.arange(len(X))
    pairs = [(X[:7], Y[:7]), (X[7:], Y[7:])]
    expected = call(doors.net(), LOSS, pairs)
    for longer in (
        [(X[:7], Y[:7], numbers[:7]), (X[7:], Y[7:], numbers[7:])],
        [[X[:7], Y[:7], ["name"] * 7, torch.rand(3)], [X[7:], Y[7:], ["name"] * 5, torch.rand(3)]],
    ):
        assert str(call(doors.net(), LOSS, longer)) == str(expected)


def test_of_longer_tuples_of_tensors_the_first_two_count():
    expected = pf.relative_flatness(doors.net(), LOSS, (X, Y))
    assert pf.relative_flatness(doors.net(), LOSS, (X, Y, torch.arange(len(X)))) == expected


@pytest.mark.parametrize("other", ["needed", "none", "any"])
def test_longer_batches_of_models_with_several_inputs_ask_for_forward(other):
    model, data = TwoInputs(other).eval(), [(X, X, Y)]
    with pytest.raises(pf.errors.InputError, match=r"a batch has 3 items, .* of TwoInputs .*pass forward="):
        pf.relative_flatness(model, LOSS, data)
    found = pf.relative_flatness(model, LOSS, data, forward=lambda net, batch: (net(batch[0], batch[1]), batch[2]))
    assert found.value == pytest.approx(pf.relative_flatness(doors.net(), LOSS, (2 * X, Y)).value, rel=1e-5)


def test_of_longer_batches_of_tokens_targets_are_no_inputs():
    """Values as targets are floating-point numbers; what is differentiated in are the embeddings."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(8, 2)).eval()
    tokens, values = torch.arange(12).view(6, 2) % 5, torch.randn(6, 2)
    pairs, longer = ([(tokens, values, *more)] for more in ((), (torch.arange(6),)))
    found, expected = (pf.representation(model, nn.MSELoss(), data) for data in (longer, pairs))
    assert str(found) == str(expected)
