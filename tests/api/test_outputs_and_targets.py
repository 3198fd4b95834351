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
        r"targets: the outputs' shape \(12, 3\) is wanted, got \(12,\); .* F.one_hot\(targets, classes\)",
    ),
    "flat": (nn.MSELoss(), torch.zeros(36), r"got \(36,\); pass targets.reshape\(12, 3\)"),
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
