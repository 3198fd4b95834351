"""What the commands print and write: narrow terminals, other encodings, pipes that close, disks without space."""

import collections
import contextlib
import io
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import pyflatness as pf
from pyflatness import cli
from pyflatness.cli import demo, doctor, output
from pyflatness.scoring.units import Row
from support.score_runs import status

NETWORK = {
    **{"name": "mlp_1/a", "network": "mlp_1", "optimizer": "adam", "learning_rate": 0.005, "batch_size": 64, "seed": 3},
    **{"epochs": 17, "converged": True, "train_loss": 0.0499123, "test_loss": 0.123456, "test_accuracy": 0.961234},
    **{"gap": 0.0735437, "relative_flatness": 12.3456789, "relative_flatness_std": 0.00123456},
}
SCORED = Row("runs/a long name of a file.safetensors", "stage1.0.conv1", "relative_flatness", 0.367799, None, "head")


def _printed(command: Callable[[], object], width: int, monkeypatch, capsys) -> collections.Counter[str]:
    """The letters and digits that a command prints on a terminal of this width."""
    for name, value in {"FORCE_COLOR": "1", "NO_COLOR": "1", "TERM": "xterm", "COLUMNS": str(width)}.items():
        monkeypatch.setenv(name, value)
    command()
    out = re.sub(r"\x1b\[\d*m", "", capsys.readouterr().out)
    assert "…" not in out
    assert max(map(len, out.splitlines())) <= max(width, 80)
    return collections.Counter(character for character in out if character.isalnum())


@pytest.mark.parametrize(
    "command",
    [
        lambda: status("layers", "--model", "torch.nn:Linear", "--model-args", '{"in_features": 4, "out_features": 3}'),
        lambda: status("measures"),
        lambda: doctor.show(
            doctor._table([doctor.EngineCheck("avx512", doctor.torch.float64, 1.5e-13, "fused", 1e-12)])
        ),
        lambda: doctor.show(doctor._environment()),
        lambda: doctor.show(demo._table([NETWORK])),
        lambda: output.show_rows([SCORED]),
    ],
    ids=["layers", "measures", "doctor", "environment", "demo", "score"],
)
def test_nothing_is_cut_off_on_a_narrow_terminal(command, monkeypatch, capsys):
    wide = _printed(command, 400, monkeypatch, capsys)
    assert sum(wide.values()) > 20
    for width in (80, 40, 20):
        assert _printed(command, width, monkeypatch, capsys) == wide


def test_a_file_or_pipe_has_lines_of_one_width(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "20")
    output.show_rows([SCORED])
    out = capsys.readouterr().out
    assert "stage1.0.conv1  relative_flatness  0.3678" in " ".join(out.split(" "))
    assert "\x1b" not in out


def _run(*arguments: str, stdout: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pyflatness", *arguments]
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)


def test_other_encodings_get_escapes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    printed = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", printed)
        assert status("measures") == 0
    printed.flush()
    assert rb"\u03ba = \u03a3_{s,s'}" in printed.buffer.getvalue()
    assert capsys.readouterr().err == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_output_without_space_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """At the end of a process too, which writes what is still in the buffer."""
    said = "Error: the output cannot be written (No space left on device)\n"
    with Path("/dev/full").open("w") as full:
        done = _run("measures", stdout=full.fileno())
    assert (done.returncode, done.stderr) == (2, said)
    for arguments in (["measures", "--markdown"], ["--version"]):
        with Path("/dev/full").open("w") as full, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", full)
            with pytest.raises(SystemExit) as stop:
                cli.main(arguments)
        assert (stop.value.code, capsys.readouterr().err) == (2, said)


def test_a_pipe_that_closes_ends_in_silence() -> None:
    read, write = os.pipe()
    os.close(read)
    done = _run("measures", stdout=write)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


def test_faults_that_are_no_output_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        Path("/nowhere/at/all").read_text()

    monkeypatch.setattr("pyflatness.cli.measures.page", missing)
    with pytest.raises(FileNotFoundError):
        cli.main(["measures", "--markdown"])


@contextlib.contextmanager
def _space(bytes_: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_results_of_the_demo_are_whole_or_the_older_ones(tmp_path: Path) -> None:
    several = [NETWORK | {"name": f"mlp_1/{place}", "gap": 0.01 * place} for place in range(9)]
    demo.write(tmp_path, several, demo.correlated(several), seed=0)
    older = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert sorted(older) == ["results.csv", "results.json", "scatter.png"]
    with _space(1000), pytest.raises(pf.errors.InputError) as caught:
        demo.write(tmp_path, several, demo.correlated(several), seed=0)
    assert str(caught.value) == f"--out: {tmp_path / 'scatter.png'} cannot be written (File too large)"
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == older


def test_a_folder_in_the_place_of_a_result(tmp_path: Path) -> None:
    (tmp_path / "results.csv").mkdir()
    with pytest.raises(pf.errors.InputError, match=r"--out: .*results\.csv cannot be written \(Is a directory\)"):
        output.write_whole(tmp_path / "results.csv", b"rows")
    assert [path.name for path in tmp_path.iterdir()] == ["results.csv"]
