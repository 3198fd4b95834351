"""Attention at other weights of the same function: what κ by rows and by columns keep, and other measures do not."""

import pytest
import torch
from torch import nn

import pyflatness as pf
from pyflatness.reparameterization import attention

transformers = pytest.importorskip("transformers")

IDS = torch.randint(1, 17, (3, 5), generator=torch.Generator().manual_seed(0))
LABELS, LOSS = torch.arange(3), nn.CrossEntropyLoss()
TOKENS = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Attending(nn.Module):
    """Attention of torch, its projections packed or with keys and values of another width."""

    def __init__(self, width=None):
        super().__init__()
        self.before, self.kv = nn.Linear(5, 8), nn.Linear(5, width or 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, kdim=width, vdim=width)
        self.head = nn.Linear(8, 3)
        nn.init.normal_(self.attention.in_proj_bias)

    def forward(self, x):
        h, kv = torch.tanh(self.before(x)), torch.tanh(self.kv(x))
        return self.head((h + self.attention(h, kv, kv, need_weights=False)[0]).mean(1))


def made(build):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return build().double().eval()


def llama(**options):
    sizes = {"vocab_size": 17, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "attention_bias": True}
    config = transformers.LlamaConfig(**sizes, **heads, num_labels=3, pad_token_id=0, initializer_range=0.5, **options)
    return transformers.LlamaForSequenceClassification(config)


def gpt2():
    config = transformers.GPT2Config(vocab_size=17, n_embd=8, n_layer=1, n_head=2, n_positions=8, num_labels=3,
        pad_token_id=0, initializer_range=0.5)  # fmt: skip
    return transformers.GPT2ForSequenceClassification(config)


PARTS = ("attention.in_proj_weight[q]", "attention.in_proj_weight[k]", "attention.in_proj_weight[v]")
SEPARATE = tuple(f"attention.{key}_proj_weight" for key in "qkv")
OF_LLAMA = "model.layers.0.self_attn"
NETWORKS = {  # how it is made, its inputs, the module, layers of rows, the layer of columns, groups, and A of its group
    "torch's": (Attending, TOKENS, "attention", PARTS, "attention.out_proj", 2, "any"),
    "of another width": (lambda: Attending(6), TOKENS, "attention", SEPARATE, "attention.out_proj", 2, "any"),
    "Llama's": (llama, IDS, OF_LLAMA, [f"{OF_LLAMA}.{key}_proj" for key in "qkv"], f"{OF_LLAMA}.o_proj", 2,
        "pairs of halves"),
    "GPT-2's": (gpt2, IDS, "transformer.h.0.attn", ["transformer.h.0.attn.c_attn"], "transformer.h.0.attn.c_proj", 2,
        "any"),
}  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
def test_rows_of_q_k_v_and_columns_of_the_outputs_keep_their_flatness(name):
    build, inputs, module, rows, columns, groups, group = NETWORKS[name]
    model = made(build)
    random = torch.Generator().manual_seed(3)
    size = attention.attentions(model)[module].q.size
    a = torch.randn(groups, size, size, generator=random, dtype=torch.float64)
    if group != "any":
        turned = torch.tensor([[2.0, 0, -1, 0], [0, 0.3, 0, -0.5], [1, 0, 2, 0], [0, 0.5, 0, 0.3]])
        a = torch.stack([turned, 3 * turned])
    factors = {module: {"qk": a, "vo": torch.randn(groups, size, size, generator=random, dtype=torch.float64)}}
    other = pf.reparameterize(model, factors, inputs)
    names = ["relative_flatness", "relative_flatness_columns", "trace", "adaptive_sharpness"]
    before, after = (
        pf.measure(each, LOSS, (inputs, LABELS), layers=[*rows, columns], measures=names) for each in (model, other)
    )
    rounding = 1e-9 if name in ("torch's", "of another width", "GPT-2's") else 1e-4  # Llama's norms are in float32

    def change(layer, measure):
        return abs(after[layer, measure].value / before[layer, measure].value - 1)

    for layer in rows:
        assert change(layer, "relative_flatness") < rounding
        assert min(change(layer, measure) for measure in names[1:]) > 0.01
    assert change(columns, "relative_flatness_columns") < rounding
    assert min(change(columns, measure) for measure in ("relative_flatness", "trace")) > 0.01


