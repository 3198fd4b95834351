"""One budget: the shares of ``memory=`` are the whole of it, and what is held at a time stays near it."""

import subprocess
import sys

import pytest
import torch

from pyflatness.passes.memory import DEFAULT_MEMORY, Budget, MicroBatches

PEAK = """
import torch
from pathlib import Path
from torch import nn
import pyflatness as pf

class Mean(nn.Module):
    def forward(self, x):
        return x.mean(1)

def largest():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))

def measured(width, n):
    layers = nn.Linear(width, width), nn.LayerNorm(width), nn.Tanh(), nn.Linear(width, 4), Mean()
    data = torch.randn(n, 16, width), torch.arange(n) % 4
    before = largest()
    pf.measure(nn.Sequential(*layers).eval(), nn.CrossEntropyLoss(), data, measures="sharpness", memory=2**25, probes=1)
    return largest() - before

torch.set_num_threads(1)
measured(16, 4)  # loads code
print(measured(256, 256))
"""


@pytest.mark.parametrize("halved", [False, True])
@pytest.mark.parametrize("memory", [None, 1, 9, 10**6, 2**29, 2**34])
def test_the_shares_are_the_whole(memory, halved):
    budget = Budget(memory, halved)
    shares = budget.buffers, budget.held_back, budget.work, budget.graph
    assert sum(shares) == (memory or DEFAULT_MEMORY)
    assert min(shares) >= 0
    assert budget.graph >= sum(shares) * 3 / 8


class Properties:
    total_memory = 10**9


@pytest.mark.parametrize("halved", [False, True])
@pytest.mark.parametrize("memory", [None, 1, 10**6, 2**34])
def test_on_a_gpu(monkeypatch, memory, halved):
    """A quarter of all that it has, and no share is bounded by what a processor's caches hold."""
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: Properties)
    budget = Budget(memory, halved, torch.device("cuda", 1))
    whole = memory or 10**9 // 4
    held = whole // (2 if whole >= 2**31 else 8)  # below 2 GiB the graph has three quarters
    assert (budget.buffers, budget.held_back, budget.work) == (whole // 8, *((0, whole // 2) if halved else (held, 0)))
    assert budget.buffers + budget.held_back + budget.work + budget.graph == whole == budget.blocks


def test_the_device_is_that_of_the_model():
    weights = torch.nn.Linear(2, 3, device="meta")
    model = torch.nn.Sequential(torch.nn.ReLU(), weights)
    assert Budget.of(model, 7, halved=True) == Budget(7, True, torch.device("meta"))
    assert Budget.of(torch.nn.ReLU(), None) == Budget(None)


@pytest.mark.parametrize("taken", [3, 10**4, 10**9])
def test_micro_batches_fit_the_share_of_the_graph(taken):
    budget = Budget(10**6)
    micro_batches = MicroBatches(budget)
    micro_batches.plan(taken, cuttable=True)
    places = []
    for place in micro_batches.places(1000):
        place.done = True
        places.append(place)
    assert [place.start for place in places[1:]] == [place.stop for place in places[:-1]]
    assert (places[0].start, places[-1].stop) == (0, 1000)
    sizes = [place.stop - place.start for place in places]
    assert max(sizes) == 1 or max(sizes) * taken <= budget.graph
    assert max(sizes) - min(sizes) <= 1


def test_what_is_not_done_comes_again():
    micro_batches = MicroBatches(Budget(10**6))
    micro_batches.plan(1, cuttable=True)
    seen = []
    for place in micro_batches.places(10):
        seen.append((place.start, place.stop))
        if place.stop - place.start > 3:
            micro_batches.halve(place.stop - place.start)
        else:
            place.done = True
    assert seen == [(0, 10), (0, 5), (0, 2), (2, 4), (4, 6), (6, 8), (8, 10)]


@pytest.mark.skipif(sys.platform != "linux", reason="the largest resident size is read from /proc")
def test_parameters_of_each_sample_s_own_and_the_graph_share_the_budget():
    """Each took the whole of it: three times the memory."""
    grown = int(subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True).stdout)
    assert grown < 2 * 2**25
