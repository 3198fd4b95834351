"""Hessian values of several layers from products that they share."""

import itertools
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pyflatness as pf
from pyflatness.contractions.factor import gram_factor
from pyflatness.losses.custom import CustomLoss
from pyflatness.numerics.signs import Signs
from pyflatness.passes import cotangents, layer_form
from support import known_stderr, truth
from support.combinations import in_soak
from support.grid import batches
from support.many_samples import seeded
from support.networks import CASES

LOSS = nn.CrossEntropyLoss()


def smooth(*widths):
    """A network of layers with tanh between them, of float64."""
    parts = [part for a, b in itertools.pairwise(widths) for part in (nn.Linear(a, b), nn.Tanh())]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(*parts[:-1], nn.Tanh()).double()


# --- mean and variance, by enumeration --------------------------------------------------------------------------------


def send_all_patterns(monkeypatch):
    """Let a draw's signs be the bits of its number, of one layer behind another's; those of columns are +1."""
    places: dict[int, Tensor] = {}

    def signs(self, stream, samples, *shape):
        count, first = torch.Size(shape).numel(), sum(map(len, places.values()))
        if stream == cotangents.STREAM:
            return torch.ones(len(self.draws), len(samples), *shape, dtype=torch.int8)
        own = places.setdefault(stream, torch.arange(first, first + count))
        bits = (torch.tensor(self.draws).unsqueeze(1) >> own).bitwise_and(1)
        return (2 * bits - 1).view(-1, 1, *shape).expand(-1, len(samples), *shape)

    monkeypatch.setattr(Signs, "__call__", signs)


def residual_blocks(model, x, y, by_factor):
    """Each layer's directions by the rest of one sample's Hessian in the outputs of all layers, less the GGN.

    Directions are unit vectors times |φ|, or the rows of the layer's Gram factor times that.
    """
    linear, inputs, h = [part for part in model if isinstance(part, nn.Linear)], [], x
    for part in model:
        inputs += [h.detach()] if isinstance(part, nn.Linear) else []
        h = part(h)

    def outputs(added):
        h, rest = x, iter(added.split([layer.out_features for layer in linear]))
        for part in model:
            h = part(h) + (next(rest) if isinstance(part, nn.Linear) else 0)
        return h

    nothing = torch.zeros(sum(layer.out_features for layer in linear), dtype=torch.float64)
    whole = torch.autograd.functional.hessian(lambda added: F.cross_entropy(outputs(added), y), nothing)
    jacobian, p = torch.autograd.functional.jacobian(outputs, nothing), torch.softmax(outputs(nothing).detach(), dim=0)
    roots = [
        phi.norm() * (gram_factor(layer.weight.detach()[None])[0] if by_factor else torch.eye(layer.out_features))
        for layer, phi in zip(linear, inputs, strict=True)
    ]
    root, sizes = torch.block_diag(*roots).double(), [len(rows) for rows in roots]
    rest = root @ (whole - jacobian.T @ (p.diag() - p.outer(p)) @ jacobian) @ root.T
    return [part.split(sizes, dim=1) for part in rest.split(sizes)]


@pytest.mark.parametrize("measure", ["trace", "relative_flatness"])
def test_mean_and_variance_over_all_signs(monkeypatch, measure):
    """The mean is the Hessian's value by nested autograd, and the variance that of the formula, in every layer.

    Two classes have one column, so that the GGN's part is exact.
    """
    model, x, y = smooth(2, 2, 3, 2), torch.randn(2, generator=seeded(1)).double(), torch.tensor(1)
    blocks = residual_blocks(model, x, y, by_factor=measure == "relative_flatness")
    bits = sum(len(row[place]) for place, row in enumerate(blocks))
    send_all_patterns(monkeypatch)
    report = pf.measure(model, LOSS, (x[None], y[None]), measures=measure, probes=2**bits)
    for place, (layer, row) in enumerate(zip(("0", "2", "4"), blocks, strict=True)):
        matrix, weight = truth.layer_hessian(model, LOSS, x[None], y[None], layer), truth.weight_of(model, layer)
        expected = truth.trace_of(matrix) if measure == "trace" else truth.relative_flatness_of(matrix, weight)
        assert report[layer, measure].value == pytest.approx(expected, rel=1e-10, abs=1e-14)
        own = 2 * (row[place].square().sum() - row[place].diagonal().square().sum())
        others = sum(block.square().sum() for number, block in enumerate(row) if number != place)
        assert report[layer, measure].stderr ** 2 == pytest.approx(float(own + others) / (2**bits - 1), rel=1e-9)


