"""What measures take beside the model, held against ``memory=`` in a process of its own; norms of large weights."""

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pyflatness as pf
from pyflatness.measures import scaled

PEAK = """
import sys, torch
from pathlib import Path
from torch import nn
import pyflatness as pf

def largest():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))

def measured(width, n=64):
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4)).eval()
    data = torch.randn(n, width), torch.arange(n) % 4
    before = largest()
    for names in (None, "neuron_flatness", "matrix_normalized_sharpness"):
        pf.measure(model, nn.CrossEntropyLoss(), data, measures=names, layers=["0"], memory=MEMORY, progress=False)
    return largest() - before

torch.set_num_threads(1)
MEMORY = int(sys.argv[1])
measured(64)  # loads code
print(measured(2048))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the largest resident size is read from /proc")
def test_the_measures_of_a_sweep_stay_within_the_budget():
    """A weight of 16 MiB: a copy of it in float64 alone would take the whole allowance, of which code has its part."""
    command = [sys.executable, "-c", PEAK, str(16 * 2**20)]
    tries = (int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) for _ in range(4))
    grown = next((grown for grown in tries if grown < 2 * 16 * 2**20), None)
    assert grown is not None, "of four processes, which differ by 10 MiB where pages are moved meanwhile"


@pytest.mark.parametrize("size", [(60, 50), (50, 60), (12, 9)])
def test_the_spectral_norm(monkeypatch, size):
    monkeypatch.setattr(scaled, "_WRITTEN_OUT", 20)
    layer = nn.Linear(size[1], size[0]).double()
    expected = float(torch.linalg.matrix_norm(layer.weight.detach(), 2))
    assert scaled.spectral_norm(layer) == pytest.approx(expected, rel=1e-12)
    assert scaled.squared_norm(layer) == pytest.approx(float(layer.weight.detach().square().sum()), rel=1e-12)


def test_the_spectral_norm_of_equal_singular_values_and_of_zero(monkeypatch):
    monkeypatch.setattr(scaled, "_WRITTEN_OUT", 20)
    layer = nn.Linear(60, 60, bias=False).double()
    layer.weight.data.copy_(3 * torch.linalg.qr(layer.weight.detach()).Q)
    assert scaled.spectral_norm(layer) == pytest.approx(3, rel=1e-12)
    layer.weight.data.zero_()
    assert scaled.spectral_norm(layer) == 0
    monkeypatch.setattr(scaled, "_PRODUCTS", 3)  # not found in so few: by the Gram matrix
    layer.weight.data.normal_()
    expected = float(torch.linalg.matrix_norm(layer.weight.detach(), 2))
    assert scaled.spectral_norm(layer) == pytest.approx(expected, rel=1e-12)


def test_the_spectral_norm_of_groups(monkeypatch):
    monkeypatch.setattr(scaled, "_WRITTEN_OUT", 2)
    convolution = nn.Conv2d(6, 8, 3, groups=2).double()
    matrices = convolution.weight.detach().flatten(1).unflatten(0, (2, 4))
    expected = float(torch.linalg.matrix_norm(matrices, 2).max())
    assert scaled.spectral_norm(convolution) == pytest.approx(expected, rel=1e-12)


def test_values_are_those_of_a_large_budget():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1100, 40), nn.ReLU(), nn.Linear(40, 4)).double().eval()
    data = torch.randn(12, 1100).double(), torch.arange(12) % 4
    small, large = (
        pf.measure(model, nn.CrossEntropyLoss(), data, memory=size, measures="sweep") for size in (2**20, 2**30)
    )
    for measure in small.measures:
        for layer in small.layers:
            if (layer, measure) in small._estimates:
                assert small[layer, measure].value == pytest.approx(large[layer, measure].value, rel=1e-10)


# --- bytes of custom losses -------------------------------------------------------------------------------------------


def notes(loss):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    data = torch.randn(2, 4), torch.arange(2)
    return pf.measure(model, loss, data, measures="trace", layers="0", curvature="ggn", memory=1)["0", "trace"].notes


def test_the_note_is_the_same():
    def custom(outputs, targets):
        return F.cross_entropy(outputs, targets)

    of_custom, of_own = (
        [note for note in notes(loss) if note.startswith("one sample takes")]
        for loss in (custom, nn.CrossEntropyLoss())
    )
    assert len(of_own) == 1
    assert of_custom == of_own
