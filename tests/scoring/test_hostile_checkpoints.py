"""Damaged checkpoints are rows with their error, and nothing in a hostile one is run: short forms of the soak's."""

import contextlib
import pickle
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import pyflatness as pf
from pyflatness.report import arrays
from pyflatness.scoring import checkpoints, data_specs
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

    assert error(corrupted.safe(state)[:3000], "safetensors").startswith("no safetensors file, or a damaged one: ")
    whole = corrupted.archive(state)
    for content in (whole[:3000], whole[:-400] + bytes(400)):
        assert error(content, "pt") == "a damaged torch checkpoint: the archive's end, with its directory, is missing"
    assert error(b"", "pt") == "no torch checkpoint, or a damaged one: it is empty"
    assert error(b"epoch,loss\n1,0.5\n", "pt") == "no torch checkpoint, or a damaged one: it cannot be unpickled"


def test_the_set_is_hostile(tmp_path: Path) -> None:
    """Read as pickles are, its files do make the folder."""
    content = hostile.calls(tmp_path / "marker")["protocol 0, no archive"]
    with hostile.watched() as reports:
        assert pickle.loads(content) is None
    assert (tmp_path / "marker").is_dir()
    assert reports


def test_nothing_in_a_file_is_run(tmp_path: Path) -> None:
    marker, tensors, messages = tmp_path / "marker", [], []
    files = hostile.calls(marker)
    with hostile.watched() as reports:
        for name, content in files.items():
            (tmp_path / "x.pt").write_bytes(content)
            try:
                state = checkpoints.read(tmp_path / "x.pt").state
            except pf.errors.InputError as error:
                messages.append(str(error))
            else:
                tensors.append(name)
                assert all(type(tensor) is torch.Tensor for tensor in state.values())
            assert not marker.exists(), name
    assert reports == []
    advised = [message for message in messages if "weights_only" in message]  # to load it unsafely
    assert all("but torch.nn.modules.linear.Linear; if it is a whole model" in message for message in advised)
    assert {name.removesuffix(", no archive") for name in tensors} == {"a pickle in a scalar of numpy"}


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Leave this process half a GiB of memory more than it has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**29, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_a_torch_whose_reader_has_holes_reads_no_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"a": torch.ones(2)}
    (tmp_path / "x.safetensors").write_bytes(corrupted.safe(state))
    torch.save(state, tmp_path / "x.pt")
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)("2.9.1+cpu"))
    assert checkpoints.read(tmp_path / "x.safetensors").state["a"].equal(state["a"])
    with pytest.raises(pf.errors.InputError, match=r"torch 2.9.1\+cpu: .*CVE-2026-24747\); save it as .safetensors"):
        checkpoints.read(tmp_path / "x.pt")


def test_bombs_are_errors_before_they_take_memory(tmp_path: Path) -> None:
    for name, content in hostile.bombs().items():
        (tmp_path / "x.pt").write_bytes(content)
        with limited(), pytest.raises(pf.errors.InputError):
            print(name, checkpoints.read(tmp_path / "x.pt"))
    torch.save({"a": torch.ones(2)}, tmp_path / "x.pt")
    assert checkpoints.read(tmp_path / "x.pt").state["a"].sum() == 2


def test_archives_of_arrays_that_claim_all_memory_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = np.zeros((8, 2**22), dtype=np.uint8)
    np.savez_compressed(tmp_path / "x.npz", inputs=zeros, targets=np.arange(8))
    assert data_specs.read_npz(tmp_path / "x.npz")[0].shape == zeros.shape  # a little more than the file's size is fine
    monkeypatch.setattr(arrays, "_MORE", 2**24)
    monkeypatch.setattr(np.lib.npyio.NpzFile, "__getitem__", None)  # nothing is read
    for read in (data_specs.read_npz, pf.results.Landscape.from_npz):
        with pytest.raises(pf.errors.InputError, match=r"claim 33\d+ bytes in a file of \d+; .*np.savez"):
            read(tmp_path / "x.npz")


@pytest.mark.parametrize(
    "name", ["model.safetensors.index.json", "x.pt", "x.safetensors", "pytorch_model.bin.index.json"]
)
def test_nested_brackets_are_the_error_of_one_checkpoint(name: str, tiny: str) -> None:
    folder = Path(tiny).parent / "nested"
    folder.mkdir()
    (folder / name).write_text("[" * 10**5)
    torch.save(tiny_net(tiny, 0).state_dict(), folder.parent / "good.pt")
    assert status(*arguments_of(tiny, folder, folder.parent / "good.pt")) == 1
    rows = rows_of(tiny)
    assert [(Path(row["checkpoint"]).name, not row["error"]) for row in rows] == [(name, False), ("good.pt", True)]
