"""Messages between ranks: how many there are, and what an error between two of them, or in meeting, comes to."""

import pytest
import torch

import pyflatness as pf
from support import rank_cases, rank_messages, ranks

FAILING = "sums", "parts", "long_messages", "wholes"
OTHERS = (
    *("what_was_sent", "one_goes_as_the_other_comes", "noted_before", "a_store_that_is_gone"),
    *("blocks_of_some_ranks", "by_a_sampler_of_ones_own", "caught_in_between"),
)


@pytest.fixture(scope="module")
def found():
    return ranks.outcomes("support.rank_messages", [*FAILING, *OTHERS], 2)


@pytest.mark.parametrize("name", FAILING)
def test_a_rank_without_memory_for_what_is_to_be_sent_ends_all(found, name):
    """It says so in a message of the size that the others wait for."""
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
    packet, many = 4096, rank_messages.MANY
    of_many = 2 * sum(range(many)) + many
    expected = {
        "few": ([packet], 9.0, 3.0),
        "many": ([packet, packet, many + 1], of_many, 3.0),
        "parts": ([packet, packet, many, 1], of_many, 3.0),
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
    expected = rank_messages.blocks_of_some_ranks(0, 1)
    for blocks in found["blocks_of_some_ranks"]:
        assert torch.allclose(blocks, expected, rtol=1e-10, atol=0)
        assert torch.equal(blocks, found["blocks_of_some_ranks"][0])


def test_a_sampler_of_another_class_is_not_taken_for_one_that_deals_samples_out(found):
    """Its samples follow each other, rank by rank, as those of any other loader."""
    values = rank_messages.by_a_sampler_of_ones_own(0, 1).per_sample
    for estimate in found["by_a_sampler_of_ones_own"]:
        assert estimate.samples == 2 * len(values)
        assert torch.allclose(estimate.per_sample, torch.cat([values, values]), rtol=1e-10)
        assert not any("DistributedSampler" in note for note in estimate.notes)
