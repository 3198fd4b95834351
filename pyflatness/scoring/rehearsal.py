"""Count the messages of a measurement by many ranks, in one process."""

import functools
from typing import Any

import torch
from torch import Tensor, nn

from .. import api
from ..measures import RELATIVE_FLATNESS
from ..numerics.ranks import Ranks


class _Rehearsing(Ranks):
    """Stand for the first of some ranks that all say and find the same, and count what they send each other."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.processes = size, [*range(size)]
        self.messages = self.received = 0

    def _gather(self, tensor: Tensor, room: list[Tensor], *, interruptible: bool = False) -> list[Tensor]:
        self.messages += 1
        self.received += (self.size - 1) * tensor.numel() * tensor.itemsize
        return [tensor] * self.size


@functools.cache
def rehearsed(names: tuple[str, ...], ranks: int, probes: int | None) -> tuple[int, int]:
    """Return the messages of a measurement and the bytes that a rank receives, for layers of these names.

    They are of a sweep over a network whose layers are called so; nothing in them depends on the sizes of weights.
    """
    if ranks == 1:
        return 0, 0
    group = _Rehearsing(ranks)
    network = nn.Module() if any(names) else _linear()  # a layer by itself
    for name in filter(None, names):
        *path, last = name.split(".")
        parent = network
        for part in path:
            if part not in parent._modules:
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        parent.add_module(last, _linear())
    found = [network.get_submodule(name) for name in names]

    def forward(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        inputs, targets = batch
        return sum((layer(inputs) for layer in found), start=torch.zeros_like(inputs)).tanh(), targets

    with group.agreed("the call"):
        api.measure(
            network,
            nn.CrossEntropyLoss(),
            (torch.ones(1, 2, dtype=torch.float32, device="cpu"), torch.zeros(1, dtype=torch.int64, device="cpu")),
            measures=[RELATIVE_FLATNESS.name],
            curvature="ggn",
            probes=probes,
            forward=forward,
            process_group=group,
            progress=False,
        )
    return group.messages, group.received


def _linear() -> nn.Linear:
    """Return a layer whose weights are not drawn: the user's random numbers stay."""
    layer: nn.Linear = nn.utils.skip_init(nn.Linear, 2, 2, device="cpu", dtype=torch.float32)
    for parameter in layer.parameters():
        nn.init.ones_(parameter)
    return layer
