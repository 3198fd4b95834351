"""A layer that is the head of one sample and not of a batch, or whose batches are too large: the sweep measures it."""

import pytest
import torch
from torch import nn

import pyflatness as pf
from support import truth

LOSS = nn.CrossEntropyLoss()


class Copied(nn.Module):
    """Return a copy of the head's output; that of a single sample is none, since one row is contiguous either way."""

    def __init__(self):
        super().__init__()
        self.front, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(torch.relu(self.front(x))).t().contiguous().t()


def problem(samples=12):
    torch.manual_seed(0)
    return Copied().double(), (torch.randn(samples, 4).double(), torch.arange(samples) % 3)


def test_a_copy_that_one_sample_does_not_show():
    model, data = problem()
    estimate = pf.relative_flatness(model, LOSS, data)
    assert (estimate.layer, estimate.method, estimate.exact) == ("head", "ggn", True)
    assert float(estimate) == pytest.approx(truth.of_model(model, LOSS, *data, "head"), rel=1e-12)


def test_data_that_can_be_read_once_are_refused():
    model, data = problem()
    with pytest.raises(pf.errors.InputError, match="'head' is not the model's head as in the batches before"):
        pf.relative_flatness(model, LOSS, iter([data]))


def test_a_tolerance_is_for_heads_alone():
    model, data = problem()
    with pytest.raises(pf.errors.InputError, match="'head' is not the model's head as in the batches before"):
        pf.relative_flatness(model, LOSS, data, rtol=0.01)


class Small(nn.Sequential):
    """Run out of memory on more than four samples."""

    def forward(self, x):
        if len(x) > 4:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.")
        return super().forward(x)


def test_batches_at_a_head_are_cut_to_the_memory():
    _, data = problem()
    layers = nn.Linear(4, 5).double(), nn.ReLU(), nn.Linear(5, 3).double()
    estimate = pf.relative_flatness(Small(*layers), LOSS, data)
    whole = pf.relative_flatness(nn.Sequential(*layers), LOSS, data)
    assert (estimate.method, estimate.exact) == ("head", True)
    assert float(estimate) == pytest.approx(float(whole), rel=1e-14)


def test_the_loss_of_scores_counts_no_batch_twice():
    """The first batch is read by the formula, and the second shows that the layer is no head: an error, as before."""
    model, (x, y) = problem()
    data = [(x[:1], y[:1]), (x[1:], y[1:])]
    row = pf.score({"copied": model}, "cross_entropy", data, layers="head").rows[0]
    assert "not the model's head as in the batches before" in row.error
    assert row.loss is None or row.loss == pytest.approx(float(LOSS(model(x), y)), rel=1e-6)
