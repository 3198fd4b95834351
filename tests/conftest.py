"""Engines: every backend and instruction set that this machine can run."""

import contextlib
import gc
import importlib
import math
import os
import shutil
import signal
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from pyflatness.contractions.backends import compiled, cuda, reference
from pyflatness.hessian import block_traces
from pyflatness.sweep import adaptive_sweep
from support import ROOT, emulated, interpreted
from support.combinations import AT_RANDOM, CUDA_DEVICES, EMULATED_ORDERS, ENGINES, in_soak
from support.summation import ORDERS

settings.register_profile("default", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("default")
interpreted.choose()

# A shell that starts a job in the background has it ignore interrupts, which tests send.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@dataclass(frozen=True)
class Engine:
    """A backend, with its instruction set in force while a test runs."""

    backend: str
    isa: str

    @property
    def module(self):
        return reference if self.backend == "reference" else compiled


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    backend, _, isa = request.param.partition("-")
    with contextlib.ExitStack() as stack:
        if isa:
            if isa not in compiled.engines():
                pytest.skip(f"this build and processor do not have {isa}")
            stack.enter_context(compiled.forced(isa))
        yield Engine(backend, isa)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add an option that runs all tests with matrix products that are added up otherwise."""
    parser.addoption(
        "--sums", choices=[*ORDERS], help="how matrix products are added up, see tests/support/summation.py"
    )


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.manual_seed(0)
    order = request.config.getoption("sums")
    if request.node.get_closest_marker("library_sums"):
        order = None
    with ORDERS[order]() if order else contextlib.nullcontext():
        yield


@pytest.fixture(autouse=True)
def _sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have ``rtol=`` sample networks as tiny as those of tests, of which exact values are cheaper."""
    monkeypatch.setattr(adaptive_sweep, "PLAN", -math.inf)


@pytest.fixture
def hessian_products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Of all Hessian products the numbers of directions and of samples."""
    taken = []

    class Counted(block_traces.LinearMap):
        def __call__(self, vectors):
            taken.append(tuple(vectors.shape[:2]))
            return super().__call__(vectors)

    monkeypatch.setattr(block_traces, "LinearMap", Counted)
    return taken


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Path of a file with a network and its data; what importing it leaves behind is undone."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    shutil.copy(ROOT / "tests" / "support" / "tiny_network.py", tmp_path / "tiny.py")
    yield str(tmp_path / "tiny.py")
    for name in set(sys.modules) - before:
        if name in ("tiny", "lenet5", "broken", "package", "package.inner") or name.endswith(".py"):
            del sys.modules[name]


@pytest.fixture(scope="module")
def new_objects() -> Iterator[None]:
    """Of a module's tests the garbage collector knows what was made in them alone: the rest would take seconds."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def benchmark_modules(monkeypatch: pytest.MonkeyPatch):
    """A function that imports a module of the benchmarks, which lie outside the package, by its name."""
    folder = ROOT / "benchmarks"
    names = [path.stem for path in folder.glob("*.py")]
    for name in names:  # some are tests' modules too
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(folder))
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture(scope="session")
def _emulated_cuda():
    only_gpu = os.environ.get("PYFLATNESS_TESTS") == "gpu"  # set by gpu.py
    return "only tests that need a GPU were asked for" if only_gpu else emulated.build()


@pytest.fixture
def emulated_cuda(_emulated_cuda):
    """The CUDA kernels' module, compiled for the CPU."""
    if isinstance(_emulated_cuda, str):
        pytest.skip(f"the CUDA kernels cannot be compiled for the CPU: {_emulated_cuda}")
    return _emulated_cuda


@pytest.fixture(params=[*CUDA_DEVICES[:2], *in_soak(*EMULATED_ORDERS, AT_RANDOM)])
def cuda_device(request):
    """Where tensors for the CUDA kernels go: a GPU, or the CPU with kernels compiled for it, whose threads take turns.

    Of the orders in which they do, each test has one of its own; the soak run has all.
    """
    if request.param == "cuda":
        reason = cuda.unavailable(torch.device("cuda"), torch.float32) if torch.cuda.is_available() else "no CUDA GPU"
        if reason:
            pytest.skip(reason)
        yield torch.device("cuda")
        return
    module = request.getfixturevalue("_emulated_cuda")
    if isinstance(module, str):
        pytest.skip(f"the CUDA kernels cannot be compiled for the CPU: {module}")
    own, known = zlib.crc32(request.node.nodeid.encode()), len(EMULATED_ORDERS)
    by_itself = {"emulated": own % known, AT_RANDOM: known + own % 10**6}
    order = by_itself[request.param] if request.param in by_itself else EMULATED_ORDERS.index(request.param)
    module.set_order(order)
    with cuda.emulated(module):
        yield torch.device("cpu")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many tests were skipped for which reason, and what came of random networks, over all workers."""
    skipped = Counter(report.longrepr[2] for report in terminalreporter.stats.get("skipped", []))
    if skipped:
        terminalreporter.section("skipped")
        for reason, count in skipped.most_common():
            terminalreporter.write_line(f"{count:5}  {reason.removeprefix('Skipped: ')}")
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, [])]
    parts = [value for report in reports for name, value in report.user_properties if name == "fuzz"]
    if parts:
        from support.fuzzed.verdicts import Total

        terminalreporter.section("random networks")
        terminalreporter.write_line(str(sum((Total.of(part) for part in parts), Total())))