# --- layers together --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["attention", "checkpointed", "recurrent", "siamese, product", "custom loss, Tanh"])
def test_alone_and_together(name):
    """Every layer's value agrees with its own alone and with the truth, and the network's with their sum."""
    case, measures = CASES[name], ["relative_flatness", "trace", "adaptive_sharpness"]
    options = {"measures": measures, "probes": 16}
    data = case.inputs, case.targets
    together = pf.measure(case.build(), case.loss, data, seed=1, **options)
    exact = pf.measure(case.build(), case.loss, data, measures=measures)
    for layer in sorted(set(case.layers) - case.linear)[:2]:
        alone = pf.measure(case.build(), case.loss, data, layers=layer, seed=2, **options)
        for key in itertools.product([layer], measures):
            one, other = alone[key], together[key]
            assert (one.method, one.exact, other.method, other.exact) == ("hessian-sampled", False) * 2
            assert abs(one.value - other.value) <= 4 * math.hypot(known_stderr(one), known_stderr(other))
            assert abs(other.value - exact[key].value) <= 4 * known_stderr(other)
    for measure in measures:
        assert abs(together[measure].value - exact[measure].value) <= 4 * known_stderr(together[measure])


@pytest.mark.parametrize("seeds", [30, *in_soak(100)])
def test_the_network_s_error_has_what_layers_share(seeds):
    """What one layer adds to another's value is in both, so that their errors add up, and are seen in the sum's."""
    model, x = smooth(3, 4, 5, 4), torch.randn(20, 3, generator=seeded(1)).double()
    data = x, torch.arange(20) % 4
    exact = pf.measure(model, LOSS, data, measures="trace")["trace"].value
    found = [pf.measure(model, LOSS, data, measures="trace", probes=4, seed=seed)["trace"] for seed in range(seeds)]
    values = torch.tensor([one.value for one in found], dtype=torch.float64)
    assert sum(one.stderr**2 for one in found) / seeds == pytest.approx(float(values.var()), rel=4 / seeds**0.5)
    assert float(values.mean()) == pytest.approx(exact, abs=4 / seeds**0.5 * float(values.std()))


def test_a_seed_is_one_value_in_any_cut():
    case = CASES["attention"]
    reports = [
        pf.measure(case.build(), case.loss, batches(case, size), probes=3, seed=7, memory=memory, per_sample=True)
        for size, memory in ((case.samples, None), (1, None), (case.samples, 1))
    ]
    for layer, measure in itertools.product(["q", "proj", "up", ""], ["relative_flatness", "trace"]):
        whole, *others = (report[layer, measure] for report in reports)
        assert float(whole.per_sample.mean()) == pytest.approx(whole.value, rel=1e-12)
        for other in others:
            assert (other.value, other.stderr) == pytest.approx((whole.value, whole.stderr), rel=1e-6)
            torch.testing.assert_close(other.per_sample, whole.per_sample, rtol=1e-6, atol=1e-9)


def test_products_are_shared(hessian_products):
    """A probe takes a product for each quantity of all layers, and not one for each layer."""
    model, x = smooth(3, 4, 5, 4), torch.randn(6, 3, generator=seeded(1)).double()
    pf.measure(model, LOSS, (x, torch.arange(6) % 4), probes=5)
    assert sum(directions for directions, _ in hessian_products) == 2 * 5


def test_a_callable_s_hessian_in_all_outputs_is_not_made(monkeypatch):
    """It would be of tokens times words; products of the whole Hessian take its place."""
    monkeypatch.setattr(CustomLoss, "factors", None)
    case, options = CASES["custom loss, Tanh"], {"layers": ["0", "2"], "measures": "trace"}
    exact = pf.measure(case.build(), case.loss, batches(case), **options)
    found = pf.measure(case.build(), case.loss, batches(case), probes=99, **options)
    for key in [("0", "trace"), ("2", "trace"), "trace"]:
        assert abs(found[key].value - exact[key].value) <= 4 * found[key].stderr


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
def test_a_ggn_value_of_one_column_is_the_hessian_s_where_the_model_is_linear(activation):
    """Two classes have one column, of which probes make no other value."""
    model = nn.Sequential(nn.Linear(3, 4), activation(), nn.Linear(4, 2)).double()
    data = torch.randn(6, 3, generator=seeded(1)).double(), torch.arange(6) % 2
    for options in ({"probes": 3}, {"rtol": 0.1}, {}):
        report = pf.measure(model, LOSS, data, curvature="ggn", **options)
        assert [report[key].stderr for key in (("0", "trace"), ("2", "trace"), "trace")] == [None] * 3
        linear = activation is nn.ReLU
        assert [report[key].exact for key in (("0", "trace"), ("2", "trace"), "trace")] == [linear, True, linear]


# --- the loss's factor is taken once ----------------------------------------------------------------------------------


def test_the_factor_of_a_weight_is_made_once(monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 4), nn.Tanh(), nn.Linear(4, 3)).double().eval()
    x, y = torch.randn(12, 9).double(), torch.arange(12) % 3
    made = []

    def counted(weight):
        made.append(weight)
        return gram_factor(weight)

    gram_factor = layer_form.gram_factor
    monkeypatch.setattr(layer_form, "gram_factor", counted)
    batches = list(zip(x.split(3), y.split(3), strict=True))
    value = pf.relative_flatness(model, nn.CrossEntropyLoss(), batches, "0")
    assert value.method == "hessian"
    assert len(made) == 1
    whole = pf.relative_flatness(model, nn.CrossEntropyLoss(), (x, y), "0")
    assert abs(value.value - whole.value) <= 1e-12 * abs(whole.value)
