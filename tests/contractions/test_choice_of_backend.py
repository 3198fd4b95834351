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


def test_auto_does_without_kernels_that_cannot_run(monkeypatch):
    monkeypatch.setattr(cuda, "unavailable", lambda device, dtype: "none for this device")
    assert backends.choose("auto", GPU, torch.float32) is reference
    with pytest.raises(BackendError, match="none for this device"):
        backends.choose("compiled", GPU, torch.float32)


class Weight(SimpleNamespace):
    """Of a head, maybe on a device that is not here."""

    def __init__(self, device, dtype=torch.bfloat16, m=16, d=2048):
        strides = (m, 1)
        super().__init__(is_cuda=device == GPU, device=device, dtype=dtype, data_ptr=lambda: 0, d=d)
        self.stride = strides.__getitem__

    def __len__(self):
        return self.d


def test_triton_is_taken_for_heads_in_half_precision(monkeypatch):
    module = pytest.importorskip("pyflatness.contractions.triton_head", reason="Triton is not installed")
    assert backends.choose_for_head("triton", Weight(GPU)) is module.triton
    assert module.triton.name == "triton"
    monkeypatch.setattr(cuda, "unavailable", lambda device, dtype: "")
    for other in (Weight(GPU, torch.float32), Weight(GPU, m=17), Weight(GPU, torch.float16)):
        assert backends.choose_for_head("triton", other) is cuda
    assert backends.choose_for_head("auto", Weight(GPU)) is cuda


@pytest.mark.parametrize("runs", [True, False])
def test_auto_takes_triton_for_wide_heads_where_no_kernels_are_built(monkeypatch, runs):
    module = pytest.importorskip("pyflatness.contractions.triton_head", reason="Triton is not installed")
    monkeypatch.setattr(module.Triton, "runs", lambda self, device: runs)
    monkeypatch.setattr(cuda, "unavailable", lambda device, dtype: "none for this device")
    assert backends.choose_for_head("auto", Weight(GPU)) is (module.triton if runs else reference)
    assert backends.choose_for_head("triton", Weight(GPU)) is module.triton
    narrow, others = Weight(GPU, d=64), (Weight(GPU, torch.float32), Weight(GPU, m=17), Weight(GPU, torch.float16))
    assert all(backends.choose_for_head("auto", other) is reference for other in (narrow, *others))
    assert backends.choose_for_head("reference", Weight(GPU)) is reference
    monkeypatch.setattr(cuda, "unavailable", lambda device, dtype: "")
    assert backends.choose_for_head("auto", Weight(GPU)) is cuda


def test_auto_does_without_triton(monkeypatch):
    monkeypatch.setattr(cuda, "unavailable", lambda device, dtype: "none for this device")
    monkeypatch.setitem(sys.modules, "pyflatness.contractions.triton_head", None)
    assert backends.choose_for_head("auto", Weight(GPU)) is reference


@pytest.mark.parametrize(
    ("capability", "hip", "broken", "expected"),
    [
        ((9, 0), None, False, True),
        ((7, 5), None, False, False),
        ((9, 4), "6", False, False),
        ((9, 0), None, True, False),
    ],
)
def test_where_triton_runs_by_itself(monkeypatch, capability, hip, broken, expected):
    module = pytest.importorskip("pyflatness.contractions.triton_head", reason="Triton is not installed")

    class Driver:
        @property
        def active(self):
            if broken:
                raise RuntimeError("Failed to find C compiler")
            return SimpleNamespace(utils=object())

    monkeypatch.setattr(module, "driver", Driver())
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert module.Triton().runs(GPU) is expected


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
        backends.choose_for_head("triton", Weight(GPU))
