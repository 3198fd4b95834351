"""The page docs/layout.md: its tree and its order of imports are the package's, and its measure works."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import pyflatness as pf
from support import ROOT, imports

PACKAGE = Path(pf.__file__).parent
PAGE = (ROOT / "docs" / "layout.md").read_text(encoding="utf-8")


def rooms() -> set[str]:
    return {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}


def test_tree_has_every_room():
    tree = PAGE[PAGE.index("    pyflatness/\n") : PAGE.index("    csrc/\n")]
    assert set(re.findall(r"^ {6}(\w+)(?:/|\.py) +\S", tree, re.MULTILINE)) == rooms()


def test_imports_go_down_the_list():
    lines = re.search(r"on lines below its own:\n\n((?: {4}.+\n)+)", PAGE)[1].splitlines()
    floor = {room: number for number, line in enumerate(lines) for room in line.split()}
    assert floor.keys() == rooms() - {"__init__", "__main__"}
    graph = imports.graph(PACKAGE)
    for room in floor:
        for other in graph[room]:
            assert floor[other] > floor[room], f"{room} imports {other}"


def test_files_that_are_named_exist():
    named = set(re.findall(r"`((?:\w+/)+[\w.]+\.(?:py|md))`", PAGE)) - {"pyflatness/measures/trace_per_weight.py"}
    assert len(named) > 15
    missing = [name for name in named if not (ROOT / name).exists() and not (PACKAGE / name).exists()]
    assert not missing


class Attention(nn.Module):
    """Attention, whose packed weight is no module's."""

    def __init__(self):
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, inputs):
        return self.head(self.attention(inputs, inputs, inputs)[0].mean(dim=1))


@pytest.fixture
def example(monkeypatch):
    """The measure of the page, in the table of measures."""
    module = ModuleType("pyflatness.measures.trace_per_weight")
    module.__package__ = "pyflatness.measures"
    monkeypatch.setitem(sys.modules, module.__name__, module)
    source = next(part for part in re.findall(r"```python\n(.+?)```", PAGE, re.DOTALL) if "TRACE_PER_WEIGHT =" in part)
    exec(source, module.__dict__)
    monkeypatch.setattr("pyflatness.measures.MEASURES", (*pf.measures.MEASURES, module.TRACE_PER_WEIGHT))


@pytest.mark.usefixtures("example")
def test_measure_of_the_example_in_attention():
    torch.manual_seed(0)
    model = Attention().double().eval()
    data = torch.randn(5, 3, 4).double(), torch.arange(5) % 3
    report = pf.measure(model, nn.CrossEntropyLoss(), data, measures=["trace", "trace_per_weight"])
    packed = [layer for layer in report.layers if "in_proj_weight" in layer]
    assert packed
    for layer in report.layers:
        count = 12 if layer == "head" else 16 if layer != "attention.in_proj_weight" else 48
        assert report[layer, "trace_per_weight"].value == pytest.approx(report[layer, "trace"].value / count)


@pytest.mark.usefixtures("example")
@pytest.mark.parametrize("alone", [False, True])
def test_measure_of_the_example(alone):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3)).double().eval()
    model, layers = (model[2], [""]) if alone else (model, ["0", "2"])
    data = torch.randn(5, 4 if alone else 3).double(), torch.arange(5) % 3
    report = pf.measure(model, nn.CrossEntropyLoss(), data, measures=["trace", "trace_per_weight"], probes=4)
    for layer in layers:
        trace, found = report[layer, "trace"], report[layer, "trace_per_weight"]
        stderr = None if trace.stderr is None else pytest.approx(trace.stderr / 12)  # of a head it is exact
        assert (found.value, found.stderr) == (pytest.approx(trace.value / 12), stderr)
    whole = sum(report[layer, "trace_per_weight"].value for layer in layers)
    assert report["", "trace_per_weight"].value == pytest.approx(whole)
