"""The tests that need a GPU, from a checkout: ``make test-gpu PYTHON=python``, or ``python tests/gpu.py [STEP …]``.

Steps: ``build`` compiles the kernels for this machine's GPU into the source tree, with the running Python's pybind11
and with cmake and nvcc as they are found; nothing is downloaded. ``test`` runs what the tests' fixture has for a GPU,
several at a time where pytest-xdist is installed. ``memcheck`` and ``racecheck`` run those of ``tests/cuda`` under
compute-sanitizer, where that is installed, in several processes and for ``--seconds`` each; what was not reached is
said. All of them unless some are named. Each step runs whatever became of the one before, but for a failed build; the
last lines say what came out, with a table of kernels to paste into ``docs/cuda.md``, and the exit status is 1 if
anything failed.
"""

import argparse
import contextlib
import datetime
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "gpu"
SELECTED = [
    "-q",
    "-k",
    "(cuda or triton_head) and not emulated",
    "-p",
    "no:cacheprovider",
    "-p",
    "support.launches",
    "-W",
    "default",
]
OPTIONAL = {"test_cli.py": ("click", "scipy", "sklearn", "matplotlib")}  # what some files import besides
NEEDED = ("torch", "pybind11", "numpy", "rich", "pytest", "hypothesis")
WORKERS = min(8, os.cpu_count() or 1)
LATE, KERNEL = "the time for these tests is over", "kernel"  # what support.launches writes into reports
UNSANITIZED = tuple(  # large ones; torch's kernels rather than ours
    f"test_cuda_{name}.py"
    for name in (
        *("streams", "public_calls", "every_call", "penalties", "curvature", "memory", "ranks", "integrations"),
    )
)
UNRACED = (  # under racecheck cuBLAS's bfloat16 products of 16 classes stop with an illegal access
    "tests/cuda/test_cuda_spread.py::test_one_call_for_all_classes_of_a_chunk[cuda]",
    "tests/cuda/test_cuda_spread.py::test_ill_conditioned_rows_among_others[cuda-dtype2]",
)
KERNELS = "pyflatness"  # in every kernel's name: torch's own are not looked at
GRACE = 60  # seconds for a test that has begun, and for the sanitizer's report


@dataclass
class Outcome:
    """What came of a step.

    Attributes:
        said: in words.
        failed: whether something is wrong.
        kernels: how many of the tests that passed launched each kernel.
    """

    said: str
    failed: bool = False
    kernels: Counter[str] = field(default_factory=Counter)


def main() -> int:
    """Runs the steps; returns the exit status."""
    steps: dict[str, Callable[..., Outcome]] = {"build": build, "test": test}
    steps |= {"memcheck": sanitized, "racecheck": sanitized}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", metavar="|".join(steps), help="all unless named")
    parser.add_argument("--seconds", type=float, default=180, help="for each of memcheck and racecheck (%(default)s)")
    parser.add_argument("--files", metavar="PATTERN", help="of the tests that are run, such as 'tests/cuda/*_rows.py'")
    given = parser.parse_args()
    chosen = given.steps or [*steps]
    if not {*chosen} <= {*steps}:
        parser.error(f"there are {', '.join(steps)}, not {', '.join(chosen)}")
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        return failed(f"{sys.executable} has no {', '.join(missing)}")
    import torch

    if not torch.cuda.is_available():
        return failed(f"needs a CUDA GPU, and a torch built for it; torch {torch.__version__} finds none")
    BUILD.mkdir(parents=True, exist_ok=True)
    found: dict[str, Outcome] = {}
    for name in chosen:
        options = {"pattern": given.files} if given.files and name != "build" else {}
        found[name] = steps[name](name, given.seconds, **options)
        if name == "build" and found[name].failed:
            break
    gpu = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}"
    print(table(found))
    print(f"{gpu}, {datetime.date.today().isoformat()}")
    for name, outcome in found.items():
        print(f"tests/gpu.py: {name}: {outcome.said}", flush=True)
    return int(any(outcome.failed for outcome in found.values()))


def table(found: dict[str, Outcome]) -> str:
    """Returns how many tests that passed launched each kernel, as a table of a document."""
    steps = {name: outcome.kernels for name, outcome in found.items() if outcome.kernels}
    kinds = defaultdict(list)
    for name in sorted({name for kernels in steps.values() for name in kernels}):
        kernel, _, kind = name.rpartition("_")
        kinds[kernel].append(kind)
    lines = [["kernel", "for", *(f"tests passed: {name}" for name in steps)], ["---"] * (2 + len(steps))]
    for kernel, has in kinds.items():
        counts = (str(sum(kernels[f"{kernel}_{kind}"] for kind in has)) for kernels in steps.values())
        lines.append([f"`{kernel}`", ", ".join(has), *counts])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def test(name: str, seconds: float, pattern: str = "tests/**/test_*.py") -> Outcome:  # noqa: PT028
    """The tests."""
    if run([sys.executable, "-c", SAYS_WHY]):
        return Outcome("the kernels cannot run", True)
    several = ["-n", str(WORKERS)] if importlib.util.find_spec("xdist") else []
    report = BUILD / "test.xml"
    status = run([*pytest_command(report), *several, *files(pattern)])
    return outcome([report], bool(status))


def pytest_command(report: Path) -> list[str]:
    """Pytest, with the file that it is to write."""
    report.unlink(missing_ok=True)
    return [sys.executable, "-m", "pytest", f"--junitxml={report}", *SELECTED]


