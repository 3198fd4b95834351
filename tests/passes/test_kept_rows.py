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


def cut(h: Tensor) -> Tensor:
    """Return samples of two tokens of two features."""
    return h.view(len(h), -1, 2)


def attention(h: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
    """Return what two heads of one channel give."""
    q, k, v = (part.unflatten(-1, (2, 1)).transpose(1, 2) for part in (h, 2 * h, h - 1))
    return attend(q, k, v).transpose(1, 2).reshape(h.shape)


STAYING: dict[str, Callable[[Tensor], Tensor]] = {
    "nothing": lambda h: h,
    "pointwise": lambda h: F.gelu(torch.tanh(h)) * torch.sigmoid(h) + h / 2 - h.clamp_min(0.1),
    "product": lambda h: F.linear(h.relu(), torch.ones(3, N), torch.zeros(3)) @ torch.ones(3, N),
    "reshaped": lambda h: h.view(N, 2, 2).mean(-1).sum(1, keepdim=True) + 0,
    "padded": lambda h: F.pad(h, (1, 1))[:, 1:-1],
    "pooled": lambda h: F.max_pool2d(F.avg_pool2d(h.view(N, 1, 2, 2), 1), 2).flatten(1),
    "convolved": lambda h: F.conv2d(h.view(N, 1, 2, 2), torch.ones(2, 1, 2, 2)).flatten(1),
    "normalised": lambda h: F.batch_norm(h, torch.zeros(N), torch.ones(N)),
    "layer norm": lambda h: (
        F.layer_norm(h, (N,)) + F.group_norm(h, 2) * (h.square().mean(-1, keepdim=True) + 1).rsqrt()
    ),
    "tokens, flattened": lambda h: F.linear(
        F.linear(cut(h), torch.ones(3, 2), torch.ones(3)), torch.ones(2, 3)
    ).flatten(1),
    "in parts": lambda h: torch.cat([*h.split(2, -1), torch.stack(h.unbind(1)[:2], -1), h[:, -1:]], 1).permute(0, 1),
    "attention": lambda h: attention(cut(h), F.scaled_dot_product_attention).flatten(1),
    "attention in steps": lambda h: attention(cut(h), lambda q, k, v: (q @ k.mT).softmax(-1) @ v).flatten(1),
    "masked": lambda h: torch.where(h > 0, h, 2 * h).masked_fill(h > 1, 0.0),
    "with what is repeated": lambda h: (cut(h) + torch.ones(1, 2, 2, requires_grad=True)).flatten(1),
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
    "layer norm over samples": lambda h: F.layer_norm(h, (N, N)),
    "attention among samples": lambda h: F.scaled_dot_product_attention(*(h[None, None] for _ in range(3)))[0, 0],
    "products among samples": lambda h: (h[None] @ torch.ones(1, N, N) + h[None] @ h[None])[0],
    "exchanged": lambda h: h.view(N, 2, 2).repeat(1, 2, 1).transpose(0, 1).flatten(1) + 0,
    "permuted": lambda h: h.permute(1, 0) + 0,
    "parts of samples": lambda h: torch.cat(h.split(2)[::-1]),
    "one of them": lambda h: h + h[:1],
    "one of them by its number": lambda h: h + h.select(0, 1),
    "stacked in front": lambda h: torch.stack(h.unbind(1)),
    "other sizes in front": lambda h: h + h.sum(0).view(2, 2).flatten().view(1, N),
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


def test_what_is_looked_up_once_is_shown_to_be_repeated_for_each_sample():
    class Positions(nn.Module):
        def __init__(self, use):
            super().__init__()
            self.token, self.place, self.use = nn.Embedding(9, N), nn.Embedding(9, N), use

        def forward(self, x):
            return self.use(self.token(x), self.place)

    ways = {
        "a row": (lambda h, place: (h + place(torch.arange(3)[None])).flatten(1), {"place"}),
        "no dimension": (lambda h, place: (h * place(torch.arange(3))).flatten(1), {"place"}),
        "as many as samples": (lambda h, place: (h[:, :1] + place(torch.arange(N))).flatten(1), {"place"}),
        "twice": (lambda h, place: (h + place(torch.arange(3)) + place(torch.arange(3))).flatten(1), {"place"}),
        "a row and whole": (lambda h, place: (lambda p: ((h + p).flatten(1)) * p.sum())(place(torch.arange(3))), set()),
        "mixed": (lambda h, place: (h + place(torch.arange(3)) @ h.mean(0).mT @ h[0]).flatten(1), set()),
        "four dimensions": (lambda h, place: (h[:, None] + place(torch.arange(3)[None])).flatten(1), set()),
        "each sample's": (lambda h, place: (h + place(torch.ones(N, 1).long())).flatten(1), set()),
    }
    for way, (use, expected) in ways.items():
        model = Positions(use).requires_grad_(False)
        recorder = Recorder({"token": model.token, "place": model.place})
        with recorder.attached(), recorder.recording():
            outputs = model(torch.randint(9, (N, 3)))
            found = kept_rows.repeated(outputs, linearity.users_of(outputs), recorder.calls, N)
        assert found == expected, way


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
