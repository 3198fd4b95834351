"""Rows of the GPU benchmarks' table, and how their numbers are taken: CUDA events, medians, alternatives in turn."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        floor_ms: what the work cannot take less than, measured in the same run.
        ours_ms: pyflatness.
        others_ms: alternatives by their names.
        extra_mib: peak memory of ours beyond the floor's.
        most_ms: what ours is to take at most; None where there is no such target.
        note: whatever else is to be said.
    """

    floor_ms: float
    ours_ms: float
    others_ms: Mapping[str, float]
    extra_mib: float
    most_ms: float | None = None
    note: str = ""

    def cells(self) -> list[str]:
        """Return the row's numbers as text, in the order of :data:`COLUMNS`."""
        target = "" if self.most_ms is None else f"{self.most_ms:.4g}"
        verdict = "" if self.most_ms is None else ("yes" if self.ours_ms <= self.most_ms else "no")
        others = ", ".join(f"{name} {taken:.4g}" for name, taken in self.others_ms.items())
        ratio = f"{self.ours_ms / self.floor_ms:.2f}"
        extra = f"{self.extra_mib:.0f}"
        return [f"{self.floor_ms:.4g}", target, f"{self.ours_ms:.4g}", verdict, ratio, others, extra, self.note]


COLUMNS = ("floor ms", "at most ms", "took ms", "reached", "took / floor", "others ms", "extra MiB", "note")

Works = Mapping[str, Callable[[], Row]]
"""What makes each row, by the name of its work."""


def milliseconds(alternatives: Mapping[str, Callable[[], Any]], device: torch.device, rounds: int) -> dict[str, float]:
    """Return each alternative's median over rounds in which they come in turn, after one uncounted round.

    A time lies between two events on the stream, with nothing before the first: where the GPU waits for the host, that
    counts.
    """
    found: dict[str, list[float]] = {name: [] for name in alternatives}
    for turn in range(rounds + 1):
        for name, function in alternatives.items():
            taken = _once(function, device)
            if turn:
                found[name].append(taken)
    return {name: statistics.median(values) for name, values in found.items()}


def peak_mib(function: Callable[[], Any], device: torch.device) -> float:
    """Return the peak of torch's allocator, beyond what is held before; 0 without a GPU."""
    if device.type != "cuda":
        function()
        return 0.0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    function()
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20


def bandwidth(device: torch.device) -> float:
    """Return how many bytes are read in a millisecond, of a large copy: half of what it moves."""
    source = torch.empty(2**28 if device.type == "cuda" else 2**20, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    taken = milliseconds({"copy": lambda: target.copy_(source)}, device, 15)["copy"]
    return 2 * source.nbytes / taken


def _once(function: Callable[[], Any], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        function()
        return (time.perf_counter() - start) * 1e3
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    function()
    last.record()
    torch.cuda.synchronize(device)
    return first.elapsed_time(last)
