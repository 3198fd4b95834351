"""The command line: doctor's self-check, the demo's numbers and files, and errors that a user can read."""

import csv
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

import pyflatness as pf
from pyflatness import cli
from pyflatness.cli import demo, demo_networks, doctor
from pyflatness.contractions import backends, compiled, cuda
from pyflatness.statistics.coefficients import STATISTICS
from pyflatness.statistics.correlation import correlation

TINY = [
    demo_networks.Recipe("MLP-1", "Adam", 0.005, 64, seed=3),
    demo_networks.Recipe("CNN", "SGD", 0.02, 64, seed=4),
    demo_networks.Recipe("MLP-2", "SGD", 0.02, 64, seed=5),
]


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pyflatness", *arguments], capture_output=True, text=True, encoding="utf-8", check=False
    )


def _status(*arguments: str) -> object:
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    return str(exit_.value) if str(exit_.value).startswith("Error: ") else exit_.value.code or 0


@pytest.fixture
def one_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_networks, "MAX_EPOCHS", 1)


@pytest.fixture
def digits() -> demo_networks.Digits:
    return demo_networks.load_digits(0)


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
    for word in compiled.instruction_sets():
        assert word in done.stdout
    assert "FAILED" not in done.stdout


def test_version_and_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert _status("--version") == 0
    assert capsys.readouterr().out == f"pyflatness, version {pf.__version__}\n"
    assert _status("docter") == 2
    assert "docter" in capsys.readouterr().err


def test_self_check_covers_every_engine_within_budget() -> None:
    checks = doctor.self_check(seed=1)
    engines = [*compiled.instruction_sets(), "reference"]
    assert [(c.engine, c.dtype) for c in checks] == [(e, d) for e in engines for d in (torch.float32, torch.float64)]
    assert all(check.ok and check.error > 0 for check in checks), checks


def test_self_check_on_cuda(cuda_device: torch.device) -> None:
    for dtype in (torch.float32, torch.float64):
        check = doctor._check("CUDA", cuda, dtype, 1, cuda_device.type)
        assert check.ok, check
        assert check.error > 0


def test_doctor_says_whether_the_cuda_kernels_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyflatness.contractions.cuda_device._MISSING", "no nvcc")
    assert doctor._facts()["CUDA kernels"] == "not built (no nvcc)"
    monkeypatch.setattr("pyflatness.contractions.cuda_device._MISSING", "")
    for works, said in (
        ((), "backend='auto' does not take them, backend='compiled' asks for them"),
        (("layers", "heads"), "backend='auto' takes them for heads and layers only, backend='compiled' asks for them"),
        (backends.WORKS, "built"),
    ):
        monkeypatch.setattr(cuda, "AUTOMATIC", frozenset(works))
        assert doctor._facts()["CUDA kernels"].endswith(said)


def test_self_check_heads_are_flat_and_peaked() -> None:
    generator = torch.Generator().manual_seed(0)
    rest = []
    for peak in (0.0, 14.0):
        features, weight, bias = doctor._head(5, 2, 3, peak, torch.float64, generator)
        rest.append(1 - (features @ weight.t() + bias).softmax(dim=1).amax(dim=1))
    assert rest[0].min() > 0.1
    assert rest[1].max() < 1e-5


