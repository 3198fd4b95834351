"""Batches of graphs, whose samples have rows of different number and order: values are those of one graph a batch."""

import copy

import pytest
import torch
from torch.nn import functional as F

import pyflatness as pf
from pyflatness.errors import InputError
from support.combinations import every
from support.graphs import Atoms, Graphs, Messages, called

SIZES = (3, 7, 1, 5, 4, 6, 2)


def _graphs(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [Graphs.random(size, generator) for size in SIZES], generator


def _batches(seed=0):
    graphs, generator = _graphs(seed)
    return [Graphs.joined(graphs[:4]), Graphs.joined(graphs[4:]).shuffled(generator)]


def _network(kind=Messages, **options):
    torch.manual_seed(1)
    return kind(**options).eval()


def _check_same(found, expected):
    assert [key for *key, _ in found] == [key for *key, _ in expected]
    for layer, measure, estimate in expected:
        one = found[layer, measure]
        assert one.value == pytest.approx(estimate.value, rel=1e-12), (layer, measure)
        assert (one.exact, one.method) == (estimate.exact, estimate.method)


@every(kind=[Messages, Atoms], activation=[torch.relu, torch.tanh], normalize=[None, "std"])
def test_values_are_those_of_one_graph_a_batch(kind, activation, normalize):
    network, (graphs, _) = _network(kind, activation=activation), _graphs()
    found = pf.measure(network, "cross_entropy", _batches(), forward=called, normalize=normalize)
    expected = pf.measure(network, "cross_entropy", graphs, forward=called, normalize=normalize)
    assert found.uncovered == {}
    _check_same(found, expected)


def test_values_are_those_of_the_dense_hessian():
    network, batches = _network(), _batches()
    found = pf.measure(network, "cross_entropy", batches, forward=called, measures=["relative_flatness", "trace"])

    def risk(weights):
        sums = [
            F.cross_entropy(torch.func.functional_call(network, weights, (batch,)), batch.targets, reduction="sum")
            for batch in batches
        ]
        return sum(sums) / len(SIZES)

    for name in ("encode", "message", "update", "head"):
        weight = getattr(network, name).weight.detach()
        hessian = torch.autograd.functional.hessian(lambda w, name=name: risk({f"{name}.weight": w}), weight)
        assert found[name, "trace"].value == pytest.approx(float(torch.einsum("ijij->", hessian)), rel=1e-10)
        kappa = torch.einsum("sj,kj,sckc->", weight, weight, hessian)
        assert found[name, "relative_flatness"].value == pytest.approx(float(kappa), rel=1e-10)


def test_samples_have_values_of_their_own():
    network, (graphs, _) = _network(), _graphs()
    found, expected = (
        pf.relative_flatness(network, "cross_entropy", batches, "message", forward=called, per_sample=True)
        for batches in ([Graphs.joined(graphs)], graphs)
    )
    assert torch.allclose(found.per_sample, expected.per_sample, rtol=1e-12, atol=0)


@pytest.mark.parametrize("kind", ["fisher", "ggn"])
def test_importances_are_those_of_one_graph_a_batch(kind):
    network, (graphs, _) = _network(), _graphs()
    found, expected = (
        pf.importance(network, "cross_entropy", data, forward=called, kind=kind) for data in (_batches(), graphs)
    )
    for name, scores in expected.items():
        assert torch.allclose(found[name], scores, rtol=1e-10, atol=1e-14)


def test_a_plan_is_that_of_one_graph_a_batch():
    network, (graphs, _) = _network(), _graphs()
    found, expected = (
        pf.allocate(network, "cross_entropy", data, ["int3", "int8"], bits=5, forward=called, probes=None)
        for data in (_batches(), graphs)
    )
    assert (found.predicted, found.loss_change) == pytest.approx((expected.predicted, expected.loss_change), rel=1e-9)


def test_graphs_that_hear_of_each_other_are_refused():
    with pytest.raises(InputError, match="cannot be told apart by the 4 samples"):
        pf.measure(_network(mixing=True), "cross_entropy", _batches(), forward=called)


def test_float32_and_rows_that_nothing_arrives_at():
    network = _network(activation=torch.relu).float()

    def forward(model, graphs):
        graphs = copy.copy(graphs)
        graphs.nodes = graphs.nodes.float()
        return called(model, graphs)

    double, (graphs, _) = _network(activation=torch.relu), _graphs()
    found = pf.measure(network, "cross_entropy", _batches(), forward=forward)
    for layer, measure, estimate in pf.measure(double, "cross_entropy", graphs, forward=called):
        assert found[layer, measure].value == pytest.approx(estimate.value, rel=1e-4)


def test_a_batch_is_left_as_it_was_and_verified():
    network, batches = _network(), _batches()
    before = copy.deepcopy(batches)
    assert pf.verify(network, "cross_entropy", batches, "message", forward=called)
    for one, other in zip(batches, before, strict=True):
        assert all(torch.equal(getattr(one, name), getattr(other, name)) for name in vars(one))


@pytest.mark.parametrize(("call", "options"), [(pf.measure, {"fraction": 0.5}), (pf.importance, {"kind": "hessian"})])
def test_what_needs_some_samples_of_a_batch_says_so(call, options):
    with pytest.raises(InputError, match="a Graphs that holds its tensors in a way of its own is not cut"):
        call(_network(), "cross_entropy", _batches(), forward=called, **options)
