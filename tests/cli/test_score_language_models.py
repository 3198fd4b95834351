"""``pyflatness score --model hf:…``: language models and their texts, without a loss to be named."""

import csv
import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import pyflatness as pf
from pyflatness.scoring import text_data
from support import word_models
from support.score_runs import status

pytest.importorskip("transformers", reason="transformers is not installed")
STORIES = Path(__file__).parents[3] / "shared" / "models" / "stories260K"
TEXTS = ["the cat sat on the mat", "a dog ran", "it was happy and then the cat ran under the hill"]


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return [*csv.DictReader(file)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return word_models.saved(tmp_path / "model")


@pytest.fixture
def data(tmp_path: Path) -> str:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS), encoding="utf-8")
    return str(path)


def test_a_model_and_texts(folder: Path, data: str, tmp_path: Path) -> None:
    """Loss and accuracy are those of the model itself; values are those of the call from Python."""
    out = tmp_path / "out.csv"
    layers, measures = ["lm_head", "*.v_proj"], ["relative_flatness", "trace"]
    chosen = [part for layer in layers for part in ("--layers", layer)]
    arguments = (*chosen, "--measures", ",".join(measures), "--probes", "3")
    assert status("score", "--model", f"hf:{folder}", "--data", data, "--out", str(out), *arguments) == 0
    net = word_models.llama()
    (batch,) = text_data.batches(TEXTS, None, tokenizer=str(folder))
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    with torch.no_grad():
        returned = net(**batch, labels=labels)
    right = (returned.logits[:, :-1].argmax(-1) == labels[:, 1:]).sum() / (labels[:, 1:] != -100).sum()
    report = pf.measure(net, data=[batch], layers=layers, measures=measures, probes=3)
    found = rows(out)
    assert len(found) == 6
    for row in found:
        assert row["checkpoint"] == f"hf:{folder}"
        assert float(row["loss"]) == pytest.approx(float(returned.loss), rel=1e-6)
        assert float(row["accuracy"]) == pytest.approx(float(right))
        key = (row["layer"], row["measure"]) if row["layer"] else row["measure"]
        assert float(row["value"]) == pytest.approx(report[key].value, rel=1e-6)


def test_checkpoints_of_a_model_in_a_store(folder, data, tmp_path, capsys):
    """Files, and an index of shards; a folder that was moved is the same model."""
    for seed in (1, 2):
        word_models.saved(tmp_path / "runs" / str(seed), seed, **({"max_shard_size": "3KB"} if seed == 2 else {}))

    def run(model: Path, *more: str) -> str:
        arguments = ("--data", data, "--data-args", '{"length": 7}', "--store", str(tmp_path / "runs.sqlite"), *more)
        arguments = (*arguments, "--executor", "serial", "--layers", "lm_head")
        assert status("score", "--model", f"hf:{model}", *arguments) == 0
        return capsys.readouterr().out

    checkpoints = str(tmp_path / "runs")
    assert "2 checkpoints, 2 units to do" in run(folder, checkpoints)
    shutil.move(folder, tmp_path / "elsewhere")
    assert "2 checkpoints, 0 units to do" in run(tmp_path / "elsewhere", checkpoints)
    assert "1 checkpoints, 1 units to do" in run(tmp_path / "elsewhere")
    assert "1 checkpoints, 0 units to do" in run(tmp_path / "elsewhere")
    assert status("store", "export", str(tmp_path / "runs.sqlite"), "--out", str(tmp_path / "runs.csv")) == 0
    batches = text_data.batches(TEXTS, None, tokenizer=str(tmp_path / "elsewhere"), length=7)
    found = {Path(row["checkpoint"]).name: float(row["value"]) for row in rows(tmp_path / "runs.csv")}
    for seed, name in ((1, "model.safetensors"), (2, "model.safetensors.index.json"), (0, "elsewhere")):
        assert found[name] == pytest.approx(pf.relative_flatness(word_models.llama(seed), data=batches).value, rel=1e-6)


def test_too_many_passes_are_refused_before_anything_is_measured(folder, data, tmp_path, capsys):
    out, given = tmp_path / "out.csv", ("--model", f"hf:{folder}", "--data", data)
    assert status("score", *given, "--max-passes", "50", "--out", str(out)) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "--layers: layer 'model.embed_tokens': its exact Hessian value takes" in said
    assert "more than --max-passes 50; pass --probes 8 for values that are sampled" in said
    assert not out.exists()
    assert (
        status("score", *given, "--layers", "*.v_proj", "--max-passes", "50", "--probes", "2", "--out", str(out)) == 0
    )
    assert status("score", *given, "--layers", "lm_head", "--max-passes", "1", "--out", str(out)) == 0
    assert len(rows(out)) == 1


