"""Experts of a mixture are layers, one for each slice of the parameter, in whose rows tokens of all samples are."""

import pytest
import torch
from torch import nn

import pyflatness as pf

pytest.importorskip("transformers", reason="transformers is not installed")

from support import weight_truth
from support.combinations import every, in_turn
from support.grid import normal
from support.mixtures import EXPERTS, FIRST, IMPLEMENTATIONS, KINDS, Mixture
from support.unchanged import assert_unchanged, snapshot

LOSS, X, Y = nn.CrossEntropyLoss(), normal(0, 5, 3, 4), torch.arange(5) % 3
MEASURES = ("relative_flatness", "trace")


def layers_of(kind="gated"):
    return [f"experts.{key}[{e}]" for key in (FIRST.get(kind, "gate_up_proj"), "down_proj") for e in range(EXPERTS)]


def truth(model, layer, x=X, y=Y):
    return weight_truth.relative_flatness_and_trace(model, lambda net: LOSS(net(x), y), layer)


def values(report, layer):
    return tuple(report[layer, measure].value for measure in MEASURES)


@every(together=1, kind=[*KINDS], implementation=[*IMPLEMENTATIONS])
def test_values_are_those_of_the_very_parameter(kind, implementation):
    model = Mixture(kind, implementation)
    parameters, before, outputs = [*model.parameters()], snapshot(model), model(X)
    report = pf.measure(model, LOSS, (X, Y), measures=MEASURES)
    assert_unchanged(model, before)
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert "forward" not in vars(model.experts)
    assert torch.equal(model(X), outputs)
    assert report.uncovered == {}
    assert set(report.layers) == {"router", *layers_of(kind), "head"}
    for layer in report.layers:
        assert values(report, layer) == pytest.approx(truth(model, layer), rel=1e-8), layer
        assert report[layer, "trace"].exact


def ggn_trace(model, layer):
    name, expert = weight_truth.parameter_of(model, layer)
    weight = dict(model.named_parameters())[name].detach()
    jacobian = torch.autograd.functional.jacobian(lambda w: torch.func.functional_call(model, {name: w}, (X,)), weight)
    p = model(X).detach().softmax(1)
    curvature = (torch.diag_embed(p) - p[:, :, None] * p[:, None]) / len(X)
    rows = jacobian[:, :, expert].flatten(2)
    return float(torch.einsum("nai,nab,nbi", rows, curvature, rows))


@in_turn(2, "kind", KINDS)
def test_ggn_and_probes(kind):
    model = Mixture(kind)
    exact = pf.measure(model, LOSS, (X, Y), measures=MEASURES, curvature="ggn")
    sampled = pf.measure(model, LOSS, (X, Y), measures=MEASURES, curvature="ggn", probes=64)
    for layer in layers_of(kind):
        assert exact[layer, "trace"].value == pytest.approx(ggn_trace(model, layer), rel=1e-8)
        for measure in MEASURES:
            estimate = sampled[layer, measure]
            assert 0 < abs(estimate.value - exact[layer, measure].value) < 5 * estimate.stderr


def without_tokens(model, x, layer):
    """Return which samples have no token at an expert, (n,)."""
    expert = weight_truth.parameter_of(model, layer)[1]
    return ~(model.routed(x)[1] == expert).any(1).view(len(x), -1).any(1)


