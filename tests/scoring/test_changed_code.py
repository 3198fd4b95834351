"""Code that changed never hands out an old value: whatever the user edits, redefines or sets later changes the key."""

import importlib
import json
import os
import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import pyflatness as pf
from support.score_runs import status

NOTEBOOK = """
import functools, threading, torch
from torch import nn
from torch.nn import functional as F

SCALE, TABLE, VECTOR = 2.0, {"scale": 2.0, "steps": [F.relu]}, torch.ones(2)

class Setting:
    scale = 2.0

setting = Setting()

def shift(x):
    return x + 1.0

def helper(x):
    return shift(x)

def scaled(scale):
    return lambda x: scale * x

class Base(nn.Module):
    power = 1

    def end(self, x):
        return x

class Net(Base):
    def __init__(self):
        super().__init__()
        self.head, self.act = nn.Linear(3, 2), scaled(2.0)

    def forward(self, x, factor=1.0):
        {uses}
        return self.end(factor * self.head(x))

def plus(module, inputs):
    return inputs[0] + 1

def times(module, inputs, output):
    return output * 2

def of_file(where, name):
    import importlib.util
    spec = importlib.util.spec_from_file_location(name, where)

def weigh(outputs, targets):
    return F.mse_loss(outputs, targets)

def loss(outputs, targets, factor=1.0):
    return factor * weigh(outputs, targets)

net = Net()
"""
IN_NOTEBOOK = {  # what forward does, and what is done later; classes and functions have no file
    "number": ("x = SCALE * x", "SCALE = 3.0"),
    "dictionary": ("x = TABLE['scale'] * x", "TABLE['scale'] = 3.0"),
    "function in a dictionary": ("x = TABLE['steps'][0](x)", "TABLE['steps'] = [torch.tanh]"),
    "order in a dictionary": ("x = [f for f in TABLE][0] and x", "TABLE = dict(reversed(TABLE.items()))"),
    "tensor": ("x = VECTOR.sum() * x", "VECTOR[0] = 7"),
    "class": ("x = Setting.scale * x", "Setting.scale = 3.0"),
    "class redefined": ("x = Setting.scale * x", "class Setting:\n    scale = 3.0"),
    "object": ("x = setting.scale * x", "setting.scale = 3.0"),
    "helper": ("x = helper(x)", "def helper(x):\n    return x - 1.0"),
    "helper's helper": ("x = helper(x)", "def shift(x):\n    return x + 2.0"),
    "closure": ("x = self.act(x)", "net.act = scaled(3.0)"),
    "default": ("x = 1 * x", "Net.forward.__defaults__ = (3.0,)"),
    "keyword default": ("x = helper(x)", "helper.__kwdefaults__ = {'y': 1}"),
    "partial": ("x = self.act(x)", "net.act = functools.partial(torch.mul, 3.0)"),
    "forward set": ("x = 1 * x", "Net.forward = lambda self, x: self.head(x) * 3"),
    "forward of one network": ("x = 1 * x", "net.forward = lambda x: net.head(x) * 3"),
    "method of a base": ("x = 1 * x", "Base.end = lambda self, x: x * 3"),
    "attribute of a base": ("x = x ** self.power", "Base.power = 2"),
    "class of a network": (
        "x = 1 * x",
        "class Other(Net):\n    def end(self, x):\n        return 3 * x\nnet.__class__ = Other",
    ),
    "hook": ("x = 1 * x", "net.head.register_forward_hook(times)"),
    "pre-hook": ("x = 1 * x", "net.head.register_forward_pre_hook(plus)"),
    "hook redefined": (
        "x = 1 * x",
        "def times(module, inputs, output):\n    return output * 3\nnet.head.register_forward_hook(times)",
    ),
    "hook on all modules": ("x = 1 * x", "handle = nn.modules.module.register_module_forward_hook(times)"),
    "torch's class": ("x = 1 * x", "nn.Linear.forward = lambda self, x: 3 * F.linear(x, self.weight, self.bias)"),
    "torch's function": ("x = F.celu(x)", "F.celu = lambda x: 3 * x"),
    "name in a text": ("x = globals()['SCALE'] * x", "SCALE = 3.0"),
    "loss": ("x = 1 * x", "def loss(outputs, targets):\n    return 3 * weigh(outputs, targets)"),
    "loss's helper": ("x = 1 * x", "def weigh(outputs, targets):\n    return 3 * F.mse_loss(outputs, targets)"),
    "loss's default": ("x = 1 * x", "loss.__defaults__ = (3.0,)"),
}


