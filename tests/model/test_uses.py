"""Weights that no layer has, measured where the model uses them in a linear operation: parameters of its own."""

import copy
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pyflatness as pf
from pyflatness import cli
from support.grid import normal
from support.parameter_truth import ParameterTruth
from support.unchanged import assert_unchanged, snapshot

LOSS, X, Y = nn.CrossEntropyLoss(), normal(0, 5, 3, 4), torch.arange(5) % 3
MEASURES = [
    "relative_flatness",
    "relative_flatness_per_feature",
    "trace",
    "adaptive_sharpness",
    "lambda_max",
    "scaled_trace",
]


class Using(nn.Module):
    """A hidden layer h, by any function of x and parameters; then an activation and a head over the mean of tokens."""

    def __init__(self, hidden, activation=torch.tanh, features=6, **shapes):
        super().__init__()
        self.hidden, self.activation = hidden, activation
        for number, (name, shape) in enumerate(shapes.items()):
            self.register_parameter(name, nn.Parameter(normal(20 + number, *shape)))
        self.head = nn.Linear(features, 3, bias=False).double()
        self.head.weight.data.copy_(normal(1, 3, features))

    def forward(self, x):
        return self.head(self.activation(self.hidden(self, x)).flatten(1, -2).mean(1))


D_M, M_D = {"w": (6, 4)}, {"w": (4, 6)}
USES = {  # by name: what is done, the parameters' shapes, whether the weight is kept as (m, d)
    "linear": (lambda net, x: F.linear(x, net.w, net.b), {**D_M, "b": (6,)}, False),
    "matmul": (lambda net, x: x @ net.w, M_D, True),
    "matmul transposed": (lambda net, x: torch.matmul(x, net.w.t()), D_M, False),
    "weight first": (lambda net, x: (net.w @ x.mT).mT, D_M, False),
    "mm": (lambda net, x: torch.mm(x.flatten(0, 1), net.w).unflatten(0, (-1, 3)), M_D, True),
    "addmm": (lambda net, x: torch.addmm(net.b, x.flatten(0, 1), net.w.T).unflatten(0, (-1, 3)), {**D_M, "b": (6,)},
        False),
    "bmm": (lambda net, x: torch.bmm(x, net.w.expand(5, -1, -1)[: len(x)]), M_D, True),
    "einsum": (lambda net, x: torch.einsum("ntm,dm->ntd", x, net.w), D_M, False),
    "einsum, weight first": (lambda net, x: torch.einsum("md,tnm->ntd", net.w, x.transpose(0, 1)), M_D, True),
    "a view and a copy": (lambda net, x: F.linear(x, net.w.transpose(0, 1).contiguous()), M_D, True),
    "convolution": (lambda net, x: F.conv1d(x.mT, net.w, net.b, padding=1, stride=2).mT, {"w": (6, 4, 2), "b": (6,)},
        False),
    "grouped": (lambda net, x: F.conv1d(x.mT, net.w, groups=2, padding="same", dilation=2).mT, {"w": (6, 2, 2)}, False),
    "transposed convolution": (lambda net, x: F.conv_transpose1d(x.mT, net.w, net.b, 2, output_padding=1).mT,
        {"w": (4, 6, 2), "b": (6,)}, True),
    "two calls": (lambda net, x: F.linear(x, net.w) + 0.5 * F.linear(x.roll(1, 1), net.w).relu(), D_M, False),
    "on its own output": (lambda net, x: torch.tanh(torch.tanh(x @ net.w) @ net.w), {"w": (4, 4)}, True),
    "in place behind": (lambda net, x: F.linear(x, net.w).mul_(0.5).relu_(), D_M, False),
}  # fmt: skip


def using(name, **options):
    hidden, shapes, transposed = USES[name]
    features = 4 if name == "on its own output" else 6
    return Using(hidden, features=features, **shapes, **options), transposed


@pytest.mark.parametrize("name", USES)
def test_values_are_those_of_the_very_parameter(name):
    model, transposed = using(name)
    parameters, before = [*model.parameters()], snapshot(model)
    report = pf.measure(model, LOSS, (X, Y), measures=MEASURES)
    assert_unchanged(model, before)
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert report.layers == ("w", "head")
    assert report.uncovered == {}
    expected = ParameterTruth(model, LOSS, X, Y, "w", transposed=transposed)
    groups = 2 if name == "grouped" else 1
    for measure, value in expected.values(expected.hessian, groups).items():
        assert report["w", measure].value == pytest.approx(value, rel=1e-8), measure
        assert report["w", measure].exact
    ggn = pf.measure(model, LOSS, (X, Y), measures=MEASURES, curvature="ggn")
    for measure, value in expected.values(expected.ggn, groups).items():
        assert ggn["w", measure].value == pytest.approx(value, rel=1e-8), measure


