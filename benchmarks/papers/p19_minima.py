"""Define the minima of Petzka et al. 2019, section 3: LeNet5 on CIFAR-10, by initialisations and batch sizes.

Four initialisations, batches of 4, 32, 64 and 512 with learning rates of 0.001, 0.008, 0.02 and 0.1, plain SGD, nine
seeds, until convergence, for which the paper has no number; here the mean loss of an epoch is below 0.1. At paper scale
the setting ``minima="p21"`` takes the networks of :mod:`.p21_minima` instead.

At small scale fully connected networks learn 600 of scikit-learn's digits.
"""

from dataclasses import replace

from . import image_data, networks, p21_minima, zoo
from .experiment import Bench
from .training import INITIALIZATIONS, Recipe, Until
from .zoo import Asked, Zoo, several

SMALL = {"images": 600, "seeds": 2, "loss": 0.02, "epochs": 300, "measured": 600, "minima": "p19"}
PAPER = p21_minima.PAPER | {"seeds": 9, "minima": "p19"}
DATA = "CIFAR-10"
MEASURES = ("scaled_lambda_max", "scaled_trace", "lambda_max", "trace")

_LENET5 = ((4, 0.001), (32, 0.008), (64, 0.02), (512, 0.1))
_DIGITS = ((8, 0.02), (16, 0.04), (32, 0.08), (64, 0.16))


def minima(bench: Bench) -> Zoo:
    """Return the networks at the scale of a run."""
    settings, small = bench.settings, bench.scale == "small"
    if settings["minima"] == "p21":
        return p21_minima.zoo(bench)
    rows = [(start, *row) for start in INITIALIZATIONS for row in (_DIGITS if small else _LENET5)]
    recipes = {f"{start}_bs{size}": Recipe("sgd", size, rate, 0, start) for start, size, rate in rows}
    seeded = several(recipes, settings["seeds"])
    until = Until(settings["loss"], settings["epochs"], together=16 if small else 1)
    if small:
        data = image_data.digits(settings["images"])
        return Zoo("p19-minima-digits", networks.digits_network, seeded, *data, until)
    train, test = image_data.read(bench.data_dir, settings["data"])
    inputs = image_data.scaled(train, settings["images"]), image_data.scaled(test)
    return Zoo(f"p19-lenet5-{settings['data']}-{settings['images']}", networks.lenet5, seeded, *inputs, until)


def asked(bench: Bench, of: Zoo) -> list[Asked]:
    """Return what is measured of the head, whose inputs are the last hidden layer's features."""
    return [Asked(MEASURES, [p21_minima.layers(bench.scale)[0]], of.first(bench.settings["measured"]))]


def with_error(bench: Bench, of: Zoo, found: zoo.Networks) -> zoo.Networks:
    """Return the table with the paper's generalisation error, the sums of losses: 5 Σ_test - Σ_train.

    With r training samples for each test sample it is r Σ_test - Σ_train, which is the gap times the training samples.
    """
    trained, tested = len(of.train[1]), len(of.test[1])
    pairs = zip(found.columns["test_loss"], found.columns["loss"], strict=True)
    errors = [trained / tested * (tested * test) - trained * train for test, train in pairs]
    return replace(found, columns=found.columns | {"generalization_error": errors})
