"""What autograd's graph shows of rows: no cotangent of one sample reaches another's in a layer that it names."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pyflatness as pf
from pyflatness.passes import kept_rows, linearity
from pyflatness.passes.recorder import Recorder

N = 4  # samples, and as many features and classes, so that shapes alone tell nothing


class Behind(nn.Module):
    """A linear layer with some operation behind it."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(N, N), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x))


def shown(model: nn.Module, x: Tensor) -> set[str]:
    """Return the layers that the graph shows to keep their rows, of those that cotangents are sent to otherwise."""
    modules = {
        name: module for name, module in model.named_modules() if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d))
    }
    recorder = Recorder(modules)
    model.requires_grad_(False)
    with recorder.attached(), recorder.recording():
        outputs = model(x)
        found = kept_rows.in_place(outputs, linearity.users_of(outputs), recorder.calls, len(x))
        for name in found:
            for place in range(len(x)):
                cotangent = torch.zeros_like(outputs)
                cotangent[place] = torch.randn_like(cotangent[place])
                (gradient,) = recorder.gradients(outputs, cotangent)[name]
                others = torch.arange(len(x)) != place
                assert not bool(gradient[others].any()), f"{name}: sample {place} reaches rows of others"
        return found


STAYING: dict[str, Callable[[Tensor], Tensor]] = {
    "nothing": lambda h: h,
    "pointwise": lambda h: F.gelu(torch.tanh(h)) * torch.sigmoid(h) + h / 2 - h.clamp_min(0.1),
    "product": lambda h: F.linear(h.relu(), torch.ones(3, N), torch.zeros(3)) @ torch.ones(3, N),
    "reshaped": lambda h: h.view(N, 2, 2).mean(-1).sum(1, keepdim=True) + 0,
    "padded": lambda h: F.pad(h, (1, 1))[:, 1:-1],
    "pooled": lambda h: F.max_pool2d(F.avg_pool2d(h.view(N, 1, 2, 2), 1), 2).flatten(1),
    "convolved": lambda h: F.conv2d(h.view(N, 1, 2, 2), torch.ones(2, 1, 2, 2)).flatten(1),
    "normalised": lambda h: F.batch_norm(h, torch.zeros(N), torch.ones(N)),
}
MOVING: dict[str, Callable[[Tensor], Tensor]] = {
    "mean over samples": lambda h: h + h.mean(0, keepdim=True).expand(N, N),
    "mean over samples, from the end": lambda h: h.view(N, N, 1).expand(N, N, N).mean(-3),
    "sum of all": lambda h: h + h.sum(),
    "sum over samples": lambda h: h.view(N, N, 1).expand(N, N, N).sum(0),
    "broadcast": lambda h: h.sum(1) + h,
    "on the right of a product": lambda h: torch.ones(N, N) @ h,
    "on the right of addmm": lambda h: torch.addmm(torch.zeros(N), torch.ones(N, N), h),
    "turned": lambda h: h.t(),
    "flipped": lambda h: h.flip(0),
    "rolled": lambda h: h.roll(1, 0),
    "shifted by padding": lambda h: F.pad(h, (0, 0, 1, -1)),
    "summed up": lambda h: h.cumsum(0),
    "batch norm in training": lambda h: F.batch_norm(h, torch.zeros(N), torch.ones(N), training=True),
    "pooled without samples": lambda h: F.max_pool2d(h[None].expand(N, N, N), 3, 1, 1).mean(2),
    "softmax over samples": lambda h: h.softmax(0),
    "kernel made of it": lambda h: F.conv1d(torch.ones(N, N, 1), h[:, :, None]).flatten(1),
}


@pytest.mark.parametrize("function", STAYING.values(), ids=STAYING.keys())
def test_rows_that_stay_are_shown_by_the_graph(function):
    torch.manual_seed(0)
    assert shown(Behind(function), torch.randn(N, N)) == {"layer"}


@pytest.mark.parametrize("function", MOVING.values(), ids=MOVING.keys())
def test_rows_that_may_move_are_left_to_cotangents(function):
    torch.manual_seed(0)
    assert shown(Behind(function), torch.randn(N, N)) == set()


def test_every_layer_of_a_residual_network_is_shown():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 6, 3, 2, padding=1), nn.Conv2d(6, 6, 3, padding=1)
            self.norm, self.head = nn.BatchNorm2d(6), nn.Linear(6, 2)

        def forward(self, x):
            h = F.relu(self.norm(self.second(F.relu(self.first(x), inplace=True))))
            h = h + F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 1, 2))
            return self.head(F.adaptive_avg_pool2d(h, 1).flatten(1))

    torch.manual_seed(0)
    assert shown(Block().eval(), torch.randn(N, 3, 8, 8)) == {"first", "second", "head"}


@pytest.mark.parametrize("probes", [1, 3])
def test_no_cotangent_is_sent_to_see_where_rows_are(monkeypatch, probes):
    sent = 0
    gradients = Recorder.gradients

    def counted(self, *args, **kwargs):
        nonlocal sent
        sent += 1
        return gradients(self, *args, **kwargs)

    monkeypatch.setattr(Recorder, "gradients", counted)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
    data = torch.randn(8, 1, 4, 4), torch.arange(8) % 3
    pf.measure(model, nn.CrossEntropyLoss(), data, measures="trace", probes=probes, progress=False)
    assert sent == probes
