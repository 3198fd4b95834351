"""What pyflatness is held to, written without it: the bare sweep, and the same with contractions composed in torch.

The sweep is one forward pass and C - 1 backward passes of signals, to the outputs of the measured layers and no
further: no gradient of a weight is computed. The contractions are those that a careful user would write: patches
unfolded once for all signals, κ by w wᵀ, which needs no decomposition, and for each layer the cheaper of two routes.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F

Form = Callable[[Tensor], Tensor]  # signal of a layer's output -> Σ ⟨w wᵀ M, M⟩ over the samples


class Sweep:
    """The bare sweep of a model and some of its layers, for cross-entropy.

    Args:
        model: called as ``model(x)``; a copy of it is kept.
        names: of the layers.
    """

    def __init__(self, model: nn.Module, names: Iterable[str]) -> None:
        self._model = copy.deepcopy(model).requires_grad_(False)
        self.layers = {name: self._model.get_submodule(name) for name in names}
        self._inputs: dict[str, Tensor] = {}
        self._edges: dict[str, GradientEdge] = {}
        for name, layer in self.layers.items():
            layer.register_forward_pre_hook(_alias)
            layer.register_forward_hook(self._keep(name))

    def run(self, batches: Iterable[Tensor]) -> None:
        """Everything but contractions."""
        for _, signals in self.passes(batches):
            for _ in signals:
                pass

    def passes(self, batches: Iterable[Tensor]) -> Iterator[tuple[dict[str, Tensor], Iterator[dict[str, Tensor]]]]:
        """For every batch: the layers' inputs, and for every signal the gradients in the layers' outputs."""
        for x in batches:
            outputs = self._model(x)
            inputs = {name: phi.detach() for name, phi in self._inputs.items()}
            yield inputs, self._signals(outputs)

    def _signals(self, outputs: Tensor) -> Iterator[dict[str, Tensor]]:
        edges = list(self._edges.values())
        for column in columns(outputs.detach()):
            found = torch.autograd.grad(outputs, edges, column, retain_graph=True)
            yield dict(zip(self._edges, found, strict=True))

    def _keep(self, name: str) -> Any:
        def keep(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            self._inputs[name], self._edges[name] = args[0], get_gradient_edge(output)

        return keep


def products(features: Tensor, weight: Tensor, part: int) -> None:
    """Make the two products of a head's formula, φ wᵀ and p w, of so many rows at a time."""
    for rows in features.split(part):
        (rows @ weight.t()) @ weight


def columns(outputs: Tensor) -> Iterator[Tensor]:
    """S of diag(p) - p pᵀ = S Sᵀ, column by column: all but the first of diag(√p) H, H the reflection of √p to e₁."""
    v = torch.softmax(outputs, 1).sqrt()
    u = v.clone()
    u[:, 0] += 1
    for c in range(1, outputs.shape[1]):
        column = -v * u * (v[:, c : c + 1] / u[:, :1])
        column[:, c] += v[:, c]
        yield column


def composed(sweep: Sweep, batches: Iterable[Tensor]) -> dict[str, Tensor]:
    """Return relative flatness of every layer."""
    weights = {name: layer.weight.flatten(1) for name, layer in sweep.layers.items()}
    grams = {name: weight @ weight.t() for name, weight in weights.items()}
    totals = {name: torch.zeros((), device=weight.device) for name, weight in weights.items()}
    samples = 0
    for inputs, signals in sweep.passes(batches):
        samples += len(next(iter(inputs.values())))
        forms: dict[str, Form] = {}
        for gradients in signals:
            for name, delta in gradients.items():
                if name not in forms:
                    forms[name] = form(sweep.layers[name], inputs[name], grams[name], delta)
                totals[name] += forms[name](delta)
    return {name: total / samples for name, total in totals.items()}


def form(layer: nn.Module, phi: Tensor, gram: Tensor, delta: Tensor) -> Form:
    """Return the layer's contraction for inputs φ; ``delta`` tells the shape of the signals to come."""
    if isinstance(layer, nn.Linear):
        return _rank_one(phi, gram)
    assert isinstance(layer, nn.Conv2d)
    patches = F.unfold(phi, layer.kernel_size, layer.dilation, layer.padding, layer.stride)  # n, m, P
    route, _ = cheapest(delta.shape[1], patches.shape[1], patches.shape[2])
    return (_gram if route == "gram" else _direct)(patches, gram)


def cheapest(d: int, m: int, places: int, signals: int = 9) -> tuple[str, float]:
    """Return the route for |R M|² with the fewest multiply-adds a sample and cotangent, and how many these are."""
    r = min(d, m)
    if places == 1:
        return "rank one", r * d
    routes = {
        "direct": d * m * places + r * d * m,
        "gram": d * d * places + d * places**2 + m * places**2 / signals,
    }
    name = min(routes, key=lambda name: routes[name])
    return name, routes[name]


def multiply_adds(sweep: Sweep, x: Tensor, signals: int) -> float:
    """Return the multiply-adds of all layers' contractions, for a sample and cotangent."""
    total = 0.0
    for inputs, gradients in sweep.passes([x[:2]]):
        deltas = next(gradients)
        for name, layer in sweep.layers.items():
            d, m = layer.weight.flatten(1).shape
            places = math.prod(deltas[name].shape[2:])
            total += cheapest(d, m, places, signals)[1]
            assert len(inputs[name]) == len(deltas[name])
    return total


def _rank_one(phi: Tensor, gram: Tensor) -> Form:
    norms = phi.square().sum(1)
    return lambda delta: norms @ ((delta @ gram) * delta).sum(1)


def _direct(patches: Tensor, gram: Tensor) -> Form:
    patches = patches.transpose(1, 2)

    def values(delta: Tensor) -> Tensor:
        gradients = delta.flatten(2) @ patches
        return ((gram @ gradients) * gradients).sum()

    return values


def _gram(patches: Tensor, gram: Tensor) -> Form:
    pairs = patches.transpose(1, 2) @ patches

    def values(delta: Tensor) -> Tensor:
        rows = delta.flatten(2)
        return ((rows.transpose(1, 2) @ (gram @ rows)) * pairs).sum()

    return values


def _alias(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
    """Let the first measured layer start the graph."""
    return None if args[0].requires_grad else (args[0].detach().requires_grad_(), *args[1:])
