"""Locate rows: the rows of each sample in a tensor, and the rows of one tensor in another's memory."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from ..contractions.layer import Memory

_SPARE = 0.25  # extra memory, as another batch may have a few more rows


@dataclass(frozen=True)
class SampleRows:
    """Hold the sample of each row of a tensor, if samples have different numbers of rows, in any order."""

    sample: Tensor  # (r,) the sample of each row
    rank: Tensor  # (r,) the index of each row among those of its sample
    place: Tensor  # (n, P) the row at each place of the padded layout; r for padding
    padding: Tensor  # the places (of n P) that are padding

    @classmethod
    def of(cls, sample: Tensor, samples: int, **fields: Any) -> Self:
        """Return the rows of ``samples`` samples, given each row's ``sample`` (r,)."""
        of_sample, order = sample.sort(stable=True)
        counts = torch.bincount(sample, minlength=samples)
        starts = counts.cumsum(0) - counts
        rank = torch.empty_like(order)
        rank[order] = torch.arange(len(sample), device=sample.device) - starts[of_sample]
        place = sample.new_full((samples, int(counts.max())), len(sample))
        place[sample, rank] = torch.arange(len(sample), device=sample.device)
        return cls(sample, rank, place, (place.flatten() == len(sample)).nonzero().flatten(), **fields)

    def laid_out(self, rows: Tensor, memory: Memory | None = None) -> Tensor:
        """Return rows (r, …) as (n, P, …), padded with zeros; if they are written to ``memory``, without a graph."""
        places = self.place.flatten().clamp_max(len(rows) - 1)
        shape = (len(places), *rows.shape[1:])
        out = None if memory is None else memory.of(shape, rows.dtype, rows.device, _SPARE)
        laid_out = torch.index_select(rows, 0, places, out=out)
        laid_out = laid_out.index_fill_(0, self.padding.to(rows.device), 0)  # the rows may be on the meta device
        first: Tensor = laid_out.unflatten(0, self.place.shape)
        return first

    def taken_back(self, laid_out: Tensor) -> Tensor:
        """Return rows (r, …) from (n, P, …); undoes :meth:`laid_out`."""
        return laid_out[self.sample, self.rank]


def order_in_memory(outputs: Tensor, output: Tensor) -> Tensor | None:
    """Return the indices of the outputs' rows among a layer's rows; None unless each is there once.

    An empty tensor means that the rows are the same, in the same order.
    """
    same = torch.empty(0, dtype=torch.int64, device="cpu")
    if _layout(outputs) == _layout(output):
        return same
    wanted, present = _places(outputs), _places(output)
    if wanted.equal(present):
        return same
    sorted_places, index = present.sort()
    found = torch.searchsorted(sorted_places, wanted).clamp_max(len(present) - 1)
    if not sorted_places[found].equal(wanted) or len(wanted.unique()) < len(wanted):
        return None
    return index[found]


def _layout(rows: Tensor) -> tuple[Any, ...]:
    return rows.storage_offset(), rows.shape[:-1], rows.stride()[:-1]


def _places(rows: Tensor) -> Tensor:
    """Return where the rows (all dimensions but the last) begin in memory, in row-major order."""
    places = torch.tensor([rows.storage_offset()], dtype=torch.int64, device="cpu")
    for count, stride in zip(rows.shape[:-1], rows.stride()[:-1], strict=True):
        places = (places.unsqueeze(1) + torch.arange(count, device="cpu") * stride).flatten()
    return places
