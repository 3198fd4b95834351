"""The networks of C24. Nothing else is in this file, so that stored values stay valid when experiments change."""

import torch
from torch import Tensor, nn


def perceptron(inputs: int, width: int, outputs: int) -> nn.Sequential:
    """Return a network of four linear layers with ReLU in between, for inputs (n, …) of so many numbers."""
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()),
        *(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs)),
    )


def small_convolutional(outputs: int) -> nn.Sequential:
    """Return a network for images of 8×8 pixels: two convolutions and two linear layers."""
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, outputs)),
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
