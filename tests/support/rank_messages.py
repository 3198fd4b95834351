"""What the ranks of a process group send each other, and how they meet, where something goes wrong in between."""

import contextlib
import time
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import pyflatness as pf
from pyflatness.numerics import meeting, shard
from pyflatness.numerics.meeting import joined
from pyflatness.numerics.ranks import Ranks
from pyflatness.numerics.shard import Shard
from support.mixtures import Mixture
from support.rank_cases import LOSS, data, model, part

MANY = shard._FEW + 1  # numbers that do not go along with what is said of them


def _failing(rank, call):
    """Return what a call gives, or its error, if rank 1 has no memory for what it is about to send or receive."""
    before = Ranks._room

    def room(ranks, tensor):
        if ranks.rank == 1 and tensor.numel() != 4096:
            raise MemoryError("no room")
        return before(ranks, tensor)

    with mock.patch.object(Ranks, "_room", room):
        try:
            with joined(None) as group:
                return call(group)
        except (pf.errors.RankError, MemoryError) as error:
            return error


def sums(rank, size):
    return _failing(rank, lambda group: Shard(group).sum("sums", {"one": torch.ones(MANY)}))


def parts(rank, size):
    return _failing(rank, lambda group: Shard(group).each("parts", {"one": torch.ones(MANY)}))


def long_messages(rank, size):
    return _failing(rank, lambda group: group.exchange("a long message", "a" * 9000))


def wholes(rank, size):
    """Rank 0 asks for the whole of a tensor, of which rank 1 cannot make its part."""

    def own():
        if rank == 1:
            raise MemoryError("no room")
        return torch.ones(100)

    def call(group):
        group.hand_over({"one": own})
        return group.whole("one") if rank == 0 else None

    return _failing(rank, call)


def caught_in_between(rank, size):
    """Rank 0 hears of an error of rank 1 where errors of the user's code are passed over, and goes on to the next."""
    found = []
    with joined(None) as group:
        for _ in range(2):
            try:
                with group.agreed("a step"):
                    if rank == 1:
                        raise ValueError("no more")
                    with contextlib.suppress(Exception):
                        group.exchange("in between", None)
                    group.exchange("afterwards", None)
            except (pf.errors.RankError, ValueError) as error:
                found.append(error)
        return found, group.exchange("another step", rank)


def what_was_sent(rank, size):
    """The numbers of messages that few numbers, many and several parts of many take, and what comes of them."""
    counted, before, found = [], Ranks._gather, {}

    def sent(ranks, *arguments, **options):
        counted.append(arguments[0].numel())
        return before(ranks, *arguments, **options)

    with joined(None) as group, mock.patch.object(Ranks, "_gather", sent):
        for name, numbers, chunk in (("few", 3, 100), ("many", MANY, 10_000), ("parts", MANY, 2 * MANY)):
            counted.clear()
            with mock.patch.object(shard, "_CHUNK", chunk):
                own = torch.arange(float(numbers)) + rank
                total = Shard(group).sum("sums", {"one": own, "whole": torch.tensor(rank + 1)})
            found[name] = [*counted], float(total["one"].sum()), float(total["whole"])
    return found


def one_goes_as_the_other_comes(rank, size):
    """Rank 0 gives up in the moment in which rank 1, who is late, has come: both are in the call, or none is."""
    store = dist.distributed_c10d._get_default_store()
    store.set_timeout(timedelta(seconds=2))
    found = []
    for pause in (0.0, 2.0, 2.5, 4.0):
        time.sleep(pause if rank == 1 else 0)
        try:
            found.append(float(pf.relative_flatness(model(), LOSS, part(rank, size))))
        except pf.errors.RankError as error:
            found.append(type(error).__name__)
        dist.barrier()  # else a rank that went meets the other, which came late, in its next call
    store.set_timeout(timedelta(seconds=60))
    return found


def noted_before(rank, size):
    """Rank 0 gives up when all have come and it has not seen that yet: it goes on with the others."""
    seen, before = [], meeting._Meeting._are_here

    def are_here(self):
        found = before(self)
        if rank == 0 and found and not seen:
            seen.append(found)
            raise KeyboardInterrupt
        return found

    with mock.patch.object(meeting._Meeting, "_are_here", are_here):
        try:
            return float(pf.relative_flatness(model(), LOSS, part(rank, size)))
        except (pf.errors.RankError, KeyboardInterrupt) as error:
            return repr(error)


def a_store_that_is_gone(rank, size):
    def add(*arguments):
        raise dist.DistNetworkError("Connection reset by peer")

    with mock.patch.object(dist.Store, "add", add), mock.patch.object(dist.PrefixStore, "add", add, create=True):
        try:
            return pf.relative_flatness(model(), LOSS, part(rank, size))
        except pf.errors.RankError as error:
            return error


def blocks_of_some_ranks(rank, size):
    """An expert that has tokens in the samples of one rank alone."""
    torch.manual_seed(0)
    network, inputs = Mixture(chosen=1).eval(), torch.randn(40, 2, 4, dtype=torch.float64)
    with torch.no_grad():
        chosen = network.routed(inputs)[1].view(40, 2)
    targets = torch.arange(40) % 3
    halves = [(inputs[which], targets[which]) for which in ((chosen == 1).any(1), (chosen != 1).all(1))]
    return pf.block_traces(network, LOSS, halves if size == 1 else halves[rank : rank + 1], "experts.down_proj[1]")


class Twice(DistributedSampler):
    """A sampler of another meaning: each rank has the same samples."""

    def __iter__(self):
        return iter(range(len(self.dataset)))

    def __len__(self):
        return len(self.dataset)


def by_a_sampler_of_ones_own(rank, size):
    dataset = TensorDataset(*data())
    sampler = None if size == 1 else Twice(dataset, size, rank)
    return pf.relative_flatness(model(), LOSS, DataLoader(dataset, 5, sampler=sampler), "0", per_sample=True)
