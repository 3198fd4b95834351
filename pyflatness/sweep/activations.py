"""Sum the diagonal of the loss Hessian in layers' outputs and inputs, from the cotangents of a sweep.

For a layer z = W x + b, with δ the gradient that a cotangent gives in z,

    ∂²ℓ/∂z² = Σ_c σ_c δ^(c) δ^(c)ᵀ        ∂²ℓ/∂x² = Wᵀ (∂²ℓ/∂z²) W = Σ_c σ_c (Wᵀ δ^(c)) (Wᵀ δ^(c))ᵀ

in the GGN, for each sample, over all positions and calls. Only the path of x through this layer counts, not its other
uses. If the model is not piecewise linear behind the layer, products y = (∂²ℓ/∂z²) v take the place of cotangents, for
all unit vectors v, or in the mean over random signs:

    diag ∂²ℓ/∂z² = Σ_v v ∘ y        diag ∂²ℓ/∂x² = Σ_v (Wᵀ v) ∘ (Wᵀ y)

Entries of the diagonal are summed over a channel's positions.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from .. import contractions
from ..contractions import promoted, promoted_dtype
from ..contractions.quantities import Contribution
from ..hessian.block_traces import derivatives
from ..hessian.entries_and_neurons import batch_of
from ..model import layers, spread
from ..model.kinds import Linear
from ..numerics.signs import Signs
from ..passes import neighbours
from ..passes.limit import check_passes
from ..passes.runner import Run

OUTPUTS, INPUTS = "outputs", "inputs"
ACTIVATIONS = (OUTPUTS, INPUTS)
"""Quantities that are sums over the diagonal in a layer's outputs or inputs, and not of its weight gradients."""

_OF_ACTIVATIONS = 2**33  # between the streams of signs of weights and of activations

Calls = Sequence[Tensor]  # values at a layer's outputs, or inputs: of each call, (n, q, …)


