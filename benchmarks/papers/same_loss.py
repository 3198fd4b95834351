"""Train many small networks of one architecture at once, each until its loss on all training data is the same number.

Measures of flatness fall with the training loss, so networks that stopped at different losses are told apart by how
far they were trained. Here the loss is held against the target after every epoch, on the whole training set. Of the
epoch in which it was reached a step that reached it is found again by bisection, and that step is shortened so that
the loss is the target: θ + t Δθ, 0 < t ≤ 1, as a smaller learning rate would have made it.

The networks of a group differ in learning rate, weight decay, optimiser and seed, and go through ``torch.func.vmap``
together. One update serves all optimisers, with β₁, β₂ by network,

    m ← β₁ m + c g        v ← β₂ v + (1 - β₂) g²        θ ← θ - η (m / (1 or √v̂ + ε) + λ θ)

SGD has β₁ = 0, momentum β₁ = 0.9 and c = 1, Adam c = 1 - β₁ with the usual corrections for the first steps; weight
decay λ is decoupled.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

Weights = dict[str, Tensor]

BASE = {"sgd": (0.2, 5e-4), "momentum": (0.02, 5e-3), "adam": (0.002, 5e-2)}
"""Learning rate and decoupled weight decay of each optimiser that a factor of 1 stands for."""

_MOMENTUM, _SQUARES, _EPSILON = 0.9, 0.999, 1e-8
_TOLERANCE = 1e-4  # of the final loss, relative to the target


@dataclass(frozen=True)
class Recipe:
    """Represent how one network of a group is trained.

    Attributes:
        optimizer: ``"sgd"``, ``"momentum"`` or ``"adam"``.
        learning_rate: a multiple of the optimiser's own of :data:`BASE`.
        weight_decay: likewise.
        seed: of the initial weights and of the order of the samples.
    """

    optimizer: str
    learning_rate: float
    weight_decay: float
    seed: int


@dataclass(frozen=True)
class Trained:
    """Hold how the training of one network ended.

    Attributes:
        weights: its state dict; None where the target was not reached.
        loss: on all training data.
        steps: of the optimiser.
    """

    weights: Weights | None
    loss: float
    steps: int


def perceptron(inputs: int, width: int, depth: int, classes: int) -> nn.Sequential:
    """Return a ReLU network with ``depth`` hidden layers of ``width`` units."""
    sizes = [inputs, *[width] * depth]
    hidden = [part for pair in pairwise(sizes) for part in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(sizes[-1], classes))


def train(
    shape: tuple[int, int, int, int],
    recipes: Sequence[Recipe],
    data: tuple[Tensor, Tensor],
    *,
    batch_size: int,
    target: float,
    most_steps: int,
) -> list[Trained]:
    """Return the networks of a group, in the order of their recipes.

    Args:
        shape: inputs, width, depth, classes, as for :func:`perceptron`.
        recipes: one for each network.
        data: inputs (n, inputs) and classes (n,), on the device where the networks are to be trained.
        batch_size: samples of a step; what is left over at the end of an epoch is left out.
        target: cross-entropy, the mean over all training data.
        most_steps: after which a network has failed.
    """
    return _Group(shape, recipes, data, batch_size).run(target, most_steps)


class _Group:
    def __init__(
        self, shape: tuple[int, int, int, int], recipes: Sequence[Recipe], data: tuple[Tensor, Tensor], batch_size: int
    ) -> None:
        self._x, self._y = data
        self._recipes, self._batch_size = recipes, batch_size
        with torch.random.fork_rng(devices=[]):
            networks = []
            for recipe in recipes:
                torch.manual_seed(recipe.seed)
                networks.append(perceptron(*shape))
        self._network = perceptron(*shape)
        stacked, _ = stack_module_state(networks)
        self._weights = {name: weight.detach().to(self._x.device) for name, weight in stacked.items()}
        self._gradient = vmap(grad(self._loss))
        self._orders = {recipe.seed: torch.Generator().manual_seed(recipe.seed) for recipe in recipes}

    def _loss(self, weights: Weights, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(functional_call(self._network, weights, (x,)), y)

    def _losses(self, weights: Weights) -> Tensor:
        """Return the loss of each network on all data, (k,)."""
        with torch.no_grad():
            return vmap(self._loss, in_dims=(0, None, None))(weights, self._x, self._y)

    def run(self, target: float, most_steps: int) -> list[Trained]:
        """Return how each network ended."""
        done: dict[int, Trained] = {}
        left = list(range(len(self._recipes)))
        update, steps = _Update(self._recipes, self._weights), 0
        while left and steps < most_steps:
            path = [self._weights]
            for x, y in self._epoch([self._recipes[place].seed for place in left]):
                path.append(update.step(path[-1], self._gradient(path[-1], x, y)))
            steps, self._weights = steps + len(path) - 1, path[-1]
            losses = self._losses(self._weights)
            lost = losses.isnan() | (losses > 1e3)
            for place, network in enumerate(left):
                if losses[place] <= target:
                    own = [_of(weights, place) for weights in path]
                    weights, loss, taken = self._at(target, own)
                    done[network] = Trained(weights, loss, steps - len(own) + 1 + taken)
                elif lost[place]:
                    done[network] = Trained(None, float(losses[place]), steps)
            keep = ((losses > target) & ~lost).nonzero().flatten()
            if len(keep) < len(left):
                left = [left[place] for place in keep.tolist()]
                self._weights = _of(self._weights, keep)
                update.keep(keep)
        losses = self._losses(self._weights) if left else torch.empty(0)
        done |= {network: Trained(None, float(losses[place]), steps) for place, network in enumerate(left)}
        return [done[network] for network in range(len(self._recipes))]

    def _epoch(self, seeds: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches (k, batch, inputs), (k, batch); networks of one seed have the same."""
        n = len(self._x)
        orders = {seed: torch.randperm(n, generator=generator) for seed, generator in self._orders.items()}
        order = torch.stack([orders[seed] for seed in seeds]).to(self._x.device)
        for start in range(0, n - self._batch_size + 1, self._batch_size):
            index = order[:, start : start + self._batch_size]
            yield self._x[index], self._y[index]

    def _at(self, target: float, path: Sequence[Weights]) -> tuple[Weights, float, int]:
        """Return the weights at which the loss is the target on a path that leads below it, the loss, the steps."""
        above, below = 0, len(path) - 1
        while below - above > 1:
            middle = (above + below) // 2
            above, below = (above, middle) if self._of_one(path[middle]) <= target else (middle, below)
        low, high, weights = 0.0, 1.0, path[below]
        loss = self._of_one(weights)
        for _ in range(40):
            if abs(loss - target) <= _TOLERANCE * target:
                break
            share = (low + high) / 2
            weights = {name: torch.lerp(path[above][name], end, share) for name, end in path[below].items()}
            loss = self._of_one(weights)
            low, high = (low, share) if loss <= target else (share, high)
        return {name: weight.clone() for name, weight in weights.items()}, loss, below

    def _of_one(self, weights: Weights) -> float:
        with torch.no_grad():
            return float(self._loss(weights, self._x, self._y))


