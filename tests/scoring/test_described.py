"""What makes a difference to a value makes one to its key, wherever an object holds it, and nothing else does."""

import functools
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pyflatness as pf
from pyflatness.scoring import keys
from pyflatness.scoring.user_files import NotFoundAgainError


class Scaled:
    def __init__(self, scale: Any) -> None:
        self.scale = scale

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.scale * F.mse_loss(outputs, targets)

    def method(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self(outputs, targets)


class Inner(nn.Module):
    def __init__(self, smoothing: float) -> None:
        super().__init__()
        self.inner = nn.CrossEntropyLoss(label_smoothing=smoothing)

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.inner(outputs, targets)


class Hidden(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self._scale = scale

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self._scale * F.mse_loss(outputs, targets)


class Unpickled(Scaled):
    def __getstate__(self) -> dict[str, Any]:
        return {}


class Slotted(Scaled):
    __slots__ = ("scale",)


def network_facts(network: nn.Module) -> keys.Facts:
    found = keys.Described.network(network)
    assert found.unknown == ""
    return found.facts


def around(function: Callable[..., Any]) -> Callable[..., Any]:
    def called(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return function(outputs, targets)

    return called


def by_global(scale: float) -> Callable[..., Any]:
    space: dict[str, Any] = {"scale": scale, "F": F}
    exec("def loss(outputs, targets): return scale * F.mse_loss(outputs, targets)", space)
    return space["loss"]


def weights(place: int) -> np.ndarray:
    found = np.zeros(5000)
    found[place] = 1e-12  # numpy prints neither what is in the middle nor so small a number
    return found


DIFFERENT = {
    "objects that are called": (Scaled(1.0), Scaled(2.0)),
    "slots": (Slotted(1.0), Slotted(2.0)),
    "methods": (Scaled(1.0).method, Scaled(2.0).method),
    "objects in objects": (Scaled(Scaled(1.0)), Scaled(Scaled(2.0))),
    "arrays": (Scaled(weights(2000)), Scaled(weights(3000))),
    "tensors": (Scaled(torch.tensor(1.0)), Scaled(torch.tensor(2.0))),
    "modules in modules": (Inner(0.0), Inner(0.1)),
    "what pickle leaves out": (Unpickled(1.0), Unpickled(2.0)),
    "hidden attributes": (Hidden(1.0), Hidden(2.0)),
    "functions in partials": (functools.partial(F.mse_loss), functools.partial(F.l1_loss)),
}
WITHOUT_A_NAME = {
    "lambdas in one line": (lambda o, t: F.mse_loss(o, t), lambda o, t: 2 * F.mse_loss(o, t)),
    "defaults": tuple(lambda o, t, scale=scale: scale * F.mse_loss(o, t) for scale in (1.0, 2.0)),
    "objects in closures": (around(Scaled(1.0)), around(Scaled(2.0))),
    "functions in closures": (around(F.mse_loss), around(F.l1_loss)),
    "closures in partials": (functools.partial(around(F.mse_loss)), functools.partial(around(F.l1_loss))),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_losses_that_differ_have_other_keys(what: str) -> None:
    one, other = (keys.of_json(keys.described(loss)) for loss in DIFFERENT[what])
    assert one != other
    assert one == keys.of_json(keys.described(DIFFERENT[what][0]))


@pytest.mark.parametrize("what", [*WITHOUT_A_NAME, "global variables"])
def test_losses_without_a_name_are_found_by_no_run(what: str) -> None:
    for loss in WITHOUT_A_NAME.get(what, (by_global(1.0), by_global(2.0))):
        with pytest.raises(
            NotFoundAgainError, match=r"is (in no file that can be imported|not what .* has by that name)"
        ):
            keys.described(loss)


def test_a_loss_with_another_parameter_is_measured_again(tmp_path: Path) -> None:
    data, networks = (torch.randn(20, 3), torch.randn(20, 2)), {"a": nn.Linear(3, 2).eval()}
    for kind in (Scaled, Hidden, lambda scale: Scaled(scale).method):
        one, two = (pf.score(networks, kind(scale), data, store=tmp_path / "a.sqlite") for scale in (1.0, 2.0))
        assert two["a", "relative_flatness"].value == pytest.approx(2 * one["a", "relative_flatness"].value, rel=1e-6)


class Net(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor], scale: float) -> None:
        super().__init__()
        self.function, self.scale, self.head = function, scale, nn.Linear(3, 2)
        self.weights = [self.head.weight]  # as torch's own recurrences do

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.head(self.function(x))


def test_networks_that_differ_in_an_attribute_are_not_one(tmp_path: Path) -> None:
    networks = {"a": Net(F.relu, 1.0), "b": Net(F.relu, 2.0), "c": Net(torch.tanh, 1.0)}
    for network in networks.values():
        network.eval().load_state_dict(networks["a"].state_dict())
    data = torch.randn(20, 3), torch.randn(20, 2)
    kept = pf.score(networks, "mse_loss", data, store=tmp_path / "a.sqlite")
    assert [row.value for row in kept] == [row.value for row in pf.score(networks, "mse_loss", data)]
    assert pf.score(networks, "mse_loss", data, store=tmp_path / "a.sqlite").computed == 0


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "attributes that hold weights": lambda: Net(F.relu, 1.0),
    "recurrence": lambda: nn.LSTM(3, 4, 2),
    "attention": lambda: nn.TransformerEncoderLayer(4, 2, activation="gelu"),
    "weights of weights": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)),
    "buffers": lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)),
    "wrapped": lambda: nn.DataParallel(nn.Linear(3, 2)),
}


