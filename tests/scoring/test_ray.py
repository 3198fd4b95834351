"""Units as tasks of a Ray cluster: one for this file, which a second program connects to."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor
from pathlib import Path

import pytest
import torch

import pyflatness as pf
from pyflatness.scoring.executors import named
from support.executor_check import check, fated, network
from support.score_runs import saved

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")


@pytest.fixture(scope="module")
def cluster() -> Iterator["pf.scoring.ray_executor.Ray"]:
    before = signal.getsignal(signal.SIGTERM)
    executor = named("ray", 2, {"num_cpus": 1})
    assert signal.getsignal(signal.SIGTERM) is before
    import ray

    pid = executor.submit(os.getpid).result()
    yield executor
    executor.shutdown()
    assert not ray.is_initialized()
    for _ in range(200):
        if not Path(f"/proc/{pid}").exists():
            return
        time.sleep(0.05)
    pytest.fail("a worker is still there")


@pytest.mark.soak
def test_values_deaths_errors_and_resuming(cluster, tiny: str, capfd: pytest.CaptureFixture[str]) -> None:
    check(cluster, tiny)
    assert capfd.readouterr().out == ""


@pytest.mark.soak
def test_threads_and_errors_of_a_task(cluster) -> None:
    assert cluster.submit(torch.get_num_threads).result() == 1
    with pytest.raises(pf.errors.InputError, match="a loss") as error:
        cluster.submit(_raise, "a loss").result()
    assert (type(error.value), str(error.value)) == (pf.errors.InputError, "a loss")
    with pytest.raises(BrokenExecutor, match="WorkerCrashedError"):
        cluster.submit(os._exit, 3).result()


def _raise(text: str) -> None:
    raise pf.errors.InputError(text)


@pytest.mark.soak
def test_a_program_on_a_cluster_that_is_there(cluster, tiny: str) -> None:
    import ray

    address = ray.get_runtime_context().gcs_address
    spec = network(tiny)
    files = [saved(tiny, 0, "a.safetensors"), fated(tiny, 97)]
    command = ["score", "--model", f"{spec}:Fateful", "--data", f"{spec}:data", "--loss", "cross_entropy"]
    command += ["--layers", "head", "--no-progress"]
    where = ["--store", "runs.sqlite", "--executor", "ray", "--ray-address", address, "--workers", "2"]
    run = subprocess.run(
        [sys.executable, "-m", "pyflatness", *command, *where, *(file.name for file in files)],
        cwd=Path(tiny).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode, run.stderr) == (1, "")
    assert "2 units done, 0 to do; 1 values failed" in run.stdout
    assert cluster.submit(os.getpid).result() > 0
    with named("ray", 1, {"address": address}) as second:
        assert second.submit(os.getpid).result() > 0
    assert cluster.submit(os.getpid).result() > 0
    with pytest.raises(pf.errors.InputError, match=r"'127\.0\.0\.1:1': this process is connected to .* already"):
        named("ray", 1, {"address": "127.0.0.1:1"})


@pytest.mark.parametrize("name", ["WorkerCrashedError", "OutOfMemoryError", "NodeDiedError", "LocalRayletDiedError"])
def test_what_a_death_is(name: str) -> None:
    import ray

    from pyflatness.scoring import ray_executor

    error = getattr(ray.exceptions, name)(*(["gone"] if name in ("OutOfMemoryError", "NodeDiedError") else []))
    assert isinstance(ray_executor._plain(error), BrokenExecutor)


def test_options_that_do_not_fit() -> None:
    from pyflatness.scoring import ray_executor

    with pytest.raises(pf.errors.InputError, match=r"no connection to '127\.0\.0\.1:1': ConnectionRefusedError"):
        ray_executor._connect("127.0.0.1:1", 1)
    with pytest.raises(pf.errors.InputError, match=r"executor='ray': .*num_cpu"):
        named("ray", 1, {"num_cpu": 2})
    with pytest.raises(pf.errors.InputError, match=r"executor='processes': .*'address'; it takes \(workers: int\)"):
        named("processes", 1, {"address": "auto"})