@pytest.mark.parametrize("kind", ["gated", "transposed, with biases, interleaved"])
def test_each_sample_by_itself_and_batches_of_several_lengths(kind):
    """The last batch has one sample, the second is cut, some samples have no token at some experts."""
    model = Mixture(kind, chosen=1)
    batches = [(normal(number, n, length, 4), torch.arange(n) % 3) for number, (n, length) in
        enumerate([(5, 2), (4, 3), (1, 1)])]  # fmt: skip
    lonely = 0
    for options in ({}, {"memory": 1}):
        report = pf.measure(model, LOSS, batches, measures=MEASURES, per_sample=True, **options)
        for layer in layers_of(kind):
            expected = []
            for x, y in batches:
                none = without_tokens(model, x, layer)
                lonely += int(none.sum())
                single = [truth(model, layer, x[i : i + 1], y[i : i + 1]) for i in range(len(x))]
                assert all(single[i] == (0, 0) for i in none.nonzero())
                expected += single
            expected = torch.tensor(expected, dtype=torch.float64)
            for measure, column in zip(MEASURES, expected.T, strict=True):
                found = report[layer, measure]
                assert torch.allclose(found.per_sample, column, rtol=1e-8, atol=1e-13), (layer, measure)
                assert found.value == pytest.approx(float(column.mean()), rel=1e-8)
                assert (found.samples, found.exact) == (10, True)
    assert lonely > 10


def test_errors_of_sampled_values_count_samples_without_a_token():
    model, batches = Mixture(chosen=1), [(X[i : i + 1], Y[i : i + 1]) for i in range(5)]
    options = {"measures": MEASURES, "probes": 6, "curvature": "ggn"}
    whole, single = (pf.measure(model, LOSS, data, **options) for data in ((X, Y), batches))
    assert whole.layers == single.layers
    for layer in layers_of():
        for measure in MEASURES:
            one, other = whole[layer, measure], single[layer, measure]
            assert one.value == pytest.approx(other.value, rel=1e-9)
            assert one.stderr == pytest.approx(other.stderr, rel=1e-9)
            assert one.samples == other.samples == 5


def unreached(model, expert):
    model.router.bias.data[expert] = -1e3
    return model


def test_an_expert_that_no_token_reaches_is_named():
    model = unreached(Mixture(), 1)
    report = pf.measure(model, LOSS, (X, Y), measures=MEASURES)
    assert set(report.layers) == {"router", "head", *(layer for layer in layers_of() if "[1]" not in layer)}
    sizes = {name: weight.numel() for name, weight in weight_truth.weights(model).items()}
    missing = {f"experts.{key}": sizes[f"experts.{key}"] / EXPERTS for key in ("gate_up_proj", "down_proj")}
    assert report.uncovered == pytest.approx({name: size / sum(sizes.values()) for name, size in missing.items()})
    assert set(report.why_uncovered.values()) == {"no token of the data is routed to expert 1"}
    assert not report["trace"].exact
    for selector in ("experts.down_proj[1]", "*[[]1]"):
        with pytest.raises(pf.errors.InputError, match=r"experts.*\[1\]' did not run"):
            pf.measure(model, LOSS, (X, Y), layers=selector, measures=MEASURES)


def test_experts_that_were_not_asked_for_are_not_said_to_lack_tokens():
    report = pf.measure(unreached(Mixture(), 1), LOSS, (X, Y), layers="experts.down_proj[0]", measures=MEASURES)
    assert report.layers == ("experts.down_proj[0]",)
    assert report.why_uncovered == {}
    report = pf.measure(unreached(Mixture(), 1), LOSS, (X, Y), layers="experts.down_proj*", measures=MEASURES)
    assert report.why_uncovered == {"experts.down_proj": "no token of the data is routed to expert 1"}


