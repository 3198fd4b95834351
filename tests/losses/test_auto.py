"""The loss "auto": that of a model of transformers, from the batches that its processor makes."""

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader

import pyflatness as pf
from pyflatness import losses
from pyflatness.losses import auto, risk
from pyflatness.model import calling
from support import truth, word_models
from support.hugging_face import FAMILIES, LENGTH, MORE, more

transformers = pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.mark.parametrize("name", FAMILIES)
def test_the_loss_is_the_models_own(name):
    net, batch = FAMILIES[name]()
    before = net.config.to_dict()
    loss = auto.of_model(net, batch)
    assert net.config.to_dict() == before
    with torch.no_grad():
        outputs, targets = calling.run(net, batch, None)
        found = loss.value(outputs, targets) / risk.weight(outputs, targets, loss, 0)
        own = net(**batch).loss
    assert float(found) == pytest.approx(float(own), rel=2e-6)


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore")  # of some of these models
@pytest.mark.parametrize("name", MORE)
def test_labels_are_shifted_where_the_model_shifts_them(name):
    net, batch = more(name)
    assert isinstance(auto.of_model(net, batch), losses.CrossEntropy)  # or else an error


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("Llama", "model.layers.0.self_attn.k_proj"),
        ("BART's decoder, which shifts nothing", "lm_head"),
        ("T5", "lm_head"),
        ("mBART, which moves the last token to the front", "lm_head"),
        ("BERT, a number", "classifier"),
        ("BERT, several labels", "classifier"),
        ("ViT", "classifier"),
    ],
)
def test_values_are_of_the_models_own_loss_over_all_tokens_of_the_data(name, layer):
    """Against the dense Hessian of the model's own ``.loss`` of each batch, by its number of labels that count."""
    net, batch = FAMILIES[name]()
    net = net.double()
    if layer == "lm_head":  # by itself: a tied weight's other use has no part in the layer's value
        net.lm_head.weight = nn.Parameter(net.lm_head.weight.detach().clone())
    batch = {key: part.double() if part.is_floating_point() else part for key, part in batch.items()}
    batches = [{key: part[some] for key, part in batch.items()} for some in (slice(0, 1), slice(1, 3))]
    found = pf.relative_flatness(net, data=batches, layer=layer)
    assert found.exact

    def counting(labels):
        labels = labels[:, 1:] if name == "Llama" else labels
        return int((labels != -100).sum()) if not labels.is_floating_point() else labels.numel()

    counts = [counting(each["labels"]) for each in batches]

    def own(weight):
        each_loss = [
            torch.func.functional_call(net, {f"{layer}.weight": weight}, (), each).loss.double() for each in batches
        ]
        return sum(count * loss for count, loss in zip(counts, each_loss, strict=True)) / sum(counts)

    with sdpa_kernel(SDPBackend.MATH):  # the others have no second derivative
        expected = truth.relative_flatness(own, net.get_submodule(layer).weight)
    assert found.value == pytest.approx(expected, rel=1e-4)  # transformers takes logits in float32 for its loss


def test_tokens_are_the_labels_of_a_causal_model_that_is_given_none():
    """Masked ones are ignored, wherever they are."""
    net, batch = FAMILIES["Llama"]()
    net = net.double()
    labels = batch.pop("labels")
    expected = pf.relative_flatness(net, data=[{**batch, "labels": labels}])
    assert pf.relative_flatness(net, data=[batch]).value == expected.value
    left = {key: part.clone() for key, part in batch.items()}
    for part in left.values():
        part[1] = part[1].roll(2)
    assert left["attention_mask"][1].tolist() == [0, 0, 1, 1, 1, 1]
    assert pf.relative_flatness(net, data=[left]).value == pytest.approx(expected.value, rel=1e-10)
    assert pf.measure(net, data=[batch], layers="lm_head")["lm_head", "relative_flatness"].value == pytest.approx(
        expected.value, rel=1e-9
    )


@pytest.mark.parametrize(("first", "seen"), [(0, {64}), (70, {100})])
def test_long_sequences_are_compared_by_their_first_positions(first, seen):
    """By all of them where the first ones have no labels, as behind a long question."""
    net, batch = FAMILIES["Llama"]()
    tokens = batch["input_ids"].repeat(1, 20)[:, :100]
    labels = tokens.clone()
    labels[:, :first] = -100
    lengths = set()
    net.model.embed_tokens.register_forward_hook(lambda module, args, output: lengths.add(args[0].shape[1]))
    assert isinstance(auto.of_model(net, {"input_ids": tokens, "labels": labels}), losses.CrossEntropy)
    assert lengths == seen


def test_images_as_pairs():
    net, batch = FAMILIES["ViT"]()
    pair = batch["pixel_values"], batch["labels"]
    assert pf.relative_flatness(net, data=pair).value == pf.relative_flatness(net, data=[batch]).value
    assert pf.relative_flatness(net, "auto", pair, reduction="sum").value == pytest.approx(
        pf.relative_flatness(net, nn.CrossEntropyLoss(reduction="sum"), pair).value
    )


