"""A device on which no kernel starts, as where the driver is older than the CUDA that the kernels were built with."""

import pytest
import torch

from pyflatness.contractions import backends
from pyflatness.contractions.backends import cuda, reference
from pyflatness.errors import BackendError

CPU = torch.device("cpu")


class Refusing:
    """A module of kernels whose launches fail; it counts them."""

    calls = 0

    def row_dots_f32(self, *arguments):
        self.calls += 1
        raise RuntimeError("row_dots: CUDA says cudaErrorInsufficientDriver, CUDA driver version is insufficient")


@pytest.fixture
def refusing(monkeypatch):
    """On the CPU, for which they are chosen there."""
    module = Refusing()
    monkeypatch.setattr(backends, "compiled", cuda)
    with cuda.emulated(module):
        yield module


def test_the_reason_is_named_or_plain_torch_taken(refusing):
    with pytest.raises(BackendError, match=r"do not start on cpu .*cudaErrorInsufficientDriver.*update it"):
        backends.choose("compiled", CPU, torch.float64)
    assert backends.choose("auto", CPU, torch.float64) is reference


def test_a_device_is_tried_once(refusing):
    assert {cuda.unavailable(CPU, dtype) for dtype in (torch.float32, torch.float64) for _ in range(3)} != {""}
    assert refusing.calls == 1


def test_kernels_that_start(emulated_cuda, monkeypatch):
    monkeypatch.setattr(backends, "compiled", cuda)
    with cuda.emulated(emulated_cuda):
        assert cuda.unavailable(CPU, torch.float32) == ""
        assert backends.choose("compiled", CPU, torch.float32) is cuda
