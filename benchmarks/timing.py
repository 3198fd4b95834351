"""Timing that holds on a noisy machine: alternatives in turn, medians, and ratios taken round by round.

A call on all cores takes several times as long while another process has one of them, since its threads wait for each
other; and that is not the same factor for all alternatives. Linux says how long a process's threads were ready to run
and had no core, so a call that was disturbed is timed again.
"""

import contextlib
import math
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_WARM = 0.001  # seconds of uncounted calls in front of those that are timed; one call may take longer
_DISTURBED = 0.02  # seconds of waiting for a core, for each second of a call
_PATIENCE = 20.0  # seconds that the calls of :func:`in_turn` which are timed again may take altogether
_INTERVAL, _PROFILED = 1e-3, 1.0  # seconds between two looks at what runs, and of all of them at least
_PAUSE = 0.02  # seconds in front of such a call, for the other process to get done


@dataclass(frozen=True)
class Timing:
    """Seconds of each round, in the order of the rounds."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Return the median round."""
        return statistics.median(self.seconds)

    def ratio(self, other: "Timing") -> float:
        """Return the median over the rounds of this over ``other`` in the same round."""
        return statistics.median(a / b for a, b in zip(self.seconds, other.seconds, strict=True))


def in_turn(
    alternatives: Mapping[str, Callable[[], Any]],
    rounds: int,
    repeats: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Time every alternative once a round, there and back: the mean of some calls in a row, after uncounted ones.

    Without these an alternative would find its data in a cache, or not, by what ran before it. What is larger than
    the caches of a core is still felt some calls later, so every second round goes backwards. One call in a row is for
    work too long for all that to matter, and has none in front. What was disturbed by another process is timed
    again while patience lasts; then the least disturbed time counts.
    """
    seconds: dict[str, list[float]] = {name: [] for name in alternatives}
    patience = _PATIENCE
    for number in range(rounds):
        for name in [*alternatives][:: -1 if number % 2 else 1]:
            function = alternatives[name]
            share, found = _timed(function, repeats, clock)
            start = time.perf_counter()
            while share > _DISTURBED and patience > time.perf_counter() - start:
                time.sleep(_PAUSE)
                share, found = min((share, found), _timed(function, repeats, clock))
            patience -= time.perf_counter() - start
            seconds[name].append(found)
    return {name: Timing(tuple(values)) for name, values in seconds.items()}


def clock_of(device: torch.device) -> Callable[[], float]:
    """Return a clock of what is done on a device: on a GPU one that first waits until all of it is done."""

    def waited() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return waited if device.type == "cuda" else time.perf_counter


def _timed(function: Callable[[], Any], repeats: int, clock: Callable[[], float]) -> tuple[float, float]:
    """Return the share of the time that was waited for a core, and the mean seconds of some calls."""
    waited, start = _waited(), time.perf_counter()
    while repeats > 1:
        function()
        if time.perf_counter() - start > _WARM:
            break
    start = clock()
    for _ in range(repeats):
        function()
    seconds = clock() - start
    return (_waited() - waited) / max(seconds, math.ulp(0.0)), seconds / repeats


def _waited() -> float:
    """Return the seconds that this process's threads were ready to run and had no core; 0 where the system is mute."""
    total = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, IndexError):  # a thread that has just ended
            total += int(path.read_text().split()[1])
    return total / 1e9


def shares(call: Callable[[], object], named: Mapping[str, list[tuple[str, str]]]) -> dict[str, float]:
    """Return the shares of calls' time that parts take, "the rest" last: every millisecond it is seen which one runs.

    A part is named with its functions: the end of their file's path, and how their names begin. What these call is of
    the part too, unless it is of one that stands before it. Another thread looks, where this one leaves Python for an
    operation of torch: a signal would wait until the call is over.
    """
    looks, caller, over = dict.fromkeys([*named, "the rest"], 0.0), threading.get_ident(), threading.Event()

    def look() -> None:
        last = time.perf_counter()
        while not over.wait(_INTERVAL):
            part = _part(sys._current_frames()[caller], named)
            now = time.perf_counter()
            looks[part] += now - last
            last = now

    watcher = threading.Thread(target=look)
    start = time.perf_counter()
    watcher.start()
    try:
        while time.perf_counter() - start < _PROFILED:
            call()
    finally:
        over.set()
        watcher.join()
    whole = sum(looks.values())
    return {part: seconds / whole for part, seconds in looks.items()}


def _part(frame: FrameType | None, named: Mapping[str, list[tuple[str, str]]]) -> str:
    """Return the first part of which a function is running."""
    running = []
    while frame is not None:
        running.append((frame.f_code.co_filename, frame.f_code.co_name))
        frame = frame.f_back
    for part, functions in named.items():
        if any(path.endswith(end) and name.startswith(begin) for path, name in running for end, begin in functions):
            return part
    return "the rest"


class Waits(TorchDispatchMode):
    """Count how often a number of a tensor is asked for, for which the host waits where the tensor is on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation."""
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))
