"""Modules of the benchmarks, which lie outside the package."""

import importlib
import sys

import pytest

from support import ROOT


@pytest.fixture
def benchmark_modules(monkeypatch):
    """A function that imports a module of the benchmarks by its name, for one test."""
    folder = ROOT / "benchmarks"
    names = [path.stem for path in folder.glob("*.py")]
    for name in names:  # some are tests' modules too
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(folder))
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)