def test_an_expert_by_name_may_run_in_a_later_batch():
    model = Mixture(chosen=1)
    layer = next(layer for layer in layers_of() if 0 < int(without_tokens(model, X, layer).sum()) < 5)
    order = without_tokens(model, X, layer).int().argsort(descending=True)
    x, y = X[order], Y[order]
    estimate = pf.relative_flatness(model, LOSS, [*zip(x.split(1), y.split(1), strict=True)], layer)
    assert estimate.value == pytest.approx(truth(model, layer)[0], rel=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_verify(kind):
    assert pf.verify(Mixture(kind, "batched_mm"), LOSS, (X, Y), layers_of(kind)[1])


def test_selected_by_name_and_glob():
    model = Mixture()
    whole = pf.measure(model, LOSS, (X, Y), measures=MEASURES)
    for selector, expected in {
        "experts.down_proj[2]": {"experts.down_proj[2]"},
        "experts.*": set(layers_of()),
        "*down_proj*": set(layers_of()[EXPERTS:]),
    }.items():
        report = pf.measure(model, LOSS, (X, Y), layers=selector, measures=MEASURES)
        assert set(report.layers) == expected
        for layer in expected:
            assert values(report, layer) == pytest.approx(values(whole, layer), rel=1e-12)
    with pytest.raises(pf.errors.InputError, match=r"experts.down_proj\[0\]"):
        pf.measure(model, LOSS, (X, Y), layers="experts.down_proj")


def test_normalized_by_the_tokens_of_an_expert():
    model = Mixture(chosen=1)
    x, index, _ = model.routed(X)
    for expert in range(EXPERTS):
        layer = f"experts.gate_up_proj[{expert}]"
        spread = x[index[:, 0] == expert].std(0, correction=0)
        weight = model.experts.gate_up_proj[expert].detach()
        hessian = weight_truth.hessian(model, lambda net: LOSS(net(X), Y), "experts.gate_up_proj")
        size, start = weight.numel(), expert * weight.numel()
        block = hessian[start : start + size, start : start + size].view(*weight.shape, *weight.shape)
        traces = torch.einsum("sjtj,j->st", block, spread**-2)
        expected = float(((weight * spread) @ (weight * spread).T * traces).sum())
        found = pf.relative_flatness(model, LOSS, (X, Y), layer, normalize="std")
        assert found.value == pytest.approx(expected, rel=1e-8)


def test_other_measures_are_those_of_plain_layers():
    """With one expert, and all tokens to it, the experts are two linear layers."""

    class Plain(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.first, self.second, self.head = nn.Linear(4, 6, bias=False), nn.Linear(3, 4, bias=False), model.head
            self.first.weight = nn.Parameter(model.experts.gate_up_proj[0].detach().clone())
            self.second.weight = nn.Parameter(model.experts.down_proj[0].detach().clone())

        def forward(self, x):
            gate, up = self.first(x.clone()).chunk(2, -1)  # what is derived in is the copy
            return self.head(torch.tanh(x + self.second(nn.functional.silu(gate) * up)).mean(1))

    model = Mixture(chosen=1)
    model.router.bias.data[0] = 1e3
    plain = Plain(model.double()).double()
    names = {"experts.gate_up_proj[0]": "first", "experts.down_proj[0]": "second"}
    one = pf.measure(model, LOSS, (X, Y), layers=[*names], measures="all")
    other = pf.measure(plain, LOSS, (X, Y), layers=[*names.values()], measures="all")
    held = other.by_measure().items()
    found = {(name, measure): by_layer[name] for measure, by_layer in held for name in by_layer if name}
    assert len(found) > 16
    for layer, name in names.items():
        for measure in one.by_measure():
            if (name, measure) in found:
                assert one[layer, measure].value == pytest.approx(found[name, measure].value, rel=1e-6), measure
    assert pf.representation(model, LOSS, (X, Y), layers=[*names])["nmls"] == pytest.approx(
        float(pf.representation(plain, LOSS, (X, Y), layers=["first", "second"])["nmls"])
    )


def test_calls_that_perturb_or_watch_the_model():
    model, layer = Mixture(chosen=1), "experts.down_proj[1]"
    robustness = pf.theory.feature_robustness(model, LOSS, (X, Y), layer, probes=3)
    assert float(robustness.rises.abs().max()) > 0
    traces = pf.block_traces(model, LOSS, (X, Y), layer)
    assert float(traces.trace()) == pytest.approx(truth(model, layer)[1], rel=1e-8)
    batches = [*zip(X.split(2), Y.split(2), strict=True)]
    assert torch.allclose(pf.block_traces(model, LOSS, batches, layer), traces)
    assert pf.measure(model, LOSS, batches, measures=["trace"])[layer, "trace"].exact
