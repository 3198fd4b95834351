"""Losses that are not known by name: what is right of them, and what to pass instead of those that are not."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pyflatness as pf
from support.cases import INDICES, PROBABILITIES, C, M, N, Normalised, classifier

WEIGHTS = torch.tensor([0.5, 2.0, 1.0, 3.0])


class Focal(nn.CrossEntropyLoss):
    """A subclass with a forward of its own, a mean by class weights."""


@pytest.fixture
def data():
    return torch.randn(N, M), INDICES


def log_probabilities():
    return nn.Sequential(*classifier(M, 7, C), nn.LogSoftmax(1)).double()


@pytest.mark.parametrize("layer", ["0", "2"])
@pytest.mark.parametrize("reduction", [None, "mean"])
def test_kl_divergence_by_its_mean_over_samples(layer, reduction):
    """KL(t|p) is cross-entropy less the entropy of t, so on log-probabilities it has cross-entropy's Hessian."""
    model, x, targets = log_probabilities(), torch.randn(N, M).double(), PROBABILITIES.double()
    loss = nn.KLDivLoss(reduction="batchmean")
    found = pf.relative_flatness(model, loss, (x, targets), layer, reduction=reduction)
    expected = pf.relative_flatness(model[:-1], nn.CrossEntropyLoss(), (x, targets), layer)
    assert found.value == pytest.approx(expected.value, rel=1e-9)
    assert found.exact
    assert pf.verify(model, loss, (x, targets), layer, reduction=reduction)


@pytest.mark.filterwarnings("ignore:reduction")
def test_kl_divergence_by_its_mean_over_all_outputs():
    model, x, targets = log_probabilities(), torch.randn(N, M).double(), PROBABILITIES.double()
    found, by_samples = (
        pf.relative_flatness(model, nn.KLDivLoss(reduction=how), (x, targets)).value for how in ("mean", "batchmean")
    )
    assert C * found == pytest.approx(by_samples, rel=1e-9)


def test_negative_log_likelihood_as_its_message_says(data):
    """Behind another operation than log_softmax, with which it is taken as cross-entropy."""
    model, (x, y) = nn.Sequential(*log_probabilities()[:-1], Normalised()), data
    x = x.double()
    with pytest.raises(
        pf.errors.InputError, match=r"leave the LogSoftmax out .* nn.CrossEntropyLoss .* reduction='sum'"
    ):
        pf.relative_flatness(model, nn.NLLLoss(WEIGHTS), (x, y), "2")
    with pytest.raises(pf.errors.InputError, match=r"over \d+ samples it is not the mean .* leave the LogSoftmax out"):
        pf.relative_flatness(model, nn.NLLLoss(WEIGHTS.double()), (x, y), "2")
    with pytest.raises(pf.errors.InputError, match="leave the LogSoftmax out"):
        pf.relative_flatness(model, functools.partial(F.nll_loss, weight=WEIGHTS.double()), (x, y), "2")
    summed = pf.relative_flatness(model, nn.NLLLoss(WEIGHTS, reduction="sum").double(), (x, y), "2")
    expected = pf.relative_flatness(model[:-1], nn.CrossEntropyLoss(weight=WEIGHTS, reduction="sum"), (x, y))
    assert summed.value == pytest.approx(expected.value, rel=1e-9)


def test_targets_of_binary_cross_entropy(data):
    """Targets (n,) for outputs (n, 1), and whole numbers, get the same advice as with logits."""
    model, (x, y) = nn.Sequential(*classifier(M, 1), nn.Sigmoid()), data
    for loss in (nn.BCELoss(), F.binary_cross_entropy, nn.BCEWithLogitsLoss()):
        with pytest.raises(pf.errors.InputError, match=rf"of {N} samples; pass targets\.reshape\(-1, 1\)"):
            pf.relative_flatness(model, loss, (x, (y > 1).float()), "0")
    with pytest.raises(pf.errors.InputError, match=r"losses are computed in float64.*; pass targets\.float"):
        pf.relative_flatness(model, nn.BCELoss(), (x, (y > 1).long()[:, None]), "0")
    pf.relative_flatness(model, nn.BCELoss(), (x, (y > 1).float()[:, None]), "0")


def test_names_of_classes_are_names_of_losses(data):
    model = classifier(M, C)
    by_class, by_function = (pf.relative_flatness(model, name, data) for name in ("CrossEntropyLoss", "cross_entropy"))
    assert by_class.value == by_function.value


@pytest.mark.parametrize("weights", [WEIGHTS, WEIGHTS.double()])
def test_subclasses_say_that_they_are(data, weights):
    with pytest.raises(
        pf.errors.InputError, match=r"Focal is a subclass of nn.CrossEntropyLoss.* pass nn.CrossEntropyLoss"
    ):
        pf.relative_flatness(classifier(M, C), Focal(weight=weights), data)


def test_a_subclass_that_is_a_mean_over_samples_is_a_callable(data):
    model = classifier(M, 7, C)
    found, expected = (pf.relative_flatness(model, loss, data).value for loss in (Focal(), nn.CrossEntropyLoss()))
    assert found == pytest.approx(expected, rel=1e-5)


def test_the_cause_of_an_error_in_a_loss_is_kept(data):
    def loss(outputs, targets):
        return outputs[:, 99].mean()

    with pytest.raises(
        pf.errors.InputError, match=r"loss is called as .* IndexError: index 99 is out of bounds"
    ) as caught:
        pf.relative_flatness(classifier(M, C), loss, data)
    assert isinstance(caught.value.__cause__, IndexError)


def test_exceptions_of_the_users_own_pass(data):
    class StoppedError(Exception):
        pass

    def loss(outputs, targets):
        raise StoppedError

    with pytest.raises(StoppedError):
        pf.relative_flatness(classifier(M, C), loss, data)


def test_options_of_a_partial_that_there_are_not(data):
    loss = functools.partial(F.cross_entropy, smoothing=0.1)
    with pytest.raises(pf.errors.InputError, match=r"is not F.cross_entropy with its options \(.*'smoothing'"):
        pf.relative_flatness(classifier(M, C), loss, data)


def test_one_class_has_no_curvature(data):
    model, one = classifier(M, 7, 1), (data[0], torch.zeros(N).long())
    assert pf.relative_flatness(model, nn.CrossEntropyLoss(), one).value == 0
    assert pf.block_traces(model, nn.CrossEntropyLoss(), one).tolist() == [[0.0]]
    assert torch.equal(pf.block_traces(model, nn.CrossEntropyLoss(), one, "0"), torch.zeros(7, 7).double())
    kernels = nn.Sequential(nn.Conv1d(2, 4, 2, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 1))
    images = torch.randn(N, 2, 3), one[1]
    for conv, rows in (("filter", 4), ("affine", 8)):
        traces = pf.block_traces(kernels, nn.CrossEntropyLoss(), images, "0", conv=conv)
        assert torch.equal(traces, torch.zeros(rows, rows).double())
