"""Checkpoints as training scripts leave them: single files, shards with an index, state dicts beside other things."""

import argparse
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import pyflatness as pf
from pyflatness.scoring import checkpoints

STATE = {"a.weight": torch.arange(6.0).reshape(2, 3), "a.bias": torch.tensor([0.5, -1.0])}


def same(one: checkpoints.State, other: checkpoints.State) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[name], other[name]) and one[name].dtype == other[name].dtype for name in one
    )


@pytest.mark.parametrize("ending", ["pt", "pth", "pth.tar", "ckpt", "bin"])
@pytest.mark.parametrize("holder", [None, "state_dict", "model_state_dict", "model"])
def test_pickles_under_the_keys_of_training_scripts(ending, holder, tmp_path: Path) -> None:
    path = tmp_path / f"x.{ending}"
    torch.save(STATE if holder is None else {"epoch": 3, holder: STATE, "optimizer": {"state": {}}}, path)
    found = checkpoints.read(path)
    assert same(found.state, STATE)
    assert found.metadata == ({} if holder is None else {"epoch": "3"})
    assert found.notes == ()


def test_what_stands_beside_the_weights(tmp_path: Path) -> None:
    content = {
        "epoch": 7,
        "pytorch-lightning_version": "2.5",
        "state_dict": STATE,
        "callbacks": {"ModelCheckpoint": {"best_model_score": torch.tensor(0.1), "dirpath": "/runs"}},
        "hyper_parameters": {"lr": 0.1, "name": "x", "layers": [1, 2]},
        "args": argparse.Namespace(batch_size=32, nesterov=True, out=Path("/runs")),
        "best": np.float64(0.25),
        "version": torch.__version__,
        "state_dict_ema": {name: tensor + 1 for name, tensor in STATE.items()},
    }
    torch.save(content, tmp_path / "x.ckpt")
    found = checkpoints.read(tmp_path / "x.ckpt")
    assert same(found.state, STATE)
    assert found.metadata == {
        **{"epoch": "7", "pytorch-lightning_version": "2.5", "lr": "0.1", "name": "x", "batch_size": "32"},
        **{"nesterov": "true", "version": str(torch.__version__)},
    }
    assert found.notes == ("the weights under 'state_dict' were taken, not those under 'state_dict_ema'",)


def test_numbers_of_every_kind_come_back_as_they_are(tmp_path: Path) -> None:
    torch.manual_seed(0)
    kinds = [torch.float64, torch.float16, torch.bfloat16, torch.complex128, torch.int64, torch.uint8, torch.bool]
    state = {str(kind): (100 * torch.randn(3, 5)).to(kind) for kind in [*kinds, torch.float8_e4m3fn]}
    state |= {"empty": torch.empty(0, 3), "scalar": torch.tensor(2.0), "transposed": torch.randn(4, 3).T}
    state |= {"view": (base := torch.randn(10))[2:5], "base": base, "again": base, "nan": torch.tensor(torch.nan)}
    torch.save(state, tmp_path / "x.pt")
    found = checkpoints.read(tmp_path / "x.pt").state
    assert found.keys() == state.keys()
    for name in state:
        assert torch.equal(
            *(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (found[name], state[name]))
        )
        assert found[name].dtype == state[name].dtype
        assert found[name].shape == state[name].shape


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_shards_with_an_index(kind: str, tmp_path: Path) -> None:
    name = {"safetensors": "model", "bin": "pytorch_model"}[kind]
    shards = {f"{name}-0000{k}-of-00002.{kind}": part for k, part in ((1, "a.weight"), (2, "a.bias"))}
    for shard, part in shards.items():
        (save_file if kind == "safetensors" else torch.save)({part: STATE[part]}, tmp_path / shard)
    index = tmp_path / f"{name}.{kind}.index.json"
    content = {"metadata": {"total_size": 32}, "weight_map": {part: shard for shard, part in shards.items()}}
    index.write_text(json.dumps(content))
    assert checkpoints.find([tmp_path]) == [index]
    found = checkpoints.read(index)
    assert same(found.state, STATE)
    assert found.metadata["total_size"] == "32"

    def error(**changes: object) -> str:
        index.write_text(json.dumps({**content, **changes}))
        with pytest.raises(pf.errors.InputError) as caught:
            checkpoints.read(index)
        return str(caught.value)

    first, second = shards
    assert (
        error(weight_map={**content["weight_map"], "b": first})
        == f"shard {first} lacks b, which the index says are in it"
    )
    assert "is no file beside it" in error(weight_map={"a.bias": "../elsewhere.safetensors"})
    assert "'weight_map'" in error(weight_map=3)
    (tmp_path / second).unlink()
    assert error() == f"1 of 2 shards are missing: {second}"
    (tmp_path / second).write_bytes(b"PK\x03\x04 and no more")
    assert error().startswith(f"shard {second}: ")


def test_hyperparameters_of_safetensors(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "x.safetensors", metadata={"lr": "0.1"})
    assert checkpoints.read(tmp_path / "x.safetensors").metadata == {"lr": "0.1"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "no state dict but a list"),
        ({"epoch": 3, "optimizer": {}}, "there are 'epoch', 'optimizer'"),
        ({"a": torch.eye(2).to_sparse()}, "a is no dense tensor of numbers"),
        ({"a": torch.ones(2, device="meta")}, "a is no dense tensor of numbers"),
    ],
)
def test_pickles_without_weights(content, message: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(pf.errors.InputError, match=message):
        checkpoints.read(tmp_path / "x.pt")


def test_notes_of_git_lfs(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n")
    with pytest.raises(pf.errors.InputError, match="git lfs pull"):
        checkpoints.read(tmp_path / "x.safetensors")


def test_what_is_expanded_takes_no_memory(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1).expand(2**28)}, tmp_path / "expanded.pt")  # 4 bytes in the file, a GiB as numbers
    with pytest.raises(pf.errors.InputError, match="a claims 1073741824 bytes and has 4"):
        checkpoints.read(tmp_path / "expanded.pt")


def test_weights_can_be_put_into_a_model_and_the_file_removed(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "x.pt")
    state = checkpoints.read(tmp_path / "x.pt").state
    (tmp_path / "x.pt").unlink()
    model = nn.ModuleDict({"a": nn.Linear(3, 2)})
    assert checkpoints.load(model, state) == ()
    assert torch.equal(model["a"].weight, STATE["a.weight"])
