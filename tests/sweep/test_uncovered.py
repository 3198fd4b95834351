"""Which weights the values of a network leave out, and that these are not called exact."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import rnn

import pyflatness as pf
from support import weight_truth
from support.cases import classifier
from support.grid import Net, normal

LOSS, Y = nn.CrossEntropyLoss(), torch.arange(6) % 3
OF_LAYERS = ["relative_flatness", "trace", "scaled_trace", "weight_norm", "nmls", "volume"]
NAMES = [*OF_LAYERS, "fisher_rao", "mls"]


def of(model, data, **options):
    return pf.measure(model.double().eval(), LOSS, data, measures=NAMES, **options)


def attention(net, x):
    h = net.first(x) + net.place
    h = net.norm(net.mix(h, h, h)[0])
    return net.head(h.mean(1))


def transformer():
    model = Net(attention, first=nn.Linear(4, 4), mix=nn.MultiheadAttention(4, 2, batch_first=True),
        norm=nn.LayerNorm((3, 4)), head=nn.Linear(4, 3))  # fmt: skip
    model.place = nn.Parameter(torch.ones(1, 3, 4))
    return model


def recurrent():
    return Net(lambda net, x: net.head(net.cell(rnn.pack_sequence([*x]))[1][0][0]), cell=nn.LSTM(4, 5),
        head=nn.Linear(5, 3))  # fmt: skip


def embedding():
    return Net(lambda net, x: net.head(torch.relu(net.embed(x)).flatten(1)), embed=nn.Embedding(7, 2, max_norm=9.0),
        head=nn.Linear(8, 3))  # fmt: skip


FLOATS, TOKENS = normal(0, 6, 3, 4), torch.randint(7, (6, 4), generator=torch.Generator().manual_seed(0))
CASES = {  # the weights left out, by their entries, and how many entries all weights have
    "attention": (transformer, FLOATS, {"place": 12}, 12 + 16 + 64 + 12),
    "recurrent": (recurrent, FLOATS, {"cell.weight_ih_l0": 80, "cell.weight_hh_l0": 100}, 180 + 15),
    "embedding": (embedding, TOKENS, {"embed.weight": 14}, 14 + 24),
}


@pytest.mark.parametrize("measure", [*OF_LAYERS, "largest_scaled_trace", "lambda_max", "matrix_normalized_sharpness"])
def test_a_measure_by_itself(measure):
    model = embedding().double()
    report = pf.measure(model, LOSS, (TOKENS, Y), measures=measure)
    assert [*report.uncovered] == ["embed.weight"]
    assert not report[measure].exact
    assert pf.measure(model, LOSS, (TOKENS, Y), measures="fisher_rao").uncovered == {}


@pytest.mark.parametrize("name", CASES)
def test_what_is_left_out_is_named_and_not_exact(name):
    make, x, left_out, whole = CASES[name]
    report = of(make(), (x, Y))
    assert report.uncovered == pytest.approx({weight: size / whole for weight, size in left_out.items()})
    for measure in OF_LAYERS:
        assert not report[measure].exact, measure
        assert all(report[layer, measure].exact for layer in report.layers if (layer, measure) in report._estimates)
    share = f"{100 * sum(left_out.values()) / whole:.3g} % of the weights"
    assert f"network: without {share}, which no measured layer has: {', '.join(left_out)}" in str(report)
    assert report["fisher_rao"].exact, "it is of all parameters"
    if x is FLOATS:
        assert report["mls"].exact, "it is at the model's input"


def test_all_of_it_measured():
    report = of(Net(lambda net, x: net.body(x.flatten(1)), body=classifier(12, 5, 3)), (FLOATS, Y))
    assert report.uncovered == {}
    assert all(report[measure].exact for measure in NAMES)
    assert "without" not in str(report)


def test_of_chosen_layers_the_value_is_theirs():
    report = of(transformer(), (FLOATS, Y), layers=["first"])
    assert sorted(report.uncovered) == ["head.weight", "mix.in_proj_weight", "mix.out_proj.weight", "place"]
    assert report["weight_norm"].exact
    assert report["weight_norm"].value == report["first", "weight_norm"].value


def test_a_tied_weight_is_a_weight_of_each_of_its_modules():
    def forward(net, x):
        return net.head(net.embed(x).sum(1))

    model = Net(forward, embed=nn.Embedding(3, 2), head=nn.Linear(2, 3, bias=False)).double()
    model.head.weight = model.embed.weight
    report = pf.measure(model, LOSS, (TOKENS % 3, Y), measures=["trace"])
    assert report.uncovered == {}
    assert report["trace"].exact
    assert "weight tied with embed" in str(report)
    report = pf.measure(model, LOSS, (TOKENS % 3, Y), layers="head", measures=["trace"])
    assert report.uncovered == {"embed.weight": 0.5}
    model = Net(lambda net, x: net.b(torch.relu(net.a(x.flatten(1)))), a=nn.Linear(12, 12), b=nn.Linear(12, 12))
    model.b.weight = model.a.weight
    assert pf.measure(model.double(), LOSS, (FLOATS, Y), measures=["trace"]).uncovered == {}


def test_parametrised_and_frozen_weights_and_modules_of_several_names():
    layer = nn.Linear(12, 12)
    model = Net(lambda net, x: net.head(net.b(torch.relu(net.a(x.flatten(1))))), a=layer, b=layer,
        head=nn.utils.parametrizations.weight_norm(nn.Linear(12, 3)))  # fmt: skip
    layer.weight.requires_grad_(False)
    assert pf.measure(model.double(), LOSS, (FLOATS, Y), measures=["trace"]).uncovered == {}


def test_json_and_back():
    report = of(transformer(), (FLOATS, Y))
    for other in (pf.results.Report.from_json(report.to_json()), pf.results.Report.from_dict(report.to_dict())):
        assert other == report
        assert other.uncovered == report.uncovered
        assert str(other) == str(report)


def test_representation():
    report = pf.representation(transformer().double().eval(), LOSS, (FLOATS, Y))
    assert sorted(report.uncovered) == ["place"]
    assert not report["nmls"].exact
    assert report["mls"].exact


class Flat(nn.Module):
    """A matrix kept in one dimension, as e3nn keeps its weights; a bias; a normalisation of the user's own."""

    def __init__(self):
        super().__init__()
        self.flat, self.shift = nn.Parameter(torch.randn(12)), nn.Parameter(torch.randn(4))
        self.norm, self.head = UnitNorm(), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.norm(x @ self.flat.view(3, 4) + self.shift)))


class UnitNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.scale * x / x.norm(dim=-1, keepdim=True)


class Vectors(nn.Module):
    """An adapter of two trained vectors between fixed matrices, as VeRA has them."""

    def __init__(self):
        super().__init__()
        self.base, self.head = nn.Linear(3, 4).requires_grad_(False), nn.Linear(4, 3)
        self.down = nn.Parameter(torch.randn(2, 3), requires_grad=False)
        self.up = nn.Parameter(torch.randn(4, 2), requires_grad=False)
        self.held = self.keep({"d": nn.Parameter(torch.ones(2)), "b": nn.Parameter(torch.ones(4))})

    def keep(self, held):
        """Have the vectors as parameters of this module's own."""
        for name, parameter in held.items():
            self.register_parameter(name, parameter)
        return held

    def forward(self, x):
        change = self.held["b"] * F.linear(self.held["d"] * F.linear(x, self.down), self.up)
        return self.head(torch.tanh(self.base(x) + change))


class VectorsInDict(Vectors):
    """The same in a dictionary of parameters, as PEFT has them."""

    def keep(self, held):
        return nn.ParameterDict(held)


class Slopes(nn.Module):
    """Activations with a trained slope for each feature."""

    def __init__(self):
        super().__init__()
        self.act, self.head = nn.PReLU(3), nn.Linear(3, 3)

    def forward(self, x):
        return self.head(self.act(x))


