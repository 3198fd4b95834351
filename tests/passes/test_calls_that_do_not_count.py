"""Calls of layers on empty tensors are none, and those inside of ``torch.func.vmap`` leave their layer out."""

import pytest
import torch
from torch import nn

import pyflatness as pf
from support import truth
from support.grid import Net, normal

LOSS, X, Y = nn.CrossEntropyLoss(), normal(0, 6, 3), torch.arange(6) % 3
MEASURES = ("relative_flatness", "trace")


def routed(net, x):
    """Each row by the expert with the largest score: of a batch of one sample the others are given no row."""
    scores = net.router(x).softmax(1)
    best, outputs = scores.argmax(1), x.new_zeros(len(x), 4)
    for number, expert in enumerate(net.experts):
        rows = (best == number).nonzero()[:, 0]
        outputs = outputs.index_add(0, rows, scores[rows, number, None] * torch.tanh(expert(x[rows])))
    return net.head(outputs)


def mixture():
    experts = nn.ModuleList(nn.Linear(3, 4) for _ in range(4))
    net = filled(Net(routed, router=nn.Linear(3, 4), experts=experts, head=nn.Linear(4, 3)))
    net.router.bias.data[3] = -10  # this one has no rows at all
    return net


def filled(net):
    for number, parameter in enumerate(net.double().eval().parameters()):
        parameter.data.copy_(normal(20 + number, *parameter.shape))
    return net


def expected(net, name):
    matrix, weight = truth.layer_hessian(net, LOSS, X, Y, name), truth.weight_of(net, name)
    return truth.relative_flatness_of(matrix, weight), truth.trace_of(matrix)


def check(report, net, names):
    assert report.layers == names
    for name in names:
        values = [report[name, measure] for measure in MEASURES]
        assert [value.value for value in values] == pytest.approx(expected(net, name), rel=1e-9), name
        assert all(value.exact for value in values)


ONES = [(X[i : i + 1], Y[i : i + 1]) for i in range(len(X))]


@pytest.mark.parametrize("data", [ONES, ONES[::-1], ONES[3:] + ONES[:3]], ids=["ones", "reversed", "turned"])
def test_experts_that_are_given_no_rows(data):
    net = mixture()
    assert net.router(X).argmax(1).unique().tolist() == [0, 1, 2]
    names = ("router", "experts.0", "experts.1", "experts.2", "head")
    report = pf.measure(net, LOSS, data, measures=MEASURES)
    check(report, net, names)
    assert [*report.uncovered] == ["experts.3.weight"]
    named = pf.measure(net, LOSS, data, measures=MEASURES, layers=[*names])
    check(named, net, names)
    for name in names:
        assert pf.relative_flatness(net, LOSS, data, name).value == pytest.approx(expected(net, name)[0], rel=1e-9)
    with pytest.raises(pf.errors.InputError, match=r"layer: 'experts\.3' did not run .*calls on empty tensors"):
        pf.measure(net, LOSS, data, layers="experts.3")


@pytest.mark.parametrize("options", [{"probes": 2}, {"curvature": "ggn"}, {"normalize": "std"}], ids=str)
def test_experts_under_options(options):
    net = mixture()
    values = [pf.measure(net, LOSS, data, **options)["head", "trace"].value for data in (ONES, ONES[::-1])]
    assert all(value > 0 for value in values)


def test_a_slice_without_entries():
    net = filled(Net(lambda net, x: net.head(torch.relu(net.a(x)) + net.a(x[:, None][:, :0]).sum(1)),
        a=nn.Linear(3, 4), head=nn.Linear(4, 3)))  # fmt: skip
    check(pf.measure(net, LOSS, (X, Y), measures=MEASURES), net, ("a", "head"))


def mapped(net, x):
    return net.head(torch.func.vmap(lambda row: torch.tanh(net.inside(row)))(torch.tanh(net.front(x))))


def test_a_layer_inside_of_vmap_is_left_out():
    net = filled(Net(mapped, front=nn.Linear(3, 4), inside=nn.Linear(4, 4), head=nn.Linear(4, 3)))
    for data in ((X, Y), ONES):
        report = pf.measure(net, LOSS, data, measures=MEASURES)
        check(report, net, ("front", "head"))
        assert [*report.uncovered] == ["inside.weight"]
        assert "inside.weight: it is called inside of torch.func.vmap" in " ".join(str(report).split())
        assert not report["trace"].exact
    for layers in ("inside", ["inside", "head"]):
        with pytest.raises(pf.errors.InputError, match=r"layer 'inside': it is called inside of torch\.func\.vmap"):
            pf.measure(net, LOSS, (X, Y), layers=layers)
    with pytest.raises(pf.errors.InputError, match=r"layer 'inside': it is called inside of torch\.func\.vmap"):
        pf.relative_flatness(net, LOSS, (X, Y), "inside")


def test_all_layers_inside_of_vmap():
    net = filled(Net(lambda net, x: torch.func.vmap(net.only)(x), only=nn.Linear(3, 3)))
    with pytest.raises(pf.errors.InputError, match=r"layer 'only': it is called inside of torch\.func\.vmap"):
        pf.measure(net, LOSS, (X, Y))


def test_a_layer_that_later_batches_call_inside_of_vmap():
    net = filled(Net(lambda net, x: net.head(torch.tanh(torch.func.vmap(net.a)(x) if (x > 1.2).any() else net.a(x))),
        a=nn.Linear(3, 4), head=nn.Linear(4, 3)))  # fmt: skip
    order = [i for i in range(len(X)) if not (X[i] > 1.2).any()] + [i for i in range(len(X)) if (X[i] > 1.2).any()]
    assert (X > 1.2).any()
    with pytest.raises(pf.errors.InputError, match=r"layer 'a': it is called inside of torch\.func\.vmap"):
        pf.measure(net, LOSS, [(X[i : i + 1], Y[i : i + 1]) for i in order], layers="a")
