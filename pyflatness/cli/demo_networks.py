"""Define the networks of ``pyflatness demo``: what they learn from, their training, what is measured of them.

Handwritten digits of 8×8 pixels (scikit-learn's, nothing is downloaded), and three architectures that all end in 64
features and a linear head, so that relative flatness is compared between heads of one size. Training stops by the
training loss, not after a number of epochs, so that slow and fast optimisers are compared at about the same fit: not
quite, as a fast one is further below the target at the end of the epoch that passes it.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from .. import progress
from ..api import relative_flatness
from ..errors import NonFiniteError
from .example_networks import cnn, mlp_1, mlp_2

TARGET_LOSS = 0.05
MAX_EPOCHS = 600
_TRAINING_IMAGES = 700  # of 1797: few enough that the gap to the test loss is real


@dataclass(frozen=True)
class Digits:
    """Hold the two halves of the data: images (n, 1, 8, 8) with values from 0 to 1, and their digits (n,)."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


@dataclass(frozen=True)
class Recipe:
    """Describe one network and its training."""

    network: str
    optimiser: str
    learning_rate: float
    batch_size: int
    seed: int


@dataclass(frozen=True)
class Trained:
    """Hold a network in eval mode, and how its training went."""

    model: nn.Module
    epochs: int
    converged: bool


@dataclass(frozen=True)
class Row(Recipe):
    """Hold one network's recipe, how its training went, and what was measured of it."""

    epochs: int
    converged: bool
    train_loss: float
    test_loss: float
    test_accuracy: float
    gap: float
    kappa: float
    normalised_kappa: float


def load_digits(seed: int) -> Digits:
    """Return the digits, split at random."""
    from sklearn import datasets

    bunch = datasets.load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(bunch.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    train, test = order[:_TRAINING_IMAGES], order[_TRAINING_IMAGES:]
    return Digits(images[train], labels[train], images[test], labels[test])


def recipes(seed: int) -> list[Recipe]:
    """Return three architectures × two optimisers × two learning rates × two batch sizes, each with its seed."""
    choices = [
        (network, optimiser, learning_rate, batch_size)
        for network in NETWORKS
        for optimiser, learning_rate in (("SGD", 0.005), ("SGD", 0.02), ("Adam", 0.001), ("Adam", 0.005))
        for batch_size in (16, 128)
    ]
    return [Recipe(*choice, seed=seed + number) for number, choice in enumerate(choices)]


def run(recipes: list[Recipe], digits: Digits) -> list[Row]:
    """Train and measure each network."""
    with single_thread():
        return [_row(recipe, digits) for recipe in progress.track(recipes, len(recipes), "networks", None)]


def train(recipe: Recipe, digits: Digits) -> Trained:
    """Train until the mean loss of an epoch is below the target, or for as many epochs as are allowed."""
    model = _initialised(recipe)
    optimiser = OPTIMISERS[recipe.optimiser](model.parameters(), lr=recipe.learning_rate)
    shuffle = torch.Generator().manual_seed(recipe.seed)
    loss, epochs = float("inf"), 0
    while not loss < TARGET_LOSS and epochs < MAX_EPOCHS:
        batches = torch.split(torch.randperm(len(digits.train_images), generator=shuffle), recipe.batch_size)
        loss = _train_epoch(model, optimiser, digits, batches)
        epochs += 1
    return Trained(model.eval(), epochs, converged=loss < TARGET_LOSS)


@torch.no_grad()
def evaluate(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """Return mean loss and accuracy."""
    logits = model(images)
    return float(nn.functional.cross_entropy(logits, labels)), float((logits.argmax(dim=1) == labels).double().mean())


@contextlib.contextmanager
def single_thread() -> Iterator[None]:
    """Give torch one thread inside a ``with`` block.

    Networks of this size gain nothing from more, and their sums do not depend on how many cores there are.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _row(recipe: Recipe, digits: Digits) -> Row:
    trained = train(recipe, digits)
    training_set = (digits.train_images, digits.train_labels)
    train_loss, _ = evaluate(trained.model, *training_set)
    test_loss, test_accuracy = evaluate(trained.model, digits.test_images, digits.test_labels)
    return Row(
        **asdict(recipe),
        epochs=trained.epochs,
        converged=trained.converged,
        train_loss=train_loss,
        test_loss=test_loss,
        test_accuracy=test_accuracy,
        gap=test_loss - train_loss,
        kappa=_kappa(trained.model, training_set, None),
        normalised_kappa=_kappa(trained.model, training_set, "std"),
    )


def _kappa(model: nn.Module, data: tuple[Tensor, Tensor], normalize: str | None) -> float:
    try:
        estimate = relative_flatness(model, nn.CrossEntropyLoss(), data, normalize=normalize, progress=False)
    except NonFiniteError:
        return math.nan  # training diverged; the network stays in the table
    return float(estimate)


def _train_epoch(
    model: nn.Module, optimiser: torch.optim.Optimizer, digits: Digits, batches: tuple[Tensor, ...]
) -> float:
    model.train()
    criterion = nn.CrossEntropyLoss()
    total = 0.0
    for batch in batches:
        optimiser.zero_grad()
        loss = criterion(model(digits.train_images[batch]), digits.train_labels[batch])
        loss.backward()
        optimiser.step()
        total += loss.item() * len(batch)
    return total / len(digits.train_images)


def _initialised(recipe: Recipe) -> nn.Module:
    """Return the network with weights drawn from the recipe's seed; the global random state stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(recipe.seed)  # of the CPU alone, which is all that is forked
        return NETWORKS[recipe.network]()


NETWORKS: dict[str, Callable[[], nn.Module]] = {"MLP-1": mlp_1, "MLP-2": mlp_2, "CNN": cnn}
OPTIMISERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": functools.partial(torch.optim.SGD, momentum=0.9),
    "Adam": torch.optim.Adam,
}
