"""Convolutional networks of the grid: every geometry in one to three dimensions, residual and segmenting ones."""

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from support.cases import CLASS_WEIGHTS, INDICES, C
from support.grid import Net, add, classes, normal

# --- convolutions -----------------------------------------------------------------------------------------------------

GEOMETRIES = {  # the layer, and the pixels that it gets
    "1d": (partial(nn.Conv1d, 2, 3, 3), (6,)),
    "1d, no bias": (partial(nn.Conv1d, 2, 3, 3, padding=1, bias=False), (5,)),
    "1d, 1×1": (partial(nn.Conv1d, 3, 4, 1), (5,)),
    "1d, strided past the end": (partial(nn.Conv1d, 2, 3, 3, stride=2, padding=1), (8,)),
    "1d, stride over the kernel": (partial(nn.Conv1d, 2, 3, 2, stride=3), (8,)),
    "1d, dilated": (partial(nn.Conv1d, 2, 3, 3, dilation=2, padding=2), (6,)),
    "1d, grouped": (partial(nn.Conv1d, 4, 6, 3, groups=2, padding=1), (5,)),
    "1d, depthwise": (partial(nn.Conv1d, 3, 6, 3, groups=3, padding=1), (5,)),
    "1d, reflect": (partial(nn.Conv1d, 2, 3, 4, padding=2, padding_mode="reflect"), (5,)),
    "1d, replicate": (partial(nn.Conv1d, 2, 3, 3, padding=2, padding_mode="replicate", stride=2), (5,)),
    "1d, circular": (partial(nn.Conv1d, 2, 3, 3, padding=1, padding_mode="circular"), (5,)),
    "1d, same": (partial(nn.Conv1d, 2, 3, 3, padding="same", dilation=2), (5,)),
    "1d, same, even": (partial(nn.Conv1d, 2, 3, 4, padding="same"), (5,)),
    "1d, same, even, circular": (partial(nn.Conv1d, 2, 3, 4, padding="same", padding_mode="circular"), (5,)),
    "1d, kernel as long as the input": (partial(nn.Conv1d, 2, 3, 5), (5,)),
    "2d": (partial(nn.Conv2d, 2, 3, 3, padding=1), (4, 3)),
    "2d, strided": (partial(nn.Conv2d, 2, 3, 3, padding=1, stride=2), (5, 4)),
    "2d, all asymmetric": (partial(nn.Conv2d, 2, 3, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2)), (4, 3)),
    "2d, grouped": (partial(nn.Conv2d, 4, 4, (2, 3), groups=2, padding=(0, 1)), (3, 3)),
    "2d, depthwise": (partial(nn.Conv2d, 3, 3, 3, groups=3, padding=1, stride=(1, 2)), (3, 4)),
    "2d, reflect": (partial(nn.Conv2d, 2, 3, (2, 3), padding=(1, 2), padding_mode="reflect"), (3, 3)),
    "2d, replicate": (partial(nn.Conv2d, 2, 3, 3, padding=(2, 1), padding_mode="replicate", stride=2), (3, 4)),
    "2d, circular": (partial(nn.Conv2d, 2, 3, (3, 2), padding=1, padding_mode="circular", dilation=(1, 2)), (3, 4)),
    "2d, grouped, circular": (partial(nn.Conv2d, 4, 6, 2, groups=2, padding=1, padding_mode="circular"), (3, 2)),
    "2d, same, even": (partial(nn.Conv2d, 2, 3, (2, 4), padding="same"), (3, 4)),
    "2d, same, even, reflect": (partial(nn.Conv2d, 2, 3, (2, 4), padding="same", padding_mode="reflect"), (3, 4)),
    "2d, same, dilated": (partial(nn.Conv2d, 2, 3, (3, 2), padding="same", dilation=(1, 2)), (3, 4)),
    "3d": (partial(nn.Conv3d, 2, 3, 2, padding=1), (2, 3, 2)),
    "3d, all asymmetric": (partial(nn.Conv3d, 2, 2, (2, 1, 3), stride=(1, 2, 1), padding=(0, 1, 1)), (3, 2, 3)),
    "3d, grouped": (partial(nn.Conv3d, 4, 4, (2, 2, 1), groups=2), (3, 2, 2)),
    "3d, depthwise, dilated": (partial(nn.Conv3d, 2, 4, 2, groups=2, dilation=(1, 2, 1), padding=1), (2, 3, 2)),
    "3d, reflect": (partial(nn.Conv3d, 2, 2, 2, padding=1, padding_mode="reflect"), (2, 2, 3)),
    "3d, replicate": (partial(nn.Conv3d, 2, 2, (1, 3, 2), padding=(0, 1, 1), padding_mode="replicate"), (2, 2, 2)),
    "3d, circular": (partial(nn.Conv3d, 2, 2, 2, padding=1, padding_mode="circular"), (2, 2, 2)),
    "3d, same, even": (partial(nn.Conv3d, 2, 2, (2, 1, 3), padding="same"), (2, 2, 3)),
}


