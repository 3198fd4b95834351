"""Mixtures of experts that are computed in other ways: their weights are right, or named with a reason."""

import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import pyflatness as pf

pytest.importorskip("transformers", reason="transformers is not installed")

from support import weight_truth
from support.architectures import VOCABULARY, Architecture, hf, text
from support.grid import normal
from support.mixtures import EXPERTS, Mixture

LOSS, X, Y = nn.CrossEntropyLoss(), normal(0, 5, 3, 4), torch.arange(5) % 3
MEASURES = ("relative_flatness", "trace")
LAYERS = [f"experts.{key}[{e}]" for key in ("gate_up_proj", "down_proj") for e in range(EXPERTS)]


def truth(model, layer, x=X, y=Y):
    return weight_truth.relative_flatness_and_trace(model, lambda net: LOSS(net(x), y), layer)


# --- transformers' models ---------------------------------------------------------------------------------------------

_SIZES = {"vocab_size": VOCABULARY, "hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 2,
    "num_key_value_heads": 1, "intermediate_size": 3, "moe_intermediate_size": 3, "max_position_embeddings": 8,
    "pad_token_id": 0, "num_experts_per_tok": 2, "eos_token_id": None}  # fmt: skip


def qwen(implementation="eager"):
    return hf.Qwen3MoeForCausalLM(
        hf.Qwen3MoeConfig(**_SIZES, num_experts=3, decoder_sparse_step=1, experts_implementation=implementation)
    )


def gpt_oss(implementation="eager"):
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    return hf.GptOssForCausalLM(
        hf.GptOssConfig(**_SIZES, num_local_experts=3, rope_parameters=rope, experts_implementation=implementation)
    )


@pytest.mark.parametrize("build", [qwen, gpt_oss])
def test_models_of_transformers(build):
    architecture = Architecture(build.__name__, build, text, pf.causal_lm)
    model = architecture.model()
    report = pf.measure(model, LOSS, [text()], measures=MEASURES, forward=pf.causal_lm, layers="*experts*")
    assert len(report.layers) == 6
    for layer in report.layers:
        expected = weight_truth.relative_flatness_and_trace(model, architecture.risk, layer)
        found = tuple(report[layer, measure].value for measure in MEASURES)
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-8), layer  # they route in float32
    every = pf.measure(model, LOSS, [text()], measures=["trace"], forward=pf.causal_lm, curvature="ggn", probes=2)
    assert not any("experts" in name for name in every.uncovered)


def test_grouped_products():
    """They have no float64, and no second derivatives."""
    sizes = {**_SIZES, "intermediate_size": 4}  # rows of 16 bytes
    config = hf.MixtralConfig(**sizes, num_local_experts=3, experts_implementation="eager")
    model = Architecture("", lambda: hf.MixtralForCausalLM(config), text, pf.causal_lm).model().float()
    reports = []
    for implementation in ("grouped_mm", "eager"):
        model.set_experts_implementation(implementation)
        batch = text()
        reports.append(pf.measure(model, LOSS, [batch], measures=["trace"], layers="*experts*"))
        assert pf.verify(model, LOSS, [batch], "model.layers.0.mlp.experts.gate_up_proj[1]")
        assert model.config._experts_implementation == implementation
    assert len(reports[0].layers) == 6
    for layer in reports[0].layers:
        assert reports[0][layer, "trace"].value == pytest.approx(reports[1][layer, "trace"].value, rel=1e-4)


# --- experts of transformers in other places --------------------------------------------------------------------------


def test_under_activation_checkpointing():
    class Checkpointed(Mixture):
        def forward(self, x):
            mixed = checkpoint(lambda x: self.experts(*self.routed(x)).view(x.shape), x, use_reentrant=False)
            return self.head(torch.tanh(x + mixed).mean(1))

    for measures in (MEASURES, ["lambda_max"]):
        one, other = (pf.measure(net, LOSS, (X, Y), measures=measures) for net in (Mixture(), Checkpointed()))
        for layer in LAYERS:
            for measure in measures:
                assert one[layer, measure].value == pytest.approx(other[layer, measure].value, rel=1e-9)


