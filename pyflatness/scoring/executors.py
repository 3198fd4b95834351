"""Choose where units are measured: here, in processes of this machine, or wherever an executor of the user's runs them.

An executor is what ``concurrent.futures`` calls one, of which two methods are used:

- ``submit(function, *arguments)`` returns a ``Future``. Function and arguments can be pickled.
- ``shutdown(wait=..., cancel_futures=...)`` ends it, where this package made it.

Its attribute ``workers``, if it has one, says how many units are to be with it at a time. A future that ends with a
``BrokenExecutor`` says that the worker died, and its unit is submitted again.
"""

import importlib
import importlib.util
import inspect
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch

from ..errors import InputError, MissingExtraError
from ..messages import check_choice

R = TypeVar("R")

_CLASSES = {  # by name: the module, the class in it, and what has to be installed
    "processes": ("executors", "Processes", ""),
    "ray": ("ray_executor", "Ray", "ray"),
    "slurm": ("slurm_executor", "Slurm", "submitit"),
}
NAMES = ("serial", *_CLASSES)


def named(name: str, workers: int, options: Mapping[str, Any] | None = None) -> Executor | None:
    """Return an executor by its name, one of :data:`NAMES`; options are further arguments of Ray's or Slurm's.

    ``"serial"`` is None: units are measured here, one after the other.
    """
    check_choice("executor", name, NAMES)
    if name == "serial":
        if options:
            raise InputError(f"executor='serial': it takes no options, got {', '.join(options)}")
        return None
    module, kind, library = _CLASSES[name]
    if library and importlib.util.find_spec(library) is None:
        raise MissingExtraError(f"executor {name!r} needs {library}: pip install 'pyflatness[{name}]'")
    made: Callable[..., Executor] = getattr(importlib.import_module(f"{__package__}.{module}"), kind)
    arguments = {"workers": workers, **(options or {})}
    try:
        inspect.signature(made).bind(**arguments)
    except TypeError as error:
        raise InputError(f"executor={name!r}: {error}; it takes {inspect.signature(made)}") from None
    return made(**arguments)


class Processes(ThreadPoolExecutor):
    """Run what is submitted in new processes of this machine, which share its threads out among them.

    Each thread here has a pool of one process, so that one that dies takes one unit with it. They are spawned, not
    forked: torch does not survive a fork once it has used its threads. They end with the process that made them,
    however that ends.
    """

    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        self._context = multiprocessing.get_context("spawn")
        watched, self._alive = self._context.Pipe(duplex=False)
        self._arguments = max(1, torch.get_num_threads() // workers), watched
        self._own = threading.local()

    def submit(self, function: Callable[..., R], /, *args: Any, **kwargs: Any) -> "Future[R]":
        """Return the future of a call in a process."""
        return super().submit(self._called, function, *args, **kwargs)

    def _called(self, function: Callable[..., R], /, *args: Any, **kwargs: Any) -> R:
        """Return what a call in this thread's process returns."""
        if not hasattr(self._own, "pool"):
            self._own.pool = ProcessPoolExecutor(1, self._context, _begin, self._arguments)
        try:
            result: R = self._own.pool.submit(function, *args, **kwargs).result()
        except BrokenExecutor:
            del self._own.pool
            raise
        return result

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the processes at once: a unit in work is dropped."""
        self._alive.close()
        super().shutdown(wait, cancel_futures=cancel_futures)


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