@pytest.mark.parametrize("name", ["linear", "matmul", "weight first", "einsum, weight first", "convolution"])
def test_in_front_of_relu_the_ggn_is_the_hessian(name):
    model, transposed = using(name, activation=torch.relu)
    expected = ParameterTruth(model, LOSS, X, Y, "w", transposed=transposed)
    estimate = pf.relative_flatness(model, LOSS, (X, Y), "w", per_sample=True)
    assert (estimate.method, estimate.exact) == ("ggn", True)
    assert estimate.value == pytest.approx(expected.values(expected.hessian)["relative_flatness"], rel=1e-10)
    for i in range(5):
        one = ParameterTruth(model, LOSS, X[i : i + 1], Y[i : i + 1], "w", transposed=transposed)
        assert estimate.per_sample[i] == pytest.approx(one.values(one.hessian)["relative_flatness"], rel=1e-8)
    traces = pf.block_traces(model, LOSS, (X, Y), "w")
    assert torch.allclose(traces, torch.einsum("sjtj->st", expected.hessian), rtol=1e-9, atol=1e-12)
    probes = pf.relative_flatness(model, LOSS, (X, Y), "w", probes=64)
    assert abs(probes.value - estimate.value) < 5 * probes.stderr
    checked = pf.verify(model, LOSS, (X, Y), "w")
    assert checked, checked


def test_as_the_head():
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(normal(3, 3, 4))

        def forward(self, x):
            return F.linear(x, self.w)

    model, data = Head(), (X[:, 0], Y)
    estimate = pf.relative_flatness(model, LOSS, data, "w")
    expected = ParameterTruth(model, LOSS, *data, "w")
    assert estimate.method == "head"
    assert estimate.value == pytest.approx(expected.values(expected.hessian)["relative_flatness"], rel=1e-12)


def test_a_parameter_that_two_modules_share_has_both_uses():
    model, _ = using("linear")
    model.other = nn.Module()
    model.other.w = model.w
    model.hidden = lambda net, x: F.linear(x, net.w) + F.linear(x.roll(1, 2), net.other.w)
    report = pf.measure(model, LOSS, (X, Y), measures=["trace"])
    expected = ParameterTruth(model, LOSS, X, Y, "w")
    assert report["w", "trace"].value == pytest.approx(expected.values(expected.hessian)["trace"], rel=1e-9)
    assert report.uncovered == {}