def geometry(make, size):
    conv = make()
    outputs = conv(torch.zeros(1, conv.in_channels, *size)).numel()
    return nn.Sequential(conv, nn.ReLU(), nn.Flatten(), nn.Linear(outputs, C))


for name, (make, size) in GEOMETRIES.items():
    add(f"conv {name}", partial(geometry, make, size), normal(20, 3, make.args[0], *size), INDICES[:3], "0")

IMAGES = normal(21, 3, 2, 6, 5)


def cnn():
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(3, 4, 2, padding=1), nn.ReLU(inplace=True), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(8, C),
    )  # fmt: skip


def batch_norm(channels, dims=2):
    norm = (nn.BatchNorm1d, nn.BatchNorm2d)[dims - 1](channels)
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    norm.weight.uniform_(0.5, 2)
    norm.bias.normal_(0, 0.3)
    return norm


class Residual(nn.Module):
    """A residual network that works in place wherever it can."""

    def __init__(self):
        super().__init__()
        self.stem, self.bn0 = nn.Conv2d(2, 3, 3, padding=1, bias=False), batch_norm(3)
        self.conv1, self.bn1 = nn.Conv2d(3, 3, 3, padding=1, bias=False), batch_norm(3)
        self.conv2, self.bn2 = nn.Conv2d(3, 3, 3, padding=1, bias=False), batch_norm(3)
        self.down = nn.Conv2d(3, 4, 1, stride=2)
        self.relu, self.head = nn.ReLU(True), nn.Linear(4, C)

    def forward(self, x):
        x = self.relu(self.bn0(self.stem(x)))
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x
        return self.head(self.relu(self.down(self.relu(out))).mean((2, 3)))


def segmenter():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
        nn.ReLU(True), nn.Conv2d(4, C, 1),
    )  # fmt: skip


def smooth_segmenter():
    return nn.Sequential(nn.Conv1d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv1d(4, 3, 3, padding=1))


def linear_on_pixels(net, x):
    """A Linear over the channels of pixels, in the way of ConvNeXt."""
    x = net.conv(x)
    x = x + net.two(F.relu(net.one(x.permute(0, 2, 3, 1)))).permute(0, 3, 1, 2)
    return net.head(F.relu(x).amax((2, 3)))


MASK = classes(22, 2, 4, 3)
MASK[0, 0], MASK[1, 2, 1] = 255, 255

add("cnn", cnn, IMAGES, INDICES[:3], "0 3 7")
add("cnn, one sample, channels last", lambda: cnn().to(memory_format=torch.channels_last),
    IMAGES[:1].to(memory_format=torch.channels_last), INDICES[:1], "0 3")  # fmt: skip
add("residual", Residual, IMAGES, INDICES[:3], "stem conv1 conv2 down head")
add("segmentation", segmenter, normal(23, 2, 2, 4, 3), MASK, "0 2 4",
    loss=nn.CrossEntropyLoss(weight=CLASS_WEIGHTS, ignore_index=255))  # fmt: skip
add("segmentation, squared error, Tanh", smooth_segmenter, normal(24, 3, 2, 5), normal(25, 3, 3, 5), "0 2", curved="0",
    loss=nn.MSELoss())  # fmt: skip
add("linear layers on pixels", lambda: Net(linear_on_pixels, conv=nn.Conv2d(2, 4, 2), one=nn.Linear(4, 6),
    two=nn.Linear(6, 4), head=nn.Linear(4, C)), normal(26, 3, 2, 4, 3), INDICES[:3], "conv one two head")  # fmt: skip
