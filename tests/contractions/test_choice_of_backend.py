"""Which backend a name means, by the device and by what it is for."""

import sys
from types import SimpleNamespace

import pytest
import torch

import pyflatness as pf
from pyflatness.contractions import backends, compiled, cuda, reference
from pyflatness.errors import BackendError

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def _kernels_everywhere(monkeypatch):
    for module in (compiled, cuda):
        monkeypatch.setattr(module, "unavailable", lambda device, dtype: "")


@pytest.mark.usefixtures("_kernels_everywhere")
@pytest.mark.parametrize("work", backends.WORKS)
@pytest.mark.parametrize("automatic", [(), ("heads",), backends.WORKS])
def test_auto_takes_kernels_on_a_gpu_where_they_are_faster(monkeypatch, work, automatic):
    monkeypatch.setattr(cuda, "AUTOMATIC", frozenset(automatic))
    on_gpu = {name: backends.choose(name, GPU, torch.float32, work) for name in backends.NAMES}
    expected = cuda if work in automatic else reference
    assert on_gpu == {"auto": expected, "compiled": cuda, "triton": expected, "reference": reference}
    assert backends.choose("auto", CPU, torch.float32, work) is compiled
    few, device = backends.choose_for_few("auto", GPU, torch.float64, work)
    assert (few, device) == ((cuda, GPU) if work in automatic else (compiled, CPU))


@pytest.mark.parametrize("work", backends.WORKS)
def test_auto_does_without_kernels_that_cannot_run(monkeypatch, work):
    monkeypatch.setattr(cuda, "AUTOMATIC", frozenset(backends.WORKS))
    monkeypatch.setattr(cuda, "unavailable", lambda device, dtype: "none for this device")
    assert backends.choose("auto", GPU, torch.float32, work) is reference
    with pytest.raises(BackendError, match="none for this device"):
        backends.choose("compiled", GPU, torch.float32, work)


def test_works_that_are_chosen_for_exist():
    assert set(backends.WORKS) >= cuda.AUTOMATIC


def weight(device, dtype=torch.bfloat16, m=16):
    """Of a head, maybe on a device that is not here."""
    return SimpleNamespace(
        is_cuda=device == GPU, device=device, dtype=dtype, data_ptr=lambda: 0, stride=lambda axis: (m, 1)[axis]
    )


def test_triton_is_taken_for_heads_in_half_precision(monkeypatch):
    triton_head = pytest.importorskip("pyflatness.contractions.triton_head", reason="Triton is not installed")
    assert backends.choose_for_head("triton", weight(GPU)) is triton_head
    assert backends.describe(triton_head) == "triton"
    monkeypatch.setattr(cuda, "unavailable", lambda device, dtype: "")
    for automatic, expected in ((("heads",), cuda), ((), reference)):
        monkeypatch.setattr(cuda, "AUTOMATIC", frozenset(automatic))
        for other in (weight(GPU, torch.float32), weight(GPU, m=17), weight(GPU, torch.float16)):
            assert backends.choose_for_head("triton", other) is expected
        assert backends.choose_for_head("auto", weight(GPU)) is expected


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