@pytest.mark.parametrize("what", NETWORKS)
def test_the_weights_that_a_network_begins_with_do_not_matter(what: str) -> None:
    assert network_facts(NETWORKS[what]()) == network_facts(NETWORKS[what]())


def test_files_that_a_source_file_imports_are_a_part_of_it(tmp_path: Path) -> None:
    found = []
    for folder, scale in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
        (place := tmp_path / folder).mkdir()
        (place / "scale_of_net.py").write_text(f"SCALE = {scale}\n")
        (place / "of_net.py").write_text(
            "from torch import nn\nimport scale_of_net\n\ndef net():\n    return nn.Linear(3, 2)\n"
        )
        show = "from pyflatness.scoring import specs, keys\nnet = specs.resolve('of_net.py:net')\n"
        show += "code = keys.Code.of(net(), [net, {}], 'mse_loss', None)\nassert code.unknown == (), code\n"
        show += "print(keys.of_json([code.model, sorted(code.files.values())]))"
        command = [sys.executable, "-c", show]
        found.append(subprocess.run(command, cwd=place, check=True, capture_output=True, text=True).stdout)
    assert found[0] == found[1] != found[2]


def test_classes_of_one_name_in_two_files_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for name, other, scale in (("one_of_two", "two_of_two", 1), ("two_of_two", "one_of_two", 2)):
        text = "from torch import nn\n\ndef other():\n    import {}\n\nclass Net(nn.Linear):\n    scale = {}\n"
        (tmp_path / f"{name}.py").write_text(text.format(other, scale))
    modules = [importlib.import_module(f"{name}_of_two") for name in ("one", "two")]
    one, other = (keys.Code.of(module.Net(3, 2), None, "mse_loss", None) for module in modules)
    assert one.files == other.files
    assert one.model != other.model


def test_heads_of_attention_are_told_apart() -> None:
    one, other = (network_facts(nn.MultiheadAttention(4, heads)) for heads in (1, 2))
    assert one != other


_PRINT = """
import json, sys
sys.path[:0] = sys.argv[1:]
import test_described as t
from pyflatness.scoring import keys
losses = [keys.described(loss) for pair in t.DIFFERENT.values() for loss in pair]
networks = [t.network_facts(make()) for make in t.NETWORKS.values()]
print(keys.of_json([losses, networks, keys.described({"a", "b", "c"})]))
"""


def test_another_process_has_the_same_keys() -> None:
    found = set()
    for seed in "12":
        environment = os.environ | {"PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", _PRINT, str(Path(__file__).parent)]
        found.add(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)
    assert len(found) == 1


@pytest.mark.parametrize("part", ["a.safetensors.index.json", "b\0.safetensors", "\ud800"])
def test_an_index_that_names_no_files_is_a_row_with_an_error(part: str, tmp_path: Path) -> None:
    index = tmp_path / "a.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"weight": part}}))
    data = torch.randn(20, 3), torch.randn(20, 2)
    store = tmp_path / "a.sqlite"
    (row,) = pf.score([index], "mse_loss", data, model=functools.partial(nn.Linear, 3, 2), store=store)
    assert row.error
    assert row.value is None


def test_the_hash_that_transformers_notes_in_a_process_does_not_count() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.GPT2Config(vocab_size=8, n_embd=4, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(config)
    before = keys.Described.network(model)
    assert isinstance(model.generation_config._original_object_hash, int)
    model.generation_config._original_object_hash += 1
    assert keys.Described.network(model) == before
    model.generation_config.max_length = 7
    assert keys.Described.network(model) != before
