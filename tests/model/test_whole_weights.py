"""A weight in all of its uses, by the parameter's name: against nested autograd in the parameter that modules share."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import pyflatness as pf
from support import known_stderr, truth
from support.combinations import every
from support.grid import Net, normal

LOSS = nn.CrossEntropyLoss()
WORDS = torch.tensor([[1, 4, 1, 0], [2, 2, 2, 5], [0, 6, 3, 4]])
SUMS = ("relative_flatness", "trace", "adaptive_sharpness", "neuron_flatness", "neuron_flatness_rows")
X, Y = normal(0, 4, 4), torch.arange(4) % 4


def language_model(between=torch.tanh, **options):
    net = Net(lambda net, x: net.head(between(net.embed(x)).cumsum(1)).transpose(1, 2),
        embed=nn.Embedding(7, 3, **options), head=nn.Linear(3, 7, bias=False))  # fmt: skip
    net.head.weight = net.embed.weight
    return net


def pair(forward, make, *inputs):
    """Two modules that share a weight, and a head."""
    net = Net(forward, a=make(), b=make(), head=nn.Linear(*inputs))
    net.b.weight = net.a.weight
    return net


def side_by_side(net, x):
    return net.head(torch.relu(net.a(x)) + torch.relu(net.b(x.flip(1))))


def images(net, x):
    return net.head(torch.relu(net.a(x).mean(2) + net.b(x.flip(2))[..., 0]))


def one(forward):
    return lambda: Net(forward, a=nn.Linear(4, 4), head=nn.Linear(4, 4))


SHARED = {  # the network, its inputs and targets, the name, whether columns and rows are exchanged, f linear in it
    "embedding and head, of the head": (language_model, WORDS, WORDS.roll(1, 1), "head.weight", False),
    "embedding and head, of the embedding": (language_model, WORDS, WORDS.roll(1, 1), "embed.weight", False),
    "with padding": (
        lambda: language_model(padding_idx=0), WORDS, WORDS.roll(1, 1), "embed.weight", False),
    "two linear modules": (lambda: pair(side_by_side, lambda: nn.Linear(4, 4), 4, 4), X, Y, "a.weight", True),
    "two linear modules, of the other": (
        lambda: pair(side_by_side, lambda: nn.Linear(4, 4), 4, 4), X, Y, "b.weight", True),
    "one on the other": (one(lambda net, x: net.head(torch.relu(net.a(torch.relu(net.a(x)))))), X, Y, "a.weight",
        False),
    "two convolutions": (lambda: pair(images, lambda: nn.Conv1d(2, 4, 2), 4, 4), normal(1, 4, 2, 3), Y, "a.weight",
        True),
    "two convolutions in groups": (lambda: pair(images, lambda: nn.Conv1d(2, 4, 2, groups=2), 4, 4),
        normal(1, 4, 2, 3), Y, "a.weight", True),
    "a module and F.linear": (one(lambda net, x: net.head(torch.relu(net.a(x)) + F.linear(x, net.a.weight))), X, Y,
        "a.weight", True),
    "a module and the transposed product": (
        one(lambda net, x: net.head(torch.relu(net.a(x)) + torch.relu(x @ net.a.weight))), X, Y, "a.weight", True),
    "in two factors": (one(lambda net, x: net.head(net.a(x) * (x @ net.a.weight))), X, Y, "a.weight", False),
    "one module alone": (one(lambda net, x: net.head(torch.relu(net.a(x)))), X, Y, "a.weight", True),
    "the head alone": (one(lambda net, x: net.head(torch.relu(net.a(x)))), X, Y, "head.weight", True),
}  # fmt: skip


def built(name):
    make, x, y, layer, linear = SHARED[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = make()
    return model.double().eval(), x, y, layer, linear


def with_weight(model, x, layer):
    """The outputs as a function of the parameter, wherever it is; the parameter; what makes matrices of it."""
    holder = model.get_submodule(layer.rpartition(".")[0])
    weight = holder.weight
    names = [key for key, value in model.named_parameters(remove_duplicate=False) if value is weight]

    def outputs(matrix):
        values = truth.as_weight(holder, matrix)
        return torch.func.functional_call(model, dict.fromkeys(names, values), (x,))

    return outputs, truth.as_matrix(holder, weight.detach()).clone(), getattr(holder, "groups", 1)


def hessian(name):
    model, x, y, layer, _ = built(name)
    outputs, matrix, groups = with_weight(model, x, layer)
    return truth.hessian(lambda w: LOSS(outputs(w), y), matrix), matrix, groups


def ggn(name):
    model, x, y, layer, _ = built(name)
    outputs, matrix, groups = with_weight(model, x, layer)
    f = outputs(matrix).detach()
    jacobian = torch.autograd.functional.jacobian(outputs, matrix).view(f.numel(), *matrix.shape)
    curvature = truth.hessian(lambda z: LOSS(z, y), f).view(f.numel(), f.numel())
    return torch.einsum("asj,ab,btk->sjtk", jacobian, curvature, jacobian), matrix, groups


def expected_of(matrix, weight, groups, kernel):
    return {
        "relative_flatness": truth.relative_flatness_of(matrix, weight, groups),
        "trace": truth.trace_of(matrix),
        "adaptive_sharpness": truth.adaptive_sharpness_of(matrix, weight),
        "neuron_flatness": float(truth.columns_of(matrix, weight, groups, kernel).sum()),
        "neuron_flatness_rows": float(truth.rows_of(matrix, weight).sum()),
    }


def approx(value, rel=1e-8):
    return pytest.approx(value, rel=rel, abs=1e-11)


@every(together=1, name=[*SHARED], curvature=["auto", "ggn"])
def test_sums(name, curvature):
    model, x, y, layer, linear = built(name)
    matrix, weight, groups = ggn(name) if curvature == "ggn" else hessian(name)
    kernel = 2 if "convolution" in name else 1
    expected = expected_of(matrix, weight, groups, kernel)
    for size in (len(x), 2):
        data = list(zip(x.split(size), y.split(size), strict=True))
        report = pf.measure(model, LOSS, data, layers=layer, measures=SUMS, curvature=curvature, per_sample=True)
        assert report.layers == (layer,)
        for measure, value in expected.items():
            estimate = report[layer, measure]
            assert estimate.value == approx(value), measure
            assert float(estimate.per_sample.mean()) == approx(value)
            assert estimate.exact == (curvature == "auto" or linear)
            assert estimate.method == ("ggn" if curvature == "ggn" or linear else "hessian")
            assert estimate.notes == ()


@pytest.mark.parametrize("name", SHARED)
def test_eigenvalues_and_block_traces(name):
    model, x, y, layer, _ = built(name)
    for curvature, (matrix, weight, groups) in (("auto", hessian(name)), ("ggn", ggn(name))):
        options = {"layers": layer, "curvature": curvature, "measures": ["lambda_max", "relative_flatness_max"]}
        report = pf.measure(model, LOSS, (x, y), **options)
        top = torch.linalg.eigvalsh(matrix.flatten(2).flatten(0, 1))[-1]
        rows = torch.linalg.eigvalsh(torch.einsum("sjsk->sjk", matrix))[:, -1]
        assert report[layer, "lambda_max"].value == approx(float(top), 1e-6)
        largest = float((weight.square().sum(1) * rows).sum())
        assert report[layer, "relative_flatness_max"].value == approx(largest, 1e-6)
        found = pf.block_traces(model, LOSS, (x, y), layer, curvature=curvature)
        torch.testing.assert_close(found, truth.block_traces(matrix, groups), rtol=1e-8, atol=1e-11)


@every(together=1, name=[*SHARED], probes=[60, "adaptive"])
def test_sampled(name, probes):
    model, x, y, layer, _ = built(name)
    measures = SUMS[:2] if probes == "adaptive" else SUMS[:3]
    curvature = "auto" if probes == 60 else "ggn"
    expected = expected_of(*(hessian(name) if curvature == "auto" else ggn(name)), 1)
    data = [(x, y)] * (20 if probes == "adaptive" else 1)
    report = pf.measure(model, LOSS, data, layers=layer, measures=measures, probes=probes, seed=1, curvature=curvature)
    for measure in measures:
        estimate = report[layer, measure]
        off = 4 * known_stderr(estimate) + 1e-9 * abs(expected[measure])
        assert abs(estimate.value - expected[measure]) <= off, measure


@pytest.mark.parametrize("name", SHARED)
def test_verified_and_left_as_it_was(name):
    model, x, y, layer, _ = built(name)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    before = {key: value.clone() for key, value in parameters.items()}
    assert pf.verify(model, LOSS, (x, y), layer)
    pf.measure(model, LOSS, (x, y), layers=layer, measures="trace")
    now = dict(model.named_parameters(remove_duplicate=False))
    assert all(now[key] is value and torch.equal(value, before[key]) for key, value in parameters.items())
    assert all(value.grad is None and value.requires_grad for value in now.values())


def test_the_sum_over_uses_is_another_value_and_both_are_there_at_once():
    model, x, y, *_ = built("embedding and head, of the head")
    report = pf.measure(model, LOSS, (x, y), layers=["head", "embed", "head.weight"], measures="trace")
    assert report.layers == ("embed", "head", "head.weight")
    alone = pf.measure(model, LOSS, (x, y), measures="trace")
    for name in alone.layers:
        assert report[name, "trace"].value == pytest.approx(alone[name, "trace"].value)
    assert report["head.weight", "trace"].value == approx(truth.trace_of(hessian("embedding and head, of the head")[0]))
    assert report.uncovered == {}
    assert alone.layers == ("embed", "head")


def test_all_names_of_a_weight_are_one_layer_by_the_first_that_is_given():
    model, x, y, *_ = built("embedding and head, of the head")
    expected = approx(truth.trace_of(hessian("embedding and head, of the head")[0]))
    for names in (["head.weight", "embed.weight"], ["embed.weight", "head.weight", "embed.weight"]):
        report = pf.measure(model, LOSS, (x, y), layers=names, measures="trace")
        assert report.layers == (names[0],)
        assert report[names[0], "trace"].value == expected


def test_of_transformers_the_embedding_and_the_head():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    sizes = {"n_embd": 6, "n_layer": 1, "n_head": 2, "n_positions": 8}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=9, **sizes)).double().eval()
    ids, name = torch.randint(9, (2, 4)), "lm_head.weight"
    assert model.lm_head.weight is model.transformer.wte.weight

    def risk(weight):
        changed = {name: weight, "transformer.wte.weight": weight}
        return torch.func.functional_call(model, changed, (), {"input_ids": ids, "labels": ids}).loss

    with sdpa_kernel(SDPBackend.MATH):
        matrix = truth.hessian(risk, model.lm_head.weight.detach())
    report = pf.measure(model, data=[{"input_ids": ids}], layers=name, measures=["relative_flatness", "trace"])
    expected = truth.relative_flatness_of(matrix, model.lm_head.weight.detach()), truth.trace_of(matrix)
    assert [report[name, measure].value for measure in report.measures] == pytest.approx(expected)
    assert report[name, "trace"].exact
    assert "lm_head.weight" not in report.uncovered
    assert "transformer.wte.weight" not in report.uncovered


OTHERWISE = {
    "cat": lambda net, x: net.head(torch.relu(net.a(x)) @ torch.cat([net.a.weight, net.a.weight])[:4]),
    "mul": lambda net, x: net.head(torch.relu(net.a(x)) + (x * net.a.weight[0])),
    "diagonal": lambda net, x: net.head(torch.relu(net.a(x)) * net.a.weight.diagonal()),
}


@pytest.mark.parametrize("function", OTHERWISE)
def test_a_use_that_is_not_linear_is_refused_by_its_name(function):
    model = one(OTHERWISE[function])().double()
    with pytest.raises(pf.errors.InputError, match=rf"layer 'a.weight': its weight is used in .*{function}"):
        pf.measure(model, LOSS, (X, Y), layers="a.weight", measures="trace")
    assert type(model.a.weight) is nn.Parameter
    assert model.a.weight.requires_grad


TWO_KINDS = {  # of a parameter that is no module's weight; whether its matrix is the transposed parameter
    "there and back": (lambda net, x: F.linear(F.linear(x, net.w), net.w.t()), (6, 4), False),
    "linear and matmul": (lambda net, x: F.linear(x, net.w) + x @ net.w, (4, 4), False),
    "matmul and linear": (lambda net, x: x @ net.w + F.linear(x, net.w), (4, 4), True),
    "looked up and multiplied": (
        lambda net, x: F.linear(F.embedding((x > 0).sum(2), net.w), net.w)[..., :4], (6, 4), True),
}  # fmt: skip


class OfTwoKinds(nn.Module):
    def __init__(self, hidden, shape):
        super().__init__()
        self.hidden, self.w = hidden, nn.Parameter(normal(5, *shape))
        self.head = nn.Linear(4, 3).double()

    def forward(self, x):
        return self.head(torch.tanh(self.hidden(self, x)).mean(1))


@pytest.mark.parametrize("name", TWO_KINDS)
def test_a_parameter_in_operations_of_two_kinds_is_one_layer_where_it_is_named(name):
    hidden, shape, transposed = TWO_KINDS[name]
    model, x, y = OfTwoKinds(hidden, shape), normal(6, 3, 2, 4), torch.arange(3)
    report = pf.measure(model, LOSS, (x, y), measures=SUMS)
    assert report.layers == ("head",)
    assert "layers='w' takes all of its linear uses together" in report.why_uncovered["w"]
    named = pf.measure(model, LOSS, [(x[:1], y[:1]), (x[1:], y[1:])], measures=SUMS, layers=["w", "head"])
    matrix = truth.hessian(lambda w: LOSS(torch.func.functional_call(model, {"w": w}, (x,)), y), model.w.detach())
    weight = model.w.detach()
    if transposed:
        matrix, weight = matrix.permute(1, 0, 3, 2), weight.t()
    for measure, value in expected_of(matrix, weight, 1, 1).items():
        assert named["w", measure].value == approx(value), measure
        assert named["head", measure].value == approx(report["head", measure].value)
    assert named.uncovered == {}
    assert pf.verify(model, LOSS, (x, y), "w")


def test_what_has_no_meaning_for_all_uses_together():
    model, x, y, layer, _ = built("embedding and head, of the head")
    with pytest.raises(
        pf.errors.InputError, match="is a weight in all of its uses, whose inputs have no deviations in common"
    ):
        pf.measure(model, LOSS, (x, y), layers=layer, measures="relative_flatness_std")
    with pytest.raises(pf.errors.InputError, match=r"'head\.weight' has an input with a derivative"):
        pf.measure(model, LOSS, (x, y), layers=layer, measures="nmls")
    with pytest.raises(pf.errors.InputError, match="is a parameter and no layer; the layer that it belongs to is 'a'"):
        pf.measure(one(side_by_side)(), LOSS, (X, Y), layers="a.bias")
