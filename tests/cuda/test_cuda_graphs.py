"""What is read off autograd's graph holds on a GPU too, where some operations have names of their own there."""

import pytest
import torch
from torch import nn

from pyflatness.passes import kept_rows, linearity
from pyflatness.passes.recorder import Recorder
from pyflatness.passes.tail import Tail

SAMPLES = 4


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    return request.param


def test_a_residual_network_needs_no_second_derivatives(device: str) -> None:
    """Every layer is proven linear, keeps its samples' rows, and lies in the tail of a small network."""
    block = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
    model = nn.Sequential(
        block, nn.MaxPool2d(2), nn.Conv2d(4, 8, 1), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(128, 3)
    )
    model = model.to(device).eval().requires_grad_(False)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, (nn.Conv2d, nn.Linear))}
    recorder = Recorder(layers)
    with recorder.attached(), recorder.recording():
        outputs = model(torch.randn(SAMPLES, 4, 8, 8, device=device))
        users, edges = linearity.users_of(outputs), linearity.edges_of(recorder.calls)
        assert linearity.proven(users, edges) == layers.keys()
        assert kept_rows.in_place(outputs, users, recorder.calls, SAMPLES) == layers.keys()
        assert set(Tail(outputs, users, {name: edge for name, (edge,) in edges.items()}).names) == layers.keys()
