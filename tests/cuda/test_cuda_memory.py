"""What measurements allocate on a GPU beside the model and its data, held against ``memory=``."""

import pytest
import torch
from torch import nn

import pyflatness as pf
from support.on_cuda import on_a_gpu

pytestmark = on_a_gpu
LOSS = nn.CrossEntropyLoss()
MEMORY = 256 * 2**20
LIBRARIES = 48 * 2**20  # what cuBLAS keeps for its work, and blocks that the allocator rounds up
N = 4096


def network():
    """Its graph of all samples takes 5 GiB."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    ).eval()  # fmt: skip


def images(n=N):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n, 3, 32, 32, generator=generator), torch.arange(n) % 10


CALLS = {
    "all layers, exact": lambda *given, **options: pf.measure(*given, **options),
    "every measure of a sweep": lambda *given, **options: pf.measure(*given, measures="sweep", probes=2, **options),
    "probes": lambda *given, **options: pf.measure(
        *given, measures=["relative_flatness", "trace"], probes=4, **options
    ),
    "a layer": lambda *given, **options: pf.relative_flatness(*given, "2", **options),
    "block traces": lambda *given, **options: pf.block_traces(*given, "2", **options),
    "density": lambda *given, **options: pf.spectrum(*given, k=0, density=True, probes=1, steps=3, **options),
    "landscape": lambda *given, **options: pf.landscape(*given, points=3, **options),
    "cost of changes": lambda model, *given, **options: pf.cost_of_change(
        model, *given, pf.changes.rounded(model, 4), **options
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_stays_within_its_budget(cuda_device, name):
    if cuda_device.type == "cpu":
        pytest.skip("the CPU's allocations are not counted")
    model, (x, y) = network().to(cuda_device), images()
    data = x.to(cuda_device), y.to(cuda_device)
    CALLS[name](model, LOSS, (data[0][:32], data[1][:32]), memory=MEMORY)  # loads code, makes workspaces
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    CALLS[name](model, LOSS, data, memory=MEMORY)
    torch.cuda.synchronize()
    taken = torch.cuda.max_memory_allocated() - before
    print(f"{name}: {taken / 2**20:.0f} MiB of {MEMORY / 2**20:.0f}")
    assert taken <= MEMORY + LIBRARIES
    assert torch.cuda.memory_allocated() <= before + LIBRARIES


@pytest.mark.parametrize("name", ["all layers, exact", "probes", "landscape"])
def test_values_do_not_depend_on_the_budget(cuda_device, name):
    model = network().double().to(cuda_device)
    data = tuple(part.to(cuda_device) for part in images(24))
    data = data[0].double(), data[1]
    few, many = (CALLS[name](model, LOSS, data, memory=memory) for memory in (8 * 2**20, 2**30))
    if name == "landscape":
        torch.testing.assert_close(few.losses, many.losses, rtol=1e-10, atol=0)
        return
    for layer, estimate in many.by_measure()["relative_flatness"].items():
        assert few.by_measure()["relative_flatness"][layer].value == pytest.approx(estimate.value, rel=1e-9), layer
