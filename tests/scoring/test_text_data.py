"""Texts as data: .txt, .jsonl, Parquet, data sets on disk, and arrays of tokens; with a model's tokenizer."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import pyflatness as pf
from pyflatness.scoring import data_specs
from pyflatness.scoring.worker import Maker
from support import word_models

pytest.importorskip("transformers", reason="transformers is not installed")
TEXTS = ["the cat sat on the mat", "a dog ran", "it was happy and then the cat ran under the hill"]
IDS = [[word_models.tokenizer().vocab[word] for word in text.split()] for text in TEXTS]
END = word_models.tokenizer().eos_token_id


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return word_models.saved(tmp_path_factory.mktemp("word model"))


def read(path: Path, **arguments: object) -> list[dict[str, torch.Tensor]]:
    """As the command line does it, from JSON."""
    return [*Maker(str(path), json.loads(json.dumps(arguments)), "--data").made()]


def refusal(path: Path, **arguments: object) -> str:
    with pytest.raises(pf.errors.InputError) as caught:
        read(path, **arguments)
    return str(caught.value)


def rows(batches: list[dict[str, torch.Tensor]]) -> list[list[int]]:
    """The tokens of samples, without padding."""
    return [
        ids[mask != 0].tolist()
        for batch in batches
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]


def written(path: Path, content: str) -> Path:
    path.write_text(content, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", ["d.txt", "d.jsonl"])
def test_a_text_is_a_sample(name: str, folder: Path, tmp_path: Path) -> None:
    lines = TEXTS if name == "d.txt" else [json.dumps({"text": text, "other": 1}) for text in TEXTS]
    path = written(tmp_path / name, "\n".join([lines[0], "", *lines[1:]]) + "\n")
    whole = read(path, tokenizer=f"hf:{folder}")
    assert rows(whole) == IDS
    assert [part.shape for part in whole[0].values()] == [(3, 11)] * 2
    assert whole[0]["attention_mask"].tolist()[1] == [1] * 3 + [0] * 8
    pairs = read(path, tokenizer=str(folder / "tokenizer.json"), batch_size=2, truncate=4)
    assert [len(batch["input_ids"]) for batch in pairs] == [2, 1]
    assert rows(pairs) == [ids[:4] for ids in IDS]
    assert rows(read(path, tokenizer=str(folder), count=2)) == IDS[:2]


def test_packed_texts(folder: Path, tmp_path: Path) -> None:
    path = written(tmp_path / "d.txt", "\n".join(TEXTS))
    (batch,) = read(path, tokenizer=str(folder), length=5)
    expected = [*IDS[0], END, *IDS[1], END, *IDS[2], END]
    assert batch.keys() == {"input_ids"}
    assert batch["input_ids"].flatten().tolist() == expected[: len(expected) // 5 * 5]
    assert batch["input_ids"].shape == (4, 5)
    assert "length=50: all texts together have 23 tokens" in refusal(path, tokenizer=str(folder), length=50)


def test_what_a_text_of_a_file_is(folder: Path, tmp_path: Path) -> None:
    path = written(tmp_path / "d.txt", f"{TEXTS[0]}\n{TEXTS[1]}\r\n\r\n{TEXTS[2]}\n")
    assert rows(read(path, tokenizer=str(folder))) == IDS
    assert rows(read(path, tokenizer=str(folder), sample_by="paragraph")) == [IDS[0] + IDS[1], IDS[2]]
    assert rows(read(path, tokenizer=str(folder), sample_by="file")) == [[*IDS[0], *IDS[1], *IDS[2]]]
    assert "line, paragraph or file is wanted, got 'word'" in refusal(path, tokenizer=str(folder), sample_by="word")


def test_labels_of_texts(folder: Path, tmp_path: Path) -> None:
    lines = [
        json.dumps({"words": text, "y": y, "z": [0.5, y], "s": "a" if y == 2 else y})
        for text, y in zip(TEXTS, [2, 0, 1], strict=True)
    ]
    path = written(tmp_path / "d.jsonl", "\n".join(lines))
    of = {"tokenizer": str(folder), "text": "words"}
    first, second = read(path, **of, targets="y", batch_size=2)
    assert (first["labels"].tolist(), second["labels"].tolist()) == ([2, 0], [1])
    assert read(path, **of, targets="z")[0]["labels"].dtype == torch.float32
    assert "numbers are wanted, got 'a'" in refusal(path, **of, targets="s")
    assert "there is no 'q' in every line; there are 'words', 'y'" in refusal(path, **of, targets="q")
    assert "packed texts have no labels" in refusal(path, **of, targets="y", length=4)


def test_labels_are_of_one_dtype_in_all_batches(folder: Path, tmp_path: Path) -> None:
    lines = [json.dumps({"text": text, "y": y}) for text, y in zip(TEXTS, (1, 0, 0.5), strict=True)]
    found = read(written(tmp_path / "d.jsonl", "\n".join(lines)), tokenizer=str(folder), targets="y", batch_size=1)
    assert [batch["labels"].tolist() for batch in found] == [[1.0], [0.0], [0.5]]
    assert {batch["labels"].dtype for batch in found} == {torch.float32}


@pytest.mark.parametrize("name", ["d.txt", "d.jsonl"])
def test_a_mark_of_the_byte_order_is_no_text(name: str, folder: Path, tmp_path: Path) -> None:
    lines = TEXTS if name == "d.txt" else [*map(json.dumps, TEXTS)]
    assert rows(read(written(tmp_path / name, "\ufeff" + "\n".join(lines)), tokenizer=str(folder))) == IDS


def test_texts_that_cannot_be_read(folder: Path, tmp_path: Path) -> None:
    of = {"tokenizer": str(folder)}
    assert "there is no such file" in refusal(tmp_path / "missing.txt", **of)
    assert "texts need one; pass the folder" in refusal(written(tmp_path / "a.txt", "the cat"))
    assert "there are none" in refusal(written(tmp_path / "b.txt", "\n \n"), **of)
    assert "line 2 is no JSON" in refusal(written(tmp_path / "c.jsonl", '{"text": "a"}\n{"text'), **of)
    assert "a text is wanted, got 3" in refusal(written(tmp_path / "e.jsonl", "3"), **of)
    assert "there is no 'text'" in refusal(written(tmp_path / "f.jsonl", '{"x": "a"}'), **of)
    assert "has texts alone" in refusal(tmp_path / "a.txt", **of, targets="y")
    assert "has no 'y' besides its text: 'a'" in refusal(written(tmp_path / "h.jsonl", '"a"'), **of, targets="y")
    assert "length=0: a number of tokens is wanted, at least 1" in refusal(tmp_path / "a.txt", **of, length=0)
    assert "truncate=-1: a number of tokens" in refusal(tmp_path / "a.txt", **of, truncate=-1)
    (tmp_path / "g.txt").write_bytes(b"\xff\xfe\xff")
    assert "cannot be read as text" in refusal(tmp_path / "g.txt", **of)
    assert "hf:" in refusal(tmp_path / "a.txt", tokenizer=str(tmp_path))
    assert "tokenizer.json" in refusal(tmp_path / "a.txt", tokenizer=str(tmp_path / "tokenizer.json"))


def test_arrays_of_tokens(tmp_path: Path) -> None:
    ids = np.arange(12, dtype=np.int16).reshape(4, 3)
    np.savez(tmp_path / "d.npz", input_ids=ids, attention_mask=ids > 1, noise=np.zeros(2))
    first, second = read(tmp_path / "d.npz", batch_size=3)
    assert first["input_ids"].tolist() == ids[:3].tolist()
    assert second["input_ids"].dtype == torch.int64
    assert first.keys() == {"input_ids", "attention_mask"}
    (one,) = read(tmp_path / "d.npz", count=1)
    assert len(one["input_ids"]) == 1
    inputs, _ = read(tmp_path / "d.npz", inputs="input_ids", targets="attention_mask")
    assert inputs.shape == (4, 3)


def test_parquet(folder: Path, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": TEXTS, "y": [2, 0, 1], "words": TEXTS[::-1]}), tmp_path / "d.parquet")
    of = {"tokenizer": str(folder)}
    assert rows(read(tmp_path / "d.parquet", **of)) == IDS
    (batch,) = read(tmp_path / "d.parquet", **of, text="words", targets="y", count=2)
    assert rows([batch]) == IDS[:0:-1]
    assert batch["labels"].tolist() == [2, 0]
    assert read(tmp_path / "d.parquet", **of, length=5)[0]["input_ids"].shape == (4, 5)
    assert "texts need one" in refusal(tmp_path / "d.parquet")
    assert "there is no 'z'" in refusal(tmp_path / "d.parquet", **of, text="z")


def test_data_sets_on_disk(folder: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    datasets.Dataset.from_dict({"text": TEXTS, "label": [2, 0, 1]}).save_to_disk(tmp_path / "set")
    of = {"tokenizer": str(folder)}
    assert rows(read(tmp_path / "set", **of)) == IDS
    assert read(tmp_path / "set", **of, targets="label", batch_size=2)[1]["labels"].tolist() == [1]
    assert read(tmp_path / "set", **of, length=5)[0]["input_ids"].shape == (4, 5)


def test_the_tokenizer_of_the_model(folder: Path, tmp_path: Path) -> None:
    path, numbers = written(tmp_path / "d.txt", "\n".join(TEXTS)), tmp_path / "d.npz"
    np.savez(numbers, x=np.zeros(3), y=np.zeros(3))
    model = f"hf:{folder}"
    assert data_specs.with_tokenizer(str(path), {}, model) == {"tokenizer": model}
    assert data_specs.with_tokenizer(str(path), {"tokenizer": "t"}, model) == {"tokenizer": "t"}
    assert data_specs.with_tokenizer(str(numbers), {}, model) == {}
    assert data_specs.with_tokenizer(str(path), {}, "file.py:Net") == {}
    scores = pf.score([model], data=str(path), layers="lm_head")
    direct = pf.relative_flatness(word_models.llama(), data=read(path, tokenizer=model))
    assert scores[model, "relative_flatness"].value == direct.value
    assert (
        scores[model, "relative_flatness"].value
        == pf.score({"a": model}, data=str(path), layers="lm_head")["a", "relative_flatness"].value
    )
