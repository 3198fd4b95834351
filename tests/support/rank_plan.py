"""What ranks really send each other in a measurement that was planned; functions for :func:`support.ranks.outcomes`."""

from unittest import mock

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import pyflatness as pf
from pyflatness.numerics.ranks import Ranks
from pyflatness.scoring.planned import sent_bytes

from . import rank_fsdp
from .rank_cases import LOSS

SAMPLES, LENGTH, PROBES = 3, 5, 3


def model():
    return rank_fsdp.made(rank_fsdp.Transformer, torch.float32)


def _sent(network):
    """Return messages and bytes that this rank receives in a measurement of one micro-batch on each rank."""
    found = [0, 0]
    collective = Ranks._collective

    def counted(ranks, call, into, sent):
        found[0] += 1
        found[1] += (ranks.size - 1) * sent_bytes(sent)
        return collective(ranks, call, into, sent)

    generator = torch.Generator().manual_seed(3)
    data = torch.randint(11, (2, SAMPLES, LENGTH), generator=generator).unbind(0)
    with mock.patch.object(Ranks, "_collective", counted):
        pf.measure(network, LOSS, data, measures=["relative_flatness"], curvature="ggn", probes=PROBES)
    return found


def whole_weights(rank, size):
    return _sent(model())


def sharded(rank, size):
    network, mesh = model(), init_device_mesh("cpu", (size,))
    for block in network.blocks:
        fully_shard(block, mesh=mesh)
    return _sent(fully_shard(network, mesh=mesh))
