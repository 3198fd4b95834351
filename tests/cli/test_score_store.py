"""``pyflatness score --store``: what there is to do, how it ends, and what its options mean."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import pyflatness as pf
from pyflatness import cli
from pyflatness.cli.network import limit_of
from pyflatness.scoring import keys, specs
from support.combinations import every
from support.score_runs import saved, status, tiny_net


@pytest.fixture
def store(tiny: str) -> Path:
    return Path(tiny).with_name("runs.sqlite")


def run(tiny: str, *rest: object, loss: str = "cross_entropy", executor: str = "serial") -> object:
    spec = ("--model", f"{tiny}:Tiny", "--data", f"{tiny}:data", "--loss", loss)
    where = ("--store", str(Path(tiny).with_name("runs.sqlite")), "--executor", executor)
    layers = () if "--layers" in rest else ("--layers", "head")
    return status("score", *spec, *where, *layers, *map(str, rest))


def exported(store: Path) -> list[dict]:
    out = store.with_suffix(".json")
    assert status("store", "export", str(store), "--out", str(out)) == 0
    return json.loads(out.read_text())["rows"]


def test_a_run_goes_on_and_says_what_there_is_to_do(tiny: str, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [saved(tiny, seed, f"{seed}.safetensors") for seed in range(3)]
    assert run(tiny, *files[:2]) == 0
    out = capsys.readouterr().out
    assert f"{store}: 2 checkpoints, 2 units to do (2 values, 2 reads of the data)" in out
    assert f"{store}: 2 units done, 0 to do; 0 values failed" in out
    assert run(tiny, *files[:2], executor="processes") == 0
    assert "2 checkpoints, 0 units to do" in capsys.readouterr().out
    assert run(tiny, *files, "--measures", "relative_flatness,trace") == 0
    assert "3 checkpoints, 4 units to do (4 values" in capsys.readouterr().out
    rows = exported(store)
    assert [row["checkpoint"] for row in rows] == [str(file) for file in files for _ in range(2)]


def test_failures_are_status_1_until_they_are_mended(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    bad, good = Path(tiny).with_name("bad.safetensors"), saved(tiny, 0, "good.safetensors")
    assert run(tiny, bad, good) == 1
    assert "there is no such file" in capsys.readouterr().out
    assert run(tiny, bad, good) == 1
    assert "0 units to do" in capsys.readouterr().out
    saved(tiny, 1, bad.name)
    assert run(tiny, bad, good, "--retry") == 0


def test_a_dry_run_leaves_everything_as_it_is(tiny: str, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [saved(tiny, seed, f"{seed}.safetensors") for seed in range(3)]
    assert run(tiny, *files, "--dry-run") == 0
    out = capsys.readouterr().out
    assert "3 units to do" in out
    assert "the first took" in out
    assert not store.exists()
    assert run(tiny, files[0]) == 0
    before = store.read_bytes()
    assert run(tiny, *files, "--dry-run") == 0
    assert "3 checkpoints, 2 units to do" in capsys.readouterr().out
    assert store.read_bytes() == before


SLOW = """
import time
from tiny import Tiny, data

class Slow(Tiny):
    def forward(self, x):
        time.sleep(0.05)
        return super().forward(x)
