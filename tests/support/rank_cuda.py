"""Calls of ranks whose models are on one GPU: exchanges go over gloo, or over NCCL where a group has that alone.

A case is a function (rank, size) -> what the call returned, as in :mod:`support.rank_cases`.
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import pyflatness as pf
from pyflatness.numerics.ranks import Ranks
from support.on_cuda import moved
from support.rank_cases import LOSS, batches, model

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _here(rank, size):
    return model().to(DEVICE), LOSS, moved(batches(rank, size), DEVICE)


def measures(rank, size):
    chosen = ["relative_flatness", "trace", "fisher_rao", "weight_norm"]
    return pf.measure(*_here(rank, size), measures=chosen)


def head(rank, size):
    return pf.relative_flatness(*_here(rank, size))


def probes(rank, size):
    return pf.relative_flatness(*_here(rank, size), "0", probes=3)


def spectrum(rank, size):
    return pf.spectrum(*_here(rank, size), k=1, tolerance=1e-6).eigenvalues


def landscape(rank, size):
    return pf.landscape(*_here(rank, size), points=3).losses


def over_nccl(rank, size):
    """A group of this process alone, which has NCCL: what is exchanged goes over the GPU and comes back whole."""
    group = dist.new_group([rank], backend="nccl")
    torch.cuda.set_device(0)
    ranks = Ranks(group, torch.device("cuda", 0))
    assert ranks.exchange("a step", "a" * 9000) == ["a" * 9000]
    tensor = torch.linspace(0, 1, 7, dtype=torch.float64)
    (found,) = ranks.gathered(tensor)
    assert torch.equal(found, tensor)
    alone = pf.measure(*_here(rank, size), process_group=group)
    assert float(alone.by_measure()["relative_flatness"]["4"]) == float(pf.relative_flatness(*_here(rank, size)))
    gradients = {}
    for wrapped in (False, True):
        net, loss, data = _here(rank, size)
        whole = DistributedDataParallel(net.train(), process_group=group) if wrapped else net.train()
        penalty = pf.FlatnessPenalty(whole, "0", loss)
        torch.cuda.manual_seed(0)
        outputs = whole(data[0][0])
        features = torch.relu(outputs)
        of_head = pf.flatness_penalty(features, net[4].weight[:, :3], None, data[0][1])
        (loss(outputs, data[0][1]) + penalty(outputs, data[0][1]) + of_head).backward()
        gradients[wrapped] = [parameter.grad.cpu() for parameter in net.parameters()]
        penalty.remove()
    for one, other in zip(*gradients.values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    return True
