"""`import pyflatness` takes no time, and the public names are found when they are asked for."""

import dataclasses
import importlib.metadata
import inspect
import re
import subprocess
import sys
import typing

import pyflatness as pf
from support import ROOT
from support.public import CALLS


def printed(script: str) -> str:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip()


def test_the_package_alone_is_imported():
    script = "import sys, torch, pyflatness; print(*(name for name in sys.modules if name.startswith('pyflatness')))"
    assert printed(script) == "pyflatness"


def test_every_name_is_found_by_a_star_without_a_file_lock_or_the_compiler():
    """Windows has no fcntl; and what has a module's name must not become that module."""
    script = """
import sys, types
sys.modules["fcntl"] = None
from pyflatness import *
import pyflatness
assert set(pyflatness.__all__) <= {*globals()} & {*dir(pyflatness)}
assert "torch._dynamo" not in sys.modules
print(*(name for name in pyflatness.__all__ if isinstance(getattr(pyflatness, name), types.ModuleType)))
"""
    assert printed(script) == "changes errors measures results statistics theory"


def test_the_first_call_of_a_process_loads_neither_the_compiler_nor_sympy():
    script = """
import sys, torch, pyflatness as pf
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3)).eval()
data = torch.randn(5, 3), torch.arange(5) % 3
pf.measure(model, torch.nn.CrossEntropyLoss(), data, measures=["relative_flatness", "trace"])
print(*(name for name in ("torch._dynamo", "sympy") if name in sys.modules))
"""
    assert printed(script) == ""


def test_a_name_that_does_not_exist_is_no_attribute():
    script = "import pyflatness; print(hasattr(pyflatness, 'flatnes'), hasattr(pyflatness, '__path__'))"
    assert printed(script) == "False True"


def test_every_class_that_calls_return_is_among_the_results():
    """Those that they return, and those that these have as attributes."""
    calls = (call for name, call in CALLS.items() if not name.startswith("plot"))  # they return matplotlib's
    returned = {one for call in calls for one in classes(typing.get_type_hints(call)["return"])}
    waiting = [one for one in returned if one.__module__.startswith("pyflatness")]
    seen = set()
    while waiting:
        one = waiting.pop()
        if one not in seen:
            seen.add(one)
            kinds = [*typing.get_type_hints(one).values()] if dataclasses.is_dataclass(one) else []
            found = {inner for kind in kinds for inner in classes(kind) if inner.__module__.startswith("pyflatness")}
            waiting += found
    assert {one.__name__ for one in seen} <= {*pf.results.__all__}
    assert all(inspect.isclass(getattr(pf.results, name)) for name in pf.results.__all__)


def classes(kind):
    """The classes in an annotation."""
    parts = typing.get_args(kind)
    return {kind} if inspect.isclass(kind) and not parts else {one for part in parts for one in classes(part)}


def test_every_public_module_says_what_is_public_in_it():
    for name in pf.__all__:
        module = getattr(pf, name)
        if inspect.ismodule(module):
            assert module.__all__ == sorted(module.__all__)
            assert all(hasattr(module, each) for each in module.__all__)


# --- the release ------------------------------------------------------------------------------------------------------


def test_there_is_one_version() -> None:
    assert importlib.metadata.version("pyflatness") == pf.__version__
    assert f"\nversion: {pf.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_the_changelog_begins_with_it() -> None:
    newest = re.search(r"^## (\S+) \((.*)\)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest is not None
    assert (newest[1] + ".dev0" if newest[2] == "unreleased" else newest[1]) == pf.__version__
