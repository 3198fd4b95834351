"""Small networks for images of handwritten digits, (n, 1, 8, 8), with 64 features before a linear head.

This file needs torch alone. `pyflatness demo` puts a copy of it beside the checkpoints that it trains.
"""

from torch import nn

FEATURES, CLASSES = 64, 10


def mlp_1() -> nn.Sequential:
    """Return a network with one hidden layer."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, FEATURES), nn.ReLU(), nn.Linear(FEATURES, CLASSES))


def mlp_2() -> nn.Sequential:
    """Return a network with two hidden layers."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, FEATURES), nn.ReLU(), nn.Linear(FEATURES, CLASSES)
    )


def cnn() -> nn.Sequential:
    """Return a network with two convolutions and a hidden layer."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64, FEATURES),
        nn.ReLU(),
        nn.Linear(FEATURES, CLASSES),
    )
