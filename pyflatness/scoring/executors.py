"""Choose where units are measured: here, in processes of this machine, or wherever an executor of the user's runs them.

An executor is what ``concurrent.futures`` calls one, of which two methods are used:

- ``submit(function, *arguments)`` returns a ``Future``. Function and arguments can be pickled.
- ``shutdown(wait=..., cancel_futures=...)`` ends it, where this package made it.

Its attribute ``workers``, if it has one, says how many units are to be with it at a time. A future that ends with a
``BrokenExecutor`` says that the worker died, and its unit is submitted again.
"""

import importlib.util
import inspect
import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch

from ..errors import InputError, MissingExtraError
from ..messages import check_choice

R = TypeVar("R")

NAMES = ("serial", "processes", "ray", "slurm")
_EXTRAS = {"ray": "ray", "slurm": "submitit"}  # of a name, what has to be installed


def named(name: str, workers: int, options: Mapping[str, Any] | None = None) -> Executor:
    """Return an executor by its name, one of :data:`NAMES`; options are further arguments of Ray's or Slurm's."""
    made = _class(name)
    arguments = {**({} if name == "serial" else {"workers": workers}), **(options or {})}
    try:
        inspect.signature(made).bind(**arguments)
    except TypeError as error:
        raise InputError(f"executor={name!r}: {error}; it takes {inspect.signature(made)}") from None
    return made(**arguments)


def _class(name: str) -> Callable[..., Executor]:
    if name == "serial":
        return Serial
    if name == "processes":
        return Processes
    check_choice("executor", name, NAMES)
    if importlib.util.find_spec(_EXTRAS[name]) is None:
        raise MissingExtraError(f"executor {name!r} needs {_EXTRAS[name]}: pip install 'pyflatness[{name}]'")
    if name == "ray":
        from .ray_executor import Ray

        return Ray
    from .slurm_executor import Slurm

    return Slurm


class Serial(Executor):
    """Run what is submitted at once, in the thread that submits it."""

    workers = 1

    def submit(self, function: Callable[..., R], /, *args: Any, **kwargs: Any) -> "Future[R]":
        """Return a future that is done; Ctrl-C is raised here."""
        future: Future[R] = Future()
        try:
            future.set_result(function(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class Processes(Executor):
    """Run what is submitted in new processes of this machine, which share its threads out among them.

    Each process is a pool of its own, so that one that dies takes one unit with it. They are spawned, not forked: torch
    does not survive a fork once it has used its threads. They end with the process that made them, however that ends.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._threads = max(1, torch.get_num_threads() // workers)
        self._context = multiprocessing.get_context("spawn")
        self._watched, self._alive = self._context.Pipe(duplex=False)
        self._idle: queue.SimpleQueue[ProcessPoolExecutor] = queue.SimpleQueue()
        for _ in range(workers):
            self._idle.put(self._pool())

    def _pool(self) -> ProcessPoolExecutor:
        arguments = self._threads, self._watched
        return ProcessPoolExecutor(1, mp_context=self._context, initializer=_begin, initargs=arguments)

    def submit(self, function: Callable[..., R], /, *args: Any, **kwargs: Any) -> "Future[R]":
        """Return the future of a call in a process that is idle; wait until there is one."""
        pool = self._idle.get()

        def give_back(future: "Future[R]") -> None:
            broken = not future.cancelled() and isinstance(future.exception(), BrokenExecutor)
            self._idle.put(self._pool() if broken else pool)

        try:
            future = pool.submit(function, *args, **kwargs)
        except BrokenExecutor:  # it died while it was idle
            pool = self._pool()
            future = pool.submit(function, *args, **kwargs)
        future.add_done_callback(give_back)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the processes at once: a unit in work is dropped."""
        self._alive.close()


def _begin(threads: int, watched: Connection) -> None:
    """Make a new process ready: Ctrl-C is its parent's to handle, and it ends when its parent does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)
    threading.Thread(target=_end_with, args=(watched,), daemon=True).start()


def _end_with(watched: Connection) -> None:
    """Wait until the other end of a pipe is closed, by its holder or by the holder's death, and end this process."""
    try:
        watched.recv_bytes()
    except (EOFError, OSError):
        os._exit(1)
