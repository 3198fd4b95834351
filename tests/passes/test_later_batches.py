"""What holds at the first batch is looked at again at later ones: samples apart, and finite second derivatives.

A model that mixes samples, in front of its head too, has no value over a data set, from whichever batch on.
"""

import pytest
import torch
from torch import nn

import pyflatness as pf
from support import truth
from support.combinations import every
from support.grid import Net, normal

X, Y = normal(1, 64, 5), torch.arange(64) % 3
LOSS = nn.CrossEntropyLoss()
CUT = [(x, y) for x, y in zip(X.split(8), Y.split(8), strict=True)]


def network(forward):
    torch.manual_seed(0)
    net = Net(forward, front=nn.Linear(5, 6), head=nn.Linear(6, 3)).double()
    net.mixes = False
    return net


def mixing_from(start, mix):
    """Samples are mixed from a batch on that holds a large value."""

    def forward(net, x):
        h = torch.relu(net.front(x))
        net.mixes |= bool((x > 50).any())
        return net.head(mix(h) if net.mixes else h)

    batches = enumerate(CUT)
    return network(forward), [(x + 100 * (number >= start) * (torch.arange(5) == 0), y) for number, (x, y) in batches]


MIX = {
    "centred": lambda h: h - h.mean(0),
    "what came before": lambda h: h.cumsum(0),
    "what comes after": lambda h: h.flip(0).cumsum(0).flip(0),
    "turned round": lambda h: h.flip(0),
    "scaled": lambda h: h / h.std(0).clamp_min(0.1),
}


@every(together=1, mix=[*MIX], start=range(1, 8))
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

    data = [(x, y) for x, y in zip(normal(2, 1000, 5).split(10), (torch.arange(1000) % 3).split(10), strict=True)]
    pf.relative_flatness(network(forward), LOSS, loader(data), "front")
    looked_at = [number for number, size in enumerate(sizes) if size == 2]
    assert len(looked_at) == (8 if loader is iter else 3)  # and first of all on two of the first batch
    assert sizes.count(10) == 100


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


# --- in front of a head -----------------------------------------------------------------------------------------------

MIX_OF_FEATURES = [*MIX][:3]


@every(together=1, mix=[*MIX_OF_FEATURES], start=range(8))
def test_samples_mixed_in_front_of_a_head_are_refused(mix, start):
    net, data = mixing_from(start, MIX[mix])
    with pytest.raises(pf.errors.InputError, match=r"(features|outputs) for the same samples change"):
        pf.relative_flatness(net, LOSS, data)


@pytest.mark.parametrize("mix", MIX_OF_FEATURES)
def test_a_single_batch_is_enough(mix):
    net, data = mixing_from(0, MIX[mix])
    with pytest.raises(pf.errors.InputError, match=r"(features|outputs) for the same samples change"):
        pf.relative_flatness(net, LOSS, data[:1])


def test_a_shuffled_loader_is_looked_at_too():
    net, _ = mixing_from(0, MIX["centred"])
    net.mixes = True
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=64, shuffle=True)
    with pytest.raises(pf.errors.InputError, match=r"(features|outputs) for the same samples change"):
        pf.relative_flatness(net, LOSS, loader)


def test_tokens_have_their_own_places():
    """Samples are told apart where each has several rows; mixing within a sample is none."""

    def forward(net, x):
        h = torch.relu(net.front(x))
        return net.head(h + h.mean(1, keepdim=True)).transpose(1, 2)

    x, y = normal(2, 6, 4, 5), torch.arange(24).view(6, 4) % 3
    whole = pf.relative_flatness(network(forward), LOSS, (x, y))
    cut = pf.relative_flatness(network(forward), LOSS, [(a, b) for a, b in zip(x.split(2), y.split(2), strict=True)])
    assert whole.method == "head"
    assert float(whole) == pytest.approx(float(cut), rel=1e-12)


@pytest.mark.parametrize(("loader", "looked_at"), [(list, 2), (iter, 7)], ids=["a list", "an iterator"])
def test_a_head_has_few_batches_looked_at(loader, looked_at):
    """The model runs on two samples of the second batch and the last one, or of some at doubling distances."""
    sizes = []

    def forward(net, x):
        sizes.append(len(x))
        return net.head(torch.relu(net.front(x)))

    data = [(x, y) for x, y in zip(normal(3, 1280, 5).split(10), (torch.arange(1280) % 3).split(10), strict=True)]
    pf.relative_flatness(network(forward), LOSS, loader(data))
    assert sizes.count(10) == 128
    assert sizes.count(1) == 1
    assert sizes.count(2) == looked_at  # batches 1, 2, 4, …, 64 of an iterator
