"""Define what every loss says of its rows, and the helpers that losses share."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from ..contractions import Backend, Bounded, Labels, RowSum
from ..errors import InputError
from ..model.outputs import refusal

Reduction = str


@dataclass
class Terms:
    """Hold the rows of a batch as the loss sees them.

    ``scale`` (rows,) float64 is 0 for a row that adds nothing, NaN for one without a loss: its targets, or what is
    known of its outputs, have NaN or infinity in them. Its curvature may be a number all the same. ``used`` (rows,) is
    False for a row that the loss ignores (one of class weight 0 is used); None where all are.
    """

    scale: Tensor
    weights: Tensor  # (rows,) float64, the row's weight in a mean; their sum over the data is the normaliser
    extra: tuple[Tensor, ...] = ()  # what the curvature needs besides the features: coefficients or targets, rows first
    used: Tensor | None = None

    def take(self, index: Tensor) -> "Terms":
        """Return the terms of some of the rows."""
        used = None if self.used is None else self.used[index]
        return Terms(self.scale[index], self.weights[index], tuple(part[index] for part in self.extra), used)


@dataclass
class Mixtures:
    """Hold square-root factors S of the loss Hessian for a batch's rows, whose columns random signs add up.

    For each row i, scale_i ∂²ℓ_i/∂f_i² = Σ_c σ_ic s_ic s_icᵀ. Any S Q with an orthogonal Q does; the variance of what
    signs give depends on it (docs/estimators.md). ``mixed`` takes signs r (rows, C) and gives Σ_c r_c s_·c, (rows, C),
    over the columns of one sign σ together, with that σ; a column whose r is 0 is left out. ``weights`` gives (rows, C)
    float64, how much each column that is added up counts, about σ |s_·c|²; 0 for a place in r that has none.
    """

    mixed: Callable[[Tensor], list[tuple[Tensor, float]]]
    weights: Callable[[], Tensor]
    take: Callable[[Tensor], "Mixtures"]  # the same of some of the rows, by their places
    orthogonal: bool = False  # whether the columns of a row are


@dataclass
class Factors:
    """Hold square-root factors of the loss Hessian for a batch's rows, made a column at a time.

    For each row i, scale_i ∂²ℓ_i/∂f_i² = Σ_c σ_ic s_ic s_icᵀ. ``column`` takes c and gives s_·c, (rows, C) in at least
    float32, and its signs σ_·c, (rows,) float64, None if all are +1. ``form`` takes changes v (rows, C) of the outputs
    and gives Σ_c σ_c ⟨s_c, v⟩², (rows,) float64; it is None where only columns are known. ``times`` takes them too and
    gives Σ_c σ_c ⟨s_c, v⟩ s_c, (rows, C); it is None where nothing is cheaper than second derivatives.
    """

    count: int  # columns
    column: Callable[[int], tuple[Tensor, Tensor | None]]
    mixtures: Callable[[], Mixtures]  # other factors of the same, for random signs
    sizes: Callable[[], Tensor]  # () -> Σ_c |s_·c|², (rows,): the trace of scale_i ∂²ℓ_i/∂f_i² where all signs are +1
    form: Callable[[Tensor], Tensor] | None = None
    times: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True)
class Curvature:
    """Hold the curvature at a head for one weight matrix.

    ``by_row`` takes features (rows, m), the scale and extra of the terms, and gives |φ_i|² ⟨w wᵀ, ∂²ℓ_i/∂z_i²⟩, (rows,)
    float64, and their bounds. A loss of which a sample is one term takes features (rows, P, m) of P positions too:
    Σ_pp' ⟨φ_ip, φ_ip'⟩ ⟨w wᵀ, ∂²ℓ_i/∂z_ip∂z_ip'⟩. ``total`` takes features, labels and values (rows,) float64 to be
    written, or None, and gives the sum over rows whose labels count at once, None where that cannot be had, or a label
    is no class.
    """

    by_row: Callable[..., Bounded]
    total: Callable[[Tensor, Labels, Tensor | None], RowSum | None] | None = None


class Loss(Protocol):
    """Describe what the measures ask of a loss.

    ``positions`` says whether each position of a sample is a loss term of its own; else a sample is one;
    ``elementwise`` that it is a sum over all outputs, none of which belong together more than others do;
    ``convex`` that it is known to be, in the outputs, so that all signs are +1; ``known`` that it is one of torch's, a
    :class:`Known`, and no callable of which values alone can be asked; ``by_rows`` that its curvature at a head follows
    from that of some of the head's rows at a time, so that these may be spread over ranks.
    """

    reduction: Reduction
    positions: ClassVar[bool]
    elementwise: ClassVar[bool]
    convex: ClassVar[bool]
    known: ClassVar[bool]
    by_rows: ClassVar[bool]

    def class_dim(self, outputs: Tensor) -> int:
        """Return the dimension of a model's output that holds a term's C outputs."""

    def terms(self, outputs: Tensor, targets: Tensor | None, class_dim: int) -> Terms:
        """Return the rows of ``outputs`` (classes in ``class_dim``) and their targets, checked, in row-major order."""

    def side_by_side(self, returned: Any) -> Tensor:
        """Return several outputs of a model as one tensor (n, C), if the loss takes them all."""

    def labels(self, shape: Sequence[int], targets: Tensor | None, class_dim: int) -> Labels | None:
        """Return the class indices of outputs of a shape if they say all of :meth:`terms`; None if that is not so."""

    def value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the loss terms of a model's outputs, as the user's loss has them: float64, with a graph.

        E is that of all batches over the normaliser for the reduction ``"mean"``, and that itself for ``"sum"``.
        """

    def each(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss terms that :meth:`value` sums, (rows,), in the order of :meth:`terms`."""

    def columns(self, outputs: int) -> int:
        """Return how many columns the square-root factor of a term with so many outputs has."""

    def factors(self, rows: Tensor, terms: Terms, *, alone: bool = False) -> Factors:
        """Return square-root factors for ``rows`` (rows, C) of outputs, in their order in ``terms``.

        ``alone``: each row is all of a sample, so that no terms of others have their signs in the same cotangent.
        """

    def curvature(
        self, weight: Tensor, bias: Tensor | None, backend: Backend, rows: int, memory: int, rtol: float
    ) -> Curvature:
        """Return the curvature at a head for one weight matrix, prepared once; about ``rows`` rows will come.

        A relative error up to ``rtol`` may be made where that saves time.
        """


class Known(Loss, Protocol):
    """Describe a loss of torch's: its formulas are known, and its terms follow from the outputs' shape and targets."""

    positions: ClassVar[bool] = True
    convex: ClassVar[bool] = True
    known: ClassVar[bool] = True

    def side_by_side(self, returned: Any) -> Tensor:
        raise refusal(returned)

    def value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.reduced(outputs, targets, "sum")

    def reduced(self, outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
        """Return the loss in float64 by torch's formula, for the reduction ``"sum"`` or ``"none"``."""

    def sampled(self, rows: Tensor, terms: Terms, signs: Tensor) -> Tensor:
        """Return Σ_c r_c s_·c of signs r (rows, C), (rows, C), with a graph in ``rows``."""

    def used(self, targets: Tensor | None) -> Tensor | None:
        """Return which rows the loss does not ignore, (rows,); None: all of them."""

    def penalty(
        self, features: Tensor, weight: Tensor, bias: Tensor | None, counts: Tensor, coefficients: Tensor
    ) -> Tensor:
        """Return Σ_i a_i |φ_i|² ⟨w wᵀ, ∂²ℓ_i/∂z_i²⟩ of a head, a scalar that is differentiable twice in all of it.

        ``counts`` are the a_i, (rows,) float64, in which the scale of the terms is; ``coefficients`` (rows, d), where
        the loss has them.
        """


def marked(terms: Terms, values: Tensor, *, masks: bool = False) -> Terms:
    """Return terms in which the scale of rows without a loss is NaN.

    A row with NaN or infinity in ``values``, targets or outputs, has none, unless it adds nothing; with ``masks`` minus
    infinity is allowed, as it is for logits of classes that are masked.
    """
    if (
        not values.is_floating_point() or values.is_meta or math.isfinite(float(values.sum()))
    ):  # the one look that is paid
        return terms
    bad = (values.isnan() | (values == torch.inf)) if masks else ~values.isfinite()
    bad = bad.flatten(1).any(dim=1).to(terms.scale.device) & (terms.scale != 0)
    return replace(terms, scale=torch.where(bad, torch.nan, terms.scale))


def uniform(rows: int, scale: float, weight: float, device: torch.device) -> Terms:
    """Return terms of the same scale and weight for all rows, in no memory."""
    numbers = torch.tensor([scale, weight], dtype=torch.float64, device=device)
    return Terms(numbers[:1].expand(rows), numbers[1:].expand(rows))


def without(shape: Sequence[int], dim: int) -> tuple[int, ...]:
    """Return ``shape`` less one dimension."""
    sizes = list(shape)
    del sizes[dim]
    return tuple(sizes)


def wrong_shape(what: str, values: Tensor, outputs: Tensor) -> InputError:
    """Return the error for values that are not of the outputs' shape."""
    shape, advice = tuple(outputs.shape), "pass a value for each output"
    if values.numel() == outputs.numel():
        advice = f"pass targets.reshape{shape}"
    elif not values.is_floating_point() and values.ndim < outputs.ndim:
        advice += ", as F.one_hot(targets, classes).double()"
    return InputError(f"{what}: the outputs' shape {shape} is wanted, got {tuple(values.shape)}; {advice}")


def rows_like(what: str, values: Tensor, outputs: Tensor, class_dim: int) -> Tensor:
    """Return ``values``, of the outputs' shape, as (rows, classes)."""
    if values.shape != outputs.shape:
        raise wrong_shape(what, values, outputs)
    values = values.movedim(class_dim, -1)
    return values.reshape(-1, values.shape[-1])


def diagonal(coefficients: Tensor) -> Factors:
    """Return the factors of a diagonal curvature: one column √coefficients[:, c] e_c for each output."""
    roots = coefficients.sqrt()

    def column(c: int) -> tuple[Tensor, None]:
        values = torch.zeros_like(roots)
        values[:, c] = roots[:, c]
        return values, None

    return Factors(
        roots.shape[1],
        column,
        lambda: _diagonal_mixtures(coefficients),
        lambda: coefficients.sum(dim=1, dtype=torch.float64),
        form=lambda changes: (coefficients * changes.square()).sum(dim=1, dtype=torch.float64),
    )


def _diagonal_mixtures(coefficients: Tensor) -> Mixtures:
    roots = coefficients.sqrt()
    return Mixtures(
        lambda signs: [(roots * signs, 1.0)],
        coefficients.double,
        lambda index: _diagonal_mixtures(coefficients[index]),
        orthogonal=True,
    )


def dense(roots: Tensor, weights: Tensor) -> Mixtures:
    """Return mixtures of orthogonal columns roots[:, :, c], (rows, C, C) float64, of weights σ |s_c|², (rows, C)."""

    def mixed(signs: Tensor) -> list[tuple[Tensor, float]]:
        kept = [((weights * sign > 0) | weights.isnan(), sign) for sign in (1.0, -1.0)]
        parts = [(torch.where(chosen, signs.double(), 0.0), sign) for chosen, sign in kept]
        return [((roots @ part.unsqueeze(2)).squeeze(2), sign) for part, sign in parts if bool((part != 0).any())]

    return Mixtures(mixed, lambda: weights, lambda index: dense(roots[index], weights[index]), orthogonal=True)
