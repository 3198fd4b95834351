"""Measure units as tasks of a Ray cluster: one that is there, or one of this machine's that ends with the executor."""

import logging
import math
import os
import signal
import socket
import threading
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Executor, Future
from typing import Any, TypeVar

import torch

from ..errors import InputError
from ..messages import reason
from . import calls

# Ray reads it when it is imported, and would print each death, which the unit's row tells, among the program's output.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "^A worker died or was killed while executing a task")

import ray
from ray.exceptions import RayError, RayTaskError

R = TypeVar("R")

_OBJECT_STORE = 128 * 2**20  # bytes; what goes to a worker and comes back is a few kilobytes
_PATIENCE = 10.0  # seconds to wait for a cluster's answer


class Ray(Executor):
    """Run what is submitted as tasks of a Ray cluster.

    Functions, arguments and results go through Ray; weights and data are read by the workers, so the cluster's machines
    need pyflatness and the same files at the same paths. Ray repeats no task by itself: a worker that dies is a
    ``BrokenExecutor`` of its unit, whichever way it died.

    Args:
        workers: how many units are with the cluster at a time.
        address: of a cluster that is there: ``"auto"``, ``"host:port"`` or ``"ray://host:port"``, which goes on when
            the executor ends. None: the cluster that this process is connected to already, or else one of this
            machine's, made here and ended by :meth:`shutdown`.
        num_cpus: processors, and threads, of a task. None: on this machine its threads shared out among the workers,
            on a cluster that is there 1.
        num_gpus: GPUs of a task.
        options: further ones of Ray's for tasks, such as ``resources``, ``memory`` or ``runtime_env``.

    Raises:
        InputError: there is no such cluster, or no such option.
    """

    def __init__(
        self,
        workers: int = 1,
        *,
        address: str | None = None,
        num_cpus: float | None = None,
        num_gpus: float = 0,
        **options: Any,
    ) -> None:
        self.workers = workers
        here = address is None and not ray.is_initialized()
        cpus: float = (max(1, torch.get_num_threads() // workers) if here else 1) if num_cpus is None else num_cpus
        try:
            self._task = ray.remote(max_retries=0, num_cpus=cpus, num_gpus=num_gpus, **options)(calls.made)
        except (TypeError, ValueError) as error:
            raise InputError(f"executor='ray': {error}") from None
        self._threads = max(1, int(cpus))
        self._ours = not ray.is_initialized()
        if self._ours:
            _connect(address, workers * cpus)
        elif address not in (None, "auto", there := ray.get_runtime_context().gcs_address):
            raise InputError(f"executor='ray': address={address!r}: this process is connected to {there!r} already")
        self._pending: dict[Future[Any], Any] = {}

    def submit(self, function: Callable[..., R], /, *args: Any, **kwargs: Any) -> "Future[R]":
        """Return the future of a task."""
        try:
            reference = self._task.remote(*calls.packed(ray.cloudpickle.dumps, self._threads, function, args, kwargs))
        except (RayError, ConnectionError) as error:
            raise BrokenExecutor(reason(error)) from error
        future: Future[R] = Future()
        future.set_running_or_notify_cancel()
        self._pending[future] = reference

        def finish(done: "Future[R]") -> None:
            self._pending.pop(future, None)
            error = done.exception()
            if error is None:
                future.set_result(done.result())
            else:
                future.set_exception(_plain(error))

        reference.future().add_done_callback(finish)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End what was begun here at once: a unit in work is dropped. A cluster that was there goes on."""
        if self._ours:
            ray.shutdown()
        elif ray.is_initialized():
            for reference in [*self._pending.values()]:
                ray.cancel(reference, force=True)


def _connect(address: str | None, cpus: float) -> None:
    """Connect to a cluster, or make one; Ray's handler of SIGTERM does not replace the program's."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    made = {"num_cpus": math.ceil(cpus), "include_dashboard": False, "object_store_memory": _OBJECT_STORE}
    before = signal.getsignal(signal.SIGTERM)
    try:
        if address and "://" not in address and ":" in address:  # Ray would try for minutes
            host, _, port = address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), timeout=_PATIENCE).close()
        ray.init(address or "local", log_to_driver=False, logging_level=logging.ERROR, **({} if address else made))
    except (RayError, OSError, RuntimeError, ValueError) as error:
        what = f"no connection to {address!r}" if address else "it cannot be started on this machine"
        raise InputError(f"executor='ray': {what}: {reason(error)}") from None
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _plain(error: BaseException) -> BaseException:
    """Return what a function raised, or a ``BrokenExecutor`` where it did not come to its end."""
    if isinstance(error, RayTaskError):
        return error.cause if isinstance(error.cause, Exception) else error
    return BrokenExecutor(reason(error)) if isinstance(error, RayError) else error
