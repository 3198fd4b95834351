"""Messages between ranks: how many there are, and what an error between two of them, or in meeting, comes to."""

import contextlib
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import pyflatness as pf
from pyflatness.numerics import process_groups, shard
from pyflatness.numerics.process_groups import joined
from pyflatness.numerics.ranks import Ranks
from pyflatness.numerics.shard import Shard
from support import rank_cases, ranks
from support.mixtures import Mixture
from support.rank_cases import LOSS, data, model, part

# --- what each of the ranks does --------------------------------------------------------------------------------------

MANY = shard._FEW + 1  # numbers that do not go along with what is said of them


def _failing(rank, call):
    """Return what a call gives, or its error, if rank 1 has no memory for what it is about to send or receive."""
    before = Ranks._room

    def room(ranks, tensor):
        if ranks.rank == 1:
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


class Full(dict):
    """Parts that cannot be copied."""

    def items(self):
        raise MemoryError("no room")


def parts(rank, size):
    own = (Full if rank == 1 else dict)(one=torch.ones(MANY))
    return _failing(rank, lambda group: Shard(group).each("parts", own))


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
    counted, before, found = [], Ranks._collective, {}

    def sent(ranks, call, into, sent):
        counted.append(sent.numel() if isinstance(sent, torch.Tensor) else "told")
        return before(ranks, call, into, sent)

    with joined(None) as group, mock.patch.object(Ranks, "_collective", sent):
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
    seen, before = [], process_groups._Rendezvous._are_here

    def are_here(self):
        found = before(self)
        if rank == 0 and found and not seen:
            seen.append(found)
            raise KeyboardInterrupt
        return found

    with mock.patch.object(process_groups._Rendezvous, "_are_here", are_here):
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


# --- what that comes to -----------------------------------------------------------------------------------------------

FAILING = "sums", "parts", "wholes"
OTHERS = (
    *("what_was_sent", "one_goes_as_the_other_comes", "noted_before", "a_store_that_is_gone"),
    *("blocks_of_some_ranks", "by_a_sampler_of_ones_own", "caught_in_between"),
)


@pytest.fixture(scope="module")
def found():
    return ranks.outcomes("ranks.test_messages", [*FAILING, *OTHERS], 2)


@pytest.mark.parametrize("name", FAILING)
def test_a_rank_without_memory_for_what_is_to_be_sent_ends_all(found, name):
    """It says so in the message that the others wait for."""
    first, second = found[name]
    assert isinstance(second, MemoryError)
    assert isinstance(first, pf.errors.RankError)
    assert str(first) == "rank 1: MemoryError: no room"


def test_an_error_of_another_rank_is_raised_again_after_it_was_caught(found):
    (errors, first), (own, second) = found["caught_in_between"]
    assert [str(error) for error in errors] == ["rank 1: ValueError: no more"] * 2
    assert [repr(error) for error in own] == ["ValueError('no more')"] * 2
    assert first == second == [0, 1]  # and the ranks go on together


def test_few_numbers_go_with_what_is_said_of_them(found):
    told, many = "told", MANY
    of_many = 2 * sum(range(many)) + many
    expected = {
        "few": ([told], 9.0, 3.0),
        "many": ([told, told, many + 1], of_many, 3.0),
        "parts": ([told, told, many, 1], of_many, 3.0),
    }
    assert found["what_was_sent"] == [expected] * 2


def test_ranks_are_all_in_a_call_or_none_is(found):
    first, second = found["one_goes_as_the_other_comes"]
    value = pytest.approx(float(pf.relative_flatness(rank_cases.model(), rank_cases.LOSS, rank_cases.data())))
    assert first == second
    assert first[0] == value
    assert first[-1] == "RankError"  # rank 1 came much later than rank 0 went


def test_an_interrupt_when_all_have_come_is_told_to_the_others(found):
    first, second = found["noted_before"]
    assert first == "KeyboardInterrupt()"
    assert "rank 0: KeyboardInterrupt" in second


def test_a_store_that_does_not_answer_is_an_error_of_the_ranks(found):
    for error in found["a_store_that_is_gone"]:
        assert isinstance(error, pf.errors.RankError)
        assert "the store of the process group does not answer" in str(error)


def test_blocks_of_a_layer_that_ran_on_one_rank_alone(found):
    expected = blocks_of_some_ranks(0, 1)
    for blocks in found["blocks_of_some_ranks"]:
        assert torch.allclose(blocks, expected, rtol=1e-10, atol=0)
        assert torch.equal(blocks, found["blocks_of_some_ranks"][0])


def test_a_sampler_of_another_class_is_not_taken_for_one_that_deals_samples_out(found):
    """Its samples follow each other, rank by rank, as those of any other loader."""
    values = by_a_sampler_of_ones_own(0, 1).per_sample
    for estimate in found["by_a_sampler_of_ones_own"]:
        assert estimate.samples == 2 * len(values)
        assert torch.allclose(estimate.per_sample, torch.cat([values, values]), rtol=1e-10)
        assert not any("DistributedSampler" in note for note in estimate.notes)
