"""kill -9 of the driver or of a worker at random moments: nothing that was committed is lost or computed twice."""

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import save_file

from support.score_runs import status, tiny_net

WORKERS = 2
LOGGED = """
import os, time
from pathlib import Path
from tiny import Tiny, data

class Logged(Tiny):
    \"\"\"Leaves a line for each pass over the data: process and weights.\"\"\"
    def forward(self, x):
        time.sleep(0.02)
        if len(x) == 7:  # the last batch
            with Path(__file__).with_name("passes").open("a") as file:
                file.write(f"{os.getpid()} {float(self.head.bias[0]):.6f}\\n")
        return super().forward(x)
"""


@pytest.fixture
def command(tiny: str, request: pytest.FixtureRequest) -> list[str]:
    """What scores so many checkpoints."""
    folder = Path(tiny).parent
    (folder / "logged.py").write_text(LOGGED)
    (folder / "zoo").mkdir()
    for seed in range(request.param):
        save_file(tiny_net(tiny, seed).state_dict(), folder / "zoo" / f"{seed}.safetensors")
    spec = ["--model", "logged.py:Logged", "--data", "logged.py:data", "--loss", "cross_entropy", "--measures", "trace"]
    return [sys.executable, "-m", "pyflatness", "score", *spec, "--layers", "head", "--workers", str(WORKERS), "zoo"]


def rows(store: Path) -> list[dict]:
    out = store.with_suffix(".json")
    assert status("store", "export", str(store), "--out", str(out)) == 0
    return [{**row, "seconds": None} for row in json.loads(out.read_text())["rows"]]


def committed(store: Path) -> dict[str, float]:
    """What is committed, seen by another reader; nothing while the store is being made."""
    try:
        connection = sqlite3.connect(f"file:{store}?mode=rw", uri=True)
        try:
            return dict(connection.execute("SELECT content, value FROM results WHERE state = 'done'").fetchall())
        finally:
            connection.close()
    except sqlite3.OperationalError:
        return {}


def workers_of(driver: int) -> list[int]:
    """The processes that the driver spawned, but for the one that watches its resources."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            text = (path / "cmdline").read_bytes()
        except (OSError, ValueError):
            continue
        if parent == driver and b"spawn_main" in text:
            found.append(int(path.name))
    return found


def killed(command: list[str], store: Path, rng: random.Random, kills: int) -> tuple[int, int]:
    """Run until all is done, with kills in between; return how many drivers and workers were killed."""
    drivers = workers = 0
    while True:
        process = subprocess.Popen(
            [*command, "--store", store.name],
            cwd=store.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        begin = committed(store)
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline and drivers + workers < kills:
            time.sleep(rng.uniform(0, 0.4))
            before = committed(store)
            assert before.items() >= begin.items()  # none is lost
            if not (alive := workers_of(process.pid)) and rng.random() < 0.9:  # most of the time they are starting
                continue
            if rng.random() < 0.5 or not alive:
                process.kill()
                process.wait()
                drivers += 1
                assert committed(store).items() >= before.items()
                left = time.monotonic() + 60
                while any(map(_lives, alive)):  # workers end with their driver, those that are starting when they can
                    assert time.monotonic() < left
                    time.sleep(0.05)
                break
            os.kill(rng.choice(alive), signal.SIGKILL)
            workers += 1
        out, err = process.communicate(timeout=120)
        if process.returncode == 0:
            assert "0 values failed" in out, err
            return drivers, workers
        assert process.returncode == -9, (process.returncode, out, err)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def check(command: list[str], tiny: str, kills: int, seed: int) -> tuple[int, int]:
    folder, passes = Path(tiny).parent, Path(tiny).with_name("passes")
    done = subprocess.run(
        [*command, "--store", "whole.sqlite"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    once = len(passes.read_text().splitlines())
    passes.unlink()
    drivers, workers = killed(command, folder / "killed.sqlite", random.Random(seed), kills)
    assert rows(folder / "killed.sqlite") == rows(folder / "whole.sqlite")
    assert status("store", "verify", str(folder / "killed.sqlite")) == 0
    again = len(passes.read_text().splitlines())
    units = len([*(folder / "zoo").iterdir()])
    assert once % units == 0
    assert again - once <= once // units * (WORKERS * drivers + workers)  # a unit a worker is done again
    with sqlite3.connect(folder / "killed.sqlite") as connection:
        assert connection.execute("SELECT count(*) FROM units").fetchone() == (units,)  # none is there twice
    connection.close()
    return drivers, workers


@pytest.mark.parametrize("command", [8], indirect=True)
def test_kills_lose_nothing(command: list[str], tiny: str) -> None:
    assert sum(check(command, tiny, kills=2, seed=0)) <= 2


@pytest.mark.soak
@pytest.mark.parametrize("command", [250], indirect=True)
def test_fifty_kills_lose_nothing(command: list[str], tiny: str) -> None:
    """Prints how many drivers and workers were killed."""
    drivers, workers = check(command, tiny, kills=50, seed=1)
    print(f"{drivers} drivers and {workers} workers were killed")