@pytest.mark.parametrize("wrong", [1 + 2e-5, math.nan])
def test_doctor_fails_on_wrong_numbers(
    wrong: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = doctor.SoftmaxVariance.__call__
    monkeypatch.setattr(doctor.SoftmaxVariance, "__call__", lambda self, features: right(self, features) * wrong)
    assert not any(check.ok for check in doctor.self_check())
    assert _status("doctor") == 1
    assert "FAILED" in capsys.readouterr().out


def test_doctor_without_compiled_kernels(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(compiled, "_C", None)
    monkeypatch.setattr(compiled, "_MISSING", "the compiled kernels are not here [for a test]")
    assert _status("doctor") == 0
    out = capsys.readouterr().out
    assert "Warning" in out
    assert "not here" in out
    assert "[for a test]" in " ".join(out.split())
    assert [check.engine for check in doctor.self_check()] == ["reference", "reference"]


@pytest.mark.parametrize("missing", ["sklearn", "matplotlib"])
def test_demo_without_its_extra(missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    message = str(_status("demo", "--out", str(tmp_path / "out")))
    assert message == f"Error: the demo needs {missing}: pip install 'pyflatness[demo]'"
    assert not (tmp_path / "out").exists()


def test_an_error_in_a_process_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = _run("demo", "--out", str(tmp_path / "file"))
    assert done.returncode == 2
    assert done.stderr.startswith(f"Error: --out {tmp_path / 'file'}: ")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


@pytest.mark.parametrize("path", ["file", "file/below"])
def test_demo_refuses_an_unwritable_folder_before_training(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(demo_networks, "load_digits", lambda seed: pytest.fail("work began"))
    assert str(_status("demo", "--out", str(tmp_path / path))).startswith(f"Error: --out {tmp_path / path}: ")


def test_the_folder_is_tried_and_left_empty(tmp_path: Path) -> None:
    demo.prepare_folder(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_recipes_vary_everything() -> None:
    recipes = demo_networks.recipes(7)
    assert len(set(recipes)) == len({recipe.seed for recipe in recipes}) == 24
    for field in ("network", "optimiser", "learning_rate", "batch_size"):
        assert len({getattr(recipe, field) for recipe in recipes}) > 1


def test_digits_are_split_by_seed(digits: demo_networks.Digits) -> None:
    assert digits.train_images.shape[1:] == (1, 8, 8)
    assert len(digits.train_images) + len(digits.test_images) == 1797
    assert torch.equal(demo_networks.load_digits(0).train_images, digits.train_images)
    assert not torch.equal(demo_networks.load_digits(1).train_images, digits.train_images)


def test_training_reaches_the_target(digits: demo_networks.Digits) -> None:
    trained = demo_networks.train(TINY[0], digits)
    loss, accuracy = demo_networks.evaluate(trained.model, digits.train_images, digits.train_labels)
    assert trained.converged
    assert not trained.model.training
    assert loss < 2 * demo_networks.TARGET_LOSS
    assert accuracy > 0.95


@pytest.mark.usefixtures("one_epoch")
def test_tiny_demo_is_deterministic_and_writes_every_row(tmp_path: Path, digits: demo_networks.Digits) -> None:
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    rows = demo_networks.run(TINY, digits)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)
    assert demo_networks.run(TINY, digits) == rows
    assert demo_networks.run([replace(TINY[0], seed=8)], digits)[0].kappa != rows[0].kappa

    correlations = demo.correlate(rows, seed=0)
    assert demo.correlate(rows, seed=0) == correlations
    demo.write(tmp_path, rows, correlations, seed=0)
    assert (tmp_path / "scatter.png").read_bytes().startswith(b"\x89PNG")
    results = json.loads((tmp_path / "results.json").read_text())
    with (tmp_path / "results.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert results["seed"] == 0
    assert results["versions"]["torch"] == torch.__version__
    assert len(results["correlations"]) == 6
    for row, from_json, from_csv in zip(rows, results["networks"], table, strict=True):
        assert demo_networks.Row(**from_json) == row
        assert float(from_csv["kappa"]) == row.kappa
        assert from_csv["network"] == row.network
        assert not row.converged
        assert row.gap == row.test_loss - row.train_loss
        assert row.kappa > 0
        assert row.normalised_kappa > 0


@pytest.mark.usefixtures("one_epoch")
def test_demo_command_shows_networks_that_did_not_get_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo_networks, "recipes", lambda seed: TINY)
    assert _status("demo", "--out", str(tmp_path), "--seed", "5") == 0
    out, err = capsys.readouterr()
    assert out.count("1*") == len(TINY)
    assert "after the most epochs allowed" in out
    for statistic in ("Pearson", "Spearman", "Kendall"):
        assert out.count(statistic) == 2
    assert err == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results.csv", "results.json", "scatter.png"]


@pytest.mark.usefixtures("one_epoch")
def test_networks_that_diverged_or_died_stay_in_everything(tmp_path: Path, digits: demo_networks.Digits) -> None:
    diverged = demo_networks.run([replace(TINY[2], learning_rate=1e30)], digits)[0]
    assert math.isnan(diverged.kappa)
    dead = replace(diverged, gap=0.1, kappa=0.0, normalised_kappa=0.0)
    rows = [diverged, dead, replace(dead, kappa=2.0)]
    demo.write(tmp_path, rows, demo.correlate(rows, seed=0), seed=0)
    results = json.loads((tmp_path / "results.json").read_text())
    assert [row["kappa"] for row in results["networks"]] == [None, 0.0, 2.0]
    assert all(item["value"] is None for item in results["correlations"])


SCIPY = {
    "Pearson": lambda x, y: stats.pearsonr(x, y).statistic,
    "Spearman": lambda x, y: stats.spearmanr(x, y).statistic,
    "Kendall": lambda x, y: stats.kendalltau(x, y).statistic,
}


@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("decimals", [1, 16])  # one decimal: with ties
def test_correlation_against_scipy(statistic: str, decimals: int) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=30).round(decimals)
    y = (x + rng.normal(size=30)).round(decimals)
    value, low, high = correlation(x, y, statistic, seed=0)
    assert value == pytest.approx(SCIPY[statistic](x, y), abs=1e-12)
    truth = stats.bootstrap(
        (x, y), SCIPY[statistic], paired=True, vectorized=False, method="percentile", n_resamples=1000, rng=rng
    ).confidence_interval
    assert (low, high) == pytest.approx((truth.low, truth.high), abs=0.05)
    assert low < value < high


@pytest.mark.parametrize("statistic", STATISTICS)
def test_correlation_of_a_line_and_of_degenerate_values(statistic: str) -> None:
    line = np.arange(5.0)
    assert correlation(line, -1e-9 * line, statistic, seed=0) == pytest.approx((-1, -1, -1))
    for bad in (np.full(5, 0.1), np.array([0, 1, 2, 3, math.nan]), np.array([0, 1, 2, 3, math.inf])):
        assert all(map(math.isnan, correlation(line, bad, statistic, seed=0)))
        assert all(map(math.isnan, correlation(bad, line, statistic, seed=0)))
    assert all(map(math.isnan, correlation(line[:1], line[:1], statistic, seed=0)))
