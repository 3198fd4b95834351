"""Treat a linear layer as a weight matrix; other kinds of layers are subclasses of this kind."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...contractions import (
    Contractor,
    Geometry,
    Ingredients,
    LayerContraction,
    WithColumns,
    divided,
    of_outputs,
    product,
    promoted,
)
from .deviations import Deviations, FeatureScale

First = Callable[[Tensor], Tensor]
"""Bring a tensor of a call to the form (n, q, …), with samples first and a sample's q rows of dimension 0 second."""


class Linear:
    """Treat a linear layer as its weight w (d, m), which multiplies inputs φ (m,).

    A kind has no weight: it serves all layers of the kind, or of the same sizes, and its methods get the weight.

    Attributes:
        space: number of dimensions of space, which follow the channels of inputs and outputs; 0 if channels are last.
        tokens: whether inputs are numbers of columns, for one-hot vectors φ.
        has_input: whether φ is one tensor of the model's graph, with a derivative in it.
        least_dims: the fewest dimensions of the tensor from :meth:`inputs_of`, one of them for samples.
        groups: the number of separate matrices in the weight.
        class_dim: the dimension of rows in the output.
        row_dims: the number of dimensions of rows in the output, if they are last.
        pointwise: whether every position is multiplied by the same matrix, once.
        repeats_inputs: whether padding repeats pixels of the input.
        keeps_graph: whether the tensor from :meth:`inputs_of` has the graph of the arguments.
        twice_differentiable: whether torch differentiates the layer's own forward twice.
        when_idle: why calls of such a layer may not be recorded, for messages; empty if they always are.
        by_weight: whether there are no positions, so that second derivatives are those in the weight itself.
        stacks_cotangents: whether stacked cotangents of a call can be brought into common form together.
        geometry: the (padded) inputs of each position.
        computes: what the output is, for messages.
    """

    space = 0
    tokens = False
    has_input = True
    least_dims = 2
    groups = 1
    class_dim = -1
    row_dims = 1
    pointwise = True
    repeats_inputs = False
    keeps_graph = True
    twice_differentiable = True
    when_idle = ""
    by_weight = False
    stacks_cotangents = True
    geometry = Geometry()
    computes = "W φ + b of its weight and input"

    def as_matrix(self, weight: Tensor) -> Tensor:
        """Return a tensor in the shape of the weight as (d, m)."""
        return weight

    def as_weight(self, matrix: Tensor) -> Tensor:
        """Return a (d, m) matrix in the shape of the weight; undoes :meth:`as_matrix`."""
        return matrix

    def as_rows(self, weight: Tensor) -> Tensor:
        """Return a tensor in the shape of the weight as the matrix whose rows a quantiser scales separately."""
        return self.as_matrix(weight)

    def from_rows(self, matrix: Tensor) -> Tensor:
        """Return such a matrix in the shape of the weight; undoes :meth:`as_rows`."""
        return self.as_weight(matrix)

    def inputs_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
        """Return the tensor among the arguments of a call that gives φ; None if the call is not a layer's."""
        first = args[0] if args else next(iter(kwargs.values()), None)
        return first if isinstance(first, Tensor) else None

    def forward(self, args: Sequence[Any], kwargs: Mapping[str, Any], weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the layer's output for the arguments of a call, with this weight and bias."""
        inputs = self.inputs_of(args, kwargs)
        assert inputs is not None
        return self.affine(inputs, weight, bias)

    def affine(self, inputs: Tensor, weight: Tensor, bias: Tensor | None, like: Tensor | None = None) -> Tensor:
        """Return W φ + b as torch computes it, in the shape of ``like`` if the input does not determine the shape."""
        return F.linear(inputs, weight, bias)

    def varied(self, inputs: Tensor, weight: Tensor, like: Tensor, coefficients: Tensor | None) -> Tensor:
        """Return the change of a call's output for a change ``weight``, in its dtype and the shape of ``like``."""
        return self.affine(inputs.to(weight.dtype), weight, None, like)

    def changed(self, call: "Linear", patches: Tensor, rows: Tensor, changes: Tensor) -> Tensor:
        """Return the change of the output of a ``call`` for each sample's ``changes`` of the weight, (n, G, m, d).

        ``patches`` are those of :meth:`patches`; ``rows``, and the result, are outputs in the form of :meth:`rows`.
        """
        return product(patches, changes)

    def varied_alone(self, inputs: Tensor, weight: Tensor, like: Tensor) -> Tensor:
        """Return the result of :meth:`varied` for a call that has only these inputs as arguments."""
        return self.varied(inputs, weight, like, self.coefficients((inputs,), {}))

    def coefficients(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
        """Return the coefficients of the tokens of a call, in their shape; None if they are 1, or without tokens."""
        return None

    def pad(self, inputs: Tensor, output: Tensor) -> Tensor:
        """Return the input with the layer's padding, for an output of this shape."""
        return inputs

    def carried(self, delta: Tensor, size: tuple[int, ...], weight: Tensor) -> Tensor:
        """Return Wᵀ δ for δ in the shape of an output; ``size`` is the inputs' shape without dimension 0."""
        return product(delta.to(weight.dtype), self.as_matrix(weight)).to(weight.dtype)

    def at_ends(
        self, inputs: Tensor, output: Tensor, weight: Tensor, coefficients: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return W φ of a few first and last rows of a call's inputs, and the same rows of its output."""
        flat = (part.reshape(-1, part.shape[-1]) for part in (inputs, output))
        first, rows = (part[:: max(1, len(part) - 1)] for part in flat)
        return self.affine(first.to(weight.dtype), weight, None), rows

    def in_common_form(self, tensor: Tensor) -> list[Tensor]:
        """Return padded inputs or cotangents of one call, (n, q, …, features), in the form of a geometry.

        Convolutions have (n, q, channels, …), with q images for each sample; with three dimensions of space the result
        has q tensors, otherwise one.
        """
        return [tensor.reshape(len(tensor), -1, tensor.shape[-1]).transpose(1, 2)[..., None, None]]

    def divided(self, inputs: Tensor, scale: Tensor) -> Tensor:
        """Return the input of a call with its channels divided by their scale; channels of scale 0 become 0."""
        return divided(inputs, scale, self.class_dim)

    def input_rows(self, inputs: Tensor, coefficients: Tensor | None, first: First) -> Tensor:
        """Return the unpadded input of a call as (n, rows, channels), for the deviations of features."""
        rows = first(inputs)
        rows = rows.movedim(2, -1) if self.class_dim == 1 else rows
        return rows.reshape(len(rows), -1, rows.shape[-1])

    def deviations(self, columns: int) -> Deviations:
        """Return an object that collects the deviations of features, from rows of :meth:`input_rows`."""
        return FeatureScale()

    def contraction(self, given: Ingredients) -> Contractor:
        """Return the contractor of the layer's inputs and cotangents in common form."""
        weight, convolution = given.weight, self.space > 0
        make = WithColumns if any(map(of_outputs, given.quantities)) else LayerContraction
        return make(
            weight, self.geometry, given.backend, given.quantities, memory=given.memory, convolution=convolution
        )

    def cotangents(
        self, gradient: Tensor, inputs: Tensor, coefficients: Tensor | None, scale: Tensor | None, first: First
    ) -> list[Tensor]:
        """Return a gradient in the output of a call in the common form of :meth:`in_common_form`.

        ``scale``, or None, is that of the input's channels in :meth:`divided`; ``first`` brings samples of the call's
        tensors to dimension 0.
        """
        return self.in_common_form(first(gradient))

    def rows(self, cotangent: Tensor) -> Tensor:
        """Return a cotangent in common form as rows (n, G, P, d)."""
        return self.geometry.rows(promoted(cotangent))

    def columns(self, inputs: Callable[[], Sequence[Tensor]]) -> Tensor | None:
        """Return the columns of the weight that inputs in common form use, ascending; None for all."""
        return None

    def patches(self, inputs: Tensor, columns: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return patches φ of inputs in common form, in these columns, (n, G, P, m)."""
        return self.geometry.patches(promoted(inputs))

    def gradients(
        self, inputs: Sequence[Tensor], cotangent: Sequence[Tensor], like: Tensor, calls: Sequence["Linear"]
    ) -> Tensor:
        """Return M, (n, G, d, m), from inputs and a cotangent in common form, and the kinds of their calls."""
        patches = [self.geometry.patches(promoted(part)) for part in inputs]
        return torch.stack([product(self.rows(d).mT, phi) for phi, d in zip(patches, cotangent, strict=True)]).sum(
            dim=0
        )

    def joined(self, parts: list[Tensor]) -> list[Tensor]:
        """Return tensors of several calls joined along an unused dimension of space, if there is one and shapes fit."""
        if len(parts) == 1 or self.space == 3 or len({(*part.shape[:2], *part.shape[3:]) for part in parts}) > 1:
            return parts
        return [torch.cat(parts, dim=2)]


class TransposedLinear(Linear):
    """Treat a linear layer that keeps its weight as (m, d), such as GPT-2's, as a matrix (d, m)."""

    def as_matrix(self, weight: Tensor) -> Tensor:
        return weight.t()

    def as_weight(self, matrix: Tensor) -> Tensor:
        return matrix.t()

    def affine(self, inputs: Tensor, weight: Tensor, bias: Tensor | None, like: Tensor | None = None) -> Tensor:
        """Return W φ + b as the layer of transformers computes it, but in one dtype."""
        return inputs @ weight if bias is None else inputs @ weight + bias


class PermutedLinear(Linear):
    """Treat a linear layer with a weight in more dimensions as a matrix: ``rows`` are rows, and the others columns.

    An example is a projection of queries (heads, m, d), a matrix of heads · d rows.
    """

    def __init__(self, shape: Sequence[int], rows: Sequence[int]) -> None:
        self._order = (*rows, *(dim for dim in range(len(shape)) if dim not in rows))
        self._sizes, self._rows = [shape[dim] for dim in self._order], len(rows)

    def as_matrix(self, weight: Tensor) -> Tensor:
        return weight.permute(self._order).flatten(self._rows).flatten(0, self._rows - 1)

    def as_weight(self, matrix: Tensor) -> Tensor:
        inverse = [self._order.index(dim) for dim in range(len(self._order))]
        return matrix.reshape(self._sizes).permute(inverse)

    def affine(self, inputs: Tensor, weight: Tensor, bias: Tensor | None, like: Tensor | None = None) -> Tensor:
        return F.linear(inputs, self.as_matrix(weight), bias)
