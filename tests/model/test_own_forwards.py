"""Subclasses of torch's layers whose forward is their own, measured where they use their weight."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pyflatness as pf
from support.combinations import every
from support.grid import Net, normal
from support.parameter_truth import ParameterTruth

LOSS, Y = nn.CrossEntropyLoss(), torch.arange(4) % 3
IMAGES, ROWS = normal(0, 4, 4, 5, 5), normal(1, 4, 3, 4)
MEASURES = ["relative_flatness", "trace", "lambda_max"]


class Same(nn.Conv2d):
    """As timm's Conv2dSame: pads by the size of the input."""

    def forward(self, x):
        return F.conv2d(F.pad(x, (0, 1, 0, 1)), self.weight, self.bias, self.stride, 0, self.dilation, self.groups)


class Standardised(nn.Conv2d):
    """As those of BiT-ResNets."""

    def forward(self, x):
        weight = F.batch_norm(self.weight.reshape(1, self.out_channels, -1), None, None, training=True, momentum=0.0)
        return F.conv2d(x, weight.reshape_as(self.weight), self.bias, self.stride, self.padding)


class Gained(nn.Conv2d):
    """As NFNets' ScaledStdConv2d, with a learned gain of each filter."""

    def __init__(self, *sizes, **options):
        super().__init__(*sizes, **options)
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, self.out_channels).view(-1, 1, 1, 1))

    def forward(self, x):
        std, mean = torch.std_mean(self.weight, dim=(1, 2, 3), keepdim=True, unbiased=False)
        return F.conv2d(x, self.gain * ((self.weight - mean) / std), self.bias, self.stride, self.padding)


class Quantised(nn.Linear):
    """As in quantisation-aware training."""

    def forward(self, x):
        weight = torch.fake_quantize_per_tensor_affine(self.weight, 0.05, 0, -128, 127)
        return F.linear(x, weight, self.bias)


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class LowRank(nn.Linear):
    """A subclass with an adapter in parameters of its own."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.down, self.up = nn.Parameter(torch.randn(2, sizes[0])), nn.Parameter(torch.randn(sizes[1], 2))

    def forward(self, x):
        return super().forward(x) + x @ self.down.T @ self.up.T


def net(make, activation=torch.tanh):
    def forward(net, x):
        h = activation(net.own(x))
        return net.head(h.flatten(2).mean(2) if x.ndim == 4 else h.mean(1))

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return Net(forward, own=make(), head=nn.Linear(6, 3)).double().eval()


PLAIN = {
    "padded by itself": (lambda: Same(4, 6, 2, stride=2), IMAGES, ["own"]),
    "grouped": (lambda: Same(4, 6, 2, groups=2), IMAGES, ["own"]),
    "scaled": (lambda: Scaled(4, 6), ROWS, ["own"]),
    "with an adapter": (lambda: LowRank(4, 6), ROWS, ["own", "own.down", "own.up"]),
}


@pytest.mark.parametrize("name", PLAIN)
def test_values_are_those_of_the_weight(name):
    make, x, layers = PLAIN[name]
    model = net(make)
    report = pf.measure(model, LOSS, (x, Y), measures=MEASURES)
    assert report.layers == (*layers, "head")
    assert report.uncovered == {}
    groups = getattr(model.own, "groups", 1)
    for layer in layers:
        parameter = "own.weight" if layer == "own" else layer
        expected = ParameterTruth(model, LOSS, x, Y, parameter)
        for measure in MEASURES:
            value = expected.values(expected.hessian, groups)[measure]
            assert report[layer, measure].value == pytest.approx(value, rel=1e-8), (layer, measure)
    assert pf.verify(model, LOSS, (x, Y), "own")
    by_module = pf.relative_flatness(model, LOSS, (x, Y), model.own)
    assert by_module.value == pytest.approx(report["own", "relative_flatness"].value, rel=1e-12)


def effective(own):
    """Return a plain layer with the weight that a layer computes of its own."""
    found = []
    original, function = (F.linear, "linear") if isinstance(own, nn.Linear) else (F.conv2d, "conv2d")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, function, lambda x, w, *rest: [found.append(w.detach()), original(x, w, *rest)][1])
        own(ROWS if isinstance(own, nn.Linear) else IMAGES)
    kind = nn.Linear if isinstance(own, nn.Linear) else nn.Conv2d
    sizes = (4, 6) if kind is nn.Linear else (4, 6, own.kernel_size)
    plain = kind(*sizes, **({} if kind is nn.Linear else {"padding": own.padding, "stride": own.stride})).double()
    plain.weight.data, plain.bias.data = found[0], own.bias.detach().clone()
    return plain


COMPUTED = {
    "standardised": (lambda: Standardised(4, 6, 2, padding=1), IMAGES),
    "standardised, with a gain": (lambda: Gained(4, 6, 3, stride=2), IMAGES),
    "quantised": (lambda: Quantised(4, 6), ROWS),
}


@every(together=1, name=[*COMPUTED], activation=[torch.relu, torch.tanh])
def test_a_weight_that_is_computed_counts_as_that_of_a_parametrised_layer(name, activation):
    make, x = COMPUTED[name]
    model = net(make, activation)
    twin = net(lambda: effective(model.own), activation)
    twin.head = model.head
    report = pf.measure(model, LOSS, (x, Y), measures=[*MEASURES, "weight_norm"])
    other = pf.measure(twin, LOSS, (x, Y), measures=[*MEASURES, "weight_norm"])
    assert report.layers == other.layers == ("own", "head")
    assert report.uncovered == {}
    for measure in [*MEASURES, "weight_norm"]:
        for layer in report.layers:
            assert report[layer, measure].value == pytest.approx(other[layer, measure].value, rel=1e-9)
            assert report[layer, measure].exact
    assert pf.verify(model, LOSS, (x, Y), "own")


class Merged(LowRank):
    """With the adapter in the weight, and used by itself too."""

    def forward(self, x):
        inside = F.linear(x, self.weight + self.up @ self.down, self.bias)
        return inside + F.linear(F.linear(x, self.down).tanh(), self.up)


def test_parameters_of_a_computed_weight_that_are_used_elsewhere_too():
    model = net(lambda: Merged(4, 6))
    report = pf.measure(model, LOSS, (ROWS, Y), measures=["trace"])
    assert report.layers == ("own", "head")
    why = "the weight of own is computed of it too"
    assert report.why_uncovered == {"own.down": why, "own.up": why}
    assert report.uncovered.keys() == report.why_uncovered.keys()
    expected = ParameterTruth(model, LOSS, ROWS, Y, "own.weight")  # the sum's derivative is that in this summand
    assert report["own", "trace"].value == pytest.approx(expected.values(expected.hessian)["trace"], rel=1e-9)


class Stopped(nn.Linear):
    """With a second use of the weight behind which there is no derivative."""

    def forward(self, x):
        return F.linear(x, self.weight, self.bias) + F.linear(x.sin(), self.weight.detach())


def test_a_use_of_the_detached_weight_is_none():
    model = net(lambda: Stopped(4, 6))
    report = pf.measure(model, LOSS, (ROWS, Y), measures=["trace"])
    expected = ParameterTruth(model, LOSS, ROWS, Y, "own.weight")
    assert report["own", "trace"].value == pytest.approx(expected.values(expected.hessian)["trace"], rel=1e-9)
    assert not report["own", "trace"].exact


def test_a_tied_weight_is_measured_by_its_own_use():
    model = Net(lambda net, x: net.head(net.other(torch.tanh(net.own(x))).mean(1)), own=Scaled(4, 4),
        other=nn.Linear(4, 4), head=nn.Linear(4, 3)).double()  # fmt: skip
    model.other.weight = model.own.weight
    estimate = pf.measure(model, LOSS, (ROWS, Y), measures=["trace"])["own", "trace"]
    assert estimate.notes == ("weight tied with other: derivative through this use only",)
    model.other.weight = nn.Parameter(model.own.weight.detach().clone())
    assert estimate.value == pytest.approx(pf.measure(model, LOSS, (ROWS, Y), measures=["trace"])["own", "trace"].value)


class Gated(nn.Linear):
    """With a weight that is the same for all samples here, but need not be."""

    def forward(self, x):
        x = x.clone().requires_grad_() if torch.is_grad_enabled() else x
        return F.linear(x, self.weight * (1 + 0 * x.sum()), self.bias)


class Summed(nn.Linear):
    def forward(self, x):
        return x.sum(-1, keepdim=True) * self.weight.sum(1)


class Twice(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight, self.bias) + F.linear(x, self.weight.sin())


@pytest.mark.parametrize("kind", [Gated, Summed, Twice])
def test_a_weight_that_depends_on_more_is_left_out_and_named(kind):
    model = net(lambda: kind(4, 6))
    report = pf.measure(model, LOSS, (ROWS, Y), measures=["trace"])
    assert report.layers == ("head",)
    assert [*report.uncovered] == [*report.why_uncovered] == ["own.weight"]
    for layer in ("own", model.own):
        with pytest.raises(pf.errors.InputError, match="'own': its weight is used in"):
            pf.relative_flatness(model, LOSS, (ROWS, Y), layer)
    for choice in ("type:Summed", None):
        only = Net(lambda net, x: net.own(x).mean(1), own=Summed(4, 3)).double()
        with pytest.raises(pf.errors.InputError, match="'own': its weight is used in sum"):
            pf.measure(only, LOSS, (ROWS, Y), layers=choice)