OTHERWISE = {
    "in another operation": (lambda net, x: x * net.w[0, :4].sum() + F.linear(x, net.w)[..., :4],
        "its weight is used in sum"),
    "by position": (lambda net, x: x + net.w[:3, :4], "its weight is used in add"),
    "a part": (lambda net, x: F.linear(x, net.w[2:]), "used in an operation on a part of it, linear"),
    "of two": (lambda net, x: F.linear(x, net.w.t() @ net.w), "its weight is used in matmul"),
    "in nothing": (lambda net, x: x, "the forward pass has no operation with it"),
    "with vectors": (lambda net, x: F.linear(x, net.w / (net.w @ x.new_ones(4)).norm())[..., :4],
        "its weight is used in matmul, div"),
    "in a row": (lambda net, x: x * (x @ net.w[0]).unsqueeze(-1), "its weight is used in matmul"),
    "beside others": (lambda net, x: F.linear(x, torch.cat([net.w, net.w]))[..., :4], "its weight is used in cat"),
    "changed in place": (lambda net, x: F.linear(x, net.w.clone().mul_(2))[..., :4], "its weight is used in mul, lin"),
    "for several of each input": (lambda net, x: (x.unsqueeze(1) @ net.w.t().expand(2, -1, -1)).flatten(1, 2)[..., :4],
        "its weight is used in matmul"),
    "inside of vmap": (lambda net, x: torch.vmap(lambda row: F.linear(row, net.w))(x)[..., :4],
        "its weight is used in linear"),
    "without samples": (lambda net, x: x * F.linear(x.new_ones(4), net.w).mean(),
        "its weight is used in linear"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERWISE)
def test_what_is_not_followed_is_named_and_left_out(name):
    hidden, why = OTHERWISE[name]
    model = Using(hidden, features=4, w=(6, 4))
    plain = Using(hidden, features=4)
    plain.w = model.w.detach().clone()  # no parameter, and so no layer
    report = pf.measure(model, LOSS, (X, Y), measures=["relative_flatness", "trace"])
    assert report.layers == ("head",)
    assert [*report.uncovered] == ["w"]
    assert re.search(why, report.why_uncovered["w"]), report.why_uncovered
    assert f"without w: {report.why_uncovered['w']}" in str(report)
    assert not report["trace"].exact
    other = pf.measure(plain, LOSS, (X, Y), measures=["relative_flatness", "trace"])
    assert report["head", "trace"] == other["head", "trace"]
    assert pf.results.Report.from_json(report.to_json()) == report
    with pytest.raises(pf.errors.InputError, match="'w'"):
        pf.relative_flatness(model, LOSS, (X, Y), "w")


@pytest.mark.parametrize("kept", [lambda w: w, lambda w: w.t()])
def test_a_use_by_way_of_a_reference_that_is_kept_elsewhere_is_noticed(kept):
    model = Using(lambda net, x: F.linear(x, net.w), w=(6, 4))
    beside = [kept(model.w)]
    model.hidden = lambda net, x: F.linear(x, net.w) + (x @ beside[0].reshape(4, 6)).sin()
    report = pf.measure(model, LOSS, (X, Y), measures=["trace"])
    assert report.layers == ("head",)
    assert report.why_uncovered == {"w": "its weight is used in what torch does not tell of"}
    assert model.w.requires_grad
    model.w.requires_grad_(False)
    pf.measure(model, LOSS, (X, Y), measures=["trace"])
    assert not model.w.requires_grad


def test_a_weight_that_is_copied_in_the_forward_pass():
    model = Using(lambda net, x: F.linear(x, net.w) + F.linear(x.sin(), copy.deepcopy(net.w)), w=(6, 4))
    twin = Using(lambda net, x: F.linear(x, net.w) + F.linear(x.sin(), net.w.detach()), w=(6, 4))
    one, other = (pf.measure(net, LOSS, (X, Y), measures=["trace"]) for net in (model, twin))
    assert one["w", "trace"].value == pytest.approx(other["w", "trace"].value, rel=1e-12)


def test_a_weight_in_another_order_in_memory_is_named():
    model = Using(lambda net, x: F.linear(x, net.w), w=(6, 4))
    model.w.data = model.w.data.t().contiguous().t()
    report = pf.measure(model, LOSS, (X, Y), measures=["trace"])
    assert "another order in memory" in report.why_uncovered["w"]
    model.w.data = model.w.data.contiguous()
    assert pf.measure(model, LOSS, (X, Y), measures=["trace"]).layers == ("w", "head")


def test_measures_of_features_are_those_of_a_module_in_its_place():
    model, _ = using("linear")
    twin = Using(lambda net, x: net.layer(x))
    twin.layer = nn.Linear(4, 6).double()
    twin.layer.weight, twin.layer.bias = model.w, model.b
    calls = {
        "feature robustness": lambda net, name: pf.theory.feature_robustness(
            net, LOSS, (X, Y), name, probes=3
        ).rises.tolist(),
        "Jacobians": lambda net, name: [float(pf.representation(net, LOSS, (X, Y))["nmls"])],
        "normalised": lambda net, name: [
            float(pf.relative_flatness(net, LOSS, (X, Y), name, normalize="std")),
        ],
    }
    for what, call in calls.items():
        assert call(model, "w") == pytest.approx(call(twin, "layer"), rel=1e-9), what


TOKENS = torch.tensor([[1, 0, 5], [2, 2, 4], [3, 1, 1], [0, 5, 4], [4, 3, 0]])


class ScaledEmbedding(nn.Embedding):
    def forward(self, tokens):
        return super().forward(tokens) * 2


def test_tables_of_embeddings():
    model = Using(lambda net, tokens: F.embedding(tokens, net.w) + net.own(tokens), features=4, w=(6, 4))
    model.own = ScaledEmbedding(6, 4, padding_idx=-1).double()
    report = pf.measure(model, LOSS, (TOKENS, Y), measures=["relative_flatness", "trace"])
    assert report.layers == ("w", "head", "own")
    assert report.uncovered == {}
    for layer, parameter in (("w", "w"), ("own", "own.weight")):
        expected = ParameterTruth(model, LOSS, TOKENS, Y, parameter, transposed=True)
        for measure in report.measures:
            value = expected.values(expected.hessian)[measure]
            assert report[layer, measure].value == pytest.approx(value, rel=1e-9), (layer, measure)
    assert pf.verify(model, LOSS, (TOKENS, Y), "w")


def test_the_command_lists_them(tmp_path, capsys):
    (tmp_path / "network.py").write_text(
        "from torch import nn\n\ndef make():\n    return nn.Sequential(nn.MultiheadAttention(4, 2), nn.Linear(4, 3))\n"
    )
    with pytest.raises(SystemExit):
        cli.main(["layers", "--model", f"{tmp_path / 'network.py'}:make"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["0.in_proj_weight", "parameter", "of", "MultiheadAttention", "12", "×", "4"] in rows
    assert ["0.out_proj", "NonDynamicallyQuantizableLinear", "4", "×", "4"] in rows
    assert ["1", "Linear", "3", "×", "4"] in rows


@pytest.mark.parametrize("inside", [True, False])
def test_a_layer_that_is_given_another_weight_is_an_error(inside):
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    data, other = (X[:, 0], Y), {"0.weight": 2 * model[0].weight.detach()}

    class Calling(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = model

        def forward(self, x):
            return torch.func.functional_call(self.body, other, (x,))

    def forward(model, batch):
        return torch.func.functional_call(model, other, (batch[0],)), batch[1]

    outer, options = (Calling(), {}) if inside else (model, {"forward": forward})
    with pytest.raises(
        pf.errors.InputError, match=r"layer '(body\.)?0' \(Linear\): its weight in the forward pass is not the"
    ):
        pf.measure(outer, LOSS, data, measures=["trace"], **options)
    other["0.weight"] = model[0].weight.detach().clone()
    report = pf.measure(outer, LOSS, data, measures=["trace"], **options)
    assert report["trace"].value == pytest.approx(pf.measure(model, LOSS, data, measures=["trace"])["trace"].value)
