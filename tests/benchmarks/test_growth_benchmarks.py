"""The benchmark of growth, small: its points are measured as they say, and its exponents are those of the figures."""

import subprocess
import sys

import pytest

from support import ROOT


@pytest.fixture
def growth(benchmark_modules):
    return benchmark_modules("growth")


def test_exponents(growth, monkeypatch):
    def powers(points, rounds):
        return [growth.Figures(3 * p.n**1.5, 5 * p.n, 7 * p.n**0.5, 11, 1.0, p.n) for p in points]

    monkeypatch.setattr(growth, "figures", powers)
    *found, last = growth.rows("n", (2, 30, 1000), growth.Network(1), 1)
    assert [row[1] for row in found] == ["2", "30", "1,000"]
    assert last[1] == "exponent"
    assert [cell for cell in last[3:] if cell] == ["1.50", "1.00", "0.50", "0.00"]


@pytest.mark.parametrize("base", ["Network", "Head"])
def test_a_point(growth, monkeypatch, base):
    asked = []
    monkeypatch.setattr(growth, "_peak", lambda name, setting, threads: asked.append(name) or 2**20)
    sizes = {
        "Network": {"n": 20, "classes": 3, "width": 4, "depth": 3},
        "Head": {"n": 20, "vocabulary": 9, "features": 4},
    }
    [found] = growth.figures([getattr(growth, base)(1, **sizes[base])], 1)
    assert min(found.seconds, found.floor_seconds, found.ratio) > 0
    assert (found.mib, found.floor_mib) == (1, 1)
    names = {"Network": ["pyflatness", "sweep"], "Head": ["head", "products"]}
    assert asked == names[base]


@pytest.mark.parametrize("depth", [2, 5])
def test_the_network(growth, depth):
    model = growth.plain(4, depth, 3)
    assert model(growth.images(2)).shape == (2, 3)
    assert len([module for module in model if hasattr(module, "weight")]) == depth


def test_peak_memory_of_a_process():
    script = str(ROOT / "benchmarks" / "peak.py")
    command = [sys.executable, script, "pyflatness", "200", "3", "16", "3", "200"]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert int(found) > 200 * 16 * 64 * 4  # at least the outputs of a convolution
