"""The papers' networks. Nothing else is in this file, so that stored values stay valid when experiments change."""

import itertools

from torch import nn


def lenet5() -> nn.Sequential:
    """Return LeNet5 for images (n, 3, 32, 32), of which ``"fc3"`` is the head.

    Names of the layers with weights are those of Petzka et al.'s: conv1, conv2, fc1, fc2, fc3.
    """
    model = nn.Sequential()
    for name, layer in (
        *(("conv1", nn.Conv2d(3, 6, 5)), ("relu1", nn.ReLU()), ("pool1", nn.MaxPool2d(2))),
        *(("conv2", nn.Conv2d(6, 16, 5)), ("relu2", nn.ReLU()), ("pool2", nn.MaxPool2d(2))),
        *(("flatten", nn.Flatten()), ("fc1", nn.Linear(400, 120)), ("relu3", nn.ReLU())),
        *(("fc2", nn.Linear(120, 84)), ("relu4", nn.ReLU()), ("fc3", nn.Linear(84, 10))),
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