"""


@every(together=1, number=[signal.SIGINT, signal.SIGTERM], executor=["serial", "processes"])
def test_an_interrupt_keeps_what_is_done_and_says_how_to_go_on(executor, number, tiny, store):
    Path(tiny).with_name("slow.py").write_text(SLOW)
    files = [str(saved(tiny, seed, f"{seed}.safetensors")) for seed in range(12)]
    arguments = ["--model", "slow.py:Slow", "--data", "slow.py:data", "--loss", "cross_entropy", "--store", str(store)]
    arguments += ["--layers", "head", "--no-progress"]
    process = subprocess.Popen(
        [sys.executable, "-m", "pyflatness", "score", *arguments, "--executor", executor, *files],
        **{"cwd": store.parent, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and _done(store) < 2:
        time.sleep(0.02)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "")
    assert "interrupted: what was done is kept, and the same command goes on from there" in out
    done = _done(store)
    assert 2 <= done < 12
    assert f"{done} units done, {12 - done} to do" in out
    assert not store.with_name("runs.sqlite-wal").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_before_the_first_unit_is_one_too(number, tiny, store, monkeypatch):
    monkeypatch.setattr(keys, "of_file", lambda path: signal.raise_signal(number))
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    assert run(tiny, saved(tiny, 0, "0.safetensors")) == 130
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers
    with pf.scoring.store.Store(store, write=True) as held:  # it can be written again
        assert held.counts(1, []) == {"to do": 0, "done": 0, "failed": 0, "none": 0}


def _done(store: Path) -> int:
    if not store.exists():
        return 0
    try:
        with pf.scoring.store.Store(store) as held:
            return held.select("SELECT count(*) FROM results WHERE state = 'done'")[0][0]
    except pf.errors.StoreError:  # it is being made
        return 0


def test_metadata_and_settings_are_columns(tiny: str, store: Path) -> None:
    files = [saved(tiny, seed, f"{seed}.safetensors") for seed in range(2)]
    save_file(
        tiny_net(tiny, 5).state_dict(), last := Path(tiny).with_name("5.safetensors"), {"lr": "0.1", "opt": "sgd"}
    )
    (table := store.with_name("runs.csv")).write_text("name,test_loss,lr\n0,0.5,0.2\n1.safetensors,0.25,\n9,1,1\n")
    assert run(tiny, *files, last, "--metadata", table, "--settings") == 0
    found = [{key: row[key] for key in ("lr", "opt", "test_loss")} for row in exported(store)]
    assert found == [
        {"lr": 0.2, "opt": None, "test_loss": 0.5},
        {"lr": None, "opt": None, "test_loss": 0.25},
        {"lr": 0.1, "opt": "sgd", "test_loss": None},
    ]
    table.write_text("name,lr\nz,3\n")
    assert "none of them is of one of these checkpoints" in str(run(tiny, *files, "--metadata", table))
    table.write_text("file,lr\n0,3\n")
    assert "a column 'checkpoint' or 'name' (its columns are file, lr)" in str(run(tiny, *files, "--metadata", table))
    table.unlink()
    assert f"metadata: there is no file {table}" in str(run(tiny, *files, "--metadata", table))


def test_metadata_named_as_a_column_of_the_values_stand_beside_it(tiny: str, store: Path) -> None:
    file = Path(tiny).with_name("0.safetensors")
    save_file(tiny_net(tiny, 0).state_dict(), file, {"loss": "7.5", "model": "mine"})
    assert run(tiny, file, "--settings") == 0
    (row,) = exported(store)
    assert (row["metadata_loss"], row["metadata_model"]) == (7.5, "mine")
    assert row["loss"] != 7.5
    assert row["model"] == f"{tiny}:Tiny"


def test_shards_are_one_run(tiny: str, store: Path) -> None:
    measures = "--measures=relative_flatness,trace,fisher_rao,mls,weight_norm"
    files = [saved(tiny, seed, f"{seed}.safetensors") for seed in range(5)]
    parts = [store.with_name(f"runs-{number}-of-2.sqlite") for number in (1, 2)]
    for number in (1, 2):
        assert run(tiny, *files, "--shard", f"{number}/2", measures) == 0
    merged = store.with_name("merged.sqlite")
    assert status("store", "merge", str(merged), *map(str, parts)) == 0
    assert run(tiny, *files, measures) == 0
    assert _sorted(merged) == _sorted(store)
    assert status("store", "merge", str(merged), *map(str, parts)) == 0  # again: nothing is there twice
    assert _sorted(merged) == _sorted(store)


def _sorted(store: Path) -> list[str]:
    return sorted(json.dumps({**row, "seconds": None}) for row in exported(store))


def test_limits_and_sizes_of_batches(tiny: str, store: Path) -> None:
    file = saved(tiny, 0, "a.safetensors")
    for options in (["--limit", 21], ["--limit", 0.25], ["--batch-size", 3], ["--batch-size", "auto"]):
        assert run(tiny, file, *options) == 0
    batches = specs.resolve(f"{tiny}:data")()
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    rows = exported(store)
    assert [row["samples"] for row in rows] == [21, 9, 37]  # the value of all samples is the same however they are cut
    for row in rows:
        count = row["samples"]
        truth = pf.relative_flatness(tiny_net(tiny, 0), "cross_entropy", (x[:count], y[:count]))
        assert row["value"] == pytest.approx(truth.value, rel=1e-6)


def test_losses_by_name_with_their_options(tiny: str, store: Path) -> None:
    file = saved(tiny, 0, "a.safetensors")
    data = ["--data-args", '{"kind": "values"}']
    losses = {"HuberLoss": '{"delta": 0.5}', "MSELoss": "{}", "mse_loss": '{"reduction": "sum"}'}
    for name, options in losses.items():
        assert run(tiny, file, *data, "--loss-args", options, loss=name) == 0
    weights = '{"weight": [1.0, 2.0, 3.0]}'
    assert run(tiny, file, "--loss-args", weights, loss="cross_entropy") == 0
    network, found = tiny_net(tiny, 0), exported(store)
    modules = [torch.nn.HuberLoss(delta=0.5), torch.nn.MSELoss(), torch.nn.MSELoss(reduction="sum")]
    for row, loss in zip(found, modules, strict=False):
        truth = pf.relative_flatness(network, loss, specs.resolve(f"{tiny}:data")("values"))
        assert row["value"] == pytest.approx(truth.value, rel=1e-6)
    weighted = torch.nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))
    truth = pf.relative_flatness(network, weighted, specs.resolve(f"{tiny}:data")())
    assert found[3]["value"] == pytest.approx(truth.value, rel=1e-6)


def test_a_config_is_the_command(tiny: str, store: Path) -> None:
    file = saved(tiny, 0, "a.safetensors")
    (config := store.with_name("run.yaml")).write_text(f"""
