"""The loss "auto" with what tokenizers and data collators give, wide vocabularies, and wrapped models."""

import pytest
import torch
from torch.utils.data import DataLoader

import pyflatness as pf
from pyflatness.losses import auto
from support import word_models

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
TEXTS = ["the cat sat on the mat", "a dog ran", "it was happy and then the cat ran under the hill"]


def test_batches_of_a_tokenizer_and_of_a_collator():
    """Padding is left out, by the mask or by the collator's labels; so it makes no difference how texts are batched."""
    net, tokenizer = word_models.llama().double(), word_models.tokenizer()
    tokenizer.pad_token = "<unk>"
    encoded = tokenizer(TEXTS, padding=True, return_tensors="pt")
    assert isinstance(encoded, transformers.BatchEncoding)
    expected = pf.relative_flatness(net, data=[encoded]).value
    collator = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
    loader = DataLoader([tokenizer(text) for text in TEXTS], batch_size=2, collate_fn=collator)
    assert pf.relative_flatness(net, data=loader).value == pytest.approx(expected, rel=1e-9)
    alone = [tokenizer([text], return_tensors="pt") for text in TEXTS]
    assert pf.relative_flatness(net, data=alone).value == pytest.approx(expected, rel=1e-9)


def test_a_vocabulary_whose_logits_are_not_made():
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    net = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=3000, **sizes)).eval()
    data = [{"input_ids": torch.randint(3000, (4, 5), generator=torch.Generator().manual_seed(0))}]
    features = net.model(data[0]["input_ids"]).last_hidden_state[:, :-1].detach()
    expected = pf.head_flatness(features, net.lm_head.weight).value
    assert pf.relative_flatness(net, data=data).value == pytest.approx(expected, rel=1e-5)
    scores = pf.score({"a": net}, data=data, layers="lm_head")
    assert scores["a", "relative_flatness"].value == pytest.approx(expected, rel=1e-5)


def test_one_sample_is_enough_where_logits_are_many(monkeypatch):
    net, sizes = word_models.llama(), []
    handle = net.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    batch = {"input_ids": torch.ones(3, 4, dtype=torch.int64)}
    auto.of_model(net, batch)
    monkeypatch.setattr(auto, "_MOST_LOGITS", 2 * 4 * net.config.vocab_size - 1)
    auto.of_model(net, batch)
    handle.remove()
    assert sizes == [2, 2, 1, 1]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
def test_the_model_inside_of_peft():
    peft = pytest.importorskip("peft", reason="peft is not installed")
    net = word_models.llama()
    data = [{"input_ids": torch.arange(12).view(2, 6)}]
    expected = pf.relative_flatness(net, data=data).value
    wrapped = peft.get_peft_model(net, peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])).eval()
    found = pf.relative_flatness(wrapped, data=data, layer="base_model.model.lm_head")
    assert found.value == pytest.approx(expected, rel=1e-6)


def test_labels_of_tokens_in_a_tuple_are_refused_with_what_to_pass():
    tokens = torch.ones(2, 3, dtype=torch.int64)
    with pytest.raises(pf.errors.InputError, match=r'pass mappings, as data=\[\{"input_ids": tokens\}\]'):
        pf.measure(word_models.llama(), data=(tokens, tokens))


def test_without_data():
    with pytest.raises(TypeError, match=r"missing 1 required positional argument: 'data'; .* by name, data="):
        pf.measure(word_models.llama(), [{"input_ids": torch.ones(2, 3, dtype=torch.int64)}])