def outcome(reports: Sequence[Path], wrong: bool) -> Outcome:
    """What pytest's reports say; one that is not there is wrong."""
    counts, kernels = Counter[str](), Counter[str]()
    for report in reports:
        if not report.exists():
            counts["processes without a report"] += 1
            wrong = True
            continue
        for case in ElementTree.parse(report).iter("testcase"):
            late = any(LATE in skipped.get("message", "") for skipped in case.iter("skipped"))
            kinds = [kind for kind in ("error", "failure", "skipped") if case.find(kind) is not None]
            kind = {"error": "failed", "failure": "failed"}.get(kinds[0], "skipped") if kinds else "passed"
            counts["not reached" if late else kind] += 1
            if not kinds:
                kernels.update(found.get("value") for found in case.iter("property") if found.get("name") == KERNEL)
    wrong = wrong or not counts["passed"]
    said = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    return Outcome(f"{'FAILED' if wrong else 'passed'}: {said}", wrong, kernels)


def files(pattern: str) -> list[str]:
    """Those with tests for a GPU whose imports are there."""
    paths = [path for path in sorted(ROOT.glob(pattern)) if "cuda" in path.read_text(encoding="utf-8")]
    lacking = {
        path: [name for name in OPTIONAL.get(path.name, ()) if importlib.util.find_spec(name) is None] for path in paths
    }
    for path, names in lacking.items():
        if names:
            print(f"tests/gpu.py: {path.name} is left out: there is no {', '.join(names)}", flush=True)
    return [str(path.relative_to(ROOT)) for path in paths if not lacking[path]]


SAYS_WHY = """
import sys, torch
from pyflatness.contractions.backends import cuda
reason = cuda.unavailable(torch.device("cuda"), torch.float32)
print("CUDA kernels:", reason or f"{cuda.module().__file__} on {torch.cuda.get_device_name()}")
sys.exit(bool(reason))
"""


def build(name: str, seconds: float) -> Outcome:
    """Compiles both modules into ``pyflatness/``."""
    import pybind11
    import torch

    cmake = shutil.which("cmake")
    if cmake is None:
        return Outcome("cmake is not on the PATH (pip install cmake ninja)", True)
    compiler = nvcc()
    if compiler is None:
        where = "on the PATH, in CUDA_HOME or in /usr/local/cuda"
        return Outcome(f"nvcc is not {where}; the kernels cannot be compiled", True)
    architecture = "".join(map(str, torch.cuda.get_device_capability()))
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
            return Outcome(f"{' '.join(command)} failed", True)
    return Outcome("passed")


def nvcc() -> str | None:
    """The compiler's path."""
    home = os.environ.get("CUDA_HOME")
    places = [shutil.which("nvcc"), *(f"{place}/bin/nvcc" for place in (home, "/usr/local/cuda") if place)]
    return next((place for place in places if place and Path(place).exists()), None)


def sanitized(tool: str, seconds: float, pattern: str = "tests/cuda/test_*.py") -> Outcome:
    """The tests under a tool of compute-sanitizer; each allocation one of its own, so that none hides an overrun."""
    folders = [Path(nvcc() or "").parent, Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin"]
    folders.append(Path("/usr/local/cuda/bin"))
    found = [shutil.which("compute-sanitizer"), *(shutil.which("compute-sanitizer", path=str(f)) for f in folders)]
    sanitizer = next((path for path in found if path), None)
    if sanitizer is None:
        return Outcome("left out: compute-sanitizer is not installed")
    said = subprocess.run([sanitizer, "--help"], capture_output=True, text=True, check=False).stdout
    chosen = ["--kernel-name", f"kns={KERNELS}"] if "--kernel-name" in said else []
    # Errors of torch's own calls are not ours; the binding raises on those of a launch.
    chosen += ["--report-api-errors", "no"] if "--report-api-errors" in said else []
    command = [sanitizer, "--tool", tool, *chosen, "--target-processes", "all", "--error-exitcode", "1"]
    tests = [name for name in files(pattern) if not name.endswith(UNSANITIZED)]
    tests += [f"--deselect={test}" for test in UNRACED] if tool == "racecheck" else []
    until = time.time() + seconds
    environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYFLATNESS_UNTIL": str(until)}
    reports = [BUILD / f"{tool}-{share}.xml" for share in range(WORKERS)]
    with contextlib.ExitStack() as stack:
        processes = []
        for share, report in enumerate(reports):
            log = stack.enter_context(report.with_suffix(".log").open("w"))
            there = environ(PYFLATNESS_SHARE=f"{share}/{WORKERS}", **environment)
            process = subprocess.Popen(
                [*command, *pytest_command(report), *tests],
                cwd=ROOT, env=there, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            stack.callback(end, process)
            processes.append(process)
        print("+", *processes[0].args, f"and {WORKERS - 1} more like it, for {seconds:g} s", flush=True)
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until + GRACE - time.time()))
    for report in reports:
        print(report.with_suffix(".log").read_text(encoding="utf-8", errors="replace"), flush=True)
    return outcome(reports, any(process.returncode for process in processes))


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and what it has started, if it still runs."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run(command: Sequence[str]) -> int:
    """The command's exit status, from the project's root."""
    print("+", *command, flush=True)
    return subprocess.run(command, cwd=ROOT, env=environ(), check=False).returncode


def environ(**more: str) -> dict[str, str]:
    """The environment of every command."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    return {**os.environ, "PYTHONPATH": path, "PYFLATNESS_TESTS": "gpu", **more}


def failed(reason: str) -> int:
    """Says why, and returns the exit status."""
    print(f"tests/gpu.py: {reason}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
