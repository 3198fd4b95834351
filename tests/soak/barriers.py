"""Look whether anything fails without each of the CUDA kernels' barriers.

    python tests/soak/barriers.py [FILE of csrc/cuda …]

Each ``__syncthreads`` and ``__syncwarp`` in csrc/cuda is left out in turn, and each ``__syncthreads`` weakened to a
``__syncwarp``, in one build of the emulated kernels in which every access is looked at (``tests/cuda_emulation``). The
tests that come by the barrier run, the quickest first, until one fails. The exit status is 1 if nothing fails without
some barrier: it is not needed then, or a test is.
"""

import contextlib
import functools
import io
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from support import emulated  # noqa: E402 — as a script

_BARRIER = re.compile(r"^[^/]*\b__sync(threads|warp)\(")
_FEW = 12  # tests that come first, since most barriers are missed by these
_OPTIONS = ["-q", "-x", "-p", "no:cacheprovider", "-k", "emulated and not threads"]


class Watch:
    """A plugin of pytest: of each test, the seconds, the barriers that it came by and the error that it ended with."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.seconds: dict[str, float] = {}
        self.barriers: dict[str, set[str]] = {}
        self.errors: dict[str, str] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        self.module.forget_barriers()
        begin = time.perf_counter()
        try:
            return (yield)
        except Exception as error:
            self.errors[item.nodeid] = (str(error).splitlines() or [type(error).__name__])[0].partition(": shared")[0]
            raise
        finally:
            self.seconds[item.nodeid] = time.perf_counter() - begin
            self.barriers[item.nodeid] = {*self.module.barriers()}


def run(module: Any, tests: Sequence[str]) -> Watch:
    """Run these tests, to the first that fails."""
    watch = Watch(module)
    if not tests:
        return watch
    with contextlib.redirect_stdout(io.StringIO()) as said:
        status = pytest.main([*_OPTIONS, *tests], plugins=[watch])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) or bool(status) != bool(watch.errors):
        raise SystemExit(f"{said.getvalue()}\npytest ended with {status!r}")
    return watch


def mutants() -> Iterator[tuple[str, str]]:
    """Yield the barriers in the sources, as ``file:line``, and what is done to them."""
    for path in sorted((ROOT / "csrc" / "cuda").glob("*.cu*")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if found := _BARRIER.match(line):
                yield f"{path.name}:{number}", "left out"
                if found[1] == "threads":
                    yield f"{path.name}:{number}", "weakened"


def main() -> int:
    """Print what finds each; return the exit status."""
    os.environ["PYFLATNESS_EMULATED"] = "races"
    module = emulated.build()
    if isinstance(module, str):
        raise SystemExit(module)
    emulated.build = functools.cache(lambda: module)  # what the tests' fixture asks
    files = {*sys.argv[1:]}
    chosen = [mutant for mutant in mutants() if not files or mutant[0].partition(":")[0] in files]
    begin, survivors = time.perf_counter(), 0
    whole = run(module, [str(ROOT / "tests" / "cuda")])
    if whole.errors:
        raise SystemExit(f"fails with every barrier in its place: {whole.errors}")
    for place, change in chosen:
        tests = sorted((t for t, seen in whole.barriers.items() if place in seen), key=whole.seconds.__getitem__)
        {"left out": module.leave_out, "weakened": module.weaken}[change](place)
        found = run(module, tests[:_FEW]).errors or run(module, tests[_FEW:]).errors
        module.leave_out("")
        survivors += not found
        said = [f"{name.rpartition('::')[2].partition('[')[0]}: {error}" for name, error in found.items()]
        print(f"{place:18}{change:10}{len(tests):4} tests come by; {said[0] if said else 'NOTHING FAILS'}", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} found, {time.perf_counter() - begin:.0f} s")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
