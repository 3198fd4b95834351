"""The papers' networks. Nothing else is in this file, so that stored values stay valid when experiments change."""

import functools
import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn


def lenet5(outputs: int = 10) -> nn.Sequential:
    """Return LeNet5 for images (n, 3, 32, 32), of which ``"fc3"`` is the head.

    Names of the layers with weights are those of Petzka et al.'s: conv1, conv2, fc1, fc2, fc3.
    """
    model = nn.Sequential()
    for name, layer in (
        *(("conv1", nn.Conv2d(3, 6, 5)), ("relu1", nn.ReLU()), ("pool1", nn.MaxPool2d(2))),
        *(("conv2", nn.Conv2d(6, 16, 5)), ("relu2", nn.ReLU()), ("pool2", nn.MaxPool2d(2))),
        *(("flatten", nn.Flatten()), ("fc1", nn.Linear(400, 120)), ("relu3", nn.ReLU())),
        *(("fc2", nn.Linear(120, 84)), ("relu4", nn.ReLU()), ("fc3", nn.Linear(84, outputs))),
    ):
        model.add_module(name, layer)
    return model


def fully_connected(*widths: int) -> nn.Sequential:
    """Return linear layers fc1, fc2, … with ReLU in between, for inputs that are flattened to ``widths[0]`` numbers."""
    model = nn.Sequential()
    model.add_module("flatten", nn.Flatten())
    for number, (before, after) in enumerate(itertools.pairwise(widths), 1):
        model.add_module(f"fc{number}", nn.Linear(before, after))
        if number < len(widths) - 1:
            model.add_module(f"relu{number}", nn.ReLU())
    return model


def digits_network() -> nn.Sequential:
    """Return the network that stands for LeNet5 at small scale: 8×8 pixels, three hidden layers and a head, fc4."""
    return fully_connected(64, 48, 32, 32, 10)


def mnist_network() -> nn.Sequential:
    """Return the network of Petzka et al. 2019, appendix C: 28×28 pixels, hidden layers of 50, 50, 50 and 30."""
    return fully_connected(784, 50, 50, 50, 30, 10)


def small_mnist_network() -> nn.Sequential:
    """Return the same for 8×8 pixels, with narrower layers."""
    return fully_connected(64, 24, 24, 24, 16, 10)


def small_convolutional(outputs: int) -> nn.Sequential:
    """Return a network for images of 8×8 pixels: two convolutions and two linear layers."""
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, outputs)),
    )


def small_lenet(outputs: int) -> nn.Sequential:
    """Return LeNet5 for images of 8×8 pixels, with kernels of 3×3: two convolutions and three linear layers."""
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 28), nn.ReLU(), nn.Linear(28, outputs)),
    )


def vgg11(outputs: int) -> nn.Sequential:
    """Return VGG-11 without normalisation for images (n, 3, 32, 32), with one linear layer behind the convolutions."""
    parts: list[nn.Module] = []
    channels = 3
    for width in (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0):
        if width:
            parts += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        else:
            parts.append(nn.MaxPool2d(2))
    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(512, outputs))


class VisionTransformer(nn.Module):
    """A small vision transformer: patches as tokens, positions, encoder layers, the mean of tokens, a head.

    Args:
        image: channels, and pixels of a side.
        patch: pixels of a patch's side.
        width: of the tokens.
        depth: encoder layers.
        outputs: classes.
    """

    def __init__(self, image: tuple[int, int], patch: int, width: int, depth: int, outputs: int) -> None:
        super().__init__()
        channels, side = image
        self.patches = nn.Conv2d(channels, width, patch, stride=patch)
        self.positions = nn.Parameter(0.02 * torch.randn((side // patch) ** 2, width))
        layer = {"dim_feedforward": 2 * width, "dropout": 0.0, "batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(width, 2, **layer) for _ in range(depth))  # type: ignore[arg-type]
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, outputs)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (n, outputs)."""
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        for layer in self.layers:
            tokens = layer(tokens)
        found: Tensor = self.head(self.norm(tokens).mean(dim=1))
        return found


class SigmoidOutputs(nn.Module):
    """A network with a sigmoid behind its logits, whose outputs squared error is taken of (C24, section 4.4)."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, inputs: Tensor) -> Tensor:
        """Return outputs in (0, 1)."""
        return torch.sigmoid(self.network(inputs))


def placed(network: Callable[[], nn.Module], device: torch.device) -> Callable[[], nn.Module]:
    """Return what makes the network on a device; on the CPU, where it is made anyway, that is what was given."""
    return network if device.type == "cpu" else functools.partial(_made, network, device)


def _made(network: Callable[[], nn.Module], device: torch.device) -> nn.Module:
    return network().to(device)