@pytest.mark.parametrize("name", NETWORKS)
def test_invariances_finds_the_group_and_says_what_is_kept(name):
    build, inputs, module, rows, columns, _, group = NETWORKS[name]
    names = ["relative_flatness", "relative_flatness_columns", "trace"]
    found = pf.invariances(made(build), LOSS, (inputs, LABELS), layers=[*rows, columns], measures=names)
    assert module in found.layers
    assert found.notes == (f"{module}: A of q and k is {attention.GROUPS[group]}",)
    kept = {(row.measure, row.way) for row in found.rows if row.way.startswith("attention") and row.change < 1e-4}
    assert kept == {("relative_flatness", "attention rows"), ("relative_flatness_columns", "attention columns")}
    assert all(found[key].claimed for key in kept)
    assert {row.way for row in found.rows if row.claimed} >= {"attention rows", "attention columns"}
    assert "attention columns" in str(found)


def test_a_gated_mlp_keeps_the_flatness_of_up_by_rows_and_of_down_by_columns():
    model, mlp = made(llama), "model.layers.0.mlp"
    factors = torch.rand(24, generator=torch.Generator().manual_seed(4)) * 5 + 0.2
    other = pf.reparameterize(model, {f"{mlp}.up_proj": factors}, IDS)
    names = ["relative_flatness", "relative_flatness_columns", "trace"]
    before, after = (
        pf.measure(each, LOSS, (IDS, LABELS), layers=[f"{mlp}.up_proj", f"{mlp}.down_proj"], measures=names)
        for each in (model, other)
    )
    same = {
        (layer, measure): after[f"{mlp}.{layer}", measure].value == pytest.approx(
            before[f"{mlp}.{layer}", measure].value, rel=1e-4)
        for layer in ("up_proj", "down_proj") for measure in names
    }  # fmt: skip
    assert [key for key, kept in same.items() if kept] == [
        ("up_proj", "relative_flatness"), ("down_proj", "relative_flatness_columns")
    ]  # fmt: skip


def test_rotary_embeddings_leave_no_other_matrix():
    model = made(llama)
    for a in (torch.randn(4, 4, generator=torch.Generator().manual_seed(5)), torch.diag(torch.tensor([1.0, 2, 3, 4]))):
        with pytest.raises(pf.errors.InputError, match="another function"):
            pf.reparameterize(model, {OF_LLAMA: {"qk": a}}, IDS)
    pf.reparameterize(model, {OF_LLAMA: {"qk": torch.diag(torch.tensor([2.0, 3, 2, 3]))}}, IDS)


def test_norms_of_q_and_k_leave_nothing_but_b():
    config = transformers.Qwen3Config(vocab_size=17, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=4, num_labels=3, pad_token_id=0,
        initializer_range=0.5)  # fmt: skip
    model = made(lambda: transformers.Qwen3ForSequenceClassification(config))
    layers = [f"{OF_LLAMA}.q_proj", f"{OF_LLAMA}.o_proj"]
    found = pf.invariances(model, LOSS, (IDS, LABELS), layers=layers, measures=["relative_flatness_columns"])
    assert found.notes == (f"{OF_LLAMA}: A of q and k is none",)
    assert found["relative_flatness_columns", "attention columns"].change < 1e-4


@pytest.mark.parametrize(("factors", "message"), [
    ({"attention": {"qk": torch.ones(4, 4)}}, "an invertible matrix .* got one that is not"),
    ({"attention": {"qk": torch.eye(3)}}, r"got shape \(3, 3\)"),
    ({"attention": {"vo": "B"}}, "'vo': an invertible matrix"),
    ({"attention": {"kq": torch.eye(4)}}, "matrices 'qk' and 'vo' are wanted"),
    ({"head": {"qk": torch.eye(4)}}, "are for attention modules .* there are"),
])  # fmt: skip
def test_what_is_refused(factors, message):
    with pytest.raises(pf.errors.InputError, match=message):
        pf.reparameterize(made(Attending), factors, TOKENS)


def test_matrices_beside_factors_and_in_place():
    model = made(Attending)
    before = model(TOKENS)
    same = pf.reparameterize(model, {model.attention: {"vo": 2 * torch.eye(4)}}, TOKENS, inplace=True)
    assert same is model
    torch.testing.assert_close(model(TOKENS), before)
