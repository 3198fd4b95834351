"""Run the emulated CUDA kernels' tests under the address and undefined-behaviour sanitizers.

    python tests/soak/bounds.py [options of pytest]

The compiler is gcc, whose libraries are loaded before Python's own. Torch's memory comes from them, so that each tensor
and each block's dynamic shared memory ends where it was asked to end. First comes a call with one element too many,
which has to be found.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from support import emulated  # noqa: E402 — as a script

_ONE_TOO_MANY = """
import torch
from support import emulated  # noqa: E402 — as a script
module, x, out = emulated.build(), torch.ones(99), torch.ones(10, dtype=torch.float64)
module.row_dots_f32((x.data_ptr(), 100), 10, (x.data_ptr(), 100), 10, 10, 10, (out.data_ptr(), 10), 0)
"""


def main() -> int:
    """Return the exit status."""
    libraries = [
        subprocess.run(
            ["gcc", f"-print-file-name={name}.so"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in ("libasan", "libubsan")
    ]
    environment = {
        **os.environ,
        "PYFLATNESS_EMULATED": "bounds",
        "ASAN_OPTIONS": "detect_leaks=0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT / "tests"),
        "CXX": "g++",
    }
    os.environ |= {name: environment[name] for name in ("PYFLATNESS_EMULATED", "CXX")}
    emulated.compiled()
    environment["LD_PRELOAD"] = ":".join(libraries)
    check = [sys.executable, "-c", _ONE_TOO_MANY]
    found = subprocess.run(check, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    if found.returncode == 0 or "heap-buffer-overflow" not in found.stderr:
        print(f"an element beyond the last was read, and nothing said so\n{found.stderr}", file=sys.stderr)
        return 1
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "emulated and not threads"]
    return subprocess.run([*tests, "tests/cuda", *sys.argv[1:]], env=environment, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
