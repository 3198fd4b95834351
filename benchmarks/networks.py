"""Networks of the benchmarks, written out: nothing is downloaded. Weights are random, but for ResNet-20."""

import io
import itertools
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SHARED = Path(__file__).resolve().parents[2] / "shared"
PUBLISHED = SHARED / "models"


def lenet5(classes: int = 10) -> nn.Sequential:
    """Return the network of the 2021 paper's headline experiment, for 32 × 32 colour images: 5 layers."""
    return nn.Sequential(
        OrderedDict[str, nn.Module](
            conv1=nn.Conv2d(3, 6, 5),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(6, 16, 5),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flat=nn.Flatten(),
            fc1=nn.Linear(400, 120),
            relu3=nn.ReLU(),
            fc2=nn.Linear(120, 84),
            relu4=nn.ReLU(),
            fc3=nn.Linear(84, classes),
        )
    )


class Block(nn.Module):
    """Two 3 × 3 convolutions beside a shortcut, which is a 1 × 1 convolution where the shape changes."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != width:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, channels, h, w) to (n, width, h / stride, w / stride)."""
        out = F.relu(self.norm1(self.conv1(x)), inplace=True)
        out = self.norm2(self.conv2(out))
        out += self.shortcut(x)
        return F.relu(out, inplace=True)


def resnet18(classes: int = 10, channels: int = 64) -> nn.Sequential:
    """Return ResNet-18 with the stem for 32 × 32 images (3 × 3, stride 1, no pooling): 20 convolutions and a head."""
    stem = [nn.Conv2d(3, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
    blocks: list[nn.Module] = []
    for width, stride in ((channels, 1), (2 * channels, 2), (4 * channels, 2), (8 * channels, 2)):
        blocks += [Block(channels, width, stride), Block(width, width, 1)]
        channels = width
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


class Inverted(nn.Module):
    """An inverted residual: 1 × 1, depthwise and 1 × 1 convolutions."""

    def __init__(self, channels: int, width: int, expansion: int, kernel: int, stride: int) -> None:
        super().__init__()
        hidden = expansion * channels
        first = conv_norm(channels, hidden, 1) if expansion > 1 else []
        depthwise = conv_norm(hidden, hidden, kernel, stride, groups=hidden)
        self.layers = nn.Sequential(*first, *depthwise, *conv_norm(hidden, width, 1)[:-1])
        self.adds = stride == 1 and channels == width

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, channels, h, w) to (n, width, h / stride, w / stride)."""
        out: Tensor = self.layers(x)
        return x + out if self.adds else out


def conv_norm(channels: int, width: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    """Return a convolution, its normalisation, and ReLU6."""
    convolution = nn.Conv2d(channels, width, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
    return [convolution, nn.BatchNorm2d(width), nn.ReLU6(inplace=True)]


def efficientnet_lite0(classes: int = 1000) -> nn.Sequential:
    """Return EfficientNet-Lite0 for 224 × 224 images: 50 layers, 4.6 million weights, 16 depthwise convolutions."""
    parts, channels = conv_norm(3, 32, 3, 2), 32
    stages = ((16, 1, 3, 1, 1), (24, 6, 3, 2, 2), (40, 6, 5, 2, 2), (80, 6, 3, 2, 3), (112, 6, 5, 1, 3))
    for width, expansion, kernel, stride, blocks in (*stages, (192, 6, 5, 2, 4), (320, 6, 3, 1, 1)):
        for number in range(blocks):
            parts.append(Inverted(channels, width, expansion, kernel, 1 if number else stride))
            channels = width
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, classes))
    return nn.Sequential(*parts, *conv_norm(channels, 1280, 1), *head)


def vgg11(classes: int = 2) -> nn.Sequential:
    """Return the network of the 2024 paper for 32 × 32 colour images: 8 convolutions and 3 linear layers."""
    parts: list[nn.Module] = []
    channels = 3
    for width in (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0):  # 0: pooling
        if width:
            parts += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
            channels = width
        else:
            parts.append(nn.MaxPool2d(2))
    head = [nn.Linear(512, 512), nn.ReLU(inplace=True), nn.Linear(512, 512), nn.ReLU(inplace=True)]
    return nn.Sequential(*parts, nn.Flatten(), *head, nn.Linear(512, classes))


def plain(width: int, depth: int, classes: int) -> nn.Sequential:
    """Return a network for 32 × 32 colour images: a convolution by patches of 4 × 4, more of 3 × 3, and a head.

    Args:
        width: channels of every convolution.
        depth: layers, at least 2: ``depth - 1`` convolutions, all with 8 × 8 places, and the head.
        classes: outputs of the head.
    """
    convolutions = [nn.Conv2d(3, width, 4, stride=4)]
    convolutions += [nn.Conv2d(width, width, 3, padding=1) for _ in range(depth - 2)]
    for layer in convolutions:  # the default would let the signals of deep networks vanish
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    parts = [part for layer in convolutions for part in (layer, nn.ReLU())]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))


def images(n: int) -> Tensor:
    """Return noise (n, 3, 32, 32)."""
    return torch.randn(n, 3, 32, 32)


@torch.no_grad()
def settled(model: nn.Module, noise: Tensor | None = None) -> nn.Module:
    """Return the model in eval mode, with BatchNorm's running statistics from some batches of noise."""
    model.train()
    for _ in range(10):
        model(images(64) if noise is None else noise)
    return model.eval()


def measurable(model: nn.Module) -> list[str]:
    """Return names of all linear and convolutional layers."""
    return [name for name, module in model.named_modules() if isinstance(module, (nn.Linear, nn.Conv2d))]


class BasicBlock(nn.Module):
    """Two 3 × 3 convolutions beside a shortcut without weights, which halves the image and fills up the channels."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self._missing = (width - channels) // 2

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, channels, h, w) to (n, width, h / stride, w / stride)."""
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self._missing:
            x = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self._missing, self._missing))
        return F.relu(out + x)