def test_the_example_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What docs/models.md shows can be run as it stands, and gives what it says."""
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    part = page[page.index("### From the command line") :]
    monkeypatch.chdir(tmp_path)
    exec(part.split("```python\n")[1].split("```")[0], {})
    command = part[part.index("    $ pyflatness ") :].split("tiny.csv")[0].replace("\\\n", " ") + "tiny.csv"
    assert status(*shlex.split(command)[2:]) == 0
    shown = re.findall(r"^ +hf:tiny +(\S+) +relative_flatness +([\d.e-]+)", part, re.MULTILINE)
    assert {row["layer"]: float(row["value"]) for row in rows(Path("tiny.csv")) if row["layer"]} == {
        layer: pytest.approx(float(value), rel=0.01) for layer, value in shown
    }
    assert len(shown) == 3


@pytest.mark.soak
def test_workers_make_the_model_and_its_tokens_by_themselves(folder: Path, data: str, tmp_path: Path) -> None:
    for seed in (1, 2):
        word_models.saved(tmp_path / "runs" / str(seed), seed)
    found = {}
    for how in (["--executor", "serial"], ["--workers", "2"]):
        store, out = tmp_path / f"{how[1]}.sqlite", tmp_path / f"{how[1]}.csv"
        arguments = ("--model", f"hf:{folder}", "--data", data, "--store", str(store), *how, str(tmp_path / "runs"))
        arguments += ("--layers", "lm_head")
        assert status("score", *arguments) == 0
        assert status("store", "export", str(store), "--out", str(out)) == 0
        found[how[1]] = {row["checkpoint"]: row["value"] for row in rows(out)}
    assert len(found["2"]) == 2
    assert found["2"] == found["serial"]


def test_what_cannot_be_done(folder, data, tmp_path, tiny, capsys):
    def refusal(*arguments: str) -> str:
        assert status("score", *arguments, "--store", str(tmp_path / "runs.sqlite")) != 0
        assert not (tmp_path / "runs.sqlite").exists()
        return " ".join(capsys.readouterr().err.split())

    model = ("--model", f"hf:{folder}", "--data", data)
    assert "has random weights; pass CHECKPOINTs of it" in refusal(*model, "--model-args", '{"weights": false}')
    assert "--shard and --workers go with several CHECKPOINTs" in refusal(*model, "--shard", "1/2")
    assert "trust_remote_code" in refusal(*model, "--model-args", '{"trust_remote_code": true}')
    of_own = ("--model", f"{tiny}:Tiny", "--data", f"{tiny}:data")
    assert "--loss: the model is none of Hugging Face's" in refusal(*of_own)
    assert "texts need one" in refusal("--model", f"{tiny}:Tiny", "--data", data, "--loss", "cross_entropy")


@pytest.mark.skipif(not STORIES.is_dir(), reason="the model that tells stories is not here")
def test_a_model_that_tells_stories(tmp_path: Path) -> None:
    """Its published loss on its own stories is 1.27; the head's value is the formula's on its features."""
    out = tmp_path / "out.csv"
    arguments = ("--data", str(STORIES / "stories_tokens.npz"), "--data-args", '{"count": 8, "batch_size": 3}')
    assert status("score", "--model", f"hf:{STORIES}", *arguments, "--layers", "lm_head", "--out", str(out)) == 0
    (row,) = rows(out)
    from transformers import LlamaForCausalLM

    net = LlamaForCausalLM.from_pretrained(STORIES)
    tokens = torch.from_numpy(np.load(STORIES / "stories_tokens.npz")["input_ids"][:8]).long()
    with torch.no_grad():
        loss = net(tokens, labels=tokens).loss
        features = net.model(tokens).last_hidden_state[:, :-1]
    assert float(row["loss"]) == pytest.approx(float(loss), rel=1e-5)
    assert float(row["loss"]) == pytest.approx(1.27, abs=0.1)
    expected = pf.head_flatness(features, net.lm_head.weight, targets=tokens[:, 1:])
    assert (row["layer"], row["exact"]) == ("lm_head", "True")
    assert float(row["value"]) == pytest.approx(expected.value, rel=1e-5)


def test_networks_without_model(folder: Path, data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    arguments = "--data", data, "--layers", "lm_head", "--json"
    assert status("score", f"hf:{folder}", f"hf:{other}", *arguments) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["checkpoint"] for row in rows] == [f"hf:{folder}", f"hf:{other}"]
    assert rows[0]["value"] == rows[1]["value"] > 0
    assert status("score", f"hf:{folder}", "last.pt", *arguments) == 2
    assert "Missing option '--model': what makes the network of last.pt" in capsys.readouterr().err