model: {tiny}:Tiny
model-args: {{width: 5}}
data: {tiny}:data
loss: cross_entropy
layers: [body, head]
measures: [trace, relative_flatness]
store: {store}
executor: serial
checkpoints: ['{file.parent}/*.safetensors']
""")
    assert status("score", "--config", str(config)) == 0
    assert [(row["layer"], row["measure"]) for row in exported(store)] == [
        (layer, measure) for layer in ("body", "head", "") for measure in ("trace", "relative_flatness")
    ]
    assert status("score", "--config", str(config), "--measures", "weight_norm") == 0  # the command line decides
    assert len(exported(store)) == 9


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--out", "a.csv"], "pass one of --out and --store"),
        (["--shard", "3/2"], "'3/2': I/N is wanted"),
        (["--limit", "2.5"], "a whole number of samples is wanted"),
        (["--batch-size", "0"], "a number of samples is wanted, or 'auto'"),
        (["--loss-args", '{"smoothing": 1}'], "unexpected keyword argument 'smoothing'"),
        (["--loss", "NoLoss"], "'NoLoss' is not known"),
        (["--config", "{folder}/bad.yaml"], "there is no option 'modle'"),
        (["--config", "{folder}/list.yaml"], "names of options with their values are wanted, got list"),
        (["--config", "{folder}/none.yaml"], "cannot be read"),
    ],
)
def test_commands_that_do_not_fit(options, words, tiny, store, capsys):
    store.with_name("bad.yaml").write_text("modle: x")
    store.with_name("list.yaml").write_text("- x")
    file = saved(tiny, 0, "a.safetensors")
    assert run(tiny, file, *(option.replace("{folder}", str(store.parent)) for option in options)) == 2
    assert words in " ".join(capsys.readouterr().err.split())
    assert not store.exists()


def test_the_first_and_last_batch_may_be_enough(tiny: str, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = saved(tiny, 0, "a.safetensors")
    assert run(tiny, file, "--fingerprint", "ends") == 0
    assert "a change between these goes unnoticed" in capsys.readouterr().err
    assert os.path.getsize(store) > 0  # noqa: PTH202


def test_the_status_of_a_command_that_cannot_be_done(tiny: str, tmp_path: Path) -> None:
    """It is 2, and that of failed units is 1: a script can tell that nothing was measured."""
    file = saved(tiny, 0, "a.safetensors")
    spec = ["--model", f"{tiny}:Tiny", "--data", f"{tiny}:data", "--loss", "cross_entropy"]
    for rest in (["--layers", "nowhere"], ["--metadata", tmp_path / "no.csv"], ["--store", file]):
        with pytest.raises(SystemExit) as stopped:
            cli.main(["score", *spec, str(file), "--store", str(tmp_path / "s.sqlite"), *map(str, rest)])
        assert stopped.value.code == 2


@pytest.mark.parametrize(("limit", "samples"), [("1", 1), ("1.0", None), ("0.5", 0.5), ("21", 21)])
def test_a_limit_with_a_point_is_a_part(limit: str, samples: float | None) -> None:
    assert limit_of(limit) == samples