class Cell(dict):
    """A notebook: cells share their names, and have no file."""

    def __init__(self, uses: str = "x = 1 * x") -> None:
        super().__init__(__name__="__main__")
        self.run(NOTEBOOK.replace("{uses}", uses))
        torch.nn.init.ones_(self["net"].head.weight), torch.nn.init.ones_(self["net"].head.bias)

    def run(self, text: str) -> None:
        exec(text, self)


@pytest.fixture
def as_it_was() -> Any:
    forward, celu = torch.nn.Linear.forward, torch.nn.functional.celu
    yield
    torch.nn.Linear.forward, torch.nn.functional.celu = forward, celu
    torch.nn.modules.module._global_forward_hooks.clear()


def fresh(network: torch.nn.Module, loss: Any, data: Any) -> tuple[float | None, str]:
    """The value of the head as it is now, or the error of a layer that is no linear map any more."""
    try:
        report = pf.measure(network, loss, data, measures="relative_flatness", curvature="ggn")
    except pf.errors.FlatnessError as error:
        return None, str(error)
    return report["head", "relative_flatness"].value, ""


@pytest.mark.parametrize("what", IN_NOTEBOOK)
@pytest.mark.usefixtures("as_it_was")
def test_what_changes_in_a_notebook_is_measured_anew(what: str, tmp_path: Path) -> None:
    uses, change = IN_NOTEBOOK[what]
    cell, generator = Cell(uses), torch.Generator().manual_seed(0)
    data = torch.randn(20, 3, generator=generator), torch.randn(20, 2, generator=generator)
    for text in ("", change):
        cell.run(text)
        networks, options = {"a": cell["net"].eval()}, {"store": tmp_path / "a.sqlite", "curvature": "ggn"}
        scores = pf.score(networks, cell["loss"], data, **options)
        assert scores.computed == 1
        assert "computed anew by each run" in scores.notes[0]
        (row,) = scores
        assert (row.value, row.error) == fresh(cell["net"], cell["loss"], data)


PATCHES = {
    "torch's class": (
        "nn.Linear.forward = lambda self, x: 3 * F.linear(x, self.weight, self.bias)",
        "forward of Linear",
    ),
    "torch's function": ("F.celu = lambda x: 3 * x", r"celu of torch\.nn\.functional"),
    "hook on all modules": ("handle = nn.modules.module.register_module_forward_hook(times)", "times is in no file"),
    "hook": ("net = nn.Linear(3, 2)\nnet.register_forward_hook(times)", "times is in no file"),
    "attribute": ("net = nn.Linear(3, 2)\nnet.act = lambda x: x", "<lambda> is in no file"),
    "class redefined": ("net.__class__ = type('Linear', (nn.Linear,), {})", "Linear is in no file"),
}


@pytest.mark.parametrize("what", PATCHES)
@pytest.mark.usefixtures("as_it_was")
def test_a_network_of_torchs_layers_with_something_of_a_notebook_is_measured_anew(what: str, tmp_path: Path) -> None:
    cell = Cell()
    cell["net"] = torch.nn.Linear(3, 2).eval()
    data, store = (torch.ones(20, 3), torch.ones(20, 2)), tmp_path / "a.sqlite"
    assert [pf.score({"a": cell["net"]}, "mse_loss", data, store=store).computed for _ in range(2)] == [1, 0]
    change, words = PATCHES[what]
    cell.run(change)
    for _ in range(2):
        scores = pf.score({"a": cell["net"].eval()}, "mse_loss", data, store=store, curvature="ggn")
        assert scores.computed == 1
        assert re.search(words, scores.notes[0])


