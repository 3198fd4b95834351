"""The tests that need a GPU, from a checkout: ``make test-gpu PYTHON=python``, or ``python tests/gpu.py``.

Builds the kernels for this machine's GPU into the source tree, with the running Python's pybind11 and with cmake and
nvcc as they are found; nothing is downloaded. Runs what the tests' fixture has for a GPU, then the same under
compute-sanitizer's memcheck and racecheck, where that is installed. Exits with status 1 if anything fails.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "gpu"
SELECTED = ["-k", "cuda and not emulated", "-p", "no:cacheprovider"]
OPTIONAL = {"test_cli.py": ("click", "scipy", "sklearn", "matplotlib")}  # what some files import besides
NEEDED = ("torch", "pybind11", "numpy", "rich", "pytest", "hypothesis")
KERNELS = "pyflatness"  # in every kernel's name: torch's own are not looked at


def main() -> int:
    """Builds, tests, and tests under the sanitizer; returns the exit status."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        return failed(f"{sys.executable} has no {', '.join(missing)}")
    import torch

    if not torch.cuda.is_available():
        return failed(f"needs a CUDA GPU, and a torch built for it; torch {torch.__version__} finds none")
    problem = build(torch.cuda.get_device_capability())
    if problem:
        return failed(problem)
    status = run([sys.executable, "-c", SAYS_WHY])
    status = status or run([sys.executable, "-m", "pytest", "-q", *SELECTED, *files()])
    return status or sanitized()


def files() -> list[str]:
    """Those with tests for a GPU whose imports are there."""
    paths = [path for path in sorted(ROOT.glob("tests/test_*.py")) if "cuda" in path.read_text(encoding="utf-8")]
    lacking = {
        path: [name for name in OPTIONAL.get(path.name, ()) if importlib.util.find_spec(name) is None] for path in paths
    }
    for path, names in lacking.items():
        if names:
            print(f"tests/gpu.py: {path.name} is left out: there is no {', '.join(names)}", flush=True)
    return [str(path.relative_to(ROOT)) for path in paths if not lacking[path]]


SAYS_WHY = """
import sys, torch
from pyflatness.contractions import cuda
reason = cuda.unavailable(torch.device("cuda"), torch.float32)
print("CUDA kernels:", reason or f"{cuda._cuda.__file__} on {torch.cuda.get_device_name()}")
sys.exit(bool(reason))
"""


def build(capability: tuple[int, int]) -> str:
    """Compiles both modules into ``pyflatness/``; returns why not, if it cannot."""
    import pybind11

    cmake = shutil.which("cmake")
    if cmake is None:
        return "cmake is not on the PATH (pip install cmake ninja)"
    compiler = nvcc()
    if compiler is None:
        return "nvcc is not on the PATH, in CUDA_HOME or in /usr/local/cuda; the kernels cannot be compiled"
    architecture = "".join(map(str, capability))
    options = {
        "PYFLATNESS_CUDA": "ON",
        "CMAKE_CUDA_COMPILER": compiler,
        "CMAKE_CUDA_ARCHITECTURES": f"{architecture}-real",
        "pybind11_DIR": pybind11.get_cmake_dir(),
        "Python_EXECUTABLE": sys.executable,
        "PYTHON_EXECUTABLE": sys.executable,
    }
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    configure = [cmake, "-S", str(ROOT), "-B", str(BUILD), *generator, *(f"-D{k}={v}" for k, v in options.items())]
    install = [cmake, "--install", str(BUILD), "--prefix", str(ROOT)]
    for command in (configure, [cmake, "--build", str(BUILD), "--parallel"], install):
        if run(command):
            return f"{' '.join(command)} failed"
    return ""


def nvcc() -> str | None:
    """The compiler's path."""
    home = os.environ.get("CUDA_HOME")
    places = [shutil.which("nvcc"), *(f"{place}/bin/nvcc" for place in (home, "/usr/local/cuda") if place)]
    return next((place for place in places if place and Path(place).exists()), None)


def sanitized() -> int:
    """The same tests under compute-sanitizer; each allocation one of its own, so that none hides an overrun."""
    sanitizer = shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path=str(Path(nvcc() or "").parent)
    )
    if sanitizer is None:
        print("tests/gpu.py: compute-sanitizer is not installed: memcheck and racecheck are left out", flush=True)
        return 0
    said = subprocess.run([sanitizer, "--help"], capture_output=True, text=True, check=False).stdout
    chosen = ["--kernel-name", f"kns={KERNELS}"] if "--kernel-name" in said else []
    status = 0
    for tool in ("memcheck", "racecheck"):
        command = [sanitizer, "--tool", tool, *chosen, "--target-processes", "all", "--error-exitcode", "1"]
        tests = [name for name in files() if not name.endswith("test_cuda_streams.py")]
        python = [sys.executable, "-m", "pytest", "-q", "-x", *SELECTED, *tests]
        status = run([*command, *python], PYTORCH_NO_CUDA_MEMORY_CACHING="1") or status
    return status


def run(command: Sequence[str], **environment: str) -> int:
    """The command's exit status, from the project's root."""
    print("+", *command, flush=True)
    there = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(command, cwd=ROOT, env=there, check=False).returncode


def failed(reason: str) -> int:
    """Says why, and returns the exit status."""
    print(f"tests/gpu.py: {reason}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
