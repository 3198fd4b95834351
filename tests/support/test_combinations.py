"""Tests that run with every combination of choices, most of them in the soak run alone."""

import itertools

from support.combinations import CUDA_DEVICES, covering, every
from support.networks import CASES, networks_in_turn

CHOICES = {"a": ["p", "q", "r"], "b": ["s", "t"], "c": ["u", "v", "w", "x"]}


def parameters(mark):
    """Of a test: the values outside of the soak run, and those in it."""
    _, rows = mark.args
    return [row.values for row in rows if not row.marks], [row.values for row in rows if row.marks]


def met(rows, together):
    return {held for row in rows for held in itertools.combinations(enumerate(row), together)}


def test_choices_occur_together():
    everything = [*itertools.product(*CHOICES.values())]
    for together, fewest in ((1, 4), (2, 12), (3, 24)):
        rows = covering(CHOICES, together)
        assert met(rows, together) == met(everything, together)
        assert fewest <= len(rows) <= 1.5 * fewest
        assert len({*rows}) == len(rows)


def test_no_combination_is_left_out_or_run_twice():
    here, soaked = parameters(every(**CHOICES))
    assert here
    assert soaked
    assert sorted([*here, *soaked]) == sorted(itertools.product(*CHOICES.values()))
    assert met(here, 2) == met([*here, *soaked], 2)


def test_a_gpu_runs_everything():
    here, _ = parameters(every(name=["p", "q", "r"], size=[1, 2], cuda_device=CUDA_DEVICES))
    assert len([row for row in here if row[2] == "cuda"]) == 6
    emulated = [tuple(map(str, row)) for row in here if row[2] != "cuda"]
    assert met(emulated, 2) == met(itertools.product("pqr", "12", CUDA_DEVICES[1:]), 2)


def test_every_network_is_measured():
    here, soaked = parameters(networks_in_turn(5))
    assert [name for (name,) in sorted([*here, *soaked])] == sorted(CASES)
    assert len(here) == 25