class CifarResNet(nn.Module):
    """The ResNet for CIFAR-10 of He et al. 2016, with the parameters' names of published weights."""

    def __init__(self, blocks: int, classes: int = 10) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        channels = 16
        for number, width in enumerate((16, 32, 64), start=1):
            stage = [BasicBlock(channels, width, 1 if number == 1 else 2)]
            stage += [BasicBlock(width, width, 1) for _ in range(blocks - 1)]
            self.add_module(f"layer{number}", nn.Sequential(*stage))
            channels = width
        self.linear = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (n, 3, 32, 32) to logits."""
        out = F.relu(self.bn1(self.conv1(x)))
        for number in (1, 2, 3):
            out = self.get_submodule(f"layer{number}")(out)
        return self.linear(out.mean(dim=(2, 3)))


def resnet20() -> nn.Module:
    """Return ResNet-20 with the published weights in ``../shared/models``, in eval mode: 19 convolutions and a head."""
    return published(20)


def published(depth: int) -> nn.Module:
    """Return ResNet-20 or -56 with the published weights in ``../shared/models``, in eval mode."""
    from safetensors.torch import load_file

    network = CifarResNet((depth - 2) // 6)
    network.load_state_dict(load_file(PUBLISHED / f"resnet{depth}_cifar10.safetensors"), strict=False)
    return network.eval()


def cifar10(count: int, part: str = "test", first: int = 0) -> tuple[Tensor, Tensor]:
    """Return images of CIFAR-10 (n, 3, 32, 32), as published networks take them, and their labels."""
    import numpy as np
    from PIL import Image

    with np.load(SHARED / "data" / "cifar10.npz") as held:
        encoded, ends, labels = (held[f"{part}_{name}"] for name in ("webp", "offsets", "labels"))
    ends, labels = ends[first : first + count + 1], labels[first : first + count]
    decoded = [
        np.asarray(Image.open(io.BytesIO(encoded[start:stop].tobytes())).convert("RGB"))
        for start, stop in itertools.pairwise(ends.tolist())
    ]
    x = torch.from_numpy(np.stack(decoded)).permute(0, 3, 1, 2) / 255
    mean, deviation = (torch.tensor(values).view(3, 1, 1) for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    return (x - mean) / deviation, torch.from_numpy(labels.astype(np.int64))


@dataclass
class Molecules:
    """Hold several molecules as one batch of graphs."""

    atoms: Tensor  # (N, 32)
    bonds: Tensor  # (2, E), both ways
    molecule: Tensor  # (N,), of each atom
    targets: Tensor  # (n,)

    @classmethod
    def random(cls, count: int, generator: torch.Generator) -> "Molecules":
        """Return so many trees of 18 to 31 atoms, each with two rings."""
        bonds, sizes, start = [], torch.randint(18, 32, (count,), generator=generator), 0
        for size in sizes.tolist():
            child = torch.arange(1, size)
            parent = (torch.rand(size - 1, generator=generator) * child).long()
            rings = torch.randint(size, (2, 2), generator=generator)
            bonds.append(torch.cat([torch.stack([child, parent]), rings], dim=1) + start)
            start += size
        one_way = torch.cat(bonds, dim=1)
        return cls(
            torch.randn(start, 32, generator=generator),
            torch.cat([one_way, one_way.flip(0)], dim=1),
            torch.arange(count).repeat_interleave(sizes),
            torch.arange(count) % 2,
        )


class MessagePassing(nn.Module):
    """Three rounds of messages along bonds, 300 wide as in chemprop, and a head on the sum of a molecule's atoms."""

    def __init__(self, classes: int, width: int = 300) -> None:
        super().__init__()
        self.encode, self.head = nn.Linear(32, width), nn.Linear(width, classes)
        self.message = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(3))
        self.update = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(3))

    def forward(self, batch: Molecules) -> Tensor:
        """Return the logits (n, classes) of the molecules."""
        hidden, (source, target) = self.encode(batch.atoms).relu(), batch.bonds
        for message, update in zip(self.message, self.update, strict=True):
            sent = message(torch.cat([hidden[source], hidden[target]], dim=1)).relu()
            received = torch.zeros_like(hidden).index_add(0, target, sent)
            hidden = update(torch.cat([hidden, received], dim=1)).relu()
        logits: Tensor = self.head(
            hidden.new_zeros(len(batch.targets), hidden.shape[1]).index_add(0, batch.molecule, hidden)
        )
        return logits