def test_what_cannot_be_found_again_is_computed_and_said(tmp_path: Path) -> None:
    cell = Cell()
    data, networks = (torch.randn(20, 3), torch.randn(20, 2)), {"a": cell["net"].eval()}
    for _ in range(2):
        scores = pf.score(networks, "mse_loss", data, store=tmp_path / "a.sqlite")
        assert scores.computed == 1
        (note,) = scores.notes
        assert "Net is in no file that can be imported" in note
        assert note in str(scores)
    network = torch.nn.Linear(3, 2).eval()
    network.lock = threading.Lock()
    scores = pf.score({"a": network}, "mse_loss", data, store=tmp_path / "a.sqlite")
    assert "lock (TypeError: cannot pickle" in scores.notes[0]
    scores = [pf.score(networks, "mse_loss", data, store=tmp_path / "a.sqlite", version="1") for _ in range(2)]
    assert [(one.computed, one.notes) for one in scores] == [(1, ()), (0, ())]
    cell.run("Net.forward = lambda self, x: 2 * self.head(x)")
    assert pf.score(networks, "mse_loss", data, store=tmp_path / "a.sqlite", version="1").computed == 0
    assert pf.score(networks, "mse_loss", data, store=tmp_path / "a.sqlite", version="2").computed == 1
    with pytest.raises(pf.errors.InputError, match="a text that stands for your code"):
        pf.score(networks, "mse_loss", data, store=tmp_path / "a.sqlite", version=2)


