"""The host asks for few numbers of tensors, for each of which it would wait for a GPU."""

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import pyflatness as pf


class Waits(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def counted(model: nn.Module, batches: int) -> int:
    x, y = torch.randn(8 * batches, 6), torch.randint(0, 3, (8 * batches,))
    with Waits() as waits:
        data = list(zip(x.split(8), y.split(8), strict=True))
        pf.measure(model, nn.CrossEntropyLoss(), data, measures=["relative_flatness", "trace"], progress=False)
    return waits.count


def test_waits_do_not_grow_with_layers_or_classes_and_are_few_in_a_batch() -> None:
    torch.manual_seed(0)
    hidden = [part for _ in range(12) for part in (nn.Linear(6, 6), nn.ReLU())]
    few = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3)).eval()
    many = nn.Sequential(*hidden, nn.Linear(6, 3)).eval()
    assert counted(many, 1) <= counted(few, 1) <= 9
    assert counted(many, 8) - counted(many, 4) <= 4 * 4