def test_called_twice():
    class Twice(Mixture):
        def forward(self, x):
            once = torch.tanh(self.experts(*self.routed(x)).view(x.shape))
            return self.head(torch.tanh(once + self.experts(*self.routed(x.flip(1) + once)).view(x.shape)).mean(1))

    model = Twice()
    report = pf.measure(model, LOSS, (X, Y), measures=MEASURES)
    for layer in LAYERS:
        found = tuple(report[layer, measure].value for measure in MEASURES)
        assert found == pytest.approx(truth(model, layer), rel=1e-8), layer
    assert report.uncovered == {}


class FixedRouter(nn.Module):
    """Routes without a weight, which would be refused as the experts are."""

    def forward(self, tokens):
        return tokens @ normal(9, 4, EXPERTS)


def fixed(model):
    model.router = FixedRouter()
    return model


def refused(report, *, routed=False):
    """Return the reasons for which the experts are left out, all others being measured."""
    assert {*report.layers} == {"head", *(["router"] if routed else [])}
    assert report.uncovered.keys() == {"experts.gate_up_proj", "experts.down_proj"}
    assert not report["trace"].exact
    return {*report.why_uncovered.values()}


def first_half_then_second(net, batch):
    """Give the tokens of all samples' first halves, and then those of all second halves."""
    tokens = torch.cat([batch[0][:, :2], batch[0][:, 2:]]).reshape(-1, 4)
    mixed = net.experts(*net.routed(tokens)).view(2, len(batch[0]), 2, 4).transpose(0, 1).flatten(1, 2)
    return net.head(torch.tanh(batch[0] + mixed).mean(1)), batch[1]


def test_tokens_that_are_not_in_order_of_samples():
    data = (normal(1, 6, 4, 4), torch.arange(6) % 3)
    report = pf.measure(fixed(Mixture()), LOSS, data, measures=MEASURES, forward=first_half_then_second)
    (why,) = refused(report)
    assert "cannot be told apart by sample" in why
    with pytest.raises(pf.errors.InputError, match="cannot be told apart"):
        pf.measure(fixed(Mixture()), LOSS, data, layers="experts.*", forward=first_half_then_second)


class WithOneMore(Mixture):
    """A token that is no sample's goes through the experts too."""

    def forward(self, x):
        tokens = torch.cat([x.reshape(-1, 4), x.new_ones(1, 4)])
        return self.head(torch.tanh(x + self.experts(*self.routed(tokens))[:-1].view(x.shape)).mean(1))


def test_tokens_of_no_sample():
    report = pf.measure(fixed(WithOneMore()), LOSS, (X, Y), measures=MEASURES)
    (why,) = refused(report)
    assert "no (T, m) of" in why


def test_experts_that_compute_something_else():
    """The class says how its experts are gated in its forward alone, which transformers' kernels would not find."""
    kind = type(Mixture().experts)

    def forward(self, tokens, index, shares):
        return 2 * kind.forward(self, tokens, index, shares)

    wrapped = type("Doubled", (kind,), {"forward": types.FunctionType(forward.__code__, {**kind.forward.__globals__},
        closure=forward.__closure__)})  # fmt: skip
    model = Mixture()
    model.experts.__class__ = wrapped
    report = pf.measure(model, LOSS, (X, Y), measures=MEASURES)
    (why,) = refused(report, routed=True)
    assert why == "the mixture computes something else than what is measured in its place"
    assert report["router", "trace"].value == pytest.approx(truth(model, "router")[1], rel=1e-8)


def test_a_weight_that_is_used_elsewhere_too():
    class Tied(Mixture):
        def forward(self, x):
            return super().forward(x @ self.experts.down_proj.mean(0)[:, :3].tanh() @ x.new_ones(3, 4))

    report = pf.measure(Tied(), LOSS, (X, Y), measures=["trace"])
    assert "experts.down_proj" in report.uncovered
    assert "mean" in report.why_uncovered["experts.down_proj"]
    for layer in {*report.layers} - {"router", "head"}:
        assert report[layer, "trace"].value == pytest.approx(truth(Tied(), layer)[1], rel=1e-8)


# --- experts of the user's own ----------------------------------------------------------------------------------------


