"""The GPU benchmarks' own work, small and on the CPU: what they time is set up right."""

import importlib
import sys

import pytest
import torch

from pyflatness.contractions import cuda, reference
from support import ROOT


@pytest.fixture
def gpu_layers(monkeypatch):
    folder = ROOT / "benchmarks"
    names = [path.stem for path in folder.glob("*.py")]
    for name in names:  # some are tests' modules too
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(folder))
    yield importlib.import_module("gpu_layers")
    for name in names:
        sys.modules.pop(name, None)


def test_rows_of_layers(gpu_layers):
    cpu = torch.device("cpu")
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(8, 16, 3, stride=2), torch.nn.ReLU(),
        torch.nn.Flatten(), torch.nn.Linear(3600, 10),
    ).eval()  # fmt: skip
    network = gpu_layers.network("a network", model, 2, cpu, reference, rounds=1)
    sequence = gpu_layers.sequence(2, 16, 128, cpu, reference, rounds=1)
    for row in (network, sequence):
        assert min(row.floor_ms, row.ours_ms, row.composed_ms) > 0


@pytest.mark.parametrize("cuda_device", ["emulated"], indirect=True)
def test_a_sequence_on_the_kernels(cuda_device, gpu_layers):
    gpu_layers.sequence(1, 16, 128, cuda_device, cuda, rounds=1)
