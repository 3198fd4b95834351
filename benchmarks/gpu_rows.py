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
        work: what is done, with its sizes.
        floor_ms: what it cannot take less than, measured in the same run.
        ours_ms: pyflatness.
        composed_ms: the same composed in torch; None where that does not fit or is not tried.
        extra_mib: peak memory of ours beyond the floor's.
        target: what is to be reached, in words.
    """

    work: str
    floor_ms: float
    ours_ms: float
    composed_ms: float | None
    extra_mib: float
    target: str


def milliseconds(alternatives: Mapping[str, Callable[[], Any]], device: torch.device, rounds: int) -> dict[str, float]:
    """Return each alternative's median over rounds in which they come in turn, after one uncounted round."""
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
