"""Notes on how a loss and the model's outputs go together."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pyflatness as pf
from support.cases import Normalised
from support.public_calls import batches

DATA = batches()
REAL = [(x, F.one_hot(y, 3).double()) for x, y in DATA]
PROBABILITIES, STRAIGHT = "outputs are probabilities", "second derivative 0"


def network(*last):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3), *last).double().eval()


def notes(net, loss, data):
    report = pf.measure(net, loss, data, measures=["trace", "fisher_rao", "mls", "weight_norm"])
    assert not report["mls"].notes  # not of the loss
    assert not report["weight_norm"].notes
    alone = pf.relative_flatness(net, loss, data).notes
    assert alone == report["2", "trace"].notes == report["fisher_rao"].notes[-len(alone) or 99 :]
    return " ".join(alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_softmax_before_cross_entropy(dtype):
    data = [(x.to(dtype), y) for x, y in DATA]
    assert PROBABILITIES in notes(network(nn.Softmax(1)).to(dtype), nn.CrossEntropyLoss(), data)
    for net in (network(), network(nn.Sigmoid()), network(nn.LogSoftmax(1))):
        assert not notes(net.to(dtype), nn.CrossEntropyLoss(), data)
    assert PROBABILITIES in repr(pf.relative_flatness(network(nn.Softmax(1)).to(dtype), F.cross_entropy, data))


@pytest.mark.parametrize(
    "loss", [nn.L1Loss(), lambda f, y: (f * y).sum(1).mean(), lambda f, y: (1 - f * y).relu().mean()]
)
def test_losses_without_curvature(loss):
    net = network()
    assert STRAIGHT in notes(net, loss, REAL)
    assert pf.relative_flatness(net, loss, REAL).value == 0


@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.HuberLoss(), lambda f, y: (f - y).pow(4).mean()])
def test_losses_with_curvature(loss):
    assert not notes(network(), loss, REAL)


def test_the_nll_of_logarithms_of_probabilities():
    """Behind another operation than log_softmax the curvature is the model's own, and the GGN is 0."""
    net = nn.Sequential(network(), Normalised())
    found = pf.relative_flatness(net, nn.NLLLoss(), DATA, "0.2")
    expected = pf.relative_flatness(network(), nn.CrossEntropyLoss(), DATA, "2")
    assert found.value == pytest.approx(expected.value, rel=1e-10)
    assert not found.notes
    for loss in (nn.NLLLoss(), F.nll_loss):
        part = pf.measure(net, loss, DATA, measures="trace", curvature="ggn")["trace"]
        assert part.value == 0
        assert "which the GGN leaves out" in " ".join(part.notes)


@pytest.mark.parametrize("last", [[], [nn.Softmax(1)]])
def test_the_nll_of_anything_else(last):
    note = " ".join(pf.measure(network(*last), nn.NLLLoss(), DATA, measures="trace")["trace"].notes)
    assert "NLLLoss wants log-probabilities" in note
    assert "log_softmax, or pass CrossEntropyLoss" in note
    assert STRAIGHT in note


@pytest.mark.parametrize("last", [nn.Sigmoid(), nn.Sequential(nn.Sigmoid(), nn.Flatten())])
def test_a_sigmoid_before_a_loss_of_logits(last):
    """It is told from 16 outputs on, which are all between 0 and 1; those of a ReLU may be 0."""
    x, y = torch.rand(20, 4).double(), torch.arange(20) % 3
    for loss, targets in ((nn.CrossEntropyLoss(), y), (nn.BCEWithLogitsLoss(), F.one_hot(y, 3).double())):
        (note,) = pf.relative_flatness(network(last), loss, (x, targets)).notes
        assert "as behind a sigmoid" in note
        assert "model[:-1]" in note
        for end in ([], [nn.ReLU()]):
            assert not pf.relative_flatness(network(*end), loss, (x, targets), "2").notes
        assert not pf.relative_flatness(network(last), nn.MSELoss(), (x, F.one_hot(y, 3).double()), "2").notes


def test_a_report_prints_a_note_once():
    printed = str(pf.measure(network(nn.Softmax(1)), nn.CrossEntropyLoss(), DATA))
    assert printed.count("outputs are probabilities") == 1
    assert "0, 2, network: the model's outputs are probabilities" in printed
    assert "leave the softmax out" in printed
