"""Scores over the ranks of a process group, held against one process, and what of them can go wrong."""

import math
import re
from dataclasses import asdict

import pytest

import pyflatness as pf
from support import rank_scores, ranks

CASES = (
    *("of_tensors", "of_batches", "of_a_loader", "of_a_shuffled_loader", "of_probes", "of_a_function"),
    *("of_a_batch_sampler", "of_few_samples", "of_fewer_samples_in_a_batch", "of_float32"),
)
ERRORS = {
    "by_processes": (pf.errors.InputError, "executor: the 2 ranks of a process group measure each model together"),
    "with_a_sampler": (pf.errors.InputError, "data: a loader with DistributedSampler has the samples of one rank"),
    "with_own_parts": (pf.errors.InputError, "data: rank 1 got other samples than rank 0"),
    "of_other_models": (pf.errors.RankError, "rank 1 has other models than rank 0"),
    "lost": (pf.errors.RankError, "rank 0: another of the 2 ranks ended"),
}


@pytest.fixture(scope="module")
def found():
    """By number of ranks and case, what each rank returned."""
    return {
        2: ranks.outcomes("support.rank_scores", ["of_tensors", "a_model_that_fails", "alone", *ERRORS], 2),
        3: ranks.outcomes("support.rank_scores", [*CASES], 3),
    }


def assert_same(rows, expected, rtol):
    """Raise unless rows are the same, numbers up to rounding."""
    assert len(rows) == len(expected)
    for row, other in zip(map(asdict, rows), map(asdict, expected), strict=True):
        for name, value in other.items():
            if isinstance(value, float):
                assert row[name] == pytest.approx(value, rel=rtol, nan_ok=True), (row["measure"], name)
            else:
                assert row[name] == value, (row["measure"], name)


@pytest.mark.parametrize(("name", "size"), [*((name, 3) for name in CASES), ("of_tensors", 2)])
def test_ranks_have_the_rows_of_one_process(found, name, size):
    every = found[size][name]
    for each in every:
        if isinstance(each, Exception):
            raise each
    assert all(repr(each) == repr(every[0]) for each in every)  # bit for bit
    rows, computed = every[0]
    expected, units = getattr(rank_scores, name)(0, 1)
    assert computed == units > 0
    assert_same(rows, expected, 1e-5 if name == "of_float32" else 1e-10)
    assert not any(math.isnan(row.loss) for row in rows)


def test_an_error_of_one_rank_in_a_model_is_a_row_and_the_next_model_goes_on(found):
    (rows, _), (others, _) = found[2]["a_model_that_fails"]
    assert rows == others
    failed = [row for row in rows if row.checkpoint == "picky"]
    assert failed
    for row in failed:
        assert re.match("rank 1: .*this sample cannot be taken", row.error), row.error
    expected, _ = rank_scores.a_model_that_fails(0, 1)
    assert_same(*([row for row in each if row.checkpoint != "picky"] for each in (rows, expected)), 1e-10)


def test_one_rank_scores_alone(found):
    first, second = found[2]["alone"]
    assert second is None
    assert_same(first[0], rank_scores.of_tensors(0, 1)[0], 1e-12)


@pytest.mark.parametrize("name", ERRORS)
def test_what_ends_a_call_is_an_error_on_every_rank(found, name):
    kind, beginning = ERRORS[name]
    for error in found[2][name]:
        assert isinstance(error, kind), error
        assert re.match(beginning, str(error)), error
