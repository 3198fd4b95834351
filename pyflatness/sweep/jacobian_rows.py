"""Collect the rows of a Jacobian at one place, for the samples of a run, and compute quantities of them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from .. import contractions
from ..interrupts import cached_property
from ..model import layers
from ..numerics import spectra
from ..passes.layer_form import LayerForm
from ..passes.runner import Run

_ENTRIES = 2**17  # entries of a matrix that are converted to float64 at a time


@dataclass(frozen=True)
class Jacobian:
    """Hold J = ∂f/∂x of every sample at a place, once all its rows are there."""

    x: Tensor  # (n, M)
    rows: Sequence[Tensor]  # of each output, (n, M)
    eigenvalues: Callable[[Tensor], Tensor]  # symmetric matrices (n, C, C) -> (n, C), ascending
    top: int | None  # see :func:`.spectra.log_volumes`
    weights: Tensor | None  # |∂f/∂w|_F² for the weight w of the layer with input x, (n,)
    past: Sequence[Tensor | None]  # rows of J - (∂f/∂z) w, by paths that skip the layer's output z; None if rounding
    scales: Tensor | None  # b, (M,), if given for the features

    @cached_property
    def gram(self) -> Tensor:
        """Return G = J Jᵀ, (n, C, C) float64."""
        return spectra.gram(self.rows)

    @cached_property
    def squares(self) -> Tensor:
        """Return the squares of the singular values, ascending, (n, C)."""
        return self.eigenvalues(self.gram)

    def total(self, of_row: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the sum over rows (n, M) of a function of each, (n,) float64."""
        zero = torch.zeros(len(self.x), dtype=torch.float64, device=self.x.device)
        return sum((of_row(row) for row in self.rows), start=zero)


@dataclass(frozen=True)
class Quantity:
    """Describe a quantity of J, as a row of the table."""

    of: Callable[[Jacobian], Tensor | None]  # every sample's value, (n,) float64; None at a place without it
    always: bool = False  # computed even if not requested
    of_weight: bool = False  # needs the gradient in the layer's weight
    of_zero: float = 0.0  # its value for J = 0; if this is infinite, values are not checked for NaN and infinity


