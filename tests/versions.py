"""The suite's core at the oldest versions that pyproject.toml accepts, or at the newest there are.

``make test-oldest`` and ``make test-newest``, each in an environment of its own. For the oldest, uv takes the lowest
version of everything that the package, its ``test`` extra and its build ask for, and the newest of what those need in
turn, for the oldest Python, which has to be installed (of pyenv's it is chosen by ``PYENV_VERSION=3.10.13``). The torch
of the package index is a build for CUDA: 7 GB with what it needs. Further arguments are given to pytest in place of the
core.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CORE = (  # heads, sweeps and Hessians; then each of the packages that are asked for
    *("head", "sweep", "hessian", "user_state", "verification", "bindings", "properties"),
    *("cli", "score", "score_measures", "score_files", "correlation", "report", "representativeness"),
    *("normalized_sharpness", "reparameterize", "sweep_data"),
    *("second_derivatives", "norm_layers", "models_that_differentiate", "recurrent"),
)


def main() -> int:
    """Make the environment, build, test; return pytest's exit status."""
    which, *arguments = sys.argv[1:]
    folder = ROOT / "build" / which
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    python, versions = f"{sys.version_info.major}.{sys.version_info.minor}", []
    if which == "oldest":
        python = _found(r'^requires-python = ">=(.*)"$', settings)
        constraints = ROOT / "build" / "build-constraints.txt"
        constraints.parent.mkdir(exist_ok=True)
        constraints.write_text("\n".join(json.loads(_found(r"^requires = (\[.*\])$", settings))).replace(">=", "=="))
        # Each torch asks for one Triton, so that the oldest Triton of the extra would choose torch. It is left out.
        overrides = constraints.with_name("overrides.txt")
        overrides.write_text("triton; sys_platform == 'none'\n")
        versions = ["--resolution", "lowest-direct", "--build-constraints", str(constraints)]
        versions += ["--overrides", str(overrides)]
    _uv("venv", "--clear", "--python", python, folder)
    how = "-C", "cmake.define.PYFLATNESS_CUDA=OFF", "-C", f"build-dir={folder / 'kernels'}"
    _uv("pip", "install", "--python", folder, *versions, *how, "--editable", f"{ROOT}[test]")
    _uv("pip", "list", "--python", folder)
    paths = arguments or [path for name in CORE for path in sorted(ROOT.glob(f"tests/**/test_{name}.py"))]
    pytest = [folder / "bin" / "python", "-m", "pytest", "-p", "no:cacheprovider", *paths]
    return subprocess.run(pytest, cwd=ROOT, env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}, check=False).returncode


def _found(pattern: str, settings: str) -> str:
    found = re.search(pattern, settings, re.MULTILINE)
    assert found is not None, f"pyproject.toml has no {pattern}"
    return found[1]


def _uv(*arguments: str | Path) -> None:
    status = subprocess.run([sys.executable, "-m", "uv", *arguments], check=False).returncode
    if status:
        sys.exit(status)  # uv has said why


if __name__ == "__main__":
    sys.exit(main())
