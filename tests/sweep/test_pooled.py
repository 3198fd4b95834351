"""Convolutions behind which there is max-pooling: cotangents are taken from behind it, and values are the Hessian's."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pyflatness as pf
from pyflatness.passes import neighbours
from support.combinations import every
from support.grid import Net, checked


@pytest.fixture
def taken(monkeypatch):
    """The number of elements of each layer's cotangents, every time that these are taken from behind pooling."""
    found = []
    positions = neighbours._positions

    def seen(nodes):
        made = positions(nodes)
        found.append(made.shape[2])
        return made

    monkeypatch.setattr(neighbours, "_positions", seen)
    return found


class Between(nn.Module):
    """A convolution, what is ``behind`` it (a function of its output), and a linear layer."""

    def __init__(self, behind, conv=None, size=(2, 7, 6)):
        super().__init__()
        self.behind, self.conv = behind, conv or nn.Conv2d(2, 3, 2)
        with torch.no_grad():
            width = behind(self.conv(torch.zeros(1, *size))).flatten(1).shape[1]
        self.head = nn.Linear(width, 6)

    def forward(self, x):
        return self.head(self.behind(self.conv(x)).flatten(1))


def relu_then(**options):
    return lambda h: F.max_pool2d(F.relu(h), **options)


BEHIND = {
    "ReLU, pooling": (relu_then(kernel_size=2), 6),
    "ReLU in place": (lambda h: F.max_pool2d(F.relu(h, inplace=True), 2), 6),
    "pooling, ReLU": (lambda h: F.relu(F.max_pool2d(h, 2)), 6),
    "ReLU, pooling, ReLU": (lambda h: F.relu(F.max_pool2d(F.relu(h), 2)), 6),
    "pooling": (lambda h: F.max_pool2d(h, 2), 6),
    "windows that overlap": (relu_then(kernel_size=3, stride=1), 12),
    "padded": (relu_then(kernel_size=3, stride=2, padding=1), 9),
    "dilated": (relu_then(kernel_size=2, stride=1, dilation=2), 12),
    "the last window cut": (relu_then(kernel_size=2, ceil_mode=True), 9),
    "two poolings": (lambda h: F.max_pool2d(F.max_pool2d(h, 2), 2), 6),
    "channels last": (lambda h: F.max_pool2d(F.relu(h.contiguous(memory_format=torch.channels_last)), 2), None),
    "ReLU used twice": (lambda h: (lambda r: F.max_pool2d(r, 2) + r[:, :, :3, :2])(F.relu(h)), None),
    "used twice": (lambda h: F.max_pool2d(F.relu(h), 2) + h[:, :, :3, :2], None),
    "average": (lambda h: F.avg_pool2d(F.relu(h), 2), None),
    "leaky": (lambda h: F.max_pool2d(F.leaky_relu(h), 2), None),
    "scaled": (lambda h: F.max_pool2d(F.relu(2 * h), 2), None),
}


def check(model, x, y, loss=F.cross_entropy, **options):
    return checked(model, loss, [(x[:5], y[:5]), (x[5:], y[5:])], progress=False, **options)


@every(together=1, behind=[*BEHIND], backend=["compiled", "reference"])
def test_what_may_be_behind(behind, backend, taken):
    function, elements = BEHIND[behind]
    model = Between(function).double().eval()
    check(model, torch.randn(8, 2, 7, 6).double(), torch.arange(8) % 6, backend=backend)
    assert taken == ([] if backend == "reference" or elements is None else [elements] * 2)


def test_groups_stride_padding_and_a_second_convolution(taken):
    first = nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2, padding_mode="reflect")
    second = nn.Conv2d(6, 4, 2)
    model = nn.Sequential(
        first,
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        second,
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16, 6),
    )
    check(model.double().eval(), torch.randn(8, 4, 24, 24).double(), torch.arange(8) % 6)
    assert taken == [36, 4] * 2


def test_a_layer_that_runs_twice_is_taken_whole(taken):
    def twice():
        def forward(net, x):
            left, right = (F.max_pool2d(F.relu(net.conv(part)), 2) for part in (x, x.flip(2)))
            return net.head((left + right).flatten(1))

        return Net(forward, conv=nn.Conv2d(2, 3, 2), head=nn.Linear(18, 6))

    check(twice().double().eval(), torch.randn(8, 2, 7, 6).double(), torch.arange(8) % 6)
    assert taken == []


def test_signs_of_a_loss_that_is_not_convex(taken):
    def loss(outputs, targets):
        return (outputs.sin() * (targets.unsqueeze(1) + 1)).sum(dim=1).mean()

    model = Between(relu_then(kernel_size=2)).double().eval()
    report = check(model, torch.randn(8, 2, 7, 6).double(), torch.arange(8) % 6, loss)
    assert report["conv", "trace"].value != 0
    assert taken == [6, 6]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_samples_alone_and_those_that_are_not_finite(dtype, taken):
    model = Between(relu_then(kernel_size=2)).to(dtype).eval()
    x, y = torch.randn(8, 2, 7, 6).to(dtype), torch.arange(8) % 6
    options = {"nan_policy": "propagate", "per_sample": True, "progress": False}
    clean = pf.relative_flatness(model, nn.CrossEntropyLoss(), (x, y), "conv", **options).per_sample
    x[3, 0, 0, 0] = torch.nan
    spoiled = pf.relative_flatness(model, nn.CrossEntropyLoss(), (x, y), "conv", **options).per_sample
    keep = torch.arange(8) != 3
    torch.testing.assert_close(spoiled[keep], clean[keep], rtol=1e-5, atol=0)
    assert spoiled[3].isnan()
    by_torch = pf.relative_flatness(model, nn.CrossEntropyLoss(), (x, y), "conv", backend="reference", **options)
    torch.testing.assert_close(spoiled, by_torch.per_sample, rtol=1e-5, atol=0, equal_nan=True)
    assert len(taken) == 2


def test_few_bytes_to_hold_back(taken):
    """Whole cotangents where fewer than four fit; several stacks of them where some do."""
    model = Between(relu_then(kernel_size=2), nn.Conv2d(2, 30, 2), (2, 21, 22)).eval()
    x, y = torch.randn(40, 2, 21, 22), torch.arange(40) % 6
    values = {}
    for memory in (2**20, 2**22, 2**24, None):
        values[memory] = pf.relative_flatness(
            model, nn.CrossEntropyLoss(), (x, y), "conv", memory=memory, progress=False
        ).value
    assert len({round(value / values[None], 4) for value in values.values()}) == 1
    assert taken


def test_affine_and_normalised_values_and_checkpoints(taken):
    model = Between(relu_then(kernel_size=2)).double().eval()
    x, y = torch.randn(8, 2, 7, 6).double(), torch.arange(8) % 6
    for options in ({"conv": "affine"}, {"normalize": "std"}):
        found, expected = (
            pf.relative_flatness(
                model, nn.CrossEntropyLoss(), (x, y), "conv", backend=backend, progress=False, **options
            ).value
            for backend in ("compiled", "reference")
        )
        assert found == pytest.approx(expected, rel=1e-10)
    assert taken == [6]
    once = Between(lambda h: torch.utils.checkpoint.checkpoint(relu_then(kernel_size=2), h, use_reentrant=False))
    check(once.double().eval(), x, y)
