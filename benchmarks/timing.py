"""Timing that holds on a noisy machine: alternatives in turn, medians, and ratios taken round by round."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


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
    """Time every alternative once a round: the mean of some calls in a row, after an uncounted one.

    Without that call an alternative would find its data in a cache, or not, by what ran before it. One call in a row is
    for work too long for that to matter, and has no other in front.
    """
    seconds: dict[str, list[float]] = {name: [] for name in alternatives}
    for _ in range(rounds):
        for name, function in alternatives.items():
            if repeats > 1:
                function()
            start = clock()
            for _ in range(repeats):
                function()
            seconds[name].append((clock() - start) / repeats)
    return {name: Timing(tuple(values)) for name, values in seconds.items()}
