"""Names of weights that are not the model's: prefixes that are taken off, and messages of what would fit."""

import re

import pytest
import torch
from torch import nn

import pyflatness as pf
from pyflatness.scoring import checkpoints, metadata


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def renamed(state: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {prefix + name: tensor for name, tensor in state.items()}


PREFIXES = (
    "module.",
    "model.",
    "_orig_mod.",
    "module._orig_mod.",
    "_orig_mod.module.",
    "model._orig_mod.",
    "module.model.",
)


@pytest.mark.parametrize("prefix", [*PREFIXES, "model._orig_mod.", "net.", "my.backbone.", "net._orig_mod."])
def test_prefixes_of_wrappers_are_taken_off(prefix: str) -> None:
    model, state = network(), network().state_dict()
    (note,) = checkpoints.load(model, renamed(state, prefix))
    assert note.endswith("was taken off the names")
    assert all(part in note for part in prefix.split("."))
    assert all(torch.equal(*pair) for pair in zip(model.state_dict().values(), state.values(), strict=True))


def test_one_prefix_of_all_the_model_s_names_is_put_in_front() -> None:
    inner, state = nn.ModuleDict({"backbone": network()}), network().state_dict()
    assert checkpoints.load(inner, state) == ("'backbone.' was put in front of the names",)
    assert all(torch.equal(*pair) for pair in zip(inner.state_dict().values(), state.values(), strict=True))


def test_no_note_where_the_names_are_the_models() -> None:
    inner = nn.ModuleDict({"model": network()})  # its own names begin with model.
    assert checkpoints.load(inner, nn.ModuleDict({"model": network()}).state_dict()) == ()
    compiled = renamed(network().state_dict(), "model._orig_mod.")
    assert checkpoints.load(inner, compiled) == ("'_orig_mod.' was taken off the names",)


def test_models_in_wrappers_take_the_weights_of_bare_ones() -> None:
    assert checkpoints.load(nn.DataParallel(network()), network().state_dict()) == ()
    assert checkpoints.load(torch.compile(network(), backend="eager"), network().state_dict()) == ()


def refusal(model: nn.Module, state: dict[str, torch.Tensor]) -> str:
    with pytest.raises(pf.errors.InputError) as caught:
        checkpoints.load(model, state)
    return str(caught.value)


def test_the_nearest_prefix() -> None:
    model = network()
    state = model.state_dict()
    message = refusal(model, {**renamed(state, "student.net."), **renamed(state, "teacher.")})
    assert "Missing key" in message
    assert "Unexpected key" in message
    left = "teacher.0.weight, teacher.0.bias, teacher.1.weight … would be left over."
    assert message.endswith(f"Without 'student.net.' in front, 9 of the model's 9 would fit; {left}")
    heads = nn.ModuleDict({"backbone": model, "head": nn.Linear(2, 2)})
    message = refusal(heads, state)
    assert message.endswith("With 'backbone.' in front, 9 of the model's 11 would fit.")
    message = refusal(model, {**renamed(state, "model."), "criterion.weight": torch.ones(2)})
    assert message.endswith(
        "Without 'model.' in front, 9 of the model's 9 would fit; criterion.weight would be left over."
    )


def test_no_prefix_is_named_where_none_helps() -> None:
    model = network()
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "2.bias"}
    assert refusal(model, state).endswith('"2.bias".')
    message = refusal(model, renamed(nn.Linear(7, 7).state_dict(), "net.2."))
    assert "would fit" not in message


def test_a_whole_model_gets_the_line_that_converts_it(tmp_path, monkeypatch) -> None:
    model, x = network().eval(), torch.randn(2, 3)
    torch.save(model, tmp_path / "whole.pt")
    with pytest.raises(pf.errors.InputError, match="whole model that you saved yourself") as caught:
        checkpoints.read(tmp_path / "whole.pt")
    line = re.search(r"run (torch\.save\(.*\)), which", str(caught.value))[1]
    monkeypatch.chdir(tmp_path.parent)
    exec(line)
    again = network().eval()
    checkpoints.load(again, checkpoints.read(tmp_path / "whole-weights.pt").state)
    assert torch.equal(again(x), model(x))


def test_settings_of_pickled_checkpoints(tmp_path) -> None:
    held = {"state_dict": network().state_dict(), "epoch": 3, "hyper_parameters": {"lr": 0.1}}
    torch.save(held, tmp_path / "a.ckpt")
    (tmp_path / "broken.pt").write_bytes(b"no")
    paths = {name: tmp_path / name for name in ("a.ckpt", "broken.pt")}
    assert metadata.of_files(paths) == {"a.ckpt": {"epoch": 3, "lr": 0.1}}
