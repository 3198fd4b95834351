"""The host asks for few numbers of tensors, for each of which it would wait for a GPU."""

import torch
from torch import nn

import pyflatness as pf


def test_waits_do_not_grow_with_layers_or_classes_and_are_few_in_a_batch(benchmark_modules) -> None:
    counting = benchmark_modules("timing").Waits
    torch.manual_seed(0)
    hidden = [part for _ in range(12) for part in (nn.Linear(6, 6), nn.ReLU())]
    few = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3)).eval()
    many = nn.Sequential(*hidden, nn.Linear(6, 3)).eval()

    def counted(model: nn.Module, batches: int) -> int:
        x, y = torch.randn(8 * batches, 6), torch.randint(0, 3, (8 * batches,))
        with counting() as waits:
            data = list(zip(x.split(8), y.split(8), strict=True))
            pf.measure(model, nn.CrossEntropyLoss(), data, measures=["relative_flatness", "trace"], progress=False)
        return waits.count

    assert counted(many, 1) <= counted(few, 1) <= 6
    assert counted(many, 8) - counted(many, 4) <= 4 * 2
