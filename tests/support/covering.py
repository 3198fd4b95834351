"""Intervals against the truth: how many of those from different seeds hold it."""

from collections.abc import Iterable

Interval = tuple[float, float]


def share(intervals: Iterable[Interval], truth: float) -> float:
    """Return the share of intervals that hold the truth."""
    held = [low <= truth <= high for low, high in intervals]
    return sum(held) / len(held)
