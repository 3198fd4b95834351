"""Define the minima of Petzka et al. 2021, section 6 and appendix C.2: LeNet5 on CIFAR-10, by several recipes.

Training ends when the mean loss of an epoch falls below 0.1. The paper varies the batch size in 64, …, 1024 and the
learning rate in 0.0001, 0.02 and 0.05, for SGD, Adam and RMSprop, keeps the combinations that converge, and does not
say which these are. Here they are eleven, with ten seeds each: 110 networks as in the paper. At paper scale the setting
``rates="paper"`` takes all 45 combinations instead, of which those that do not converge are listed and do not count.

At small scale fully connected networks learn 600 of scikit-learn's digits.
"""

import itertools

from torch import nn

from . import image_data, networks
from .experiment import Bench
from .training import Recipe, Until
from .zoo import Zoo, several

SMALL = {"images": 600, "seeds": 3, "loss": 0.02, "epochs": 400, "measured": 600}
PAPER = {
    "images": 50_000,
    "seeds": 10,
    "loss": 0.1,
    "epochs": 400,
    "measured": 1000,
    "data": "cifar10",
    "rates": "ours",
}
DATA = "CIFAR-10"

_LENET5 = [
    *(("adam", 64, 0.001), ("adam", 128, 0.0005), ("adam", 256, 0.001), ("adam", 512, 0.002), ("adam", 1024, 0.002)),
    *(("rmsprop", 64, 0.0005), ("rmsprop", 128, 0.001)),
    *(("sgd", 64, 0.02), ("sgd", 64, 0.05), ("sgd", 128, 0.05), ("sgd", 256, 0.05)),
]
_PAPER = [*itertools.product(("sgd", "adam", "rmsprop"), (64, 128, 256, 512, 1024), (0.0001, 0.02, 0.05))]
_DIGITS = [
    *((name, size, rate) for name in ("adam", "rmsprop") for size in (16, 64) for rate in (0.001, 0.003)),
    *(("sgd", 16, 0.03), ("sgd", 16, 0.1), ("sgd", 64, 0.1), ("sgd", 64, 0.3)),
]


def zoo(bench: Bench) -> Zoo:
    """Return the networks at the scale of a run."""
    settings = bench.settings
    small = bench.scale == "small"
    rows = _DIGITS if small else {"ours": _LENET5, "paper": _PAPER}[settings["rates"]]
    recipes = {f"{name}_bs{size}_lr{rate:g}": Recipe(name, size, rate, 0) for name, size, rate in rows}
    seeded = several(recipes, settings["seeds"])
    until = Until(settings["loss"], settings["epochs"], together=24 if small else 1)
    if small:
        return Zoo("p21-digits", networks.digits_network, seeded, *image_data.digits(settings["images"]), until)
    train, test = image_data.read(bench.data_dir, settings["data"])
    name = f"p21-lenet5-{settings['data']}-{settings['images']}"
    inputs = image_data.scaled(train, settings["images"]), image_data.scaled(test, 10_000)
    return Zoo(name, networks.lenet5, seeded, *inputs, until)


def network(scale: str) -> nn.Module:
    """Return an untrained network of the scale."""
    return networks.digits_network() if scale == "small" else networks.lenet5()


def layers(scale: str) -> tuple[str, str]:
    """Return the names of the head, whose inputs are the penultimate features, and of the layer before it."""
    return ("fc4", "fc3") if scale == "small" else ("fc3", "fc2")
