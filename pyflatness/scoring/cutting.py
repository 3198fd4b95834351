"""Cut the user's batches smaller, and stop after a number of samples."""

from collections.abc import Iterator
from typing import Any

import torch

from ..errors import InputError
from ..model.data import Batches, part, size


class Cut:
    """Give batches of at most so many samples, and of all samples some that follow each other.

    Args:
        data: see :class:`.data.Batches`; what can be read again.
        device: where batches go.
        most: samples of a batch; None: as they come.
        limit: the first so many, or, below 1, this part of them; None: all.
        skip: but so many of these.

    Raises:
        InputError: a part of data that do not say how many samples they have.
    """

    def __init__(
        self,
        data: Any,
        device: torch.device,
        *,
        most: int | None = None,
        limit: float | None = None,
        skip: int = 0,
    ) -> None:
        self._batches, self.most, self._skip = Batches(data, device, shown=False), most, skip
        if limit is not None and 0 < limit < 1:
            if not self._batches.samples:
                raise InputError(f"limit={limit}: the data do not say how many samples they have; pass a whole number")
            limit = limited(limit, self._batches.samples)
        self._limit = None if limit is None else int(limit)

    def __iter__(self) -> Iterator[Any]:
        done = 0
        if self._limit is not None and self._limit <= self._skip:
            return
        for batch in self._batches:
            first = max(0, self._skip - done)
            stop = size(batch) if self._limit is None else min(size(batch), self._limit - done)
            for start in range(first, stop, self.most or max(1, stop - first)):
                yield part(batch, start, min(start + (self.most or stop), stop))
            done += size(batch)
            if self._limit is not None and done >= self._limit:
                return


def limited(limit: float | None, samples: int) -> int:
    """Return how many of so many samples there are within a limit, see :class:`Cut`."""
    if limit is None:
        return samples
    return min(samples, int(limit)) if limit >= 1 else max(1, round(limit * samples))
