"""Calls of ``pf.score`` that the ranks of a process group make together; see :mod:`support.rank_cases`."""

from dataclasses import replace
from unittest import mock

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

import pyflatness as pf
from pyflatness.numerics.ranks import Ranks
from support import rank_cases
from support.rank_cases import data, model


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
            mock.patch.object(Ranks, "_gather", sent).start()
            return super().forward(x)

    try:
        return rows(data(), {"losing": Losing(*model()).eval()})
    finally:
        mock.patch.stopall()
