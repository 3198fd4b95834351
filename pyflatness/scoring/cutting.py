"""Cut the user's batches smaller, and stop after a number of samples."""

from collections.abc import Iterator
from typing import Any

import torch

from ..errors import InputError
from ..model.data import Batches, part, size


class Cut:
    """Give batches of at most so many samples, and no more than so many samples in all.

    Args:
        data: see :class:`.data.Batches`; what can be read again.
        device: where batches go.
        most: samples of a batch; None: as they come.
        limit: samples in all, or, below 1, this part of them; None: all.

    Raises:
        InputError: a part of data that do not say how many samples they have.
    """

    def __init__(self, data: Any, device: torch.device, *, most: int | None = None, limit: float | None = None) -> None:
        self._batches, self.most = Batches(data, device, shown=False), most
        if limit is not None and limit < 1:
            if not self._batches.samples:
                raise InputError(f"limit={limit}: the data do not say how many samples they have; pass a whole number")
            limit = max(1, round(limit * self._batches.samples))
        self._limit = None if limit is None else int(limit)

    def __iter__(self) -> Iterator[Any]:
        left = self._limit
        for batch in self._batches:
            samples = size(batch) if left is None else min(left, size(batch))
            step = self.most or samples
            for start in range(0, samples, step):
                yield part(batch, start, min(start + step, samples))
            left = None if left is None else left - samples
            if left == 0:
                return
