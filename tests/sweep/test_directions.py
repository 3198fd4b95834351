"""Layers of one position by directions of their outputs, where these are fewer than cotangents."""

import pytest
import torch
from torch import nn

import pyflatness as pf
from pyflatness.sweep import layer_sweep
from support.grid import checked

CLASSES = 70
MEASURES = ["relative_flatness", "trace"]
X = torch.randn(4, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.tensor([3, 69, 0, 11])


def refuse(*args, **options):
    raise AssertionError("cotangents are sent")


@pytest.fixture
def no_cotangents(monkeypatch):
    monkeypatch.setattr(layer_sweep, "Contracted", refuse)


def network(activation=nn.ReLU, width=6, classes=CLASSES, behind=()):
    torch.manual_seed(0)
    layers = nn.Linear(5, width), activation(), nn.Linear(width, classes), *behind
    return nn.Sequential(*layers).double().eval()


LOSSES = {
    "cross-entropy": (nn.CrossEntropyLoss(), Y),
    "class weights, smoothing": (nn.CrossEntropyLoss(torch.rand(CLASSES).double() + 0.1, label_smoothing=0.1), Y),
    "ignored": (nn.CrossEntropyLoss(ignore_index=0), Y),
    "probabilities, sum": (nn.CrossEntropyLoss(reduction="sum"), torch.softmax(torch.randn(4, CLASSES), 1).double()),
    "squared error": (nn.MSELoss(), torch.randn(4, CLASSES).double()),
    "binary": (nn.BCEWithLogitsLoss(), torch.rand(4, CLASSES).double()),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_definition(name, no_cotangents):
    loss, y = LOSSES[name]
    found = checked(network(), loss, (X, y), MEASURES, layers="0", rel=1e-10)
    assert found["0", "trace"].exact
    assert found["0", "trace"].method == "ggn"


@pytest.mark.parametrize("options", [{}, {"normalize": "std"}, {"memory": 1}, {"backend": "reference"}])
def test_the_values_of_cotangents(options, monkeypatch):
    """For each sample, behind a smooth activation too."""

    def measured():
        model = network(nn.Tanh)
        given = {"curvature": "ggn", "per_sample": True, **options}
        return pf.measure(model, nn.CrossEntropyLoss(), (X, Y), layers="0", measures=MEASURES, **given)

    with monkeypatch.context() as inside:
        inside.setattr(layer_sweep, "Contracted", refuse)
        found = measured()
    monkeypatch.setattr(layer_sweep.output_directions, "are_fewer", lambda *args: False)
    expected = measured()
    for measure in MEASURES:
        rows = found["0", measure].per_sample, expected["0", measure].per_sample
        torch.testing.assert_close(*rows, rtol=1e-11, atol=0)


def test_layers_that_share_their_cotangents():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 7), nn.ReLU(), nn.Linear(7, CLASSES)).double()
    assert checked(model, nn.CrossEntropyLoss(), (X, Y), "relative_flatness", rel=1e-10)["relative_flatness"].exact


def test_loss_terms_share_directions(no_cotangents):
    """Four terms of each sample, of 20 classes, behind a layer of one position; some terms are ignored."""
    targets = torch.randint(20, (4, 4), generator=torch.Generator().manual_seed(0))
    targets[1, 2:], targets[3] = -100, -100
    model = network(classes=80, behind=[nn.Unflatten(1, (20, 4))])
    found = checked(model, nn.CrossEntropyLoss(), (X, targets), MEASURES, layers="0", per_sample=True, rel=1e-10)
    assert float(found["0", "trace"].per_sample[3]) == 0


def test_more_classes_than_backward_passes():
    """Six directions are allowed where 2,999 cotangents are not."""
    model = network(classes=3000)
    found = pf.relative_flatness(model, nn.CrossEntropyLoss(), (X, Y), "0")
    p = torch.softmax(model(X), dim=1).detach()
    through = model[2].weight.detach() * (model[0](X) > 0).unsqueeze(1)  # J, (n, C, d)
    rows = through @ model[0].weight.detach()  # J w
    spread = (p.unsqueeze(2) * rows.square()).sum(1) - (p.unsqueeze(2) * rows).sum(1).square()
    assert found.value == pytest.approx(float((X.square().sum(1) * spread.sum(1)).mean()), rel=1e-9)
    with pytest.raises(pf.errors.InputError, match=r"2999 backward passes .* more than max_passes=4"):
        pf.relative_flatness(model, nn.CrossEntropyLoss(), (X, Y), "0", max_passes=4)


class Doubled(torch.autograd.Function):
    """A function whose backward pass torch cannot see, so that its derivative in the cotangent would be missing."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, cotangent):
        return 2 * cotangent.detach()


class Once(Doubled):
    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, cotangent):
        return 2 * cotangent


class Calling(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@pytest.mark.parametrize("behind", [Calling(Doubled.apply), Calling(Once.apply), nn.Hardsigmoid()])
def test_what_cannot_be_differentiated_twice_takes_cotangents(behind):
    checked(network(behind=[behind]), nn.CrossEntropyLoss(), (X, Y), "relative_flatness", layers="0", curvature="ggn")
