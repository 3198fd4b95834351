"""Treat a linear layer as a weight matrix; what it says is what other kinds of layers say otherwise."""

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
"""Bring a tensor of a call to samples in dimension 0 and what else is in that in dimension 1: (n, q, …)."""


class Linear:
    """Say how a layer is a matrix w (d, m) that multiplies inputs φ (m,): a linear layer, which keeps its weight so.

    It is the same for all layers of the kind, or of the same sizes; the weight comes with each question.

    Attributes:
        space: dimensions of space that inputs and outputs have, behind their channels; 0: channels are last.
        tokens: whether inputs are numbers of columns, one-hot vectors φ.
        has_input: whether φ is one tensor that the model makes, with a derivative in it.
        least_dims: that what :meth:`inputs_of` returns has, with one for samples.
        groups: separate matrices that the weight is made of.
        class_dim: the dimension of the output that holds rows.
        row_dims: dimensions of the output that rows take where they are last.
        pointwise: whether every position is multiplied by the same matrix, once.
        repeats_inputs: whether padding repeats pixels of the input.
        keeps_graph: whether what :meth:`inputs_of` gives has the graph of the arguments.
        twice_differentiable: whether torch differentiates the layer's own forward twice.
        when_idle: why a layer that the model calls may not be seen to run, for messages; empty where it is.
        by_weight: whether the weight has no positions, so that second derivatives are taken in itself.
        stacks_cotangents: whether several cotangents of a call may come into common form as one, in dimension 0.
        geometry: which (padded) inputs a position sees.
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
        """Return a tensor of the shape of the weight as (d, m)."""
        return weight

    def as_weight(self, matrix: Tensor) -> Tensor:
        """Return a (d, m) matrix as a tensor of the shape of the weight; undoes :meth:`as_matrix`."""
        return matrix

    def as_rows(self, weight: Tensor) -> Tensor:
        """Return a tensor of the shape of the weight as the matrix each of whose rows a quantiser scales by itself."""
        return self.as_matrix(weight)

    def from_rows(self, matrix: Tensor) -> Tensor:
        """Undo :meth:`as_rows`."""
        return self.as_weight(matrix)

    def inputs_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
        """Return what φ is made of among the arguments of a call; None for a call that is none of a layer."""
        first = args[0] if args else next(iter(kwargs.values()), None)
        return first if isinstance(first, Tensor) else None

    def forward(self, args: Sequence[Any], kwargs: Mapping[str, Any], weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the layer's output for the arguments of a call, with a given weight and bias."""
        inputs = self.inputs_of(args, kwargs)
        assert inputs is not None
        return self.affine(inputs, weight, bias)

    def affine(self, inputs: Tensor, weight: Tensor, bias: Tensor | None, like: Tensor | None = None) -> Tensor:
        """Return W φ + b as torch computes it, of the shape of ``like`` where the input leaves that open."""
        return F.linear(inputs, weight, bias)

    def varied(self, inputs: Tensor, weight: Tensor, like: Tensor, coefficients: Tensor | None) -> Tensor:
        """Return how a call's output changes with a change of the weight, in its dtype and the shape of ``like``."""
        return self.affine(inputs.to(weight.dtype), weight, None, like)

    def changed(self, call: "Linear", patches: Tensor, rows: Tensor, changes: Tensor) -> Tensor:
        """Return how the output of a ``call`` changes with each sample's own change of the weight (n, G, m, d).

        φ is as :meth:`patches` has it; ``rows``, and what is returned, are as :meth:`rows` has outputs.
        """
        return product(patches, changes)

    def varied_alone(self, inputs: Tensor, weight: Tensor, like: Tensor) -> Tensor:
        """Return what :meth:`varied` does for a call on these inputs alone."""
        return self.varied(inputs, weight, like, self.coefficients((inputs,), {}))

    def coefficients(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
        """Return what the tokens of a call are multiplied by, of their shape; None: by 1, or there are none."""
        return None

    def pad(self, inputs: Tensor, output: Tensor) -> Tensor:
        """Return the input, padded as the layer does it for an output of this shape."""
        return inputs

    def carried(self, delta: Tensor, size: tuple[int, ...], weight: Tensor) -> Tensor:
        """Return Wᵀ δ for δ of the shape of an output and inputs of this size, without dimension 0."""
        return product(delta.to(weight.dtype), self.as_matrix(weight)).to(weight.dtype)

    def at_ends(
        self, inputs: Tensor, output: Tensor, weight: Tensor, coefficients: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return W φ of a few first and last rows of a call's inputs, and the same rows of its output."""
        flat = (part.reshape(-1, part.shape[-1]) for part in (inputs, output))
        first, rows = (part[:: max(1, len(part) - 1)] for part in flat)
        return self.affine(first.to(weight.dtype), weight, None), rows

    def in_common_form(self, tensor: Tensor) -> list[Tensor]:
        """Return inputs (padded) or cotangents of one call, (n, …, features), in the dimensions of a geometry.

        Channels in front of space come as (n, q, channels, …), of q images a sample; three dimensions of space
        give q tensors.
        """
        return [tensor.reshape(len(tensor), -1, tensor.shape[-1]).transpose(1, 2)[..., None, None]]

    def divided(self, inputs: Tensor, scale: Tensor) -> Tensor:
        """Return the input of a call with its channels divided by their scale; those of scale 0 become 0."""
        return divided(inputs, scale, self.class_dim)

    def input_rows(self, inputs: Tensor, coefficients: Tensor | None, first: First) -> Tensor:
        """Return the unpadded input of a call as (n, rows, channels), of which the deviations of features are taken."""
        rows = first(inputs)
        rows = rows.movedim(2, -1) if self.class_dim == 1 else rows
        return rows.reshape(len(rows), -1, rows.shape[-1])

    def deviations(self, columns: int) -> Deviations:
        """Return what collects the deviations of inputs as :meth:`input_rows` has them, of a weight's columns."""
        return FeatureScale()

    def contraction(self, given: Ingredients) -> Contractor:
        """Return what contracts inputs and cotangents of the layer, as they are in common form."""
        weight, convolution = given.weight, self.space > 0
        make = WithColumns if any(map(of_outputs, given.quantities)) else LayerContraction
        return make(
            weight, self.geometry, given.backend, given.quantities, memory=given.memory, convolution=convolution
        )

    def cotangents(
        self, gradient: Tensor, inputs: Tensor, coefficients: Tensor | None, scale: Tensor | None, first: First
    ) -> list[Tensor]:
        """Return a gradient in the output of a call in common form, as :meth:`in_common_form` has inputs.

        ``scale`` is of the input's channels, by which :meth:`divided` divides them, or None; ``first`` lays out
        the call's tensors.
        """
        return self.in_common_form(first(gradient))

    def rows(self, cotangent: Tensor) -> Tensor:
        """Return a cotangent in common form by position, (n, G, P, d)."""
        return self.geometry.rows(promoted(cotangent))

    def columns(self, inputs: Callable[[], Sequence[Tensor]]) -> Tensor | None:
        """Return which columns of the weight inputs in common form have, ascending; None: all of them."""
        return None

    def patches(self, inputs: Tensor, columns: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return φ of inputs in common form by position in these columns, (n, G, P, m), written out."""
        return self.geometry.patches(promoted(inputs))

    def gradients(
        self, inputs: Sequence[Tensor], cotangent: Sequence[Tensor], like: Tensor, calls: Sequence["Linear"]
    ) -> Tensor:
        """Return M of some samples, (n, G, d, m), of inputs and a cotangent in common form, and their calls' kinds."""
        patches = [self.geometry.patches(promoted(part)) for part in inputs]
        return torch.stack([product(self.rows(d).mT, phi) for phi, d in zip(patches, cotangent, strict=True)]).sum(
            dim=0
        )

    def joined(self, parts: list[Tensor]) -> list[Tensor]:
        """Return tensors of several calls as one, along a free dimension of space, if there is one and sizes allow."""
        if len(parts) == 1 or self.space == 3 or len({(*part.shape[:2], *part.shape[3:]) for part in parts}) > 1:
            return parts
        return [torch.cat(parts, dim=2)]


class TransposedLinear(Linear):
    """A linear layer that keeps its weight as (m, d), as that of GPT-2 does."""

    def as_matrix(self, weight: Tensor) -> Tensor:
        return weight.t()

    def as_weight(self, matrix: Tensor) -> Tensor:
        return matrix.t()

    def affine(self, inputs: Tensor, weight: Tensor, bias: Tensor | None, like: Tensor | None = None) -> Tensor:
        """Return W φ + b as transformers' layer computes it, but in one dtype."""
        return inputs @ weight if bias is None else inputs @ weight + bias


class PermutedLinear(Linear):
    """A linear layer that keeps its weight in more dimensions, of which ``rows`` are rows and the others columns.

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
