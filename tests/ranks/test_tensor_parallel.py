"""Tensor-parallel models over the ranks of a process group, held against one process that has the whole model."""

import re

import pytest

import pyflatness as pf
from ranks.test_values import assert_same, plain
from support import rank_parallel, ranks

CASES = "sampled", "exactly", "positions", "head", "head_normalized", "head_of_squared_error", "vocabulary_in_parts"
REFUSED = {
    "other data": (pf.errors.RankError, "rank 1 has other samples than rank 0"),
    "parts of logits": (pf.errors.RankError, "rank 1 has other outputs than rank 0"),
    "lambda_max": (
        pf.errors.NotYetError,
        "lambda_max cannot be had yet of a model whose parameters are spread over ranks",
    ),
    "one rank": (pf.errors.InputError, r"spread over the processes \[0, 1\], .* each with the same data"),
}


@pytest.fixture(scope="module")
def found():
    return ranks.outcomes("support.rank_parallel", [*CASES, "refused"], 2)


@pytest.mark.parametrize("name", CASES)
def test_ranks_have_the_value_of_one_process(found, name):
    for result in found[name]:
        if isinstance(result, Exception):
            raise result
    one, other = map(plain, found[name])
    assert repr(one) == repr(other)  # bit for bit
    assert_same(one, plain(getattr(rank_parallel, name)(0, 1)), 1e-10)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_there_is_refused(found, name):
    kind, message = REFUSED[name]
    for errors, _ in found["refused"]:
        assert isinstance(errors[name], kind)
        assert re.search(message, str(errors[name]))


def test_the_model_is_left_as_it_was_found(found):
    for _, parameters in found["refused"]:
        assert parameters == [("DTensor", True, True)] * 6
