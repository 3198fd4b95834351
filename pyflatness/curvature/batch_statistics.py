"""Compute the statistics of BatchNorm anew for other parameters: the means of those of batches, as SWA takes them.

Izmailov et al. 2018 (https://arxiv.org/abs/1803.05407) do so for averaged weights, ``torch.optim.swa_utils.update_bn``,
since means and variances that were collected at the weights of training are not those of activations elsewhere.
"""

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import NotYetError
from ..model import calling
from ..model.parameters import Parameters
from ..passes.task import Task

_MEAN, _VARIANCE, _CALLS = "running_mean", "running_var", "num_batches_tracked"


def norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """Return the BatchNorm layers with running statistics by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and module.running_mean is not None and module.num_batches_tracked is not None
    }


def refreshed(task: Task, values: Parameters) -> Parameters:
    """Return the statistics by name of buffer: means over all calls of a layer on batches, by one read of the data."""
    own, buffers = norms(task.model), dict(task.model.named_buffers())
    synchronised = next((name for name, norm in own.items() if isinstance(norm, nn.SyncBatchNorm)), None)
    if synchronised is not None and not task.batches.shard.ranks.alone:
        raise NotYetError(f"{synchronised!r} (SyncBatchNorm): its statistics are not refreshed over several ranks")
    names = [(f"{name}.{_CALLS}", [f"{name}.{key}" for key in (_MEAN, _VARIANCE)]) for name in own]
    sums: dict[str, Tensor] = {}
    with _of_batches(own.values()), calling.dry_run():
        for batch in task.batches:
            fresh = {key: torch.zeros_like(buffers[key]) for calls, of in names for key in (calls, *of)}
            task.run(batch, {**values, **fresh})
            for calls, of in names:
                sums[calls] = sums.get(calls, 0) + fresh[calls].double()
                for key in of:
                    sums[key] = sums.get(key, 0) + fresh[calls] * fresh[key].double()
    sums = task.batches.shard.sum("the statistics of BatchNorm", sums)
    return {
        key: (sums[key] / sums[calls]).to(buffers[key].dtype) for calls, of in names if int(sums[calls]) for key in of
    }


@contextlib.contextmanager
def _of_batches(found: Iterable[_BatchNorm]) -> Iterator[None]:
    """Let BatchNorm layers, and these alone, normalise by the batch and average its statistics, inside."""
    before = [(norm, norm.training, norm.momentum) for norm in found]
    try:
        for norm, _, _ in before:
            norm.training, norm.momentum = True, None
        yield
    finally:
        for norm, training, momentum in before:
            norm.training, norm.momentum = training, momentum