def _by_parts(of: Callable[..., Tensor], *matrices: Tensor) -> Tensor:
    """Return ``of`` matrices (n, M) in float64, (n,), some rows at a time so that no whole copy is made."""
    rows = max(1, _ENTRIES // max(1, matrices[0].shape[1]))
    parts = zip(*(matrix.split(rows) for matrix in matrices), strict=True)
    return torch.cat([of(*(part.double() for part in some)) for some in parts])


def _scaled(at: Jacobian) -> Tensor:
    return at.total(lambda row: _by_parts(lambda rows, x: (rows * x).square().sum(dim=1), row, at.x))


def _rescaled(at: Jacobian) -> Tensor | None:
    scales = at.scales
    if scales is None:
        return None

    def of_row(row: Tensor) -> Tensor:
        return _by_parts(lambda rows: (rows.square() / scales)[:, scales > 0].sum(dim=1), row)

    return at.total(of_row) * _by_parts(lambda x: x.square() @ scales, at.x)


def _past(at: Jacobian) -> Tensor | None:
    if at.weights is None:
        return None
    if all(row is None for row in at.past):
        return torch.zeros_like(at.weights)
    rows = [torch.zeros_like(at.rows[0]) if row is None else row for row in at.past]
    return at.eigenvalues(spectra.gram(rows))[:, -1].sqrt()


QUANTITIES = {
    "size": Quantity(lambda at: _by_parts(lambda rows: rows.square().sum(dim=1), at.x), always=True),
    "largest": Quantity(lambda at: at.squares[:, -1].sqrt(), always=True),
    "trace": Quantity(lambda at: at.gram.diagonal(dim1=1, dim2=2).sum(dim=1), always=True),
    "square": Quantity(lambda at: at.gram.square().sum(dim=(1, 2)), always=True),
    "scaled": Quantity(_scaled),
    "log_volume": Quantity(lambda at: spectra.log_volumes(at.rows, at.squares, at.top), of_zero=-math.inf),
    "weights": Quantity(lambda at: at.weights, of_weight=True),
    "past": Quantity(_past, of_weight=True),
    "rescaled": Quantity(_rescaled),
}
"""Of each sample: |x|², s_max, Tr G, Tr G²; on request |J diag(x)|_F², Σ log s, |∂f/∂w|_F² of a layer's weight w, s_max
of J - (∂f/∂z) w, which is the derivative in x by paths that skip the layer's output z, and
|J diag(b)^-½|_F² |diag(b)^½ x|² over the features with b > 0."""


class WeightGradient:
    """Sum |∂f/∂w|_F² of each sample for a layer's weight w, and compute the part (∂f/∂z) w of J through the layer.

    ``apart`` says why w is not one matrix that is used once; empty if it is.
    """

    def __init__(self, run: Run, name: str, module: nn.Module, form: LayerForm, width: int) -> None:
        self._run, self._module, self._form, self.calls = run, module, form, run.calls(name)
        with contractions.full_precision(run.outputs):
            self._squares = form.contraction(run).at(form.inputs(run), width).of
        self.total = torch.zeros(run.samples, dtype=torch.float64, device=run.outputs.device)
        self.apart = _shape_apart(module, [call.inputs for call in self.calls], run.samples)

    def add(self, deltas: Sequence[Tensor]) -> None:
        """Add the gradients of one output of the model in the layer's outputs."""
        with contractions.full_precision(self._run.outputs):
            self.total += self._squares(self._form.cotangent(self._run, deltas)).values[0]

    def carried(self, deltas: Sequence[Tensor]) -> list[Tensor]:
        """Return gradients in the layer's outputs sent back to its inputs, in their shapes, through the layer alone."""
        with contractions.full_precision(self._run.outputs):
            pairs, weight = zip(deltas, self.calls, strict=True), layers.weight_of(self._module)
            return [call.kind.carried(delta, tuple(call.inputs.shape[1:]), weight) for delta, call in pairs]


class PlaceRows:
    """Collect the rows of J at one place, of all samples of a run: at one tensor x, or one for each call of a layer.

    ``passed`` says whether x also reaches the outputs by a path that skips the layer, such as a residual connection.
    """

    def __init__(
        self,
        name: str,
        edges: Sequence[GradientEdge],
        tensors: Sequence[Tensor],
        samples_first: Callable[[Tensor], Tensor],
        weight: WeightGradient | None = None,
        scales: Tensor | None = None,
    ) -> None:
        self.name, self.weight = name, weight
        self.edges = [*edges, *(call.edge for call in weight.calls)] if weight else [*edges]
        self._tensors, self._samples_first = tensors, samples_first
        self._x = self._flat([tensor.detach() for tensor in tensors])
        fit = scales is not None and len(scales) == self._x.shape[1]
        self._scales = scales.to(self._x.device) if scales is not None and fit else None
        self._rows: list[Tensor] = []
        self._past: list[Tensor | None] = []
        self.passed = False

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Add the gradients of one output at all edges; None for an edge that does not reach it."""
        shapes = [*self._tensors, *(call.output for call in self.weight.calls)] if self.weight else self._tensors
        found = [
            torch.zeros(like.shape, dtype=like.dtype, device=self._x.device) if gradient is None else gradient
            for gradient, like in zip(gradients, shapes, strict=True)
        ]
        row = self._flat(found[: len(self._tensors)])
        self._rows.append(row)
        if self.weight is not None:
            deltas = found[len(self._tensors) :]
            self.weight.add(deltas)
            self._past.append(self._clear(row - self._flat(self.weight.carried(deltas)), row))

    def values(
        self, wanted: Mapping[str, Quantity], eigenvalues: Callable[[Tensor], Tensor], top: int | None
    ) -> dict[str, Tensor]:
        """Return those of the wanted quantities that the place has, (n,) float64 on the CPU, and free the rows."""
        weights = None if self.weight is None else self.weight.total
        at = Jacobian(self._x, self._rows, eigenvalues, top, weights, self._past, self._scales)
        self._rows, self._past = [], []
        found = {name: row.of(at) for name, row in wanted.items()}
        return {name: values.cpu() for name, values in found.items() if values is not None}

    def _clear(self, rest: Tensor, row: Tensor) -> Tensor | None:
        """Return the rest of a row without the path through the layer; None if it is rounding."""
        left, size = (each.nan_to_num(0.0, 0.0, 0.0).norm() for each in (rest, row))
        if not bool(left > torch.finfo(row.dtype).eps ** 0.5 * size):
            return None
        self.passed = True
        return rest

    def _flat(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return each sample's entries of all calls side by side, (n, M)."""
        arranged = [self._samples_first(tensor) for tensor in tensors]
        rows = [tensor.reshape(len(tensor), -1) for tensor in arranged]
        return rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)


def _shape_apart(module: nn.Module, inputs: Sequence[Tensor], samples: int) -> str:
    """Return why the layer is not one matrix that is used once, from its shapes; empty if it is."""
    if layers.is_convolution(module):
        return "a convolution"
    if len(inputs) > 1:
        return "called several times"
    return "several positions" if inputs[0].numel() != samples * inputs[0].shape[-1] else ""
