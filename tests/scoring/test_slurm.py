"""Units as tasks of Slurm: by submitit's local executor, and as an array of commands that stand in for Slurm's."""

import importlib.util
import os
import signal
import time
from concurrent.futures import BrokenExecutor
from pathlib import Path

import pytest
import torch

import pyflatness as pf
from pyflatness.scoring.executors import named
from support import fake_slurm
from support.executor_check import check

pytestmark = pytest.mark.skipif(importlib.util.find_spec("submitit") is None, reason="submitit is not installed")


def test_values_deaths_errors_and_resuming(tiny: str) -> None:
    folder = Path(tiny).with_name("tasks")
    folder.mkdir()
    with named("slurm", 2, {"cluster": "local", "folder": folder}) as executor:
        check(executor, tiny)
    (own,) = folder.iterdir()  # kept for the log of the task that died
    assert any("_log.err" in path.name for path in own.iterdir())


def _told(mark: Path) -> str:
    """Get the signal that Slurm sends before it ends a task, the first time."""
    try:
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGUSR2)
            time.sleep(10)
    except Exception as error:  # as a unit does
        return repr(error)
    return "done"


def test_a_preempted_task_is_requeued_and_one_out_of_time_has_died(tmp_path: Path) -> None:
    options = {"cluster": "local", "folder": tmp_path}
    with named("slurm", 1, options) as usual, named("slurm", 1, {**options, "time": 1}) as short:
        preempted, late = usual.submit(_told, tmp_path / "a"), short.submit(_told, tmp_path / "b")
        assert preempted.result() == "done"
        with pytest.raises(BrokenExecutor, match=r"timed-out and not checkpointable.*_log\.err"):
            late.result()
    assert len([*tmp_path.glob("pyflatness-slurm-*")]) == 1  # that of the task that died


def test_an_array(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyflatness.scoring import slurm_executor

    fake_slurm.install(tmp_path)
    monkeypatch.setenv("FAKE_SLURM", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setitem(slurm_executor._WAITS, "slurm", slurm_executor._Waits(0.1, 0.0))
    monkeypatch.setattr(slurm_executor, "_ASK", 0.1)
    options = {"folder": tmp_path, "partition": "long", "cpus_per_task": 3}
    with named("slurm", 2, options) as executor:
        threads, death = executor.submit(torch.get_num_threads), executor.submit(os._exit, 3)
        pending = executor.submit(time.sleep, 100)
        assert threads.result() == 3
        with pytest.raises(BrokenExecutor):
            death.result()
        assert not pending.done()
    assert (tmp_path / "cancelled").read_text() == "7\n"
    script = (tmp_path / "script").read_text()
    wanted = {"array=0-2%2", "partition=long", "requeue", "cpus-per-task=3", "time=60", "job-name=pyflatness"}
    assert wanted <= {line.removeprefix("#SBATCH --") for line in script.splitlines()}


def test_what_slurm_refuses_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyflatness.scoring import slurm_executor

    (tmp_path / "srun").touch(mode=0o755)
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: invalid partition' >&2; exit 1")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setitem(slurm_executor._WAITS, "slurm", slurm_executor._Waits(0.1, 0.0))
    with named("slurm", 2, {"folder": tmp_path}) as executor:
        with pytest.raises(pf.errors.InputError, match="invalid partition"):
            executor.submit(os.getpid).result()
        with pytest.raises(BrokenExecutor, match="invalid partition"):
            executor.submit(os.getpid)


def test_options_that_do_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(pf.errors.InputError, match="cluster='pbs' does not exist"):
        named("slurm", 1, {"cluster": "pbs"})
    with pytest.raises(pf.errors.InputError, match="Unknown argument 'partitoin'"):
        named("slurm", 1, {"cluster": "local", "folder": tmp_path, "partitoin": "long"})
    assert not [*tmp_path.iterdir()]
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(pf.errors.InputError, match=r"there is no Slurm here \(no srun\)"):
        named("slurm", 1)
