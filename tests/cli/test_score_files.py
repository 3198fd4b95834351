"""``pyflatness score`` and files: odd names and links, damaged archives, what ``--out`` may overwrite, full disks."""

import csv
import io
import os
import random
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import pyflatness as pf
from pyflatness.cli import output
from pyflatness.scoring import checkpoints
from pyflatness.scoring.units import csv_line
from pyflatness.statistics import tables
from support.score_runs import READS_PICKLES, arguments_of, built_mark, needs_pickles, rows_of, saved, status, tiny_net

HOSTILE = ("=cmd|' &C calc'!A1.safetensors", "@sum.safetensors", "\x1b[31mred\n.safetensors", "'quoted'.safetensors")


def test_links_to_themselves_and_names_that_are_not_utf8_stop_nothing(tiny: str) -> None:
    folder = Path(tiny).parent
    first, last = saved(tiny, 1, "first.safetensors"), saved(tiny, 2, "last.safetensors")
    (loop := folder / "loop.safetensors").symlink_to("loop.safetensors")
    os.mkfifo(pipe := folder / "pipe.safetensors")
    unnameable = [Path(os.fsdecode(os.fsencode(folder) + name)) for name in (b"/\xff.safetensors", b"/\xff.pt")]
    try:
        unnameable[0].write_bytes(first.read_bytes())
    except OSError:
        pytest.skip("this file system takes no names that are not UTF-8")
    torch.save(tiny_net(tiny, 1).state_dict(), unnameable[1])
    every = [first, loop, pipe, *unnameable, last]
    assert status(*arguments_of(tiny, *every)) == 1
    rows = rows_of(tiny)
    assert [row["checkpoint"] for row in rows] == [str(path) for path in every]
    errors = [row["error"] for row in rows]
    assert "cannot be read" in errors[1]
    assert "no regular file" in errors[2]
    assert "utf-8" in errors[3].lower()
    assert [bool(row["value"]) for row in rows] == [True, False, False, False, READS_PICKLES, True]
    if READS_PICKLES:
        assert rows[4]["value"] == rows[0]["value"]


