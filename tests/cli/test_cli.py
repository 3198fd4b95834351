"""The command line: doctor's self-check, correlations, and errors that a user can read."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import pyflatness as pf
from pyflatness.cli import demo, doctor, output
from pyflatness.contractions.backends import compiled, cuda
from support.score_runs import status


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pyflatness", *arguments], capture_output=True, text=True, encoding="utf-8", check=False
    )


def test_doctor_in_a_process() -> None:
    done = _run("doctor")
    assert done.returncode == 0, done.stderr
    for word in (
        pf.__version__,
        torch.__version__,
        "CUDA",
        "CUDA kernels",
        "threads",
        "float32",
        "float64",
        "OK",
    ):
        assert word in done.stdout
    for word in compiled.engines():
        assert word in done.stdout
    assert "FAILED" not in done.stdout


def test_version_and_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("--version") == 0
    assert capsys.readouterr().out == f"pyflatness, version {pf.__version__}\n"
    assert status("docter") == 2
    assert "docter" in capsys.readouterr().err


def test_self_check_covers_every_engine_within_budget() -> None:
    checks = doctor.self_check(seed=1)
    engines = [*compiled.engines(), "reference"]
    assert [(c.engine, c.dtype) for c in checks] == [(e, d) for e in engines for d in (torch.float32, torch.float64)]
    assert all(check.ok and check.error > 0 for check in checks), checks


def test_self_check_on_cuda(cuda_device: torch.device) -> None:
    for dtype in (torch.float32, torch.float64):
        check = doctor._check("CUDA", cuda, dtype, 1)
        assert check.ok, check
        assert check.error > 0


def test_doctor_says_whether_the_cuda_kernels_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "missing", "no nvcc")
    assert doctor._facts()["CUDA kernels"] == "not built (no nvcc)"
    monkeypatch.setattr(cuda, "missing", "")
    assert doctor._facts()["CUDA kernels"] == "built"


def test_self_check_heads_are_flat_and_peaked() -> None:
    generator = torch.Generator().manual_seed(0)
    rest = []
    for peak in (0.0, 14.0):
        features, weight, bias = doctor._head(5, 2, 3, peak, torch.float64, generator)
        rest.append(1 - (features @ weight.t() + bias).softmax(dim=1).amax(dim=1))
    assert rest[0].min() > 0.1
    assert rest[1].max() < 1e-5


@pytest.mark.parametrize("wrong", [1 + 2e-5, math.nan])
def test_doctor_fails_on_wrong_numbers(wrong, monkeypatch, capsys):
    right = doctor.SoftmaxVariance.__call__
    monkeypatch.setattr(doctor.SoftmaxVariance, "__call__", lambda self, features: right(self, features) * wrong)
    assert not any(check.ok for check in doctor.self_check())
    assert status("doctor") == 1
    assert "FAILED" in capsys.readouterr().out


def test_doctor_without_compiled_kernels(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(compiled, "missing", "the compiled kernels are not here [for a test]")
    assert status("doctor") == 0
    out = capsys.readouterr().out
    assert "Warning" in out
    assert "not here" in out
    assert "[for a test]" in " ".join(out.split())
    assert [check.engine for check in doctor.self_check()] == ["reference", "reference"]


@pytest.mark.parametrize("missing", ["sklearn", "matplotlib"])
def test_demo_without_its_extra(missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    message = str(status("demo", "--out", str(tmp_path / "out")))
    assert message == f"Error: the demo needs {missing}: pip install 'pyflatness[demo]'"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("path", ["file", "file/below"])
def test_demo_refuses_an_unwritable_folder_before_training(path, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(demo, "digits", lambda seed: pytest.fail("work began"))
    assert str(status("demo", "--out", str(tmp_path / path))).startswith(f"Error: --out {tmp_path / path}: ")


def test_the_folder_is_tried_and_left_empty(tmp_path: Path) -> None:
    output.prepare_folder(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []
