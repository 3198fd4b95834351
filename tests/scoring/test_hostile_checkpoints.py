"""Damaged checkpoints are rows with their error, and nothing in a hostile one is run: short forms of the soak's."""

import pickle
from pathlib import Path

import pytest
import torch

import pyflatness as pf
from pyflatness.scoring import checkpoints, pickles
from support import corrupted, hostile
from support.score_runs import arguments_of, rows_of, status, tiny_net


def test_damaged_checkpoints_are_rows_with_their_error(tiny: str) -> None:
    state = tiny_net(tiny, 0).state_dict()
    files = corrupted.write(Path(tiny).parent, state, 2 * len(corrupted.DAMAGES))
    assert status(*arguments_of(tiny, *files)) == 1
    rows = rows_of(tiny)
    assert [row["checkpoint"] for row in rows] == [str(path) for path in files]
    assert [files[Path(row["checkpoint"])] for row in rows if not row["error"] or row["value"]] == []


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    torch.manual_seed(0)
    state = {"a": torch.randn(40, 30), "b": torch.zeros(30)}  # zeros throughout are no damage

    def error(content: bytes, ending: str) -> str:
        (tmp_path / f"x.{ending}").write_bytes(content)
        with pytest.raises(pf.errors.InputError) as caught:
            checkpoints.read(tmp_path / f"x.{ending}")
        return str(caught.value)

    whole = corrupted.safe(state)
    assert error(whole[:3000], "safetensors").endswith(f"; 3000 of {len(whole)} bytes are there")
    keep = corrupted.data_start(whole) + 4 * 100
    content = whole[:keep] + bytes(len(whole) - keep)
    assert error(content, "safetensors") == "damaged: a breaks off at number 100 of 1200, with zeros to the end"
    whole = corrupted.archive(state)
    assert error(whole[:3000], "pt").endswith("the archive has no directory at its end; its end is missing")
    content = whole[:-400] + bytes(400)
    assert error(content, "pt").endswith("its last 400 bytes are zeros")
    assert error(b"", "pt").endswith("the file is empty")


@pytest.mark.parametrize("zeros", [(slice(30, None),), (slice(None), slice(20, None))])
def test_zeros_that_are_no_damage(zeros: tuple[slice, ...], tmp_path: Path) -> None:
    """Whole rows, as of an embedding's unused tokens; and as many in every row, as of unused inputs."""
    torch.manual_seed(0)
    weight = torch.randn(40, 30)
    weight[zeros] = 0
    (tmp_path / "x.safetensors").write_bytes(corrupted.safe({"a": weight, "b": torch.zeros(9)}))
    assert torch.equal(checkpoints.read(tmp_path / "x.safetensors").state["a"], weight)


def test_zeros_of_pruning_are_no_damage(tmp_path: Path) -> None:
    torch.manual_seed(0)
    for seed in range(100):
        weight = torch.randn(200, 50)
        weight[torch.rand(200, 50) < 0.95] = 0
        (tmp_path / f"{seed}.safetensors").write_bytes(corrupted.safe({"a": weight}))
        checkpoints.read(tmp_path / f"{seed}.safetensors")


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program, log = hostile.watched_program(tmp_path)
    monkeypatch.setattr(pickles, "_PROGRAM", program)
    reader = pickles.Reader()
    monkeypatch.setattr(pickles, "read", reader.read)
    yield log
    reader.close()


def test_the_set_is_hostile(tmp_path: Path) -> None:
    """Read as pickles are, its files do make the folder."""
    content = hostile.calls(tmp_path / "marker")["protocol 0, no archive"]
    assert pickle.loads(content) is None
    assert (tmp_path / "marker").is_dir()


def test_nothing_in_a_file_is_run(watched: Path, tmp_path: Path) -> None:
    marker, tensors, messages = tmp_path / "marker", [], []
    for name, content in hostile.calls(marker).items():
        (tmp_path / "x.pt").write_bytes(content)
        try:
            state = checkpoints.read(tmp_path / "x.pt").state
        except pf.errors.InputError as error:
            messages.append(str(error))
        else:
            tensors.append(name)
            assert all(type(tensor) is torch.Tensor for tensor in state.values())
        assert not marker.exists(), name
    assert watched.read_text() == ""
    assert "weights_only" not in "".join(messages)  # torch's advice to load it unsafely
    assert {name.removesuffix(", no archive") for name in tensors} == {"a pickle in a scalar of numpy"}


def test_bombs_are_errors(watched: Path, tmp_path: Path) -> None:
    for name, content in hostile.bombs().items():
        if name not in hostile.SLOW:
            (tmp_path / "x.pt").write_bytes(content)
            with pytest.raises(pf.errors.InputError):
                print(name, checkpoints.read(tmp_path / "x.pt"))
    torch.save({"a": torch.ones(2)}, tmp_path / "x.pt")
    assert checkpoints.read(tmp_path / "x.pt").state["a"].sum() == 2
