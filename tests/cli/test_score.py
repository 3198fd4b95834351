"""``pyflatness score`` and ``layers``: right numbers, and bad checkpoints that stop nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

import pyflatness as pf
from pyflatness.cli import output
from pyflatness.scoring import checkpoints, specs, units, worker
from support import ROOT
from support.score_runs import READS_PICKLES, arguments_of, built_mark, needs_pickles, rows_of, saved, status, tiny_net

ZOO = ROOT.parent / "shared" / "zoo"
CHOICES = ("relative_flatness", "relative_flatness_std", "trace")


def _bad_safetensors(tiny: str) -> dict[str, list[str]]:
    """Files that cannot be scored, and words of the errors that say why."""
    folder, good = Path(tiny).parent, tiny_net(tiny, 0).state_dict()
    whole = saved(tiny, 0, "whole.safetensors").read_bytes()
    (folder / "truncated.safetensors").write_bytes(whole[:-20])
    (folder / "garbage.safetensors").write_bytes(b"x" * 100)
    (folder / "empty.safetensors").touch()
    (folder / "folder.safetensors").mkdir()
    (folder / "weights.ckpt").write_bytes(whole)
    (folder / "weights.npy").write_bytes(whole)
    foreign = {f"net.{k}": v for k, v in good.items()} | {"spare": torch.ones(1)}
    save_file(foreign, folder / "foreign.safetensors")
    save_file({"odd\x1b[31m\nname": torch.ones(1), **good}, folder / "odd.safetensors")
    save_file(specs.resolve(f"{tiny}:Tiny")(width=6).state_dict(), folder / "shapes.safetensors")
    save_file({**good, "head.weight": good["head.weight"].to(torch.int8)}, folder / "integer.safetensors")
    save_file({**good, "body.bias": good["body.bias"] * torch.nan}, folder / "nan.safetensors")
    return {
        "truncated.safetensors": ["damaged"],
        "garbage.safetensors": ["damaged", "header"],
        "empty.safetensors": ["damaged", "header"],
        "folder.safetensors": ["it is a folder"],
        "weights.npy": ["'.npy' is no known ending"],
        "weights.ckpt": ["no torch checkpoint, or a damaged one" if READS_PICKLES else "(CVE-2026-24747)"],
        "foreign.safetensors": ["does not fit", "Missing", '"head.weight"', "Unexpected", '"net.head.weight"'],
        "odd.safetensors": ["Unexpected", r"odd\x1b[31m"],
        "shapes.safetensors": ["body.weight", "[6, 4]", "[5, 4]"],
        "integer.safetensors": ["head.weight is torch.int8, in the model torch.float32"],
        "nan.safetensors": ["NaN or infinity"],
        "missing.safetensors": ["no such file"],
    }


def test_bad_checkpoints_between_good_ones(tiny: str) -> None:
    folder, bad = Path(tiny).parent, _bad_safetensors(tiny)
    first, last = saved(tiny, 1, "first.safetensors"), saved(tiny, 2, "last.safetensors")
    every = [first, *(folder / name for name in bad), last]
    arguments = arguments_of(tiny, "--no-progress", *every, *(f"--measures={name}" for name in CHOICES))
    done = subprocess.run(
        [sys.executable, "-m", "pyflatness", *arguments], capture_output=True, text=True, encoding="utf-8", check=False
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr == ""  # no bar outside a terminal, no traceback, no warning
    assert done.stdout.endswith(f"scores.csv: {3 * len(every)} rows, {3 * len(bad)} errors\n")
    assert "\x1b" not in done.stdout

    rows = rows_of(tiny)
    assert [(row["checkpoint"], row["measure"]) for row in rows] == [(str(p), m) for p in every for m in CHOICES]
    for row in rows[3:-3]:
        name = Path(row["checkpoint"]).name
        for word in bad[name]:
            assert word in row["error"], row
        assert "\n" not in row["error"]
        assert not any(row[key] for key in ("value", "method", "exact", "samples", "loss", "accuracy", "seconds"))
        assert f"{name}: {row['error']}" in done.stdout.splitlines()
    inputs, targets = (torch.cat(parts) for parts in zip(*specs.resolve(f"{tiny}:data")(), strict=True))
    for row, seed in zip(rows[:3] + rows[-3:], (1, 1, 1, 2, 2, 2), strict=True):
        network, name = tiny_net(tiny, seed), row["measure"]
        report = pf.measure(network, "cross_entropy", (inputs, targets), layers="head", measures=name)
        truth, method = report["head", name], "ggn" if name == "trace" else "head"
        logits = network(inputs).detach().double()
        kept = targets != -100
        assert float(row["value"]) == pytest.approx(truth.value, rel=1e-5)
        assert float(row["loss"]) == pytest.approx(float(F.cross_entropy(logits, targets.long())), rel=1e-6)
        assert float(row["accuracy"]) == float((logits.argmax(dim=1) == targets)[kept].double().mean())
        assert (row["layer"], row["method"], row["exact"], row["samples"]) == ("head", method, "True", "37")
        assert float(row["seconds"]) > 0
        assert row["error"] == ""
        assert f"{float(row['value']):.5g}" in done.stdout


class _Malicious:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.marker),)


@needs_pickles
def test_pickles_give_tensors_and_run_nothing(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    folder, network, marker = Path(tiny).parent, tiny_net(tiny, 1), Path(tiny).with_name("marker")
    state = network.state_dict()
    contents = {
        "malicious.pt": _Malicious(marker),
        "hidden.pt": {"state_dict": state, "extra": _Malicious(marker)},
        "whole_model.pt": network,
        "nothing.pt": {"epoch": 3, "model": {}},
        "plain.pt": state,
        "lightning.pth": {"epoch": 3, "state_dict": state},
        "trainer.pt": {"model": state, "args": {"lr": 0.1}},
    }
    for name, content in contents.items():
        torch.save(content, folder / name)
    (folder / "truncated.pt").write_bytes((folder / "plain.pt").read_bytes()[:200])
    (folder / "empty.pt").touch()
    names = [*contents, "truncated.pt", "empty.pt"]
    assert status(*arguments_of(tiny, *(folder / name for name in names))) == 1
    assert not marker.exists()
    rows = {Path(row["checkpoint"]).name: row for row in rows_of(tiny)}
    assert list(rows) == names
    truth = pf.relative_flatness(network, "cross_entropy", specs.resolve(f"{tiny}:data")())
    for name in ("plain.pt", "lightning.pth", "trainer.pt"):
        assert float(rows[name]["value"]) == truth.value
    for name in ("malicious.pt", "hidden.pt"):
        assert f"{os.mkdir.__module__}.mkdir" in rows[name]["error"]
    assert "tiny.Tiny" in rows["whole_model.pt"]["error"]
    assert "no state dict" in rows["nothing.pt"]["error"]
    for name in ("malicious.pt", "hidden.pt", "whole_model.pt", "nothing.pt", "truncated.pt", "empty.pt"):
        assert rows[name]["value"] == ""
        assert name == "whole_model.pt" or "False" not in rows[name]["error"]  # torch's advice to load it unsafely


@pytest.mark.parametrize(
    ("data", "kind", "loss"),
    [
        ("data", "chances", "cross_entropy"),
        ("data", "values", "mse_loss"),
        ("data", "chances", "binary_cross_entropy_with_logits"),
        ("pair", None, "cross_entropy"),
    ],
)
def test_losses_and_kinds_of_data(data: str, kind: str | None, loss: str, tiny: str) -> None:
    arguments = {"count": 29, **({"kind": kind} if kind else {})}
    network, checkpoint = tiny_net(tiny, 1), saved(tiny, 1, "a.safetensors")
    batches = specs.resolve(f"{tiny}:{data}")(**arguments)
    options = ("--data-args", json.dumps(arguments), "--layers", "h*")
    assert status(*arguments_of(tiny, *options, checkpoint, data=data, loss=loss)) == 0
    (row,) = rows_of(tiny)
    inputs, targets = batches if data == "pair" else (torch.cat(parts) for parts in zip(*batches, strict=True))
    outputs = network.double()(inputs.double()).detach()
    targets = targets.double() if kind else targets.long()
    assert float(row["loss"]) == pytest.approx(float(getattr(F, loss)(outputs, targets)), rel=1e-6)
    assert bool(row["accuracy"]) == (kind is None)
    assert row["layer"] == "head"


def test_the_models_are_run_once_per_pass(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [saved(tiny, seed, f"{seed}.safetensors") for seed in (1, 2)]
    calls = []
    network = specs.resolve(f"{tiny}:Tiny")
    forward = network.forward
    monkeypatch.setattr(network, "forward", lambda self, x: calls.append(len(x)) or forward(self, x))
    counted = []
    cross_entropy = F.cross_entropy
    monkeypatch.setattr(
        F,
        "cross_entropy",
        lambda outputs, *rest, **how: counted.append(len(outputs)) or cross_entropy(outputs, *rest, **how),
    )
    assert status(*arguments_of(tiny, *files, *(f"--measures={name}" for name in CHOICES))) == 0
    assert [size for size in calls if size > 2] == [10, 10, 10, 7] * 4 * len(files)  # two for the normalised measure
    assert counted == [10, 10, 10, 7] * len(files)
    assert len({(row["loss"], row["accuracy"]) for row in rows_of(tiny)}) == len(files)


def test_outputs_without_values_have_no_loss() -> None:
    recorder = worker.FitRecorder("cross_entropy", lambda: None, active=True)
    recorder(lambda inputs: inputs.to("meta"), (torch.ones(2, 3), torch.tensor([0, 1])))
    assert recorder.fit() == units.Fit(None, None)


@pytest.mark.parametrize("existing", [False, True])
def test_an_unwritable_out_is_refused_before_work(existing: bool, tiny: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    out = tmp_path if existing else tmp_path / "file" / "scores.csv"
    checkpoint = saved(tiny, 0, "a.safetensors")
    built_mark(tiny).unlink()
    message = status(*arguments_of(tiny, checkpoint, "--out", out))
    assert str(message).startswith(f"Error: --out {out}: ")
    assert not built_mark(tiny).exists()


def test_an_older_result_is_kept_until_there_is_a_new_one(tiny: str, tmp_path: Path) -> None:
    output.prepare_file(tmp_path / "deep" / "new.csv")
    assert list((tmp_path / "deep").iterdir()) == []
    (tmp_path / "old.csv").write_text("old")
    checkpoint = saved(tiny, 0, "a.safetensors")
    assert "no such disk" in str(status(*arguments_of(tiny, checkpoint, "--out", tmp_path / "old.csv", data="failing")))
    assert (tmp_path / "old.csv").read_text() == "old"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model", "nothing.py:Tiny"], ["'--model'", "nothing.py", "no such file"]),
        (["--model", "no.such.module:Tiny"], ["'--model'", "No module named 'no'"]),
        (["--model", "tiny.py"], ["'--model'", "file.py:callable"]),
        (["--model", "{tiny}:Tony"], ["'--model'", "there is no 'Tony'", "did you mean Tiny"]),
        (["--model", "{tiny}:__name__"], ["'--model'", "is a str"]),
        (["--model", "{tiny}:loaded"], ["'--model'", "is a Linear"]),
        (["--data", "{folder}/broken.py:data"], ["'--data'", "ZeroDivisionError: division by zero"]),
        (["--model-args", "{{width: 3}}"], ["'--model-args'", "is neither k=v nor JSON"]),
        (["--data-args", "[3]"], ["'--data-args'", "JSON object"]),
        (["--model-args", '{{"wide": 3}}'], ["--model-args", "'wide'", "width=5"]),
        (["--loss", "hinge"], ["--loss", "'hinge'", "mse_loss"]),
        (["--measures", "sharpnes"], ["'--measures'", "'sharpnes'", "did you mean sharpness"]),
        (["--out", "{folder}/a.safetensors"], ["--out", "one of the checkpoints"]),
    ],
)
def test_usage_errors(options: list[str], words: list[str], tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = saved(tiny, 0, "a.safetensors")
    folder = checkpoint.parent
    (folder / "broken.py").write_text("1 / 0")
    filled = [option.format(tiny=tiny, folder=folder) for option in options]
    assert status(*arguments_of(tiny, checkpoint, *filled)) == 2
    out, err = capsys.readouterr()
    for word in words:
        assert word in " ".join(err.split())
    assert [line for line in err.splitlines() if line.startswith("Error: ")] == err.splitlines()[-1:]
    assert "Traceback" not in out + err
    assert not (folder / "out").exists()
    assert checkpoint.stat().st_size > 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--layers", "heads"], ["'heads'", "did you mean head"]),
        (["--layers", "re:("], ["'re:('", "is not a regular expression"]),
        (["--data", "{tiny}:once"], ["--data", "read once"]),
        (["--data", "{tiny}:failing"], ["--data", "OSError: no such disk"]),
        (["--data", "{tiny}:Tiny"], ["data", "got Tiny"]),
        (["--model", "{tiny}:data"], ["--model", "returned a list"]),
    ],
)
def test_errors_that_concern_every_checkpoint_are_one(options: list[str], words: list[str], tiny: str) -> None:
    checkpoint = saved(tiny, 0, "a.safetensors")
    message = str(status(*arguments_of(tiny, checkpoint, *(option.format(tiny=tiny) for option in options))))
    assert message.startswith("Error: ")
    for word in words:
        assert word in message
    assert not Path(tiny).with_name("out").joinpath("scores.csv").exists()


def test_hidden_layers_are_rows_too(tiny: str) -> None:
    checkpoint = saved(tiny, 1, "a.safetensors")
    assert status(*arguments_of(tiny, checkpoint, "--layers", "body", "--layers", "head")) == 0
    hidden, head, network = rows_of(tiny)
    assert (hidden["layer"], hidden["method"], hidden["exact"]) == ("body", "ggn", "True")
    assert (head["layer"], head["method"], head["exact"]) == ("head", "head", "True")
    assert network["layer"] == ""
    assert float(network["value"]) == pytest.approx(float(hidden["value"]) + float(head["value"]), rel=1e-12)
    assert (hidden["loss"], hidden["accuracy"]) == (head["loss"], head["accuracy"])


def test_an_interrupt_keeps_the_rows_so_far(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    first, last = saved(tiny, 1, "first.safetensors"), saved(tiny, 2, "last.safetensors")
    state = tiny_net(tiny, 3).state_dict()
    state["head.bias"][0] = 1234
    save_file(state, Path(tiny).with_name("stop.safetensors"))
    assert status(*arguments_of(tiny, first, Path(tiny).with_name("stop.safetensors"), last)) == 130
    assert [row["checkpoint"] for row in rows_of(tiny)] == [str(first)]
    assert "interrupted; wrote" in capsys.readouterr().out


def test_progress_on_a_terminal(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    files = [saved(tiny, seed, f"{seed}.safetensors") for seed in (1, 2)]
    assert status(*arguments_of(tiny, "--progress", *files)) == 0
    err = capsys.readouterr().err
    for word in ("scoring", "2.0 of 2 rows", "rows/min", "0:00:00"):
        assert word in err


def test_tied_weights_may_be_stored_once(tiny: str) -> None:
    tied = specs.resolve(f"{tiny}:Tied")()
    state = {name: torch.full_like(tensor, 2.0) for name, tensor in tied.state_dict().items()}
    checkpoints.load(tied, {name: tensor for name, tensor in state.items() if name != "a.weight"})
    assert (tied.a.weight == 2).all()
    with pytest.raises(pf.errors.InputError, match=r"a\.weight and b\.weight, one weight in the model, differ"):
        checkpoints.load(tied, {**state, "a.weight": state["a.weight"] + 1})


def test_many_differences_are_shortened() -> None:
    network = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(50)))
    state = {("other." if n < 56 else "") + name: torch.ones(3) for n, name in enumerate(network.state_dict())}
    with pytest.raises(pf.errors.InputError, match=r"Missing key.* … Unexpected key.* … .* And 42 more\.") as caught:
        checkpoints.load(network, state)
    assert len(str(caught.value)) < 1000


def test_without_safetensors(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    message = status(*arguments_of(tiny, "a.safetensors"))
    assert message == "Error: safetensors files need safetensors: pip install 'pyflatness[cli]'"
    assert not built_mark(tiny).exists()
