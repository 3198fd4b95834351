"""A script for torchrun: it prints what all ranks find, or ends as it is told to.

torchrun --nproc-per-node 2 rank_script.py FOLDER [die]
"""

import os
import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import pyflatness as pf
from support.ranks import launched


def dataset(samples=25):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, 5, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(3, (samples,), generator=generator))


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)).double().eval()


class Dying(DataLoader):
    """A loader whose process ends at its second batch."""

    def __iter__(self):
        for number, batch in enumerate(super().__iter__()):
            if number == 1:
                os._exit(1)
            yield batch


def main(folder, kind=""):
    with launched(folder, kind) as (rank, size, write):
        sampler = DistributedSampler(dataset(), size, rank, shuffle=False)
        loader = (Dying if kind == "die" and rank == 1 else DataLoader)(dataset(), batch_size=4, sampler=sampler)
        network = DistributedDataParallel(model())
        write(pf.measure(network, nn.CrossEntropyLoss(), loader, measures=["relative_flatness", "trace"]).to_json())


if __name__ == "__main__":
    main(*sys.argv[1:])
