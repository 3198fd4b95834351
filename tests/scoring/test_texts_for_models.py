"""Texts as data of models that are not causal: tokens to find behind masks, texts to make of texts, classes."""

import json
from pathlib import Path

import pytest
import torch

import pyflatness as pf
from pyflatness.scoring import pretrained
from pyflatness.scoring.worker import Maker
from support import word_models

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
TEXTS = ["the cat sat on the mat", "a dog ran", "it was happy and then the cat ran under the hill"] * 20
ANSWERS = ["a cat sat", "the dog was happy on the hill", "sad"] * 20
LABELS = [2, 0, 1] * 20
SIZES = {"vocab_size": 19, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with a token for masks, and one for padding."""
    made = word_models.tokenizer()
    made.add_special_tokens({"mask_token": "<mask>", "pad_token": "<unk>"})
    found = tmp_path_factory.mktemp("masks")
    made.save_pretrained(found)
    return found


def read(path: Path, folder: Path, **arguments: object) -> list[dict[str, torch.Tensor]]:
    given = json.loads(json.dumps({"tokenizer": str(folder), **arguments}))
    return [*Maker(str(path), given, "--data").made()]


def written(path: Path) -> Path:
    rows = zip(TEXTS, ANSWERS, LABELS, strict=True)
    path.write_text("\n".join(json.dumps({"text": a, "answer": b, "label": c}) for a, b, c in rows))
    return path


def whole(batches: list[dict[str, torch.Tensor]], key: str) -> list[list[int]]:
    """A part of all samples, without padding."""
    return [
        part[mask != 0].tolist()
        for batch in batches
        for part, mask in zip(batch[key], batch["attention_mask"], strict=True)
    ]


def test_masks_are_drawn_by_the_seed_whatever_the_batches_are(folder: Path, tmp_path: Path) -> None:
    path, state = written(tmp_path / "d.jsonl"), torch.random.get_rng_state()
    masked = read(path, folder, mask=0.3)
    assert torch.equal(torch.random.get_rng_state(), state)
    plain, tokens, labels = (
        whole(*part) for part in ((read(path, folder), "input_ids"), (masked, "input_ids"), (masked, "labels"))
    )
    drawn = [label != -100 for row in labels for label in row]
    assert 0.2 < sum(drawn) / len(drawn) < 0.4
    mask = pretrained.tokenizer(str(folder)).mask_token_id
    flat = [[token for row in rows for token in row] for rows in (plain, tokens, labels)]
    for before, now, label in zip(*flat, strict=True):
        assert (label, now) == (-100, before) if label == -100 else label == before
    seen = [now for now, label in zip(*flat[1:], strict=True) if label != -100]
    assert 0.6 < sum(now == mask for now in seen) / len(seen) < 0.95
    for batch in masked:
        assert (batch["labels"][batch["attention_mask"] == 0] == -100).all()
    again = read(path, folder, mask=0.3, batch_size=1)
    assert (whole(again, "input_ids"), whole(again, "labels")) == (tokens, labels)
    assert whole(read(path, folder, mask=0.3, seed=1), "labels") != labels
    (batch, *_) = read(path, folder, mask=0.3, length=12)
    assert batch.keys() == {"input_ids", "labels"}
    assert batch["input_ids"].shape == batch["labels"].shape == (8, 12)


def test_a_masked_language_model_is_measured_on_texts(folder: Path, tmp_path: Path) -> None:
    path = written(tmp_path / "d.jsonl")
    torch.manual_seed(0)
    net = transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, max_position_embeddings=16)).eval()
    values = [
        float(
            pf.relative_flatness(
                net, data=read(path, folder, mask=0.3, batch_size=size), layer="cls.predictions.decoder"
            )
        )
        for size in (8, 60)
    ]
    assert values[0] == pytest.approx(values[1], rel=1e-4)
    with pytest.raises(
        pf.errors.InputError, match=r"no `labels`, which BertForMaskedLM needs; .* mask=0.15 makes them"
    ):
        pf.measure(net, data=read(path, folder))


def test_texts_to_make_of_texts(folder: Path, tmp_path: Path) -> None:
    path = written(tmp_path / "d.jsonl")
    batches = read(path, folder, targets="answer", batch_size=4, truncate=5)
    encoder = pretrained.tokenizer(str(folder))
    expected = [encoder(answer)["input_ids"][:5] for answer in ANSWERS]
    rows = [row[row != -100].tolist() for batch in batches for row in batch["labels"]]
    assert rows == expected
    assert batches[0]["labels"].tolist()[0] == [*expected[0], -100, -100]
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    torch.manual_seed(0)
    net = transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=19, **sizes)).eval()
    found = [
        float(pf.relative_flatness(net, data=read(path, folder, targets="answer", batch_size=size), layer="lm_head"))
        for size in (7, 60)
    ]
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_classes_of_texts(folder: Path, tmp_path: Path) -> None:
    batches = read(written(tmp_path / "d.jsonl"), folder, targets="label")
    config = transformers.BertConfig(**SIZES, max_position_embeddings=16, num_labels=3)
    torch.manual_seed(0)
    net = transformers.BertForSequenceClassification(config).eval()
    assert pf.relative_flatness(net, data=batches).layer == "classifier"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mask": 0.3, "targets": "label"}, "mask: masked texts have no labels of their own; pass no mask"),
        ({"length": 4, "targets": "answer"}, "length: packed texts have no labels"),
        ({"mask": 1.5}, "mask: a probability between 0 and 1 is wanted, got 1.5"),
        ({"mask": "some"}, "mask: a probability between 0 and 1"),
    ],
)
def test_options_that_do_not_fit(arguments: dict[str, object], message: str, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(pf.errors.InputError, match=message):
        read(written(tmp_path / "d.jsonl"), folder, **arguments)


def test_a_tokenizer_without_a_token_for_masks(tmp_path: Path) -> None:
    word_models.tokenizer().save_pretrained(tmp_path)
    with pytest.raises(pf.errors.InputError, match="the tokenizer has no token for masks"):
        read(written(tmp_path / "d.jsonl"), tmp_path, mask=0.15)
