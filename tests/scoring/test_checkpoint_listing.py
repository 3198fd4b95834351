"""Which checkpoints files, folders and patterns name, and in what order."""

import json
from pathlib import Path

import pytest

from pyflatness.scoring import checkpoints


def made(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def found(folder: Path, *paths: str) -> list[str]:
    return [str(path.relative_to(folder)) for path in checkpoints.find([folder / path for path in paths])]


def test_folders_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    made(
        tmp_path, *(f"run{r}/epoch_{e}.safetensors" for r in (10, 9) for e in (10, 9, 100)), "run9/log.txt", ".git/x.pt"
    )
    every = [f"run{r}/epoch_{e}.safetensors" for r in (9, 10) for e in (9, 10, 100)]
    assert found(tmp_path, ".") == found(tmp_path, "run*") == found(tmp_path, "**/*.safetensors") == every
    assert found(tmp_path, "run10/*_10*.safetensors", "run9") == [*every[4:], *every[:3]]
    assert found(tmp_path, "run10/epoch_9.safetensors", "run10") == every[3:]  # each once


def test_fractions_in_names(tmp_path: Path) -> None:
    names = ["lr0.005_batch16.pt", "lr0.005_batch128.pt", "lr0.02.pt", "lr0.1.pt", "lr1.pt", "lr10.pt"]
    made(tmp_path, *reversed(names))
    assert found(tmp_path, ".") == names


def test_what_trainers_save_beside_the_weights(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    made(tmp_path, *(f"checkpoint-{n}/{name}" for n in (500, 1000) for name in {*index["weight_map"].values()}))
    for n in (500, 1000):
        (tmp_path / f"checkpoint-{n}" / "model.safetensors.index.json").write_text(json.dumps(index))
        beside = "optimizer.pt scheduler.pt rng_state.pth rng_state_0.pth scaler.pt training_args.bin config.json"
        made(tmp_path, *(f"checkpoint-{n}/{name}" for name in [*beside.split(), "pytorch_model.bin"]))
    every = [f"checkpoint-{n}/model.safetensors.index.json" for n in (500, 1000)]
    assert found(tmp_path, ".") == found(tmp_path, "checkpoint-*") == found(tmp_path, "*/*") == every
    assert found(tmp_path, "checkpoint-500/optimizer.pt") == ["checkpoint-500/optimizer.pt"]  # asked for by its name


def test_a_damaged_index_stays_with_what_could_be_its_shards(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin.index.json").write_text("[1")
    made(tmp_path, "pytorch_model-00001-of-00002.bin")
    assert len(found(tmp_path, ".")) == 2


@pytest.mark.parametrize("name", ["missing.pt", "empty", "*.safetensors", "[x"])
def test_what_is_not_there_is_kept(name: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert found(tmp_path, name) == [name]


def test_names_with_the_characters_of_patterns(tmp_path: Path) -> None:
    made(tmp_path, "lr=[0.1].pt", "lr=0.pt")
    assert found(tmp_path, "lr=[0.1].pt") == ["lr=[0.1].pt"]


def test_endings_and_folders_that_link_to_themselves(tmp_path: Path) -> None:
    made(tmp_path, "a.pt", "b.pth", "c.pth.tar", "d.ckpt", "e.bin", "f.safetensors", "g.npy", "h.tar", "i.index.json")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert found(tmp_path, ".") == ["a.pt", "b.pth", "c.pth.tar", "d.ckpt", "e.bin", "f.safetensors"]
