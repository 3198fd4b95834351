"""The build compiles CUDA kernels by itself only where torch has CUDA, and finds that out without running torch."""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

CUDA = Path(__file__).resolve().parents[2] / "csrc" / "cuda"
CMAKE = Path(sys.executable).parent / "cmake"
VERSIONS = {
    "cuda": "__version__ = '2.10.0+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n",
    "older": "cuda = '12.6'\n",
    "cpu": "from typing import Optional\n\ncuda: Optional[str] = None\n",
    "rocm": "__version__ = '2.10.0+rocm7.0'\ncuda: Optional[str] = None\nhip: Optional[str] = '7.0'\n",
    "odd": "import cuda\nnot_cuda = '13.0'\n",
}

pytestmark = pytest.mark.skipif(not CMAKE.exists(), reason="cmake is not in this environment")


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder)
    return folder


@pytest.fixture
def packages(environment):
    """The environment's site-packages, where ``torch`` is what the test puts there."""
    (folder,) = environment.glob("lib/python*/site-packages")
    yield folder
    for path in folder.glob("torch/*"):
        path.unlink()


def put(folder, version):
    (folder / "torch").mkdir(exist_ok=True)
    (folder / "torch" / "__init__.py").write_text("raise SystemExit('torch is run')")
    (folder / "torch" / "version.py").write_text(version)


def cmake(environment, tmp_path, text, **variables):
    """What a script of cmake's says on standard output and error, with the environment's Python."""
    script = tmp_path / "script.cmake"
    script.write_text(f'set(Python_EXECUTABLE "{environment}/bin/python")\n{text}')
    run = {"cwd": CUDA, "env": {**os.environ, **variables}, "capture_output": True, "text": True, "check": True}
    done = subprocess.run([CMAKE, "-P", script], **run)
    return (done.stdout + done.stderr).strip()


def found(environment, tmp_path, **variables):
    return cmake(environment, tmp_path, 'include(torch.cmake)\ntorch_cuda(found)\nmessage("${found}")', **variables)


@pytest.mark.parametrize(
    ("version", "expected"),
    [("cuda", "13.0"), ("older", "12.6"), ("cpu", "none"), ("rocm", "none"), ("odd", "unknown")],
)
def test_the_cuda_of_torch_is_read(version, expected, environment, packages, tmp_path):
    put(packages, VERSIONS[version])
    assert found(environment, tmp_path) == expected


def test_without_torch_it_is_not_known(environment, tmp_path):
    assert found(environment, tmp_path) == "unknown"


def test_pip_s_build_isolation_hides_no_torch(environment, packages, tmp_path):
    """Pip sets these variables, and its sitecustomize.py takes the environment's packages off the path."""
    put(packages, VERSIONS["cpu"])
    overlay = tmp_path / "overlay"
    overlay.mkdir()
    (overlay / "sitecustomize.py").write_text(f"import sys\nsys.path[:] = {{*sys.path}} - {{{str(packages)!r}}}\n")
    variables = {"PYTHONPATH": str(overlay), "PYTHONNOUSERSITE": "1"}
    hidden = [environment / "bin" / "python", "-c", "import torch"]
    assert b"No module" in subprocess.run(hidden, env={**os.environ, **variables}, capture_output=True).stderr
    assert found(environment, tmp_path, **variables) == "none"


def test_torch_on_pythonpath_comes_first(environment, packages, tmp_path):
    put(packages, VERSIONS["cpu"])
    put(tmp_path, VERSIONS["cuda"])
    assert found(environment, tmp_path, PYTHONPATH=str(tmp_path)) == "13.0"


def listing(tmp_path, gpus):
    """A PATH with an nvidia-smi that lists these GPUs."""
    folder = tmp_path / "smi"
    folder.mkdir()
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\necho '{gpus}'\n")
    (folder / "nvidia-smi").chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


@pytest.mark.parametrize("gpus", ["", "No devices found."])
def test_without_a_gpu_nvcc_alone_compiles_nothing(gpus, environment, packages, tmp_path):
    put(packages, VERSIONS["cuda"])
    run = "set(PYFLATNESS_CUDA AUTO)\ninclude(CMakeLists.txt)"
    said = cmake(environment, tmp_path, run, PATH=listing(tmp_path, gpus), CUDACXX="/bin/true")
    assert "CUDA kernels are left out: nvidia-smi lists no GPU here (PYFLATNESS_CUDA=ON compiles them" in said


def test_beside_a_torch_without_cuda_the_kernels_are_left_out(environment, packages, tmp_path):
    put(packages, VERSIONS["rocm"])
    run = "set(PYFLATNESS_CUDA AUTO)\ninclude(CMakeLists.txt)"
    said = cmake(environment, tmp_path, run, PATH=listing(tmp_path, "GPU 0: NVIDIA H100 (UUID: GPU-0)"))
    assert "CUDA kernels are left out: the torch of" in said
    assert "PYFLATNESS_CUDA=ON" in said