FILES = {
    "net.py": """
import torch
from torch import nn
import settings
from config import SCALE, TABLE, VECTOR
from helpers import act, twice

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 2)

    @twice
    def forward(self, x):
        from later import late
        return late(self.head(act(SCALE * TABLE["scale"] * VECTOR * x) * settings.POWER))

def data():
    return torch.arange(60.0).reshape(20, 3) / 60, torch.arange(40.0).reshape(20, 2) / 40
""",
    "config.py": "import torch\nfrom base import SCALE\nTABLE, VECTOR = {'scale': 2.0}, torch.ones(3)\n",
    "base.py": "SCALE = 2.0\n",
    "settings.py": "POWER = 1.0\n",
    "helpers.py": """
def act(x):
    return x.tanh()

def twice(function):
    return lambda *args: 1 * function(*args)
""",
    "later.py": "def late(x):\n    from deep.last import last\n    return last(x)\n",
    "deep/__init__.py": "",
    "deep/last.py": "from . import most\n\ndef last(x):\n    return most.FACTOR * x\n",
    "deep/most.py": "FACTOR = 1.0\n",
}
IN_FILES = {
    "number by two hops": ("base.py", "2.0", "3.0"),
    "dictionary": ("config.py", "'scale': 2.0", "'scale': 3.0"),
    "tensor": ("config.py", "torch.ones(3)", "3 * torch.ones(3)"),
    "number of a module": ("settings.py", "1.0", "3.0"),
    "function": ("helpers.py", "x.tanh()", "x.sin()"),
    "decorator": ("helpers.py", "1 * function", "3 * function"),
    "class": ("net.py", "return late(", "return 3 * late("),
    "imported while it runs": ("deep/last.py", "most.FACTOR * x", "3 * most.FACTOR * x"),
    "imported by that": ("deep/most.py", "1.0", "3.0"),
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (folder := tmp_path / "project" / "deep").mkdir(parents=True)
    for name, text in FILES.items():
        (folder.parent / name).write_text(text)
    monkeypatch.chdir(folder.parent)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # two edits in one second are one time to the cache
    torch.manual_seed(0)
    save_file(torch.nn.Linear(3, 2).state_dict(), folder.parent / "a.safetensors")
    state = {f"head.{name}": held for name, held in torch.nn.Linear(3, 2).state_dict().items()}
    save_file(state, folder.parent / "a.safetensors")
    yield folder.parent
    forget()


def forget() -> None:
    """Be as a new process is."""
    for name in ("net", "config", "base", "settings", "helpers", "later", "deep", "deep.last", "deep.most"):
        sys.modules.pop(name, None)
    importlib.invalidate_caches()


def scored(*options: str, store: str = "runs.sqlite") -> tuple[int, list[float]]:
    """Score from the command line; return how many units were done, and the values of all settings."""
    forget()
    spec = ["--model", "net.py:Net", "--data", "net.py:data", "--loss", "mse_loss", "a.safetensors"]
    assert status("score", *spec, "--executor", "serial", "--store", store, *options) == 0
    assert status("store", "export", store, "--out", "rows.json") == 0
    with pf.scoring.store.Store(Path(store)) as held:
        done = len(held.select("SELECT * FROM units"))
    return done, [row["value"] for row in json.loads(Path("rows.json").read_text())["rows"]]


@pytest.mark.parametrize("what", IN_FILES)
@pytest.mark.usefixtures("project")
def test_an_edited_file_is_measured_anew_from_the_command_line(what: str) -> None:
    done, before = scored()
    assert done == 1
    name, old, new = IN_FILES[what]
    text = Path(name).read_text()
    assert text.count(old) == 1
    Path(name).write_text(text.replace(old, new))
    done, values = scored()
    assert done == 2
    assert values[1] != values[0] == before[0]


def test_other_projects_and_a_new_place_change_nothing(project: Path) -> None:
    scored()
    (project.parent / "other.py").write_text("OTHER = 1\n")
    (project / "beside.py").write_text("NOT_IMPORTED = 1\n")
    assert scored()[0] == 1
    moved = project.rename(project.parent / "moved")
    os.chdir(moved)
    sys.path[:] = [entry for entry in sys.path if not entry.startswith(str(project))]
    assert scored()[0] == 1


def test_a_version_decides_alone(project: Path) -> None:
    assert scored("--version", "1")[0] == 1
    (project / "base.py").write_text("SCALE = 3.0\n")
    assert scored("--version", "1")[0] == 1
    assert scored("--version", "2")[0] == 2
    assert scored()[0] == 3


def test_what_was_edited_after_it_was_imported_is_measured_anew(project: Path) -> None:
    sys.path.insert(0, str(project))
    net = importlib.import_module("net")
    networks, data = {"a": net.Net().eval()}, net.data()
    text = (project / "net.py").read_text()
    edited = text.replace("return late(", "return 3 * late(")
    (project / "net.py").write_text(edited)  # before the store meets it for the first time
    for _ in range(2):
        scores = pf.score(networks, "mse_loss", data, store="runs.sqlite")
        assert scores.computed == 1
        assert any("net.py has: that was edited after its import" in note for note in scores.notes)
    (project / "net.py").write_text(text)
    assert pf.score(networks, "mse_loss", data, store="runs.sqlite").computed == 1
    (project / "base.py").write_text("SCALE = 5.0\n")
    assert pf.score(networks, "mse_loss", data, store="runs.sqlite").computed == 1
    for name in ("base", "config", "net"):  # what a notebook may do in place of a restart
        importlib.reload(sys.modules[name])
    again = pf.score({"a": net.Net().eval()}, "mse_loss", data, store="runs.sqlite")
    assert again.computed == 1


def test_workers_with_other_code_are_refused(project: Path) -> None:
    (project / "grows.py").write_text(
        "import os, torch\nfrom net import data\n\ndef make():\n    network = torch.nn.Linear(3, 2)\n"
        "    with open('net.py', 'a') as file:\n        file.write('LATER = 1\\n')\n    return network\n"
    )
    sys.path.insert(0, str(project))
    save_file(torch.nn.Linear(3, 2).state_dict(), project / "a.safetensors")
    options = {"model": "grows.py:make", "store": "runs.sqlite", "executor": "processes"}
    with pytest.raises(pf.errors.InputError, match="a worker that made them got others"):
        pf.score(["a.safetensors"], "mse_loss", "grows.py:data", **options)
