"""Errors in calls over the ranks of a process group: all ranks end, with the error of the one that has it."""

import re

import pytest

import pyflatness as pf
from support import rank_cases, ranks

# case -> the error of each of two ranks: its class, and what its message begins with
ERRORS = {
    "nan_raised": [(pf.errors.NonFiniteError, r"rank 1: batch 0: 1 of 14 samples have NaN")] * 2,
    "nan_raised_at_the_head": [(pf.errors.NonFiniteError, r"rank 1: batch 0: 1 of 14 rows have NaN")] * 2,
    "nan_raised_of_every_measure": [(pf.errors.NonFiniteError, r"rank 1: batch 0: ")] * 2,
    "error_in_reading": [(pf.errors.RankError, "rank 1: ValueError: no such file"), (ValueError, "no such file")],
    "error_in_the_model": [
        (pf.errors.RankError, "rank 1: RuntimeError: mat1 and mat2"),
        (pf.errors.InputError, r"model: model\(inputs\) on the inputs \(14, 4\)"),
    ],
    "error_of_all": [(pf.errors.InputError, "layer: nothing is called 'none'|layer")] * 2,
    "no_samples": [(pf.errors.InputError, "data: there are no samples in it")] * 2,
    "other_options": [(pf.errors.RankError, "rank 1 has other options than rank 0")] * 2,
    "other_weights": [(pf.errors.RankError, "rank 1 has other weights than rank 0")] * 2,
    "other_buffers": [(pf.errors.RankError, "rank 1 has other buffers than rank 0 .* BatchNorm")] * 2,
    "other_calls": [
        (pf.errors.RankError, "ranks have lost each other in this call: rank 0 is at the head, .* rank 1 at the")
    ]
    * 2,
    "other_layers": [(pf.errors.RankError, "rank 1 has other layers than rank 0")] * 2,
    "other_measures": [(pf.errors.RankError, "rank 1 has other measures than rank 0")] * 2,
    "other_losses": [(pf.errors.RankError, "rank 1 has other loss than rank 0")] * 2,
    "other_head": [(pf.errors.RankError, "rank 1 has other weights than rank 0")] * 2,
    "columns_of_a_head": [(pf.errors.InputError, r"weight: a DTensor with \(Shard\(dim=1\),\) over")] * 2,
    "rows_of_another_loss": [
        (pf.errors.NotYetError, "weight: its rows can be spread over ranks .* cross-entropy alone")
    ]
    * 2,
    "other_features": [(pf.errors.RankError, "rank 1 has other features or targets than rank 0")] * 2,
    "wrong_bias": [(pf.errors.InputError, r"bias has shape \(2,\) for 3 rows of weight")] * 2,
    "objects_in_batches": [(pf.errors.InputError, "rank 1: data: rank 1 has no samples, and a batch of rank 0 holds")]
    * 2,
    "adaptive": [(pf.errors.NotYetError, r"probes='adaptive' .* 2 ranks .* pass probes=k")] * 2,
    "not_a_group": [(pf.errors.InputError, "process_group='world': a torch.distributed.ProcessGroup")] * 2,
}
OTHERS = "left_out_of_one_rank", "refused", "interrupted", "on_one_rank", "in_parts", "afterwards"


@pytest.fixture(scope="module")
def found():
    return ranks.outcomes("support.rank_failures", [*ERRORS, *OTHERS], 2)


@pytest.mark.parametrize("name", ERRORS)
def test_every_rank_ends_with_the_error_of_the_one_that_has_it(found, name):
    for (kind, beginning), error in zip(ERRORS[name], found[name], strict=True):
        assert isinstance(error, kind), error
        assert re.match(beginning, str(error)), error


def test_samples_of_one_rank_can_all_be_left_out(found):
    for estimate in found["left_out_of_one_rank"]:
        assert (estimate.omitted, estimate.samples) == (9, 14)
        assert estimate == found["left_out_of_one_rank"][0]
    inputs, targets = rank_cases.data()
    expected = pf.relative_flatness(rank_cases.model(), rank_cases.LOSS, (inputs[9:], targets[9:]))
    assert float(found["left_out_of_one_rank"][0]) == pytest.approx(float(expected), rel=1e-12)


def test_calls_that_need_all_data_in_one_place_say_so(found):
    for calls in found["refused"]:
        for name, error in calls.items():
            assert isinstance(error, pf.errors.NotYetError), name
            assert name in str(error)
            assert "process_group=False" in str(error)


def test_what_is_sent_may_be_larger_than_a_message(found):
    expected = {("of", "tuples"): [3.0 * k for k in range(10)], "one": 2.0, "more": [[1.0, 1.0], [1.0, 1.0]]}
    for lengths, sums, head in found["in_parts"]:
        assert lengths == [9000, 18000]
        assert sums == expected
        assert head == pytest.approx(float(rank_cases.vocabulary_of_7(0, 1)), rel=1e-12)


def test_an_interrupt_of_one_rank_ends_all(found):
    error, interrupted = found["interrupted"]
    assert isinstance(error, pf.errors.RankError)
    assert str(error).startswith("rank 1: KeyboardInterrupt")
    assert interrupted == "interrupted"


def test_a_call_on_one_rank_ends_with_a_way_out(found):
    (error, first), (nothing, second) = found["on_one_rank"]
    assert nothing is None
    assert re.search("Rank 1 did not come within .* s$", str(error)), error
    assert "process_group=False" in str(error)
    assert first == second == 1.0  # what rank 1 sent was not taken for an answer


def test_nothing_is_left_of_calls_that_failed(found):
    expected = float(pf.relative_flatness(rank_cases.model(), rank_cases.LOSS, rank_cases.data()))
    assert found["afterwards"] == pytest.approx([expected] * 2, rel=1e-12)
