"""Eq. 17 of the 2024 paper at residual blocks (its appendix A), by autograd at the very sum."""

import pytest
import torch
from torch import nn

import pyflatness as pf
from support.bounds import holds
from support.brute_force import network
from support.cases import INDICES, C, M
from support.grid import Net, normal
from support.residual import LOSS

X = normal(10, 6, M)
PAST = "its input goes another way too"


def layers(**widths):
    torch.manual_seed(0)
    return {name: nn.Linear(*sizes) for name, sizes in widths.items()}


def two_blocks(net, x, seen=None):
    """A branch of one layer, and one of two; ``seen`` takes what is behind each sum."""
    sums = {} if seen is None else seen
    sums["one"] = x = x + torch.relu(net.one(x))
    sums["two"] = x = x + net.three(torch.tanh(net.two(x)))
    return net.head(x)


WIDTHS = {"one": (M, M), "two": (M, 7), "three": (7, M), "head": (M, C)}


def largest(model, place, x):
    """The mean over samples of s_max of the Jacobian at what ``place(inputs)`` gives with the outputs."""
    found = []
    for sample in x:
        outputs, tensor = place(sample[None])
        rows = [torch.autograd.grad(f, tensor, retain_graph=True)[0].flatten() for f in outputs.flatten()]
        found.append(torch.linalg.svdvals(torch.stack(rows))[0])
    return float(torch.stack(found).mean())


def at_sum(model, name):
    def place(x):
        seen = {}
        return two_blocks(model, x, seen), seen[name]

    return lambda x: largest(model, place, x)


def at_input(model):
    def place(x):
        x = x.requires_grad_()
        return model(x * 1.0), x

    return lambda x: largest(model, place, x)


@pytest.mark.parametrize("scale", [1.0, 0.1])
def test_its_left_side_is_at_what_follows_the_sum(scale):
    for seed in range(10):
        torch.manual_seed(seed)
        model = Net(two_blocks, **{name: nn.Linear(*sizes) for name, sizes in WIDTHS.items()}).double()
        model.three.weight.data.mul_(scale)
        bounds = pf.theory.bounds(model, LOSS, [(X[:4], INDICES[:4]), (X[4:], INDICES[4:])])
        first, second = (at_sum(model, name)(X) for name in ("one", "two"))
        assert bounds["one", "17"].left == pytest.approx(at_input(model)(X) - first, rel=1e-8, abs=1e-12)
        assert bounds["two", "17"].left == pytest.approx(first - second, rel=1e-8, abs=1e-12)
        assert "what follows the sum" in bounds["two", "17"].what
        for layer in ("one", "two", "three"):
            assert bounds[layer, "17"].guaranteed, layer
            assert holds(bounds[layer, "17"]), layer
        assert bounds["one", "5"].caveat == bounds["two", "5"].caveat == PAST  # these are not for residual blocks
        assert bounds["17, summed"].guaranteed
        assert holds(bounds["17, summed"])
        assert bounds["17, summed"].left == pytest.approx(at_input(model)(X) - second, rel=1e-8)


def test_the_pair_of_two_layers_of_a_branch_is_no_inequality():
    """Of the first of two layers less the second a value above the bound was given: no such inequality holds."""
    model = Net(lambda net, x: net.head(x + net.two(net.one(x))), **layers(one=(M, 7), two=(7, M), head=(M, C)))
    model = model.double()
    model.two.weight.data.mul_(1e-3)
    bounds = pf.theory.bounds(model, LOSS, (X, INDICES))
    assert bounds["one", "5"].left - bounds["two", "5"].left > bounds["one", "17"].right
    assert holds(bounds["one", "17"])


@pytest.mark.parametrize("behind", [torch.relu, lambda h: 3 * h])
def test_the_sum_over_layers_is_guaranteed_where_it_telescopes(behind):
    """What is behind a sum may make derivatives smaller on the way to the next layer's input, as ReLU, not larger."""

    def forward(net, x):
        return net.head(behind(x + torch.relu(net.one(x))))

    model = Net(forward, **layers(one=(M, M), head=(M, C))).double()
    model.one.weight.data.mul_(0.1)
    bounds = pf.theory.bounds(model, LOSS, (X, INDICES))
    assert bounds["one", "17"].guaranteed
    assert holds(bounds["one", "17"])
    assert bounds["17, summed"].guaranteed == (behind is torch.relu)


def test_convolutional_blocks():
    """Without a guarantee, and yet with the same left side."""

    def forward(net, x, seen=None):
        sums = {} if seen is None else seen
        sums["one"] = x = x + net.two(torch.relu(net.one(x)))
        return net.head(x.flatten(1))

    parts = {"one": nn.Conv2d(2, 3, 3, padding=1, stride=1), "two": nn.Conv2d(3, 2, 3, padding=1)}
    model = Net(forward, **parts, head=nn.Linear(2 * 16, C)).double()
    x = normal(3, 5, 2, 4, 4)

    def place(inputs):
        seen = {}
        return forward(model, inputs, seen), seen["one"]

    row = pf.theory.bounds(model, LOSS, (x, INDICES[:5]))["one", "17"]
    assert row.left == pytest.approx(at_input(model)(x) - largest(model, place, x), rel=1e-8)
    assert row.caveat == "a convolution"


def test_a_sample_with_nan_hides_no_shortcut():
    x = X.clone()
    x[3] = torch.nan
    model = Net(two_blocks, **layers(**WIDTHS)).double()
    bounds = pf.theory.bounds(model, LOSS, (x, INDICES), nan_policy="omit")
    kept = [0, 1, 2, 4, 5]
    expected = pf.theory.bounds(model, LOSS, (X[kept], INDICES[kept]))
    assert [row.caveat for row in bounds.rows] == [row.caveat for row in expected.rows]
    assert bounds["one", "17"].left == pytest.approx(expected["one", "17"].left, rel=1e-12)


def test_of_plain_layers_the_next_one_is_taken_off():
    bounds = pf.theory.bounds(network(M, 6, 5, C), LOSS, (X, INDICES))
    assert bounds["0", "17"].what == "mean s_max less that of the next layer"
    assert bounds["0", "17"].left == bounds["0", "5"].left - bounds["2", "5"].left
    assert [row.layer for row in bounds.rows if row.equation == "17"] == ["0", "2"]
