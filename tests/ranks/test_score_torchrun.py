"""``pyflatness score`` in processes that torchrun has started: one model at a time, measured by all of them."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from pyflatness.scoring.store import Store
from support.score_runs import saved, status

DYING = """
import os, signal
from pathlib import Path

import torch
from tiny import Tiny, data

class Dying(Tiny):
    '''The second of its checkpoints kills rank 1, once.'''

    def forward(self, x):
        mark = Path(__file__).with_name("died")
        if os.environ.get("RANK") == "1" and self.head.bias[0] == 5 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)
"""


def torchrun(tiny: str, *arguments: object, model: str = "") -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "pyflatness",
    ]
    spec = ["score", "--model", model or f"{tiny}:Tiny", "--data", f"{tiny}:data", "--loss", "cross_entropy"]
    spec += [] if "--layers" in arguments else ["--layers", "head"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, *spec, *map(str, arguments)], env=environment, capture_output=True, text=True, timeout=300
    )


def values(store: Path) -> dict[tuple[str, ...], list[float]]:
    """Return value, loss and accuracy by checkpoint, layer and measure."""
    with Store(store) as held:
        rows = held.select(
            "SELECT checkpoints.name, layer, measure, value, units.loss, accuracy FROM results "
            "JOIN units ON units.id = results.unit JOIN checkpoints ON checkpoints.content = results.content"
        )
    return {tuple(row)[:3]: [*tuple(row)[3:]] for row in rows}


@pytest.mark.soak
def test_two_ranks_fill_a_store_that_one_process_finds_full(tiny: str) -> None:
    files = [saved(tiny, seed, f"{seed}.safetensors") for seed in range(2)]
    both, one = (Path(tiny).with_name(f"{name}.sqlite") for name in ("both", "one"))
    what = "--layers", "*", "--measures", "relative_flatness,pac_bayes", *files
    done = torchrun(tiny, "--store", both, *what)
    assert done.returncode == 0, done.stderr
    begun, ended = done.stdout.splitlines()  # of the first rank alone
    assert begun.startswith(f"{both}: 2 checkpoints, 4 units to do (8 values, ")
    assert ended == f"{both}: 4 units done, 0 to do; 0 values failed"
    arguments = "--model", f"{tiny}:Tiny", "--data", f"{tiny}:data", "--loss", "cross_entropy", *map(str, what)
    assert status("score", "--store", str(one), "--executor", "serial", *arguments) == 0
    expected = values(one)
    assert len(expected) == 8
    for key, numbers in values(both).items():
        assert numbers == pytest.approx(expected.pop(key), rel=1e-5), key
    assert not expected
    # In a process of its own: the modules of tests are a user's modules, so that they are a part of this one's keys.
    command = [sys.executable, "-m", "pyflatness", "score", "--store", str(both), "--executor", "serial", *arguments]
    again = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "2 checkpoints, 0 units to do" in again.stdout


def test_rows_of_two_ranks_go_to_one_file(tiny: str) -> None:
    bad, good = Path(tiny).with_name("bad.safetensors"), saved(tiny, 0, "good.safetensors")
    bad.write_bytes(b"nothing")
    out = Path(tiny).with_name("scores.csv")
    done = torchrun(tiny, "--out", out, bad, good)
    assert done.returncode == 1, done.stderr
    assert f"wrote {out}: 2 rows, 1 errors" in done.stdout
    assert done.stdout.count("wrote") == 1
    with out.open(newline="") as file:
        rows = [*csv.DictReader(file)]
    assert ["no safetensors file" in row["error"] for row in rows] == [True, False]
    assert [row["samples"] for row in rows] == ["", "37"]


@pytest.mark.soak
def test_a_rank_that_is_killed_ends_the_others_and_the_store_goes_on(tiny: str) -> None:
    Path(tiny).with_name("dying.py").write_text(DYING)
    files = [saved(tiny, seed, f"{seed}.safetensors") for seed in range(3)]
    state = load_file(files[1])
    state["head.bias"][0] = 5
    save_file(state, files[1])
    store = Path(tiny).with_name("runs.sqlite")
    what = "--store", store, *files
    model = f"{Path(tiny).with_name('dying.py')}:Dying"
    killed = torchrun(tiny, *what, model=model)
    assert killed.returncode != 0
    told = killed.stdout + killed.stderr
    assert "ended, or does not answer" in told or "interrupted" in told, told  # torchrun sends SIGTERM at the same time
    with Store(store) as held:
        states = [row["state"] for row in held.select("SELECT state FROM results ORDER BY id")]
    assert states == ["done", "to do", "to do"]
    again = torchrun(tiny, *what, model=model)
    assert again.returncode == 0, again.stderr
    assert f"{store}: 2 units done, 0 to do; 0 values failed" in again.stdout


@pytest.mark.soak
def test_what_ranks_cannot_help_with_is_refused_once(tiny: str) -> None:
    files = [saved(tiny, seed, f"{seed}.safetensors") for seed in range(2)]
    done = torchrun(
        tiny, "--store", Path(tiny).with_name("runs.sqlite"), "--executor", "processes", "--workers", 2, *files
    )
    assert done.returncode != 0
    assert done.stderr.count("Error: the 2 processes of a launcher measure each checkpoint together") == 1
