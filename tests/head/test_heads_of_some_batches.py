"""A layer that is the head of one sample and not of a batch, or whose batches are too large: the sweep measures it."""

import pytest
import torch
from torch import nn

import pyflatness as pf
from pyflatness.model import layers
from support import truth
from support.grid import Net

LOSS = nn.CrossEntropyLoss()


def copied():
    """Return a copy of the head's output; that of a single sample is none, since one row is contiguous either way."""

    def forward(net, x):
        return net.head(torch.relu(net.front(x))).t().contiguous().t()

    return Net(forward, front=nn.Linear(4, 5), head=nn.Linear(5, 3))


def problem(samples=12):
    torch.manual_seed(0)
    return copied().double(), (torch.randn(samples, 4).double(), torch.arange(samples) % 3)


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


# --- layers in chains -------------------------------------------------------------------------------------------------


X, Y = torch.randn(40, 4, generator=torch.Generator().manual_seed(0)).double(), torch.arange(40) % 3


class Backwards(nn.Sequential):
    """Call its parts from the last to the first."""

    def forward(self, x):
        for part in reversed(self):
            x = part(x)
        return x


def first_alone(net, x):
    """Call the first part of a chain alone: it is the head."""
    return net.chain[0](x)


def chain():
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(5, 6), nn.Tanh())
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), inner, nn.Linear(6, 3), nn.Identity()).double()


@pytest.mark.parametrize(("name", "sizes"), [("0", [2, 40]), ("2.0", [2, 40]), ("3", [1, 40])])
def test_the_samples_that_go_through_the_model(name, sizes):
    model, seen = chain(), []
    model.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    estimate = pf.relative_flatness(model, LOSS, (X, Y), name)
    assert seen == sizes
    assert float(estimate) == pytest.approx(truth.of_model(model, LOSS, X, Y, name), rel=1e-10)


def test_which_layers_feed_another():
    model = chain()
    assert [name for name, _ in model.named_modules() if name and layers.feeds_another(model, name)] == [
        *("0", "1", "2", "2.0", "2.1")
    ]
    assert not layers.feeds_another(Backwards(nn.Linear(3, 4), nn.Linear(4, 3)), "0")
    assert not layers.feeds_another(nn.Linear(3, 4), "")


@pytest.mark.parametrize("options", [{}, {"rtol": 0.01}])
def test_a_head_that_is_called_without_its_chain(options):
    model = Net(first_alone, chain=nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3))).double()
    estimate = pf.relative_flatness(model, LOSS, (X, Y), "chain.0", **options)
    assert estimate.method == "head"
    assert float(estimate) == pytest.approx(
        truth.of_model(model, LOSS, X, Y, "chain.0"), rel=options.get("rtol", 1e-10)
    )
