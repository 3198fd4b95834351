"""The tests that need a GPU, from a checkout: ``make test-gpu PYTHON=python``, or ``python tests/gpu.py [STEP …]``.

Steps: ``build`` compiles the kernels for this machine's GPU into the source tree, with the running Python's pybind11
and with cmake and nvcc as they are found; nothing is downloaded. ``test`` runs what the tests' fixture has for a GPU,
``memcheck`` and ``racecheck`` the same under compute-sanitizer, where that is installed. All of them unless some are
named. Each step runs whatever became of the one before, but for a failed build; the last lines say what came out, and
the exit status is 1 if anything failed.
"""

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "gpu"
SELECTED = [
    "-k",
    "cuda and not emulated",
    "-p",
    "no:cacheprovider",
    "-W",
    "default",
]  # torch's own warnings are its own
OPTIONAL = {"test_cli.py": ("click", "scipy", "sklearn", "matplotlib")}  # what some files import besides
NEEDED = ("torch", "pybind11", "numpy", "rich", "pytest", "hypothesis")
NOT_INSTALLED = "left out: compute-sanitizer is not installed"
KERNELS = "pyflatness"  # in every kernel's name: torch's own are not looked at


def main() -> int:
    """Runs the steps; returns the exit status."""
    steps = {"build": build, "test": test, "memcheck": sanitized, "racecheck": sanitized}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", metavar="|".join(steps), help="all unless named")
    chosen = parser.parse_args().steps or [*steps]
    if not {*chosen} <= {*steps}:
        parser.error(f"there are {', '.join(steps)}, not {', '.join(chosen)}")
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        return failed(f"{sys.executable} has no {', '.join(missing)}")
    import torch

    if not torch.cuda.is_available():
        return failed(f"needs a CUDA GPU, and a torch built for it; torch {torch.__version__} finds none")
    found = {}
    for name in chosen:
        problem = build(torch.cuda.get_device_capability()) if name == "build" else steps[name](name)
        found[name] = problem or "passed"
        if name == "build" and problem:
            break
    for name, outcome in found.items():
        print(f"tests/gpu.py: {name}: {outcome}", flush=True)
    return int(any(outcome not in ("passed", NOT_INSTALLED) for outcome in found.values()))


def test(name: str) -> str:
    """The tests; returns what is wrong."""
    if run([sys.executable, "-c", SAYS_WHY]):
        return "the kernels cannot run"
    return "FAILED" if run([sys.executable, "-m", "pytest", "-q", *SELECTED, *files()]) else ""


def files() -> list[str]:
    """Those with tests for a GPU whose imports are there."""
    paths = [path for path in sorted(ROOT.glob("tests/**/test_*.py")) if "cuda" in path.read_text(encoding="utf-8")]
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
print("CUDA kernels:", reason or f"{cuda.module().__file__} on {torch.cuda.get_device_name()}")
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


def sanitized(tool: str) -> str:
    """The tests under a tool of compute-sanitizer; each allocation one of its own, so that none hides an overrun."""
    folders = [Path(nvcc() or "").parent, Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin"]
    folders.append(Path("/usr/local/cuda/bin"))
    found = [shutil.which("compute-sanitizer"), *(shutil.which("compute-sanitizer", path=str(f)) for f in folders)]
    sanitizer = next((path for path in found if path), None)
    if sanitizer is None:
        return NOT_INSTALLED
    said = subprocess.run([sanitizer, "--help"], capture_output=True, text=True, check=False).stdout
    chosen = ["--kernel-name", f"kns={KERNELS}"] if "--kernel-name" in said else []
    # Errors of torch's own calls are not ours; the binding raises on those of a launch.
    chosen += ["--report-api-errors", "no"] if "--report-api-errors" in said else []
    command = [sanitizer, "--tool", tool, *chosen, "--target-processes", "all", "--error-exitcode", "1"]
    tests = [name for name in files() if not name.endswith("test_cuda_streams.py")]
    python = [sys.executable, "-m", "pytest", "-q", *SELECTED, *tests]
    return "FAILED" if run([*command, *python], PYTORCH_NO_CUDA_MEMORY_CACHING="1") else ""


def run(command: Sequence[str], **environment: str) -> int:
    """The command's exit status, from the project's root."""
    print("+", *command, flush=True)
    there = {**os.environ, "PYTHONPATH": str(ROOT), "PYFLATNESS_TESTS": "gpu", **environment}
    return subprocess.run(command, cwd=ROOT, env=there, check=False).returncode


def failed(reason: str) -> int:
    """Says why, and returns the exit status."""
    print(f"tests/gpu.py: {reason}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
