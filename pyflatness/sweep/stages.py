"""Take as many probes as a wanted standard error needs."""

import math
import time
from collections.abc import Callable

from ..errors import InputError
from ..messages import duration
from .totals import Sums

_FIRST_STAGE, _LATER_STAGES = 4, 3  # probes from which their number is found; how often it is corrected
_FEWEST = 2  # probes of a stage: one has no variance of its own
_CLOSE = 1.05  # a standard error within this of the one that was asked for is that


def until(target: float, summed: Callable[[range | None], Sums], exact_passes: Callable[[], int], most: int) -> Sums:
    """Return values whose standard errors are about ``target`` at most, or exact ones where these take no more.

    A first stage of a few probes says how many there have to be in all, and a later one is added where that was too
    few. No stage looks at the values, and all count by their probes (after Stein 1945), which keeps the coverage of the
    interval.

    Args:
        target: the standard error.
        summed: the values in the probes of these numbers, None: exact.
        exact_passes: backward passes or Hessian products that exact values take; known once there were probes.
        most: ``max_passes=`` of the user, and probes at most.

    Raises:
        InputError: it would take more probes than ``most``.
    """
    start = time.perf_counter()
    sums, probes = summed(range(_FIRST_STAGE)), _FIRST_STAGE
    for _ in range(_LATER_STAGES):
        assert sums.errors is not None
        excess = float(sums.errors.nan_to_num(0.0).max()) / target  # more probes do not help where it is NaN
        if excess <= _CLOSE:
            break
        needed = max(math.ceil(probes * excess**2), probes + _FEWEST)
        if exact_passes() <= min(needed, most):
            return summed(None)
        if needed > most:
            seconds = (time.perf_counter() - start) * needed / probes
            raise InputError(
                f"target_stderr={target:g} takes about {needed} probes (the standard error of {probes} is "
                f"{excess * target:.3g}), more than max_passes={most}, and about {duration(seconds)}; pass a larger "
                f"one, max_passes={needed} to take that time, or probes="
            )
        sums, probes = sums.pooled(summed(range(probes, needed)), probes / needed), needed
    return sums
