"""Which backend a name means, by the device and by what it is for."""

import sys
from types import SimpleNamespace

import pytest
import torch

import pyflatness as pf
from pyflatness.contractions import backends
from pyflatness.contractions.backends import compiled, cuda, reference
from pyflatness.errors import BackendError

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def _kernels_everywhere(monkeypatch):
    for module in (compiled, cuda):
        monkeypatch.setattr(module, "unavailable", lambda device, dtype: "")


@pytest.mark.usefixtures("_kernels_everywhere")
def test_auto_takes_kernels():
    on_gpu = {name: backends.choose(name, GPU, torch.float32) for name in backends.NAMES}
    assert on_gpu == {"auto": cuda, "compiled": cuda, "triton": cuda, "reference": reference}
    assert backends.choose("auto", CPU, torch.float32) is compiled
    assert backends.choose_for_few("auto", GPU, torch.float64) == (cuda, GPU)


def test_auto_does_without_kernels_that_cannot_run(monkeypatch):
    monkeypatch.setattr(cuda, "unavailable", lambda device, dtype: "none for this device")
    assert backends.choose("auto", GPU, torch.float32) is reference
    with pytest.raises(BackendError, match="none for this device"):
        backends.choose("compiled", GPU, torch.float32)
    monkeypatch.setattr(compiled, "unavailable", lambda device, dtype: "")
    assert backends.choose_for_few("auto", GPU, torch.float64) == (compiled, CPU)


def weight(device, dtype=torch.bfloat16, m=16):
    """Of a head, maybe on a device that is not here."""
    return SimpleNamespace(
        is_cuda=device == GPU, device=device, dtype=dtype, data_ptr=lambda: 0, stride=lambda axis: (m, 1)[axis]
    )


def test_triton_is_taken_for_heads_in_half_precision(monkeypatch):
    module = pytest.importorskip("pyflatness.contractions.triton_head", reason="Triton is not installed")
    assert backends.choose_for_head("triton", weight(GPU)) is module.triton
    assert module.triton.name == "triton"
    monkeypatch.setattr(cuda, "unavailable", lambda device, dtype: "")
    for other in (weight(GPU, torch.float32), weight(GPU, m=17), weight(GPU, torch.float16)):
        assert backends.choose_for_head("triton", other) is cuda
    assert backends.choose_for_head("auto", weight(GPU)) is cuda


def test_triton_for_heads_wants_a_gpu():
    head = torch.ones(2, 3), torch.ones(4, 3), None
    with pytest.raises(BackendError, match='backend="triton" runs on a GPU, the weight is on cpu; pass backend="auto"'):
        pf.head_flatness(*head, backend="triton")
    with pytest.raises(
        BackendError, match="backend='tritone' does not exist; choose one of 'auto', 'compiled', 'triton'"
    ):
        pf.head_flatness(*head, backend="tritone")


def test_triton_missing_is_said_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyflatness.contractions.triton_head", None)
    with pytest.raises(BackendError, match=r"needs Triton: pip install 'pyflatness\[triton\]' \(.*triton_head"):
        backends.choose_for_head("triton", weight(GPU))
