"""Scores over the ranks of a process group, held against one process, and what of them can go wrong."""

import math
import re
from dataclasses import asdict, replace
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

import pyflatness as pf
from pyflatness.numerics.ranks import Ranks
from support import rank_cases, ranks
from support.rank_cases import data, model

# --- what each of the ranks does --------------------------------------------------------------------------------------


def network(seed):
    found = model()
    with torch.no_grad():
        found[0].weight += seed
    return found


def rows(given, models=None, **options):
    """Return the rows but for the time they took, and how many units were measured."""
    models = {f"seed {seed}": network(seed) for seed in range(2)} if models is None else models
    options = {"layers": "*", "measures": ["relative_flatness", "trace", "fisher_rao"], **options}
    scores = pf.score(models, "cross_entropy", given, **options)
    return [replace(row, seconds=None) for row in scores], scores.computed


def of_tensors(rank, size):
    return rows(data())


def of_batches(rank, size):
    """Batches that do not end where the parts of the ranks do, of data that cannot be cut by places."""
    inputs, targets = data()
    return rows([*zip(inputs.split(6), targets.split(6), strict=True)], layers=None, measures="relative_flatness")


def of_a_loader(rank, size):
    loader = DataLoader(TensorDataset(*data()), batch_size=5, drop_last=True)
    return rows(loader, measures=["relative_flatness", "pac_bayes"])


def of_a_shuffled_loader(rank, size):
    """Each rank would read in an order of its own; the first one's is that of all."""
    torch.manual_seed(rank)
    return rows(DataLoader(TensorDataset(*data()), batch_size=5, shuffle=True))


def of_a_batch_sampler(rank, size):
    """Which samples there are is said by the sampler of the batches, and not by the loader's."""
    chosen = BatchSampler(range(20, 3, -2), batch_size=4, drop_last=False)
    return rows(DataLoader(TensorDataset(*data()), batch_sampler=chosen), layers="0", measures="trace", probes=3)


def of_probes(rank, size):
    """Random probes belong to samples by their places in all data."""
    return rows(data(), layers="0", measures="trace", probes=3)


def of_a_function(rank, size):
    return rows(data, layers="2", measures="relative_flatness", normalize="std")


def of_few_samples(rank, size):
    """Two samples: of three ranks one has none, and is lent a batch that must not count in the loss."""
    return rows(tuple(held[:2] for held in data()))


def of_fewer_samples_in_a_batch(rank, size):
    """The first rank has none of two samples that come as a batch, of which every rank leaves out some."""
    return rows([tuple(held[:2] for held in data())], layers="0", measures="trace", probes=3)


def of_float32(rank, size):
    models = {"one": model(torch.float32)}
    return rows(data(torch.float32), models)


class Picky(nn.Sequential):
    """A model that fails on one sample, which is the last rank's."""

    def forward(self, x):
        if bool((x[:, 0] == data()[0][-1, 0]).any()):
            raise RuntimeError("this sample cannot be taken")
        return super().forward(x)


def a_model_that_fails(rank, size):
    return rows(data(), {"picky": Picky(*model()).eval(), "seed 0": network(0)}, measures=["trace", "fisher_rao"])


def alone(rank, size):
    return rows(data(), process_group=False) if rank == 0 else None


def by_processes(rank, size):
    return rows(data, executor="processes", workers=2)


def with_a_sampler(rank, size):
    dataset = TensorDataset(*data())
    return rows(DataLoader(dataset, 5, sampler=DistributedSampler(dataset, size, rank)))


def with_own_parts(rank, size):
    return rows(rank_cases.part(rank, size))


def of_other_models(rank, size):
    return rows(data(), {f"rank {rank}": network(0)})


def lost(rank, size):
    """A message that does not arrive is no error of the model: the call ends, and no row has it."""

    def sent(ranks, *arguments, **options):
        raise pf.errors.RankError("rank 0: another of the 2 ranks ended")

    class Losing(nn.Sequential):
        def forward(self, x):
            mock.patch.object(Ranks, "_collective", sent).start()
            return super().forward(x)

    try:
        return rows(data(), {"losing": Losing(*model()).eval()})
    finally:
        mock.patch.stopall()


# --- what that comes to -----------------------------------------------------------------------------------------------

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
        2: ranks.outcomes("ranks.test_scores", ["of_tensors", "a_model_that_fails", "alone", *ERRORS], 2),
        3: ranks.outcomes("ranks.test_scores", [*CASES], 3),
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
    expected, units = globals()[name](0, 1)
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
    expected, _ = a_model_that_fails(0, 1)
    assert_same(*([row for row in each if row.checkpoint != "picky"] for each in (rows, expected)), 1e-10)


def test_one_rank_scores_alone(found):
    first, second = found[2]["alone"]
    assert second is None
    assert_same(first[0], of_tensors(0, 1)[0], 1e-12)


@pytest.mark.parametrize("name", ERRORS)
def test_what_ends_a_call_is_an_error_on_every_rank(found, name):
    kind, beginning = ERRORS[name]
    for error in found[2][name]:
        assert isinstance(error, kind), error
        assert re.match(beginning, str(error)), error
