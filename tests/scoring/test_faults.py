"""A store whose every write may fail: an error that says so, and what was committed is there and whole afterwards."""

import ctypes
import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_store import OUTCOME, PAIRS, filled

import pyflatness as pf
from pyflatness.scoring import store as stores
from pyflatness.scoring.store import Store
from support import ROOT
from support.score_runs import saved

ERRORS = {"full disk": errno.ENOSPC, "no permission": errno.EACCES, "failing disk": errno.EIO}


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that lets writes fail."""
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("writes are made to fail by a library in front of libc, on Linux with a C compiler")
    library = tmp_path_factory.mktemp("faults") / "faults.so"
    source = ROOT / "tests" / "support" / "faults.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library


def written(path: Path) -> None:
    """Go on with a store: another checkpoint, asked for and committed."""
    with Store(path, write=True) as store:
        setting = store.setting({"key": {"loss": "x"}})
        store.name({"b": (None, "other")})
        if store.ask(setting, {"other": PAIRS}):
            store.commit(setting, "other", OUTCOME)


def state(path: Path) -> tuple[dict, list[int]]:
    """The values that were there before, and how many of the other checkpoint are; the file is whole."""
    with Store(path) as store:
        assert stores.problems(store) == []
        before = {pair: held.row for pair, held in store.values(1, "content").items()}
        return before, [len(store.values(1, "other")), len(store.select("SELECT * FROM units"))]


def every_write(folder: Path) -> None:
    """Let one write after the other fail; what this prints is how many there were. In a process with the library."""
    library = ctypes.CDLL(None)
    os.environ["FAULT_NAME"] = "runs.sqlite"
    first = folder / "first" / "runs.sqlite"
    filled(first)
    failed = 0
    for number in ERRORS.values():
        os.environ["FAULT_ERRNO"] = str(number)
        for at in range(1, 1000):
            path = folder / f"{number}-{at}" / "runs.sqlite"
            path.parent.mkdir()
            shutil.copy(first, path)
            library.reset_changes()
            os.environ["FAULT_AT"] = str(at)
            message = ""
            try:
                written(path)
            except pf.errors.StoreError as error:
                message = str(error)
            finally:
                changes = library.count_changes()
                del os.environ["FAULT_AT"]
            assert not message or f"store: {path} cannot be written (" in message
            before, (values, units) = state(path)
            assert before == OUTCOME.values
            assert (values, units) in ((0, 1), (4, 2)), (at, values, units)  # all of the unit or nothing
            assert message or (values, units) == (4, 2)
            failed += bool(message)
            written(path)
            assert state(path) == (OUTCOME.values, [4, 2])
            shutil.rmtree(path.parent)
            if changes < at:
                break
    print(failed)


@pytest.mark.soak
def test_every_write_may_fail(faults: Path, tmp_path: Path) -> None:
    script = f"from pathlib import Path; import test_faults; test_faults.every_write(Path({str(tmp_path)!r}))"
    folders = f"{Path(__file__).parent}:{ROOT / 'tests'}"
    environment = {**os.environ, "LD_PRELOAD": str(faults), "PYTHONPATH": folders}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 60


THIRD = """
import ctypes, os, sys
from pyflatness import cli
from pyflatness.scoring.store import Store

commit, calls = Store.commit, []

def third(*arguments):
    calls.append(arguments)
    if len(calls) == 3:
        os.environ["FAULT_AT"] = "0"
    return commit(*arguments)

Store.commit = third
cli.main(sys.argv[1:])
"""


def test_a_run_that_cannot_write_says_so_and_goes_on_later(faults: Path, tiny: str) -> None:
    files = [saved(tiny, seed, f"{seed}.safetensors") for seed in range(4)]
    store = Path(tiny).with_name("runs.sqlite")
    spec = ["--model", f"{tiny}:Tiny", "--data", f"{tiny}:data", "--loss", "cross_entropy", "--executor", "serial"]
    arguments = ["score", *spec, "--no-progress", "--store", str(store), *map(str, files)]
    environment = {"LD_PRELOAD": str(faults), "FAULT_NAME": "runs.sqlite", "FAULT_ERRNO": str(errno.ENOSPC)}

    def run(*command: str, **more: str) -> subprocess.CompletedProcess[str]:
        every = [sys.executable, *command, *arguments]
        return subprocess.run(every, env={**os.environ, **more}, capture_output=True, text=True, check=False)

    done = run("-c", THIRD, **environment)
    assert done.returncode == 2
    expected = f"Error: store: {store} cannot be written (database or disk is full); what was committed is kept\n"
    assert done.stderr == expected
    again = run("-m", "pyflatness")
    assert (again.returncode, again.stderr) == (0, "")
    assert "4 checkpoints, 2 units to do" in again.stdout
