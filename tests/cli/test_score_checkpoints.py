"""``pyflatness score`` of checkpoints as training scripts leave them: the same values, and notes on what was done."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from support.score_runs import arguments_of, rows_of, saved, status, tiny_net


def _variants(tiny: str) -> list[Path]:
    state, folder = tiny_net(tiny, 1).state_dict(), Path(tiny).with_name("runs")
    folder.mkdir()
    plain = saved(tiny, 1, "a.safetensors").rename(folder / "a.safetensors")
    torch.save({"epoch": 2, "state_dict": {f"model.{k}": v for k, v in state.items()}}, folder / "b.ckpt")
    torch.save({"state_dict": {f"model.{k}": v for k, v in state.items()}, "model": state}, folder / "c.ckpt")
    save_file({f"module._orig_mod.{k}": v for k, v in state.items()}, folder / "d.safetensors")
    return [plain, *(folder / name for name in ("b.ckpt", "c.ckpt", "d.safetensors"))]


@pytest.mark.parametrize("store", [False, True])
def test_notes_are_printed_once(tiny: str, store: bool, capsys: pytest.CaptureFixture[str]) -> None:
    paths = _variants(tiny)
    arguments = arguments_of(tiny, paths[0].parent)
    if store:
        place = arguments.index("--out")
        arguments[place : place + 2] = ["--store", str(Path(tiny).with_name("s.sqlite"))]
    assert status(*arguments) == 0
    out = capsys.readouterr().out
    _, lightning, both, wrapped = map(str, paths)
    for note in (
        f"{lightning} and 1 more: 'model.' was taken off the names",
        f"{both}: the weights under 'state_dict' were taken, not those under 'model'",
        f"{wrapped}: 'module._orig_mod.' was taken off the names",
    ):
        assert out.splitlines().count(note) == 1
    if not store:
        assert [row["checkpoint"] for row in rows_of(tiny)] == [str(path) for path in paths]
        assert len({row["value"] for row in rows_of(tiny)}) == 1
    status(*arguments)
    assert ("was taken off" in capsys.readouterr().out) != store  # nothing was read
