"""What holds at the first batch is looked at again at later ones: samples apart, and finite second derivatives."""

import pytest
import torch
from torch import nn

import pyflatness as pf
from support import truth
from support.grid import Net, normal

X, Y = normal(1, 64, 5), torch.arange(64) % 3
LOSS = nn.CrossEntropyLoss()
CUT = [(x, y) for x, y in zip(X.split(8), Y.split(8), strict=True)]


def network(forward):
    torch.manual_seed(0)
    return Net(forward, front=nn.Linear(5, 6), head=nn.Linear(6, 3)).double()


def mixing_from(start, mix):
    """Samples are mixed from a batch on that holds a large value."""

    def forward(net, x):
        h = torch.relu(net.front(x))
        net.mixes |= bool((x > 50).any())
        return net.head(mix(h) if net.mixes else h)

    net = network(forward)
    net.mixes = False
    return net, [(x + 100 * (number >= start) * (torch.arange(5) == 0), y) for number, (x, y) in enumerate(CUT)]


MIX = {
    "centred": lambda h: h - h.mean(0),
    "what came before": lambda h: h.cumsum(0),
    "what comes after": lambda h: h.flip(0).cumsum(0).flip(0),
    "turned round": lambda h: h.flip(0),
    "scaled": lambda h: h / h.std(0).clamp_min(0.1),
}


@pytest.mark.parametrize("start", range(1, 8))
@pytest.mark.parametrize("mix", MIX)
def test_samples_that_are_mixed_from_a_later_batch_on_are_refused(mix, start):
    for measure in ("trace", "lambda_max", "mls"):
        net, data = mixing_from(start, MIX[mix])
        with pytest.raises(pf.errors.InputError, match=r"outputs for the same samples change|cannot be told apart"):
            pf.measure(net, LOSS, data, layers="front", measures=measure)


@pytest.mark.parametrize("loader", [lambda data: data, iter], ids=["a list", "an iterator"])
def test_few_batches_are_looked_at(loader):
    """The model runs on two samples of the second batch and the last one, or of some at doubling distances."""
    sizes = []

    def forward(net, x):
        sizes.append(len(x))
        return net.head(torch.relu(net.front(x)))

    data = [(x, y) for x, y in zip(normal(2, 4000, 5).split(10), (torch.arange(4000) % 3).split(10), strict=True)]
    pf.relative_flatness(network(forward), LOSS, loader(data), "front")
    looked_at = [number for number, size in enumerate(sizes) if size == 2]
    assert len(looked_at) == (10 if loader is iter else 3)  # and first of all on two of the first batch
    assert sizes.count(10) == 400


def rooted(x):
    """Its square root as a square: finite first derivatives at 0 (by torch's choice), no second ones."""
    return x.relu().pow(1.5)


@pytest.mark.parametrize("last", [False, True], ids=["behind others", "alone"])
def test_second_derivatives_that_are_not_finite_are_said(last):
    def forward(net, x):
        return net.head(net.front(x).abs().pow(1.5))

    net = network(forward)
    net.front.bias.data.zero_()
    x = X[:16].clone()
    x[15] = 0
    data = [(x, Y[:16])] if last else [(x[:8], Y[:8]), (x[8:], Y[8:16])]
    said = r"batch \d: 1 of \d+ samples have NaN or infinity .* second derivatives .* layer 'front'"
    for options in ({}, {"curvature": "hessian"}):
        with pytest.raises(pf.errors.NonFiniteError, match=said):
            pf.relative_flatness(net, LOSS, data, "front", **options)
    left = pf.relative_flatness(net, LOSS, data, "front", nan_policy="omit")
    assert (left.omitted, left.exact) == (1, True)
    assert left.value == pytest.approx(truth.of_model(net, LOSS, x[:15], Y[:15], "front"), rel=1e-9)


def test_a_sample_of_nan_alone_does_not_make_a_network_another_one():
    """Linear in pieces, though the graph does not say so: a sample with NaN is not taken for a second derivative."""
    net = network(lambda net, x: net.head(nn.functional.elu(net.front(x))))
    net.front.weight.data.abs_()
    net.front.bias.data.zero_()
    x = X[:8].abs()
    before = pf.relative_flatness(net, LOSS, (x, Y[:8]), "front")
    x[3, 2] = torch.nan
    after = pf.relative_flatness(net, LOSS, (x, Y[:8]), "front", nan_policy="omit")
    assert before.method == after.method == "ggn"
    assert after.omitted == 1


@pytest.mark.parametrize("measure", ["fisher_rao", "relative_flatness"])
def test_a_batch_of_a_model_that_runs_on_whole_batches_is_never_cut(measure):
    """A later one that is larger than the first either."""
    net, batches = network(lambda net, x: net.head(torch.relu(net.front(x)))), [(X[:6], Y[:6]), (X[6:16], Y[6:16])]

    def forward(model, batch):
        if len(batch[0]) not in (6, 10):
            raise ValueError("cut")
        return model(batch[0]), batch[1]

    found = pf.measure(net, LOSS, batches, measures=measure, forward=forward)[measure].value
    assert found == pytest.approx(pf.measure(net, LOSS, batches, measures=measure)[measure].value, rel=1e-12)