class Activations:
    """Contract cotangents, or Hessian products, with themselves in the outputs and inputs of layers of a run."""

    def __init__(
        self, run: Run, modules: Mapping[str, nn.Module], wanted: Sequence[str], scales: Mapping[str, Tensor]
    ) -> None:
        self._run, self._modules, self._wanted, self._scales = run, modules, wanted, scales

    def input_edges(self, names: Collection[str]) -> dict[str, GradientEdge]:
        """Return the edges at which Wᵀ δ alone arrives in a backward pass, for layers that have one."""
        if INPUTS not in self._wanted:
            return {}
        dtypes = {name: self._weight(name).dtype for name in names}
        whole = [name for name, dtype in dtypes.items() if promoted_dtype(dtype) == dtype]  # otherwise it is rounded
        found = {name: neighbours.carried_edge(self._run, name, dtypes[name]) for name in whole}
        return {name: edge for name, edge in found.items() if edge is not None}

    def of(
        self,
        gradients: Mapping[str, Sequence[Tensor]],
        at_inputs: Mapping[str, Tensor],
        sign: Tensor | float | None,
        share: float = 1.0,
    ) -> Iterator[tuple[str, Contribution]]:
        """Yield each layer's contribution of a cotangent, from its gradients in outputs and in the only call's input.

        ``share`` multiplies its part of the diagonal: 1 / draws of sampled values.
        """
        for name, several in gradients.items():
            delta = self._by_sample(name, several)
            gamma = self._by_sample(name, [at_inputs[name]]) if name in at_inputs else None
            with contractions.full_precision(self._run.outputs):
                diagonals = self._diagonals(name, delta, delta, gamma)
            yield name, self._contribution(name, diagonals, sign, share)

    def nothing(self, names: Collection[str]) -> Iterator[tuple[str, Contribution]]:
        """Yield zero contributions, as of a loss over a single class, which has no cotangents."""
        device, calls = self._run.outputs.device, {name: self._run.calls(name) for name in names}
        zeros = {name: [torch.zeros_like(call.output, device=device) for call in made] for name, made in calls.items()}
        yield from self.of(zeros, {}, None)

    def products(self, name: str) -> int:
        """Return how many Hessian products a layer's exact values take: one for each entry of a sample's outputs."""
        run = self._run
        return sum(run.layouts[name].entries(call.output, run.samples) for call in run.calls(name))

    def by_hessian(
        self, name: str, gradients: Sequence[Tensor], signs: Signs | None, stream: int, most: int
    ) -> Iterator[tuple[int, Contribution]]:
        """Yield a layer's values by second derivatives: as probe 0 without signs, else of each probe."""
        multiply, like = self._multiplied(name, gradients), promoted(gradients[0])
        count, samples = self.products(name), self._run.samples
        batch = batch_of(samples * count * like.element_size())
        if signs is None:
            what = (
                f"layer {name!r}: exact values of its activations take {count} Hessian products (one for each output)"
            )
            one = partial(multiply, like.new_zeros(1, samples, count))
            check_passes(count, most, what, one, samples, by_hessian=True)
            for chosen in torch.arange(count, device=like.device).split(batch):
                units = like.new_zeros(len(chosen), samples, count)
                units[torch.arange(len(chosen), device=like.device), :, chosen] = 1.0
                yield 0, self._contribution(name, [diagonals.sum(dim=0) for diagonals in multiply(units)])
            return
        for start in range(0, len(signs.draws), batch):
            drawn = Signs(signs.seed, signs.draws[start : start + batch])
            found = zip(
                *multiply(drawn(stream + _OF_ACTIVATIONS, self._run.numbers, count).to(like.dtype)), strict=True
            )
            for draw, diagonals in enumerate(found, start):
                yield draw, self._contribution(name, diagonals, share=1 / len(signs.draws))

    def _multiplied(self, name: str, gradients: Sequence[Tensor]) -> Callable[[Tensor], list[Tensor]]:
        """Return a function: directions v (k, n, entries) of outputs -> diagonals of v yᵀ, (k, n, channels).

        There is one for each quantity.
        """
        run, calls = self._run, self._run.calls(name)
        with torch.enable_grad():
            first = self._by_sample(name, gradients)
            joined = torch.cat([part.flatten(1) for part in first], dim=1)
        second, shapes = derivatives(joined, [call.edge for call in calls]), [part.shape[1:] for part in first]

        def multiply(directions: Tensor) -> list[Tensor]:
            products = [
                directions.new_zeros(len(directions) * run.samples, *shape)
                if part is None
                else torch.func.vmap(lambda gradient: promoted(run.samples_first(name, gradient)))(part).flatten(0, 1)
                for part, shape in zip(second(directions), shapes, strict=True)
            ]
            flat = directions.flatten(0, 1).split([shape.numel() for shape in shapes], dim=1)
            moved = [part.view(-1, *shape) for part, shape in zip(flat, shapes, strict=True)]
            diagonals = self._diagonals(name, moved, products)
            return [diagonal.unflatten(0, (len(directions), -1)) for diagonal in diagonals]

        return multiply

    def _diagonals(self, name: str, left: Calls, right: Calls, gamma: Calls | None = None) -> list[Tensor]:
        """Return the diagonals of u vᵀ by channel, (n, channels) float64, of each quantity.

        ``gamma`` is Wᵀ u if u is v.
        """
        calls, found = self._run.calls(name), []
        for quantity in self._wanted:
            sides = left, right
            if quantity == INPUTS:
                first = gamma or self._carried(name, left)
                sides = first, first if left is right else self._carried(name, right)
            by_call = [_by_channel(a * b, call.kind, quantity) for a, b, call in zip(*sides, calls, strict=True)]
            if layers.kind_of(self._modules[name]).by_weight:  # the channels of one use need not be those of another
                by_call = [each.sum(dim=1, keepdim=True) for each in by_call]
            diagonal = torch.stack(by_call).sum(dim=0)
            if quantity == INPUTS and name in self._scales:
                diagonal = diagonal * self._scales[name].double().square()
            found.append(diagonal)
        return found

    def _carried(self, name: str, delta: Calls) -> list[Tensor]:
        """Return Wᵀ δ of each call, (n, q, …)."""
        found, weight = [], promoted(spread.whole(self._weight(name)).detach())
        for part, call in zip(delta, self._run.calls(name), strict=True):
            gamma = call.kind.carried(part.flatten(0, 1), tuple(call.inputs.shape[1:]), weight)
            found.append(gamma.unflatten(0, part.shape[:2]))
        return found

    def _weight(self, name: str) -> Tensor:
        weight = self._modules[name].weight
        assert isinstance(weight, Tensor)
        return weight

    def _by_sample(self, name: str, parts: Sequence[Tensor]) -> list[Tensor]:
        return [promoted(self._run.samples_first(name, part)) for part in parts]

    def _contribution(
        self, name: str, diagonals: Sequence[Tensor], sign: Tensor | float | None = None, share: float = 1.0
    ) -> Contribution:
        signed = [diagonal if sign is None else (diagonal.mT * sign).mT for diagonal in diagonals]
        summands = {quantity: share * each for quantity, each in zip(self._wanted, signed, strict=True)}
        if layers.kind_of(self._modules[name]).by_weight:
            summands = {}
        return Contribution(torch.stack([each.sum(dim=1) for each in signed]), summands)


def _by_channel(products: Tensor, kind: Linear, quantity: str) -> Tensor:
    """Return values at a call's outputs, or inputs, (n, q, …), summed over positions: (n, channels) float64."""
    if kind.class_dim == 1:
        channels = products.movedim(2, -1)
    else:
        channels = products.flatten(-kind.row_dims) if quantity == OUTPUTS else products
    return channels.flatten(1, -2).sum(dim=1, dtype=torch.float64)
