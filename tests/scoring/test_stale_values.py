"""A value is found again where nothing changed, and measured anew whatever changed that it depends on."""

import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import pyflatness as pf

FILES = {
    "stale_net.py": """
import json, os, random, time
from pathlib import Path
import numpy as np
import torch
from torch import nn
import stale_settings
from stale_base import Base
from stale_helpers import scaled

SCALE, TABLE, STEPS, act, RUN = 2.0, {"scale": 2.0}, [lambda x: 2.0 * x], scaled(1.0), object()

class Net(Base):
    slope = 1.0

    def __init__(self):
        super().__init__()
        facts = json.loads(Path(__file__).with_name("facts.json").read_text())
        self.head, self.scale = nn.Linear(3, 2), facts["scale"]
        self.power = float(os.environ.get("STALE_POWER", "1"))

    def forward(self, x, factor=1.0):
        x = STEPS[0](act(x)) * SCALE * TABLE["scale"] * self.slope * factor * stale_settings.SHIFT
        return self.end(self.head(x ** self.power * self.scale))

    def other(self, x):
        return 3 * x

class Reading(Net):
    def forward(self, x):
        return super().forward(x) * json.loads(Path(__file__).with_name("forward.json").read_text())

class Drawn(Net):
    def __init__(self):
        super().__init__()
        self.first = self.head.weight.detach().clone(), random.random(), np.random.rand()

class Dated(Net):
    def __init__(self):
        super().__init__()
        self.made = time.time(), os.getpid()

class Late(Net):
    def forward(self, x):
        from stale_late import late
        return super().forward(late(x))

def make(kind="Net"):
    return globals()[kind]()

def weigh(outputs, targets, factor=1.0):
    return factor * nn.functional.mse_loss(outputs, targets)
""",
    "stale_base.py": """
from torch import nn
from stale_config import SHIFT

class Base(nn.Module):
    def end(self, x):
        return x + SHIFT
""",
    "stale_config.py": "SHIFT = 1.0\n",
    "stale_settings.py": "SHIFT = 1.0\n",
    "stale_other.py": "SHIFT = 1.0\n",
    "stale_late.py": "FACTOR = 1.0\n\ndef late(x):\n    return FACTOR * x\n",
    "stale_helpers.py": "def scaled(scale):\n    return lambda x: scale * x\n",
    "facts.json": '{"scale": 2.0, "author": "A"}',
    "forward.json": "1.0",
}
MODULES = [name.removesuffix(".py") for name in FILES if name.endswith(".py")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "beside.py").write_text("OTHER = 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # two edits in one second are one time to the cache
    monkeypatch.delenv("STALE_POWER", raising=False)
    state = {f"head.{name}": held for name, held in torch.nn.Linear(3, 2).state_dict().items()}
    save_file(state, tmp_path / "a.safetensors")
    forget()
    yield tmp_path
    forget()


def forget() -> None:
    """Be as a new process is."""
    for name in MODULES:
        sys.modules.pop(name, None)
    importlib.invalidate_caches()


def net() -> Any:
    return importlib.import_module("stale_net")


def edit(name: str, old: str, new: str) -> None:
    text = Path(name).read_text()
    assert text.count(old) == 1
    Path(name).write_text(text.replace(old, new))


def edited(name: str, old: str, new: str) -> Callable[[], None]:
    def change() -> None:
        edit(name, old, new)
        forget()

    return change


def setting(owner: str, name: str, made: Callable[[], Any]) -> Callable[[], None]:
    def change() -> None:
        found = net()
        for part in owner.split(".")[1:]:
            found = getattr(found, part)
        setattr(found, name, made())

    return change


def notebook(text: str) -> Any:
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(f"made = {text}", space)
    return space["made"]


def scored(loss: Any = "mse_loss", model: str = "make", **options: Any) -> pf.results.Scores:
    """Score one checkpoint, whose value is that of ``pf.measure`` now, whatever was found again."""
    data = torch.arange(60.0).reshape(20, 3) / 60, torch.arange(40.0).reshape(20, 2) / 40
    how = {"layers": "head", "measures": "relative_flatness", "curvature": "ggn"}
    scores = pf.score(
        ["a.safetensors"], loss, data, model=f"stale_net.py:{model}", store="runs.sqlite", **how, **options
    )
    network = getattr(net(), model)().eval()
    network.load_state_dict(load_file("a.safetensors"))
    expected = pf.measure(network, loss, data, **how)["head", "relative_flatness"].value
    assert scores.rows[0].value == pytest.approx(expected, rel=1e-6)
    return scores


STALE: dict[str, Callable[[], Any]] = {
    "attribute from JSON": lambda: edit("facts.json", "2.0", "3.0"),
    "attribute from the environment": lambda: os.environ.update(STALE_POWER="2"),
    "number of a module": setting("net", "SCALE", lambda: 3.0),
    "number of another module": lambda: setattr(net().stale_settings, "SHIFT", 3.0),
    "number in a dictionary": lambda: net().TABLE.update(scale=3.0),
    "lambda in a list": lambda: net().STEPS.__setitem__(0, notebook("lambda x: 3.0 * x")),
    "what a closure holds": setting("net", "act", lambda: net().scaled(3.0)),
    "a module for another": lambda: setattr(net(), "stale_settings", importlib.import_module("stale_config")),
    "method": setting("net.Net", "end", lambda: notebook("lambda self, x: 3 * x")),
    "method by another of the file": setting("net.Net", "end", lambda: net().Net.other),
    "method of a base": setting("net.Base", "end", lambda: notebook("lambda self, x: 3 * x")),
    "class attribute": setting("net.Net", "slope", lambda: 3.0),
    "default argument": lambda: setattr(net().Net.forward, "__defaults__", (3.0,)),
    "default argument in the file": edited(
        "stale_net.py", "def forward(self, x, factor=1.0)", "def forward(self, x, factor=3.0)"
    ),
    "class attribute in the file": edited("stale_net.py", "slope = 1.0", "slope = 3.0"),
    "lambda in the file": edited("stale_net.py", "lambda x: 2.0 * x", "lambda x: 3.0 * x"),
    "helper file": edited("stale_helpers.py", "scale * x", "3 * scale * x"),
    "file of the base class": edited("stale_base.py", "x + SHIFT", "3 * x + SHIFT"),
    "number imported by two hops": edited("stale_config.py", "1.0", "3.0"),
    "file edited after its import": lambda: edit("stale_net.py", "return self.end(", "return 3 * self.end("),
}


@pytest.mark.parametrize("what", STALE)
def test_what_changed_is_measured_anew(what: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STALE_POWER", "1")  # so that it is put back
    assert scored().computed == 1
    assert scored().computed == 0
    STALE[what]()
    assert scored().computed == 1
    forget()  # what was measured with something set by a program is not what a new process has
    for name, text in FILES.items():
        (folder / name).write_text(text)
    os.environ["STALE_POWER"] = "1"
    assert scored().computed == 0


LOSSES: dict[str, Callable[[float], Any]] = {
    "lambda": lambda factor: lambda outputs, targets: factor * ((outputs - targets) ** 2).mean(),
    "partial of a lambda": lambda factor: functools.partial(
        lambda o, t, factor: factor * ((o - t) ** 2).mean(), factor=factor
    ),
}


@pytest.mark.parametrize("what", LOSSES)
@pytest.mark.usefixtures("folder")
def test_a_loss_without_a_name_is_measured_anew_and_that_is_said(what: str) -> None:
    for factor in (1.0, 1.0, 3.0):
        scores = scored(LOSSES[what](factor))
        assert scores.computed == 1
        assert len(scores.notes) == 1
    assert [scored(LOSSES[what](1.0), version=version).computed for version in ("1", "1", "2")] == [1, 0, 1]


@pytest.mark.usefixtures("folder")
def test_a_loss_in_a_file_counts_with_what_a_partial_and_its_defaults_hold() -> None:
    for factor, computed in ((1.0, 1), (1.0, 0), (3.0, 1), (1.0, 0)):
        assert scored(functools.partial(net().weigh, factor=factor)).computed == computed
    assert [scored(net().weigh).computed for _ in range(2)] == [1, 0]
    net().weigh.__defaults__ = (3.0,)
    assert scored(net().weigh).computed == 1


@pytest.mark.usefixtures("folder")
def test_files_that_are_read_in_the_forward_pass_are_measured_anew_and_said() -> None:
    found = []
    for text in ("1.0", "1.0", "3.0"):
        Path("forward.json").write_text(text)
        scores = scored(model="Reading")
        assert scores.computed == 1
        assert ["forward.json is read while the network or the loss runs: values" in note for note in scores.notes] == [
            True
        ]
        found.append(scores.rows[0].value)
    assert found[0] == found[1] != found[2]
    assert [scored(model="Reading", version=version).computed for version in ("1", "1", "2")] == [1, 0, 1]


@pytest.mark.usefixtures("folder")
def test_a_module_that_is_imported_while_the_network_runs() -> None:
    assert scored(model="Late").computed == 1
    scored(model="Late")  # from now on it counts what the module holds
    assert scored(model="Late").computed == 0
    importlib.import_module("stale_late").FACTOR = 3.0
    assert scored(model="Late").computed == 1
    forget()
    assert scored(model="Late").computed == 0
    edited("stale_late.py", "FACTOR = 1.0", "FACTOR = 3.0")()
    assert scored(model="Late").computed == 1


INNOCENT: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "a new process": forget,
    "another file": edited("beside.py", "OTHER = 1", "OTHER = 2"),
    "a comment in another file": edited("beside.py", "OTHER = 1", "OTHER = 1  # one"),
    "what the callable does not take of a file": lambda: edit("facts.json", '"A"', '"B"'),
    "a name that nothing uses": setting("net", "RUN", object),
    "a call of everything": lambda: [net().make()(torch.randn(2, 3)) for _ in range(100)],
}


@pytest.mark.parametrize("what", INNOCENT)
@pytest.mark.usefixtures("folder")
def test_what_does_not_matter_is_found_again(what: str) -> None:
    assert scored().computed == 1
    INNOCENT[what]()
    assert scored().computed == 0


def test_numbers_that_a_network_draws_are_the_same_in_every_process(folder: Path) -> None:
    (folder / "stale_data.py").write_text(
        "import torch\n\ndef data():\n    return torch.ones(8, 3), torch.ones(8, 2)\n"
    )
    options = {"model": "stale_net.py:Drawn", "store": "runs.sqlite"}
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    found = [pf.score(["a.safetensors"], "mse_loss", "stale_data.py:data", **options) for _ in range(2)]
    assert torch.equal(torch.rand(3), expected)
    assert [scores.computed for scores in found] == [1, 0]
    options |= {"executor": "processes", "store": "workers.sqlite"}
    assert pf.score(["a.safetensors"], "mse_loss", "stale_data.py:data", **options).computed == 1


def test_a_network_of_other_attributes_in_each_process_is_measured_anew_and_that_is_said(folder: Path) -> None:
    (folder / "stale_data.py").write_text(
        "import torch\n\ndef data():\n    return torch.ones(8, 3), torch.ones(8, 2)\n"
    )
    options = {"model": "stale_net.py:Dated", "store": "runs.sqlite", "executor": "processes"}
    for _ in range(2):
        scores = pf.score(["a.safetensors"], "mse_loss", "stale_data.py:data", **options)
        assert scores.computed == 1
        assert any("network of other attributes in each process" in note for note in scores.notes)


def test_a_number_of_a_module_that_no_file_imports(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module is set by a program, in the place of another."""
    other = importlib.import_module("stale_other")
    monkeypatch.setattr(net(), "stale_settings", other)
    assert scored().computed == 1
    assert scored().computed == 0
    monkeypatch.setattr(other, "SHIFT", 3.0)
    assert scored().computed == 1


def test_workers_may_have_a_module_by_another_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name is taken here by a module of something else, so that it is loaded by its path."""
    (folder / "stale_data.py").write_text(
        "import torch\n\ndef data():\n    return torch.ones(8, 3), torch.ones(8, 2)\n"
    )
    (folder / "stale_user.py").write_text("from stale_net import Net\n\nclass User(Net):\n    pass\n")
    monkeypatch.setitem(sys.modules, "stale_user", ModuleType("stale_user"))
    options = {"model": "stale_user.py:User", "store": "runs.sqlite", "executor": "processes"}
    assert pf.score(["a.safetensors"], "mse_loss", "stale_data.py:data", **options).computed == 1


def test_workers_that_hold_other_numbers_in_their_modules_are_refused(folder: Path) -> None:
    data = folder / "stale_data.py"
    data.write_text("import torch\n\ndef data():\n    return torch.ones(8, 3), torch.ones(8, 2)\n")
    net().SCALE = 3.0
    options = {"model": "stale_net.py:make", "store": "runs.sqlite", "executor": "processes"}
    with pytest.raises(pf.errors.InputError, match="set what a module holds in its file, not later"):
        pf.score(["a.safetensors"], "mse_loss", "stale_data.py:data", **options)
    net().SCALE = 2.0
    assert pf.score(["a.safetensors"], "mse_loss", "stale_data.py:data", **options).computed == 1


def test_a_network_in_memory_of_which_a_weight_is_frozen_is_measured_anew(tmp_path: Path) -> None:
    """Sharpness is over all parameters that are not frozen."""
    network = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3))
    data, found = (torch.randn(40, 5), torch.arange(40) % 3), []
    for trained in (True, False, True):
        network[0].requires_grad_(trained)
        scores = pf.score({"m": network}, "cross_entropy", data, measures=["sharpness"], store=tmp_path / "s.sqlite")
        found.append(scores["m", "sharpness"].value)
        report = pf.measure(network, "cross_entropy", data, measures=["sharpness"])
        assert found[-1] == pytest.approx(report["sharpness"].value)
    assert found[1] < 0.99 * found[0]
