"""A network and its data as `pyflatness score` takes them; tests copy this file, and a copy leaves a trace of use."""

from pathlib import Path

import torch


class Tiny(torch.nn.Module):
    def __init__(self, width=5):
        super().__init__()
        Path(__file__).with_name("built").touch()
        self.body, self.drop, self.head = torch.nn.Linear(4, width), torch.nn.Dropout(), torch.nn.Linear(width, 3)

    def forward(self, x):
        if self.head.bias[0] == 1234:
            raise KeyboardInterrupt
        return self.head(self.drop(self.body(x).relu()))


class Curved(Tiny):
    """Its Hessian has negative entries on the diagonal, and one of its layers never runs."""

    def __init__(self):
        super().__init__()
        self.spare = torch.nn.Linear(3, 3)

    def forward(self, x):
        return self.head(torch.tanh(3 * self.body(x)))


class Odd(torch.nn.Sequential):
    """Names of layers may hold anything but a dot."""

    def __init__(self):
        super().__init__()
        self.add_module("=\x1b[2J", torch.nn.Linear(4, 4))
        self.add_module("-1", torch.nn.Linear(4, 3))


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(self.a(x))


def data(kind="indices", count=37):
    """Batches of different sizes; one of the indices is ignored."""
    generator = torch.Generator().manual_seed(0)
    inputs, labels = (torch.randn(count, size, generator=generator) for size in (4, 3))
    targets = {"indices": labels.argmax(dim=1).int(), "values": labels, "chances": labels.softmax(dim=1).double()}[kind]
    if kind == "indices":
        targets[3] = -100
    return list(zip(inputs.split(10), targets.split(10), strict=True))


def pair(count=37):
    return tuple(map(torch.cat, zip(*data(count=count), strict=True)))


def once():
    return iter(data())


def failing():
    raise OSError("no such\ndisk")


loaded = torch.nn.Linear(1, 1)
