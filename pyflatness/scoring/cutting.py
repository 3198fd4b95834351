"""Say which samples are measured together: batches cut smaller, the first of the data alone, each rank's own part.

The ranks' parts follow one another in the order of the ranks, so that a sample has the place in all data that it has in
one process, and random probes with it.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, Subset

from ..errors import InputError
from ..model.data import Batches, distributed, part, size
from ..numerics.ranks import Ranks
from . import keys


class Cut:
    """Give batches of ``most`` samples (None: as they come), and of all samples some that follow each other.

    These are the first ``limit``, or, below 1, this part of them, but ``skip``.
    """

    def __init__(
        self, data: Any, device: torch.device, *, most: int | None = None, limit: float | None = None, skip: int = 0
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


_CPU = torch.device("cpu")


def dealt(data: Any, ranks: Ranks, limit: float | None = None) -> tuple[Any, int]:
    """Return this rank's part of data that every rank has, and how many samples it has.

    Of tensors and of a loader of torch's a rank reads its part alone; of other batches all, and leaves out others'.
    """
    if distributed(data) is not None:
        raise InputError(
            "data: a loader with DistributedSampler has the samples of one rank; pass one of all samples, which are "
            "dealt out to the ranks here"
        )
    places: Sequence[int] | None = None
    if _is_plain(data):
        places = _places(data, ranks)
        data, loader = _reading(data, places), data
    _check_same(data, ranks)
    count = limited(limit, Batches(data, _CPU, shown=False).count() if places is None else len(places))
    start, stop = (count * place // ranks.size for place in (ranks.rank, ranks.rank + 1))
    if places is not None:
        mine = _reading(loader, places[start:stop])
    elif isinstance(data, tuple) and isinstance(data[0], Tensor):
        mine = part(data, start, stop)
    else:
        mine = Cut(data, _CPU, skip=start, limit=stop)
    return mine, stop - start


def _check_same(data: Any, ranks: Ranks) -> None:
    found = ranks.exchange("the data", keys.of_data(data, ordered=True, ends=True))
    for rank, facts in enumerate(found):
        if facts != found[0]:
            raise InputError(
                f"data: rank {rank} got other samples than rank 0, or in another order; let every rank load all "
                "samples in one order (seed what is drawn), and they are dealt out to the ranks here"
            )


def _is_plain(data: Any) -> bool:
    """Return whether samples of a loader can be read by their places."""
    plain = type(data) is DataLoader and type(data.batch_sampler) is BatchSampler
    return plain and not isinstance(data.dataset, IterableDataset)


def _places(loader: Any, ranks: Ranks) -> Sequence[int]:
    """Return the places in its data set of the samples that a loader gives, in its order, or that of the first rank."""
    batches = loader.batch_sampler  # its sampler is the loader's, unless the user made it
    if type(batches.sampler) is SequentialSampler and not batches.drop_last:
        return range(len(batches.sampler))
    places: list[int] = ranks.first("the order of the samples", [place for batch in batches for place in batch])
    return places


def _reading(loader: Any, places: Sequence[int]) -> Any:
    names = "collate_fn", "num_workers", "pin_memory", "timeout", "worker_init_fn"
    options = {name: getattr(loader, name) for name in (*names, "multiprocessing_context", "prefetch_factor")}
    return DataLoader(Subset(loader.dataset, places), loader.batch_sampler.batch_size, **options)
