"""Loss, accuracy and gap: every loss by its own function over the whole data, whatever the batches."""

import pytest
import torch
from torch import nn

import pyflatness as pf
from support.cases import LOSSES, TOKEN_TARGETS, TOKENS, Tokens, to
from support.grid import classes, normal
from support.unchanged import LOSS, X, Y, assert_unchanged, snapshot


def linear(d=4, m=5, seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Linear(m, d).double()


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_by_its_own_function(loss):
    fn, targets = (to(torch.float64, part) for part in LOSSES[loss])
    model, x, other = linear(), normal(1, 6, 5), normal(2, 6, 5)
    if "sum" in loss:
        counted = 1 if loss == "huber sum" else (4 if "squared" in loss or "binary" in loss else 1)
        whole = (6 if "ignored" not in loss else 4) * counted
        if loss == "class weights sum":
            whole = float(fn.weight[targets].sum())
    else:
        whole = 1
    cut = [(x[:4], targets[:4]), (x[4:], targets[4:])]
    with torch.no_grad():
        truth = [float(fn(model(inputs), targets)) / whole for inputs in (x, other)]
    found = pf.generalization_gap(model, fn, cut, (other, targets))
    assert found.train.loss == pytest.approx(truth[0], rel=1e-9)
    assert found.test.loss == pytest.approx(truth[1], rel=1e-9)
    assert found.gap == found.test.loss - found.train.loss
    assert (found.train.samples, found.test.samples) == (6, 6)


def test_accuracies():
    model, x = linear(), normal(1, 30, 5)
    f = model(x).detach()
    right = f.argmax(1)
    wrong = right.clone()
    wrong[:6] = (wrong[:6] + 1) % 4
    ignored = wrong.clone()
    ignored[:3] = -100

    def accuracies(loss, targets):
        found = pf.generalization_gap(model, loss, (x, right_of[targets.dtype]), (x, targets))
        return found.train.accuracy, found.test.accuracy, found.accuracy_gap

    right_of = {torch.int64: right, torch.float64: nn.functional.one_hot(right, 4).double()}
    assert accuracies(LOSS, wrong) == pytest.approx((1, 0.8, 0.2))
    assert accuracies(LOSS, ignored)[1] == pytest.approx(24 / 27)
    assert accuracies(LOSS, nn.functional.one_hot(wrong, 4).double())[1] == pytest.approx(0.8)
    assert accuracies(lambda a, b: nn.functional.cross_entropy(a, b), wrong)[1] == pytest.approx(0.8)
    binary = (f > 0).double()
    found = pf.generalization_gap(model, nn.BCEWithLogitsLoss(), (x, binary), (x, 1 - binary))
    assert (found.train.accuracy, found.test.accuracy) == (1, 0)


@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.HuberLoss(), lambda a, b: (a - b).abs().mean()])
def test_regression_has_no_accuracy(loss):
    data = normal(1, 30, 5), normal(2, 30, 4)
    found = pf.generalization_gap(linear(), loss, data, data)
    assert found.train.accuracy is None
    assert found.accuracy_gap is None
    assert found.gap == 0


def test_counts_as_targets_of_a_callable_are_no_classes():
    data = normal(1, 30, 5), classes(2, 30, 4)
    assert pf.generalization_gap(linear(), nn.PoissonNLLLoss(), data, data).train.accuracy is None


def test_tokens_and_iterators():
    """Each data set is read once, so that an iterator will do."""
    model = Tokens().double()
    batches = [(TOKENS[:2], TOKEN_TARGETS[:2]), (TOKENS[2:], TOKEN_TARGETS[2:])]
    found = pf.generalization_gap(model, LOSS, iter(batches), iter(batches))
    f = model(TOKENS).detach()
    kept = TOKEN_TARGETS >= 0
    assert found.train.loss == pytest.approx(float(LOSS(f, TOKEN_TARGETS)), rel=1e-9)
    assert found.train.accuracy == pytest.approx(float((f.argmax(1) == TOKEN_TARGETS)[kept].double().mean()))


def test_nan_policies():
    model, x, y = linear(), normal(1, 30, 5), classes(2, 30)
    bad = x.clone()
    bad[4], bad[9] = torch.nan, torch.inf
    left = torch.tensor([i for i in range(30) if i not in (4, 9)])
    with pytest.raises(pf.errors.NonFiniteError, match="batch 0: the loss is nan"):
        pf.generalization_gap(model, LOSS, (x, y), (bad, y))
    found = pf.generalization_gap(model, LOSS, (x, y), (bad, y), nan_policy="omit")
    clean = pf.generalization_gap(model, LOSS, (x, y), (x[left], y[left]))
    assert found.test.loss == pytest.approx(clean.test.loss)
    assert found.test.accuracy == clean.test.accuracy
    assert (found.test.samples, found.test.omitted, found.train.omitted) == (28, 2, 0)
    through = pf.generalization_gap(model, LOSS, (x, y), (bad, y), nan_policy="propagate")
    assert through.gap != through.gap
    assert through.test.samples == 30
    with pytest.raises(pf.errors.NonFiniteError, match="nan_policy='omit': all 1 samples have NaN"):
        pf.generalization_gap(model, LOSS, (x, y), (bad[4:5], y[4:5]), nan_policy="omit")


def test_masked_logits_are_no_reason_to_complain():
    """-inf for a class that is not the target's has a finite loss."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = linear()

        def forward(self, x):
            return self.layer(x).masked_fill(torch.tensor([False, False, False, True]), -torch.inf)

    x, y = normal(1, 10, 5), classes(2, 10, of=3)
    assert pf.generalization_gap(Masked(), LOSS, (x, y), (x, y)).gap == 0


def test_no_trace():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    LOSS(model(X), Y).backward()
    with pytest.raises(pf.errors.InputError, match=r"model.eval\(\)"):
        pf.generalization_gap(model, LOSS, (X, Y), (X, Y))
    model.eval()
    before = snapshot(model)
    pf.generalization_gap(model, LOSS, (X, Y), (X, Y))
    assert_unchanged(model, before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nan_policy": "skip"}, "nan_policy='skip'"),
        ({"train": (X, Y + 7)}, "batch 0: targets: class"),
        ({"test": (X, Y.float())}, "class indices must be int64"),
        ({"test": []}, "no samples"),
        ({"test": [(X,)]}, "a tuple of 1"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(pf.errors.InputError, match=message):
        pf.generalization_gap(nn.Linear(4, 3), LOSS, **{"train": (X, Y), "test": (X, Y), **options})
