"""Networks of layers that are neither linear nor convolutions, each with a loss and data: :data:`CASES`."""

from functools import partial

import torch
from torch import nn

from support.cases import INDICES, C
from support.grid import Case, Net, made, normal

CASES: dict[str, Case] = {}


def add(name, *arguments, **options):
    """A case as in the grid, which has it not."""
    CASES[name] = made(name, *arguments, **options)


# --- transposed convolutions ------------------------------------------------------------------------------------------

GEOMETRIES = {  # the layer, the pixels that it gets, and what else its call is given
    "1d": (partial(nn.ConvTranspose1d, 2, 3, 3), (4,), {}),
    "1d, padded, no bias": (partial(nn.ConvTranspose1d, 2, 3, 3, padding=1, bias=False), (4,), {}),
    "1d, cropped": (partial(nn.ConvTranspose1d, 2, 3, 2, stride=2, padding=2), (4,), {}),
    "1d, as large as it is told": (partial(nn.ConvTranspose1d, 2, 3, 3, stride=3), (3,), {"output_size": [11]}),
    "2d, strided": (partial(nn.ConvTranspose2d, 2, 3, 2, stride=2), (2, 2), {}),
    "2d, all asymmetric": (partial(nn.ConvTranspose2d, 2, 3, (3, 2), stride=(2, 3), padding=(1, 0),
        output_padding=(1, 2), dilation=(1, 2)), (2, 2), {}),
    "2d, grouped": (partial(nn.ConvTranspose2d, 4, 6, (2, 3), groups=2, stride=(1, 2), padding=(0, 1)), (2, 2), {}),
    "2d, depthwise": (partial(nn.ConvTranspose2d, 3, 3, 3, groups=3, stride=2, padding=1), (2, 2), {}),
    "2d, 1×1": (partial(nn.ConvTranspose2d, 3, 4, 1), (2, 2), {}),
    "3d, grouped": (partial(nn.ConvTranspose3d, 4, 4, (2, 1, 2), groups=2, stride=(1, 2, 1)), (2, 1, 2), {}),
}  # fmt: skip


def upsampling(net, x, **options):
    return net.head(net.between(net.up(x, **options)).flatten(1))


def geometry(make, size, options, between):
    up = make()
    outputs = up(torch.zeros(1, up.in_channels, *size), **options).numel()
    return Net(partial(upsampling, **options), up=up, between=between(), head=nn.Linear(outputs, C))


for name, (make, size, options) in GEOMETRIES.items():
    x, linear = normal(20, 3, make.args[0], *size), not name.endswith(("strided", "is told"))
    add(f"transposed convolution {name}", partial(geometry, make, size, options, nn.ReLU if linear else nn.Tanh), x,
        INDICES[:3], "up", curved="" if linear else "up")  # fmt: skip


def twice(net, x):
    """The same layer on its own output, of another size, the second time."""
    return net.head(torch.relu(net.up(torch.relu(net.up(x)))).mean(2))


def segmentation(net, x):
    return net.up(torch.relu(net.down(x)))


add("transposed convolution on its own output", lambda: Net(twice, up=nn.ConvTranspose1d(2, 2, 3, stride=2),
    head=nn.Linear(2, C)), normal(21, 3, 2, 2), INDICES[:3], "up", curved="up")  # fmt: skip
add("segmentation by a transposed convolution", lambda: Net(segmentation, down=nn.Conv2d(2, 3, 2, stride=2),
    up=nn.ConvTranspose2d(3, C, 2, stride=2)), normal(22, 2, 2, 2, 4), torch.arange(16).view(2, 2, 4) % C,
    "down up")  # fmt: skip