@pytest.mark.parametrize("link", [os.link, os.symlink])
def test_a_link_to_a_checkpoint_is_not_overwritten(link, tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = saved(tiny, 0, "a.safetensors")
    content = checkpoint.read_bytes()
    link(checkpoint, out := checkpoint.with_name("scores.csv"))
    built_mark(tiny).unlink()
    assert status(*arguments_of(tiny, saved(tiny, 1, "b.safetensors"), checkpoint, "--out", out)) == 2
    assert f"the same file as {checkpoint}" in "".join(capsys.readouterr().err.split("\n"))
    assert checkpoint.read_bytes() == content


def _equal(one: checkpoints.State, other: checkpoints.State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_no_altered_weight_is_read_from_an_archive(tiny: str) -> None:
    state, path = tiny_net(tiny, 0).state_dict(), Path(tiny).with_name("a.pt")
    torch.save(state, path)
    content, rng = path.read_bytes(), random.Random(0)
    refused = 0
    for place in rng.sample(range(len(content)), 300):
        flipped = bytearray(content)
        flipped[place] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
        try:
            assert _equal(checkpoints.read(path).state, state), place
        except pf.errors.InputError:
            refused += 1
    assert refused > 100  # the others are in the padding between the archive's parts
    values = content.index(state["body.weight"].numpy().tobytes())
    path.write_bytes(content[:values] + bytes([content[values] ^ 1]) + content[values + 1 :])
    with pytest.raises(pf.errors.InputError, match=r"damaged.* the checksum of a/data/0 is wrong"):
        checkpoints.read(path)


@needs_pickles
def test_files_without_checksums_are_read(tiny: str) -> None:
    state, path = tiny_net(tiny, 0).state_dict(), Path(tiny).with_name("a.pt")
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(state, path)
    finally:
        torch.serialization.set_crc32_options(True)
    assert _equal(checkpoints.read(path).state, state)
    torch.save(state, path, _use_new_zipfile_serialization=False)
    assert _equal(checkpoints.read(path).state, state)


def test_names_reach_terminal_and_table_as_text(tiny, monkeypatch, capsys):
    monkeypatch.chdir(Path(tiny).parent)
    for name in HOSTILE:
        save_file(tiny_net(tiny, 0, "Odd").state_dict(), name)
    missing = "\x1b]0;title\x07.safetensors"
    assert status(*arguments_of(tiny, *HOSTILE, missing, "--layers=*", "--model", f"{tiny}:Odd")) == 1
    out, err = capsys.readouterr()
    assert all(line.isprintable() for line in (out + err).splitlines())
    for word in (r"\x1b[31mred\n", r"=\x1b[2J", r"\x1b]0;title\x07.safetensors: there is no such file"):
        assert word in out

    path = Path("out/scores.csv")
    content = path.read_text(encoding="utf-8")
    assert all(line.isprintable() for line in content.splitlines())
    for line in csv.reader(io.StringIO(content)):
        assert not any(cell.startswith(("=", "+", "-", "@", "\t", "\r")) for cell in line)
    rows = rows_of(tiny)
    assert [row["checkpoint"] for row in rows] == [name for name in (*HOSTILE, missing) for _ in range(3)]
    assert [row["layer"] for row in rows] == ["=\x1b[2J", "-1", ""] * (len(HOSTILE) + 1)
    assert tables.read(path).names == (*HOSTILE, missing)


def test_numbers_are_written_as_they_are() -> None:
    numbers = [-1.5, -3, 1e-300, True, None, 0.1 + 0.2]
    assert csv_line(numbers) == b"-1.5,-3,1e-300,True,,0.30000000000000004\n"


def _run(tiny: str, *rest: object, limit: int) -> subprocess.CompletedProcess[str]:
    """In a process whose files may have so many bytes."""
    return subprocess.run(
        [sys.executable, "-m", "pyflatness", *arguments_of(tiny, *rest)],
        **{"capture_output": True, "text": True, "check": False},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )


def test_a_full_disk_leaves_whole_rows(tiny: str) -> None:
    files = [saved(tiny, seed, f"{seed}.safetensors") for seed in range(4)]
    assert status(*arguments_of(tiny, *files)) == 0
    path = Path(tiny).with_name("out") / "scores.csv"
    lines = path.read_bytes().splitlines(keepends=True)
    limit = sum(map(len, lines[:3])) + 40  # two rows and a part of the third; rows differ in length by their seconds
    done = _run(tiny, *files, limit=limit)
    assert path.read_bytes().endswith(b"\n")
    rows = rows_of(tiny)
    assert [row["checkpoint"] for row in rows] == [str(file) for file in files[:2]]
    assert all(row["value"] and row["error"] == "" for row in rows)
    assert done.returncode == 2
    assert done.stderr == f"Error: --out {path}: cannot be written (File too large); it has 2 rows\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_device_without_space(tiny: str) -> None:
    message = status(*arguments_of(tiny, saved(tiny, 0, "a.safetensors"), "--out", "/dev/full"))
    assert message == "Error: --out /dev/full: cannot be written (No space left on device); it has 0 rows"


class _Interrupted(io.FileIO):
    """Takes three bytes at a time, and Ctrl-C comes with the third."""

    calls = 0

    def write(self, content) -> int:
        self.calls += 1
        if self.calls == 3:
            raise KeyboardInterrupt
        return super().write(content[:3])


def test_an_interrupt_leaves_no_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b"whole\n")
    with _Interrupted(path, "r+") as file:
        file.seek(0, os.SEEK_END)
        with pytest.raises(KeyboardInterrupt):
            output.append_whole(file, b"0123456789\n")
    assert path.read_bytes() == b"whole\n"
    with io.FileIO(path, "r+") as file:
        file.seek(0, os.SEEK_END)
        output.append_whole(file, b"0123456789\n")
    assert path.read_bytes() == b"whole\n0123456789\n"


def test_paths_that_are_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").touch()
    (tmp_path / "b").touch()
    assert output.is_same_file(Path("a"), tmp_path / "a")
    assert not output.is_same_file(Path("a"), Path("b"))
    assert output.is_same_file(Path("missing"), tmp_path / "missing")
    assert not output.is_same_file(Path("a"), Path("missing"))