class Own(nn.Module):
    """Weights of three experts in one parameter, used in any way."""

    def __init__(self, mix, *shape):
        super().__init__()
        self.mix, self.w = mix, nn.Parameter(normal(3, *(shape or (EXPERTS, 4, 4))))
        self.router, self.head = nn.Linear(4, EXPERTS).double(), nn.Linear(4, 3).double()
        for number, layer in enumerate((self.router, self.head)):
            layer.weight.data.copy_(normal(4 + number, *layer.weight.shape))

    def forward(self, x):
        return self.head(torch.tanh(x + self.mix(self, x)).mean(1))


def by_bmm_over_all(net, x):
    """(E, n T, m) by (E, m, d), and then the shares of a router."""
    tokens = x.reshape(1, -1, 4).expand(len(net.w), -1, -1)
    return torch.einsum("etd,te->td", torch.bmm(tokens, net.w), net.router(x.reshape(-1, 4)).softmax(1)).view(x.shape)


def by_bmm_with_samples_in_front(net, x):
    return torch.bmm(x, net.w[net.router(x).sum(1).argmax(1)]) + net.router(x).mean((1, 2))[:, None, None]


def by_einsum(net, x):
    return torch.einsum("ntm,emd,nte->ntd", x, net.w, net.router(x).softmax(-1))


def by_einsum_of_two(net, x):
    return (torch.einsum("ntm,emd->ntde", x, net.w) * net.router(x).softmax(-1)[:, :, None]).sum(-1)


def in_a_loop(net, x):
    """Gather the rows of all samples that an expert has."""
    tokens = x.reshape(-1, 4)
    logits = net.router(tokens)
    best, result = logits.argmax(1), torch.zeros_like(tokens)
    for e in range(EXPERTS):
        rows = (best == e).nonzero()[:, 0]
        result = result.index_add(0, rows, F.linear(tokens[rows], net.w[e]) * logits[rows, e, None])
    return result.view(x.shape)


@pytest.mark.parametrize(
    ("mix", "places"),
    [
        (by_bmm_over_all, lambda w: w.transpose(1, 2)),
        (by_einsum_of_two, lambda w: w.transpose(1, 2).flatten(0, 1)[None]),
    ],
)
def test_all_experts_over_all_tokens_are_a_layer(mix, places):
    """By a product for each expert they are groups, by one product for all of them rows of one matrix."""
    model = Own(mix)
    report = pf.measure(model, LOSS, (X, Y), measures=MEASURES)
    assert report.layers == ("w", "router", "head")
    hessian = weight_truth.hessian(model, lambda net: LOSS(net(X), Y), "w")
    w, kappa = model.w.detach().flatten(), 0.0
    for rows in places(torch.arange(w.numel()).view(model.w.shape)):
        blocks = hessian[rows.flatten()][:, rows.flatten()].view(*rows.shape, *rows.shape)
        kappa += float(torch.einsum("sm,tm,sjtj->", w[rows], w[rows], blocks))
    found = [report["w", measure].value for measure in MEASURES]
    assert found == pytest.approx([kappa, float(hessian.trace())], rel=1e-8)


@pytest.mark.parametrize("mix", [by_bmm_with_samples_in_front, by_einsum, in_a_loop])
def test_own_ways_are_named_and_left_out(mix):
    model = Own(mix)
    report = pf.measure(model, LOSS, (X, Y), measures=MEASURES)
    assert report.layers == ("router", "head")
    assert [*report.uncovered] == ["w"]
    assert "its weight is used in" in report.why_uncovered["w"]
    for layer in report.layers:
        found = tuple(report[layer, measure].value for measure in MEASURES)
        assert found == pytest.approx(truth(model, layer), rel=1e-8, abs=1e-12), layer
    with pytest.raises(pf.errors.InputError, match="'w'"):
        pf.relative_flatness(model, LOSS, (X, Y), "w")


def test_one_expert_over_all_tokens_is_a_layer():
    model = Own(by_bmm_over_all, 1, 4, 4)
    model.router = nn.Linear(4, 1).double()
    report = pf.measure(model, LOSS, (X, Y), measures=["trace"])
    if "w" in report.layers:
        hessian = weight_truth.hessian(model, lambda net: LOSS(net(X), Y), "w")
        assert report["w", "trace"].value == pytest.approx(float(hessian.trace()), rel=1e-8)
    else:
        assert "w" in report.uncovered
