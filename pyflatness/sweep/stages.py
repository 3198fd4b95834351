"""Read the data once, or in stages until there are as many probes as a wanted standard error needs."""

import math
import time
from collections.abc import Callable, Iterator

from ..errors import InputError
from ..messages import duration
from ..options import Options
from .totals import Sums

_FIRST_STAGE, _LATER_STAGES = 4, 3  # probes from which their number is found; how often it is corrected
_FEWEST = 2  # probes of a stage: one has no variance of its own
_CLOSE = 1.05  # a standard error within this of the one that was asked for is that


class Stages:
    """Yield the probes of each read of the data, None for exact values, whose ``sums`` the caller sets before the next.

    Where no standard error is wanted there is one read. Otherwise a first stage of a few probes says how many there
    have to be in all, for values whose standard errors are about that at most, and a later one is added where that was
    too few. Exact values are taken where they take no more. No stage looks at the values, and all count by their probes
    (after Stein 1945), which keeps the coverage of the interval. Probes that ``agree`` by chance say nothing of it.
    """

    sums: Sums

    def __init__(self, options: Options, exact_passes: Callable[[], int], agree: Callable[[Sums], bool]) -> None:
        self._options, self._exact_passes, self._agree = options, exact_passes, agree

    def __iter__(self) -> Iterator[range | None]:
        """Yield the numbers of the probes of a read, None: exact."""
        target, most = self._options.target_stderr, self._options.max_passes
        if target is None:
            yield self._options.draws
            return
        start, probes = time.perf_counter(), _FIRST_STAGE
        yield range(probes)
        for _ in range(_LATER_STAGES):
            earlier = self.sums
            assert earlier.errors is not None
            excess = float(earlier.errors.nan_to_num(0.0).max()) / target  # more probes do not help where it is NaN
            if excess <= _CLOSE and not self._agree(earlier):
                return
            needed = max(math.ceil(probes * excess**2), probes + _FEWEST)
            if self._exact_passes() <= min(needed, most):
                yield None
                return
            if needed > most:
                seconds = (time.perf_counter() - start) * needed / probes
                raise InputError(
                    f"target_stderr={target:g} takes about {needed} probes (the standard error of {probes} is "
                    f"{excess * target:.3g}), more than max_passes={most}, and about {duration(seconds)}; pass a "
                    f"larger one, max_passes={needed} to take that time, or probes="
                )
            yield range(probes, needed)
            self.sums, probes = earlier.pooled(self.sums, probes / needed), needed