class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        self.spectrum, self.head = nn.Parameter(torch.randn(2, 2, dtype=torch.cdouble)), nn.Linear(2, 3)

    def forward(self, x):
        return self.head(torch.fft.irfft(torch.fft.rfft(x) @ self.spectrum, n=2))


class Quantised(nn.Module):
    """A linear layer that keeps its weight in bytes, as bitsandbytes and others do."""

    def __init__(self):
        super().__init__()
        self.in_features, self.out_features = 3, 4
        self.weight = nn.Parameter(torch.randint(255, (6, 1), dtype=torch.uint8), requires_grad=False)

    def forward(self, x):
        both = torch.cat([self.weight & 15, self.weight >> 4]).view(4, 3)
        return x @ (both.to(x.dtype) / 8 - 1).t()


class ComplexLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.front, self.head = nn.Linear(3, 4, dtype=torch.complex128), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.front(x.to(torch.complex128)).abs())


class AboutOne(nn.Module):
    """Scales that are 1 + g, as of Gemma's normalisations, and a bias that is a sum of two."""

    def __init__(self):
        super().__init__()
        self.front, self.head = nn.Linear(3, 4), nn.Linear(4, 3)
        self.g, self.b, self.c = (nn.Parameter(torch.randn(4)) for _ in range(3))

    def forward(self, x):
        return self.head(torch.tanh(self.front(x) * (1 + self.g) + (self.b + self.c)))


