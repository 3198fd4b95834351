"""Hold one rank's part of data that are spread over the processes of a group.

The place of a sample in all data is that in the shards one after another, in the order of the ranks. If all ranks read
by torch's ``DistributedSampler``, it is the place in that sampler's order of the whole data set, which does not depend
on the number of ranks. A rank without samples gets a batch of another rank: it learns from that which layers run and
which one is the head, and adds nothing to sums.
"""

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

from ..errors import InputError
from ..numerics.ranks import Ranks
from ..numerics.shard import Shard
from .data import Batches, distributed, no_samples, repeated

_EVEN = (
    "the loader of accelerate repeats {} samples, to make batches even, and these count twice; DataLoaderConfiguration("
    "even_batches=False) has each once"
)


def batches(
    data: Any,
    device: torch.device,
    ranks: Ranks,
    *,
    reads: int = 1,
    ordered: bool = False,
    placed: bool = False,
    shown: bool | None = None,
) -> Batches:
    """Return the user's data as :class:`.data.Batches`, with their place among the data of all ranks.

    With ``placed`` the exact places of samples in all data are found.
    """
    if shown is None and ranks.rank > 0:
        shown = False
    own = Batches(data, device, reads=reads, ordered=ordered, shown=shown)
    if ranks.alone:
        return own
    own.shard, lender = _shard(data, own, ranks, placed=placed)
    if lender is None:
        return own
    lent = _lent(own, lender)
    if own.shard.counts:
        return own
    borrowed = Batches([lent], device, reads=reads, shown=False)
    borrowed.shard = own.shard
    return borrowed


def _shard(data: Any, own: Batches, ranks: Ranks, *, placed: bool) -> tuple[Shard, int | None]:
    """Return this rank's part of the data, and the rank that lends a batch if some rank has no samples."""
    empty, sampler = own.is_empty(), distributed(data)
    place = None if sampler is None else _place(*sampler)
    count = 0 if empty or not placed else own.count() if place is None else place["taken"]
    told = {"empty": empty, "place": place, "count": count, "repeated": repeated(data)}
    facts = ranks.exchange("the sizes of the shards", told)
    if all(fact["empty"] for fact in facts):
        raise no_samples()
    empties = [fact["empty"] for fact in facts]
    lender = empties.index(False) if any(empties) else None
    places = [fact["place"] for fact in facts]
    if place is not None and all(places) and _are_of_one_order(places):
        return Shard(ranks, not empty, place["start"], place["step"], _notes(places)), lender
    start, again = sum(fact["count"] for fact in facts[: ranks.rank]), max(fact["repeated"] for fact in facts)
    notes = (_EVEN.format(again),) if again else ()
    return Shard(ranks, not empty, start, notes=notes), lender


def _place(sampler: DistributedSampler[Any], taken: int) -> dict[str, int]:
    """Return the places of a sampler's samples, of which a loader takes ``taken``, in the order of the data set."""
    whole: int = len(sampler.dataset)  # type: ignore[arg-type]
    start, step = sampler.rank, sampler.num_replicas
    return {
        "start": start,
        "step": step,
        "taken": taken,
        "whole": whole,
        "again": sum(start + step * k >= whole for k in range(max(0, taken - 2), taken)),
        "dropped": max(0, whole - sampler.total_size),
    }


def _are_of_one_order(places: Sequence[Mapping[str, int]]) -> bool:
    """Return whether the samplers of all ranks have different samples of one data set."""
    starts, steps = ({place[name] for place in places} for name in ("start", "step"))
    return len(starts) == len(places) and len(steps) == 1


def _notes(places: Sequence[Mapping[str, int]]) -> tuple[str, ...]:
    """Return notes for readers on the samplers of all ranks."""
    whole, again, dropped = places[0]["whole"], sum(place["again"] for place in places), places[0]["dropped"]
    notes = []
    if again:
        notes.append(
            f"DistributedSampler repeats {again} of the {whole} samples, to give every rank as many, and these count "
            "twice; Subset(dataset, range(rank, len(dataset), ranks)) in a loader without it has each once"
        )
    if dropped:
        notes.append(f"DistributedSampler(drop_last=True) leaves out {dropped} of the {whole} samples")
    return tuple(notes)


def _lent(own: Batches, lender: int) -> Any:
    """Return the first batch of rank ``lender`` to a rank without samples, and None to others."""
    ranks = own.shard.ranks
    try:
        lent = ranks.exchange("a batch", _plain(own.peek()) if ranks.rank == lender else None)[lender]
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise InputError(
            f"data: a rank has no samples, and a batch of rank {lender} cannot be sent there ({error}); give every "
            "rank one batch at least"
        ) from error
    return None if own.shard.counts else lent


def _plain(batch: Any) -> Any:
    """Return a batch with tensors on the CPU, in Python's own containers."""
    if isinstance(batch, Tensor):
        return batch.detach().cpu().clone()
    if isinstance(batch, Mapping):
        return {key: _plain(part) for key, part in batch.items()}
    if isinstance(batch, (tuple, list)):
        parts = [_plain(part) for part in batch]
        return tuple(parts) if isinstance(batch, tuple) else parts
    return batch
