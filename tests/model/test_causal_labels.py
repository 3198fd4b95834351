"""Causal language models of transformers: labels are shifted as they do it themselves."""

import pytest
import torch
from torch import nn

import pyflatness as pf

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
LOSS = nn.CrossEntropyLoss()
TOKENS = torch.tensor([[1, 5, 2, 0], [3, 3, 9, 4]])
BATCHES = [{"input_ids": TOKENS, "labels": TOKENS}]


def gpt2(kind=transformers.GPT2LMHeadModel):
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2, pad_token_id=0)
    return kind(config).eval()


def llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    return transformers.LlamaForCausalLM(config).eval()


class Own(transformers.GPT2LMHeadModel):
    """A user's subclass."""


@pytest.mark.parametrize("make", [gpt2, llama, lambda: gpt2(Own)])
def test_labels_are_shifted(make):
    net = make()
    logits = net(TOKENS).logits[:, :-1]
    expected = pf.head_flatness(
        net.get_submodule("transformer" if hasattr(net, "transformer") else "model")(TOKENS)[0][:, :-1],
        net.lm_head.weight,
        targets=TOKENS[:, 1:],
    )
    for options in ({}, {"forward": pf.causal_lm}):
        found = pf.relative_flatness(net, LOSS, BATCHES, "lm_head", **options)
        assert found.value == pytest.approx(expected.value, rel=1e-4)
    assert logits.shape == (2, 3, 11)
    assert pf.verify(net, LOSS, BATCHES, "lm_head")


def test_labels_that_are_shifted_already():
    shifted = [{"input_ids": TOKENS[:, :-1], "labels": TOKENS[:, 1:]}]
    found = pf.relative_flatness(
        gpt2(),
        LOSS,
        shifted,
        "lm_head",
        forward=lambda model, batch: (model(batch["input_ids"]).logits.movedim(-1, 1), batch["labels"]),
    )
    expected = pf.relative_flatness(gpt2(), LOSS, BATCHES, "lm_head", forward=pf.causal_lm)
    assert found.value == pytest.approx(expected.value, rel=1e-5)


def test_other_models_of_tokens_take_their_labels_as_they_are():
    assert pf.relative_flatness(gpt2(transformers.GPT2ForTokenClassification), LOSS, [
        {"input_ids": TOKENS, "labels": TOKENS % 2}
    ]).exact  # fmt: skip
    assert pf.relative_flatness(gpt2(transformers.GPT2ForSequenceClassification), LOSS, [
        {"input_ids": TOKENS, "labels": torch.tensor([0, 1])}
    ]).value > 0  # fmt: skip