class _Update:
    """Make the steps of all networks; constants are (k, 1), as weights are (k, numbers) here."""

    def __init__(self, recipes: Sequence[Recipe], weights: Weights) -> None:
        bases = [BASE[recipe.optimizer] for recipe in recipes]
        column = functools.partial(_column, device=next(iter(weights.values())).device)
        self._rate = column([rate * r.learning_rate for (rate, _), r in zip(bases, recipes, strict=True)])
        self._decay = column([decay * r.weight_decay for (_, decay), r in zip(bases, recipes, strict=True)])
        self._adam = column([float(recipe.optimizer == "adam") for recipe in recipes])
        self._beta = column([0.0 if recipe.optimizer == "sgd" else _MOMENTUM for recipe in recipes])
        self._first = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        self._second = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        self._steps = 0

    def step(self, weights: Weights, gradients: Weights) -> Weights:
        """Return the weights after a step."""
        self._steps += 1
        return {name: self._stepped(name, weight, gradients[name]) for name, weight in weights.items()}

    def _stepped(self, name: str, weight: Tensor, gradient: Tensor) -> Tensor:
        constants = self._rate, self._decay, self._adam, self._beta
        rate, decay, adam, beta = (part.view(-1, *(1,) * (weight.ndim - 1)) for part in constants)
        self._first[name] = beta * self._first[name] + torch.where(adam > 0, 1 - beta, 1.0) * gradient
        self._second[name] = _SQUARES * self._second[name] + (1 - _SQUARES) * gradient.square()
        first = self._first[name] / torch.where(adam > 0, 1 - beta**self._steps, 1.0)
        root = (self._second[name] / (1 - _SQUARES**self._steps)).sqrt() + _EPSILON
        return weight - rate * (first / torch.where(adam > 0, root, 1.0) + decay * weight)

    def keep(self, places: Tensor) -> None:
        """Go on with some of the networks."""
        self._first, self._second = _of(self._first, places), _of(self._second, places)
        self._rate, self._decay = self._rate[places], self._decay[places]
        self._adam, self._beta = self._adam[places], self._beta[places]


def _column(numbers: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(numbers, device=device).unsqueeze(1)


def _of(weights: Mapping[str, Tensor], place: int | Tensor) -> Weights:
    return {name: weight[place] for name, weight in weights.items()}
