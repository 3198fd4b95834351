"""Measure units as tasks of Slurm job arrays, which submitit submits and reads the results of."""

import functools
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import BrokenExecutor, Executor, Future
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import cloudpickle
import submitit

from ..errors import InputError
from ..messages import check_choice, reason
from . import calls

R = TypeVar("R")

_ARRAY = 1000  # tasks that Slurm takes in an array, unless it is configured otherwise (MaxArraySize)
_ASK = 60.0  # seconds between two questions to Slurm for tasks that ended without a result


class _Waits(NamedTuple):
    poll: float  # seconds between two looks for results
    late: float  # seconds that a result may take to be seen through the shared file system


_WAITS = {"slurm": _Waits(5.0, 15.0), "local": _Waits(0.1, 0.0)}


class Slurm(Executor):
    """Run what is submitted as tasks of Slurm job arrays.

    Functions, arguments and results go through files in a folder that the cluster's machines share; weights and data
    are read by the tasks. A task that is preempted, or whose machine fails, is requeued. One that dies otherwise or
    reaches its time limit is a ``BrokenExecutor`` of its unit. Each unit is a task and starts a Python, which takes
    some seconds.

    Args:
        workers: how many tasks run at a time.
        folder: where a folder for what goes to the tasks and comes from them is made; None: the working directory. It
            is removed by :meth:`shutdown`, unless a task died, whose log is in it.
        time: of a task at most, in minutes.
        cpus_per_task: processors, and threads, of a task.
        cluster: ``"slurm"``, or ``"local"`` for processes of this machine, to try it out.
        options: further ones of ``sbatch``, as submitit names them: ``partition``, ``account``, ``gpus_per_node``,
            ``mem``, ``constraint``, ``setup`` (commands that run first), ``additional_parameters``, …

    Raises:
        InputError: there is no Slurm here, or no such option.
    """

    def __init__(
        self,
        workers: int = 1,
        *,
        folder: str | Path | None = None,
        time: int = 60,
        cpus_per_task: int = 1,
        cluster: str = "slurm",
        **options: Any,
    ) -> None:
        check_choice("executor='slurm': cluster", cluster, _WAITS)
        if cluster == "slurm" and shutil.which("srun") is None:
            raise InputError("executor='slurm': there is no Slurm here (no srun); run it where jobs are submitted")
        self.workers = _ARRAY if cluster == "slurm" else workers
        self._parallel, self._threads, self._cluster = workers, cpus_per_task, cluster
        self._folder = Path(tempfile.mkdtemp(prefix="pyflatness-slurm-", dir=folder or Path.cwd()))
        self._slurm = submitit.AutoExecutor(self._folder, cluster=cluster)
        options["additional_parameters"] = {"requeue": True, **options.get("additional_parameters", {})}
        try:
            self._slurm.update_parameters(
                name="pyflatness",
                timeout_min=time,
                cpus_per_task=cpus_per_task,
                slurm_array_parallelism=workers,
                **{f"slurm_{name}": value for name, value in options.items()},
            )
        except (NameError, TypeError, ValueError, AssertionError) as error:
            shutil.rmtree(self._folder)
            raise InputError(f"executor='slurm': {str(error).splitlines()[0]}") from None
        self._gathered: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._sent: dict[Future[Any], submitit.Job[Any]] = {}
        self._since: dict[Future[Any], float] = {}  # when a task without a result was first seen to have ended
        self._asked, self._died = 0.0, False
        self._end, self._why = threading.Event(), "it was shut down"
        self._thread = threading.Thread(target=self._serve, name="pyflatness-slurm", daemon=True)
        self._thread.start()

    def submit(self, function: Callable[..., R], /, *args: Any, **kwargs: Any) -> "Future[R]":
        """Return the future of a task; what is submitted at about the same time becomes one array."""
        future: Future[R] = Future()
        future.set_running_or_notify_cancel()
        call = calls.packed(cloudpickle.dumps, self._threads, function, args, kwargs)
        self._gathered.append((future, functools.partial(_run, call)))
        if self._end.is_set():  # asked afterwards: what ends it takes what was gathered by then
            raise BrokenExecutor(self._why)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Cancel the tasks at once: a unit in work is dropped."""
        self._end.set()
        self._thread.join()
        if self._cluster == "slurm":
            arrays = {job.job_id.partition("_")[0] for job in self._sent.values()}
            if arrays:
                subprocess.run(["scancel", *arrays], check=False)
        else:
            _stop(self._sent.values())
        self._sent.clear()
        if not self._died:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _serve(self) -> None:
        """Submit what was gathered and look for results, until the executor is ended."""
        while not self._end.wait(_WAITS[self._cluster].poll):
            try:
                self._send()
                self._look()
            except Exception as error:  # sbatch refuses, or the folder cannot be read or written
                self._why = reason(error)
                self._end.set()
                for future in [*self._sent, *dict([*self._gathered])]:
                    future.set_exception(InputError(f"executor='slurm': {self._why}"))

    def _send(self) -> None:
        """Submit what was gathered as an array, once the cluster has little left to do."""
        if not self._gathered or len(self._sent) > 2 * self._parallel:
            return
        gathered = [self._gathered[place] for place in range(min(len(self._gathered), _ARRAY))]
        jobs = self._slurm.submit_array([call for _, call in gathered])
        for (future, _), job in zip(gathered, jobs, strict=True):
            self._sent[future] = job
            self._gathered.popleft()

    def _look(self) -> None:
        """Give the futures of tasks that have ended what came of them."""
        now, late = time.monotonic(), _WAITS[self._cluster].late
        if self._sent and now > self._asked + _ASK:
            self._asked = now
            next(iter(self._sent.values())).get_info(mode="force")  # of all tasks, which done() asks for less often
        for future, job in [*self._sent.items()]:
            if not job.done():
                continue
            if job.paths.result_pickle.exists():
                try:
                    value, error = job.result()
                except submitit.core.utils.UncompletedJobError as failure:  # outside of the function, as in unpickling
                    error = BrokenExecutor(reason(failure))
                if error is None:
                    future.set_result(value)
                else:
                    future.set_exception(error)
            elif now < self._since.setdefault(future, now) + late:
                continue
            else:
                self._died = True
                future.set_exception(BrokenExecutor(f"{_last_line(job)}, see {job.paths.stderr}"))
            del self._sent[future]


def _last_line(job: "submitit.Job[Any]") -> str:
    """Return what a task wrote last to its log."""
    lines = (job.stderr() or "").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "its task ended without a result")


def _stop(jobs: Iterable["submitit.Job[Any]"]) -> None:
    """End processes of this machine, and wait a little until they have ended."""
    running = [job for job in jobs if not job.done()]
    for job in running:
        job.cancel(check=False)
    until = time.monotonic() + 5
    while time.monotonic() < until and not all(job.done() for job in running):
        time.sleep(0.05)


def _run(call: calls.Packed) -> tuple[Any, Exception | None]:
    """Make a call in a task, and return its result or what it raised, of which submitit would return a text."""
    _end_on_timeout()
    try:
        return calls.made(*call), None
    except Exception as error:
        return None, error


def _end_on_timeout() -> None:
    """Let a task that reaches its time limit end.

    Submitit's handler of the signal before the limit requeues a task that is preempted, and raises where it is not,
    which in the middle of a unit would be taken for an error of the unit.
    """
    number = getattr(signal, f"SIG{submitit.JobEnvironment.USR_SIG}")
    submitits = signal.getsignal(number)
    assert callable(submitits)

    def handler(number: int, frame: FrameType | None) -> None:
        try:
            submitits(number, frame)
        except Exception:
            traceback.print_exc()
            os._exit(1)

    signal.signal(number, handler)