def test_every_public_call_takes_it():
    net, batch = FAMILIES["ViT, several labels"]()
    loss, data = nn.BCEWithLogitsLoss(), [batch]
    for call, options in (
        (pf.block_traces, {"layer": "classifier"}),
        (pf.representation, {"layers": "classifier"}),
        (pf.measures.mls_adversarial, {"steps": 1}),
        (pf.measures.pac_bayes, {"probes": 2, "steps": 1}),
        (pf.measures.adaptive_sharpness_mc, {"probes": 2}),
        (pf.theory.feature_robustness, {"layer": "classifier", "probes": 2}),
    ):
        found, expected = call(net, data=data, **options), call(net, loss, data, **options)
        assert repr(found) == repr(expected), call
    assert pf.verify(net, data=data).truth == pytest.approx(pf.verify(net, loss, data).truth, rel=1e-12)
    assert pf.generalization_gap(net, train=data, test=data) == pf.generalization_gap(net, loss, data, data)


def test_a_loss_that_is_none_of_these_is_an_error():
    def refusal(net, batch, match):
        with pytest.raises(pf.errors.InputError, match=match):
            pf.relative_flatness(net.eval(), data=[batch])

    net, batch = FAMILIES["Llama"]()
    refusal(nn.Linear(2, 2), batch, "a Linear is none; pass the loss that it was trained with")
    refusal(net.model, batch, "LlamaModel")
    refusal(net, {**batch, "labels": [1, 2, 3]}, "labels that are one tensor, and this LlamaForCausalLM has a list")
    refusal(net, torch.ones(3, 4), "mappings with the model's inputs and `labels`, got a Tensor")
    masked, of_words = FAMILIES["BERT, masked"]()
    del of_words["labels"]
    refusal(masked, of_words, "no `labels`, which BertForMaskedLM needs; there are input_ids, attention_mask")
    experts, of_experts = FAMILIES["Mixtral"]()
    experts.config.output_router_logits = True
    refusal(experts, of_experts, "loss of its own, .*the balance of experts")
    config = transformers.Wav2Vec2Config(
        vocab_size=9, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, conv_dim=(8,),
        conv_stride=(5,), conv_kernel=(5,), num_feat_extract_layers=1, feat_extract_norm="layer",
        do_stable_layer_norm=True,
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
    )  # fmt: skip
    speech = transformers.Wav2Vec2ForCTC(config)
    refusal(speech, {"input_values": torch.randn(2, 100), "labels": torch.tensor([[1, 2], [3, 4]])}, "Wav2Vec2ForCTC")


def test_sequences_of_a_loss_of_ones_own_are_shifted_too():
    net, batch = FAMILIES["GPT-2"]()
    labels = batch["labels"]

    def loss(outputs, targets):
        assert targets.shape == (len(outputs), labels.shape[1] - 1)
        return torch.nn.functional.cross_entropy(outputs, targets.clamp(0), reduction="sum") / len(outputs)

    assert pf.relative_flatness(net, loss, [batch], "lm_head", probes=2).samples == 3


# --- answers ----------------------------------------------------------------------------------------------------------


LAYER = "qa_outputs"


def answers():
    net, batch = FAMILIES["BERT, answers"]()
    return net.double(), batch


def hessian_value(net, batches, terms):
    """Return κ of the layer by the dense Hessian of the model's own losses, with each batch's number of terms."""
    weight = net.get_submodule(LAYER).weight

    def risk(matrix):
        values = [
            torch.func.functional_call(net, {f"{LAYER}.weight": matrix}, (), batch, tie_weights=False).loss
            for batch in batches
        ]
        return sum(value * count for value, count in zip(values, terms, strict=True)) / sum(terms)

    return truth.relative_flatness_of(truth.hessian(risk, weight.detach()), weight.detach())


def test_values_are_of_the_models_own_loss_over_batches_of_several_lengths():
    net, batch = answers()
    first, second = ({key: part[some] for key, part in batch.items()} for some in (slice(0, 1), slice(1, 3)))
    second = {key: part[:, :4] if part.ndim == 2 else part for key, part in second.items()}
    found = pf.relative_flatness(net, data=[first, second], layer=LAYER)
    assert found.exact
    assert found.value == pytest.approx(hessian_value(net, [first, second], [2, 4]), rel=1e-6)
    report = pf.measure(net, data=[batch], probes=2, curvature="ggn", measures="relative_flatness")
    assert LAYER in report.layers


def test_positions_behind_the_text_are_ignored():
    """Of the mean of both parts the model has the whole batch's; all terms count alike here."""
    net, batch = answers()
    batch["end_positions"] = torch.tensor([4, LENGTH, 3])
    batch["start_positions"] = torch.tensor([1, LENGTH + 2, 3])
    found = pf.relative_flatness(net, data=[batch], layer=LAYER)
    assert found.value == pytest.approx(hessian_value(net, [batch], [4]), rel=1e-6)


def test_batches_without_positions_are_told_what_is_missing():
    net, batch = answers()
    del batch["end_positions"]
    with pytest.raises(pf.errors.InputError, match="'start_positions' and 'end_positions', one number for each sample"):
        pf.measure(net, data=[batch])
    labelled = {"input_ids": batch["input_ids"], "labels": batch["input_ids"]}
    with pytest.raises(pf.errors.InputError, match="there are input_ids, labels"):
        pf.measure(net, data=[labelled])


# --- data -------------------------------------------------------------------------------------------------------------


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