UNUSUAL = {  # the entries left out, how many entries all weights have, and why
    "in one dimension": (Flat, {"flat": 12}, 24, "its entries, in one dimension, are used in mm"),
    "slopes": (Slopes, {"act.weight": 3}, 12, "its entries, in one dimension, are used in prelukernel"),
    "about one": (AboutOne, {"g": 4}, 28, "its entries, in one dimension, are used in mul"),
    "vectors": (Vectors, {"d": 2, "b": 4}, 12 + 12 + 6 + 8 + 6, "its entries, in one dimension, are used in mul"),
    "in a dictionary": (
        VectorsInDict, {"held.d": 2, "held.b": 4}, 44, "its entries, in one dimension, are used in mul",
    ),
    "a complex layer": (ComplexLayer, {"front.weight": 12}, 24, "its numbers are complex"),
    "complex": (Spectral, {"spectrum": 4}, 10, "its numbers are complex"),
    "quantised": (
        lambda: nn.Sequential(Quantised(), nn.Tanh(), nn.Linear(4, 3)),
        {"0.weight": 12}, 24, "its Quantised keeps it quantised, in integers",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", UNUSUAL)
def test_weights_that_are_no_matrices_of_real_numbers_are_named(kind):
    make, entries, total, why = UNUSUAL[kind]
    torch.manual_seed(0)
    model = make().double().eval()
    report = pf.measure(model, LOSS, (normal(0, 6, 3), Y))
    assert report.uncovered == pytest.approx({name: size / total for name, size in entries.items()})
    assert set(report.why_uncovered.values()) == {why}
    assert not report["trace"].exact
    assert not any("autocast" in note for note in report["trace"].notes)


class Positions(nn.Embedding):
    """An embedding with a forward of its own, so that what is computed of its weight may be a weight."""

    def forward(self, places):
        return self.weight[places]


class Other(nn.Linear):
    """A layer whose class is not torch's: whether its output is W φ + b is computed of its input."""


@pytest.mark.parametrize("kind", [nn.Linear, Other])
def test_what_the_library_computes_of_a_weight_is_no_use_of_it(kind):
    model = Net(lambda net, x: net.head(net.query(x + net.place(torch.arange(3))).mean(1)), place=Positions(6, 4),
        query=kind(4, 4), head=nn.Linear(4, 3))  # fmt: skip
    report = of(model, (FLOATS[:2], Y[:2]))  # of which the sum has as many entries as the weight
    assert report.why_uncovered == {"place.weight": "its weight is used in mean"}


def test_what_is_not_trained_does_not_count_where_others_are():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double().eval()
    model.grid = nn.Parameter(torch.rand(5, 7), requires_grad=False)
    report = pf.measure(model, LOSS, (normal(0, 6, 3), Y))
    assert report.uncovered == {}
    assert report["trace"].exact
    assert [*pf.measure(model.requires_grad_(False), LOSS, (normal(0, 6, 3), Y)).uncovered] == ["grid"]


class ConditionalLayerNorm(nn.LayerNorm):
    """A normalisation whose scale is its own, and a matrix of the features besides."""

    def __init__(self, size):
        super().__init__(size)
        self.to_scale = nn.Parameter(torch.randn(size, size))

    def forward(self, x):
        return super().forward(x) * (1 + x @ self.to_scale)


WrappedNorm, NormFreeNet = type("WrappedNorm", (Net,), {}), type("NormFreeNet", (Net,), {})


def holding(kind, name, size, forward, **layers):
    """Return a module with a parameter of this name, which ``forward`` gets as well, beside its layers."""
    module = kind(lambda net, x: forward(net, x, getattr(net, name)), **layers)
    module.register_parameter(name, nn.Parameter(torch.rand(size)))
    return module


def added(net, x, weight):
    return net.head((torch.softmax(x @ x.mT + weight, -1) @ net.values(x)).mean(1))


CALLED = {  # by a network: the weights besides its head that are layers, and those that are named
    **{name: (lambda name=name: holding(Net, name, (4, 4), lambda net, x, w: net.head(torch.tanh(x @ w).mean(1))),
              [name], []) for name in ("to_bias", "bias_projection", "projection")},
    **{name: (lambda name=name: holding(Net, name, (3, 3), added, values=nn.Linear(4, 4)), ["values"], [name])
       for name in ("relative_bias", "bias", "relative_position")},
    **{str(size): (lambda size=size: holding(Net, "bias", size, added, values=nn.Linear(4, 4)), ["values"], [])
       for size in ((3,), (1, 3), (3, 1))},
    "layer scale": (lambda: holding(NormFreeNet, "gamma", (4,), lambda net, x, w: net.head(
        (x + w * torch.tanh(net.branch(x))).mean(1)), branch=nn.Linear(4, 4)), ["branch"], ["gamma"]),
    "matrix of a normalisation": (lambda: Net(lambda net, x: net.head(net.norm(torch.tanh(x)).mean(1)),
        norm=ConditionalLayerNorm(4)), ["norm.to_scale"], []),
    "scale of a normalisation": (lambda: Net(lambda net, x: net.head(net.norm(torch.tanh(x)).mean(1)), norm=holding(
        WrappedNorm, "gamma", (4,), lambda net, x, w: w * net.norm(x), norm=nn.LayerNorm(4))), [], []),
}  # fmt: skip


@pytest.mark.parametrize("case", CALLED)
def test_what_a_parameter_or_a_class_is_called_hides_no_weight(case):
    build, layers, named = CALLED[case]
    torch.manual_seed(0)
    model = build()
    model.head = nn.Linear(4, 3)
    report = pf.measure(model.double().eval(), LOSS, (FLOATS, Y))
    assert (report.layers, [*report.uncovered]) == ((*layers, "head"), named)
    assert report["trace"].exact != bool(named)
    for name in (*layers, *named):
        parameter = f"{name}.weight" if name in ("values", "branch") else name
        trace = weight_truth.hessian(model, lambda net: LOSS(net(FLOATS), Y), parameter).trace()
        assert abs(trace) > 1e-4
        assert name in named or report[name, "trace"].value == pytest.approx(float(trace), rel=1e-8)
