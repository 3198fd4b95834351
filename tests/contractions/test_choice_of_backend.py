"""Which backend a name means, by the device and by what it is for."""

import pytest
import torch

from pyflatness import BackendError
from pyflatness.contractions import backends, compiled, cuda, reference

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
    assert on_gpu == {"auto": expected, "compiled": cuda, "reference": reference}
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
