"""Define the interface of losses, and their common helpers."""

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
    """Hold the loss terms of a batch, one for each row.

    ``scale`` (rows,) float64 is 0 for a row that adds nothing. It is NaN for a row without a loss, with NaN or infinity
    in its targets or outputs, although its curvature may be finite. ``used`` (rows,) is False for a row that the loss
    ignores (a row of class weight 0 is used); None if all rows are used. ``whole`` is True if it is known that no
    scale is 0.
    """

    scale: Tensor
    weights: Tensor  # (rows,) float64, the row's weight in a mean; their sum over the data is the normaliser
    extra: tuple[Tensor, ...] = ()  # other arguments of the curvature: coefficients or targets, rows in dimension 0
    used: Tensor | None = None
    whole: bool = False

    def take(self, index: Tensor) -> "Terms":
        """Return the terms of some of the rows."""
        used = None if self.used is None else self.used[index]
        extra = tuple(tensor[index] for tensor in self.extra)
        return Terms(self.scale[index], self.weights[index], extra, used, self.whole)

    def counted(self, values: Tensor) -> Tensor:
        """Return values (rows, C) with 0 in rows that add nothing."""
        return values if self.whole else torch.where((self.scale != 0).unsqueeze(1), values, 0.0)


@dataclass
class Mixtures:
    """Hold square-root factors S of the loss Hessian for a batch's rows, to be mixed by random signs.

    For each row i, scale_i ∂²ℓ_i/∂f_i² = Σ_c σ_ic s_ic s_icᵀ. S Q is a factor for every orthogonal Q, and the variance
    of sampled values depends on Q (docs/estimators.md). ``mixed`` takes signs r (rows, C) and returns Σ_c r_c s_·c,
    (rows, C), for the columns of each sign σ, with that σ; a column with r = 0 is left out. ``weights`` returns about
    σ |s_·c|² for each column, (rows, C) float64, and 0 for a place in r without a column.
    """

    mixed: Callable[[Tensor], list[tuple[Tensor, float]]]
    weights: Callable[[], Tensor]
    take: Callable[[Tensor], "Mixtures"]  # places of some rows -> the mixtures of these rows
    orthogonal: bool = False  # whether the columns of each row are orthogonal


@dataclass
class Factors:
    """Hold square-root factors of the loss Hessian for a batch's rows, computed a column at a time.

    For each row i, scale_i ∂²ℓ_i/∂f_i² = Σ_c σ_ic s_ic s_icᵀ. ``column`` takes c and returns s_·c, (rows, C) in at
    least float32, and its signs σ_·c, (rows,) float64, or None if all are +1. ``form`` takes changes v (rows, C) of the
    outputs and returns Σ_c σ_c ⟨s_c, v⟩², (rows,) float64; it is None if only columns are known. ``times`` takes them
    too and returns Σ_c σ_c ⟨s_c, v⟩ s_c, (rows, C); it is None if second derivatives are as cheap.
    """

    count: int  # columns
    column: Callable[[int], tuple[Tensor, Tensor | None]]
    mixtures: Callable[[], Mixtures]  # factors of the same Hessian to be mixed by random signs
    sizes: Callable[[], Tensor]  # Σ_c |s_·c|², (rows,): the trace of scale_i ∂²ℓ_i/∂f_i² if all signs are +1
    form: Callable[[Tensor], Tensor] | None = None
    times: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True)
class Curvature:
    """Hold the curvature at a head for one weight matrix.

    ``by_row`` takes features (rows, m), the scale and extra of the terms, and returns |φ_i|² ⟨w wᵀ, ∂²ℓ_i/∂z_i²⟩,
    (rows,) float64, and their bounds. A loss with one term per sample also takes features (rows, P, m) of P positions:
    Σ_pp' ⟨φ_ip, φ_ip'⟩ ⟨w wᵀ, ∂²ℓ_i/∂z_ip∂z_ip'⟩. ``total`` takes features, labels, and a tensor (rows,) float64 to
    write values to, or None. It returns the sum over rows whose labels count, in one pass; None if it cannot, or if a
    label is no class.
    """

    by_row: Callable[..., Bounded]
    total: Callable[[Tensor, Labels, Tensor | None], RowSum | None] | None = None


class Loss(Protocol):
    """Describe the interface of a loss that measures use, with what holds for most losses.

    With ``positions``, each position of a sample is a loss term; otherwise a sample is one term. ``elementwise`` means
    that the loss is a sum over all outputs, and ``convex`` that it is known to be convex in the outputs, so that all
    signs are +1. It is ``known`` if it is one of torch's, a :class:`Known`, and not a callable that only gives values.
    ``by_rows`` means that its curvature at a head can be computed from some of the head's rows at a time, so that these
    may be spread over ranks.
    """

    reduction: Reduction
    positions: ClassVar[bool] = False
    elementwise: ClassVar[bool] = False
    convex: ClassVar[bool] = False
    known: ClassVar[bool] = False
    by_rows: ClassVar[bool] = False

    def class_dim(self, outputs: Tensor) -> int:
        """Return the dimension of a model's output with a term's C outputs."""
        return -1

    def terms(self, outputs: Tensor, targets: Tensor | None, class_dim: int) -> Terms:
        """Return the rows of ``outputs`` (classes in ``class_dim``) and their targets, checked, in row-major order."""

    def side_by_side(self, returned: Any) -> Tensor:
        """Return several outputs of a model as one tensor (n, C), or raise if the loss takes one output only."""

    def labels(self, shape: Sequence[int], targets: Tensor | None, class_dim: int) -> Labels | None:
        """Return the class indices for outputs of a shape if they determine :meth:`terms`; otherwise None."""
        return None

    def value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the loss terms of a model's outputs, by the user's loss: float64, with a graph.

        E is the sum over all batches, divided by the normaliser for the reduction ``"mean"``.
        """

    def each(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss terms that :meth:`value` sums, (rows,), in the order of :meth:`terms`."""

    def columns(self, outputs: int) -> int:
        """Return the number of columns of the square-root factor of a term with this number of outputs."""
        return outputs

    def factors(self, rows: Tensor, terms: Terms, *, alone: bool = False) -> Factors:
        """Return square-root factors for ``rows`` (rows, C) of outputs, in their order in ``terms``.

        With ``alone`` each row is a whole sample, so that a sample's cotangent mixes columns of one term only.
        """

    def curvature(
        self, weight: Tensor, bias: Tensor | None, backend: Backend, rows: int, memory: int, rtol: float
    ) -> Curvature:
        """Return the curvature at a head for one weight matrix, prepared for about ``rows`` rows.

        A relative error of up to ``rtol`` is allowed, to save time.
        """


class Known(Loss, Protocol):
    """Describe a loss of torch's, with known formulas and terms that depend on the outputs' shape and the targets."""

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
        """Return Σ_c r_c s_·c, (rows, C), for signs r (rows, C), with a graph in ``rows``."""

    def used(self, targets: Tensor | None) -> Tensor | None:
        """Return which rows the loss does not ignore, (rows,) bool; None for all rows."""
        return None

    def penalty(
        self, features: Tensor, weight: Tensor, bias: Tensor | None, counts: Tensor, coefficients: Tensor
    ) -> Tensor:
        """Return Σ_i a_i |φ_i|² ⟨w wᵀ, ∂²ℓ_i/∂z_i²⟩ of a head, twice differentiable in features, weight and bias.

        ``counts`` are the a_i, (rows,) float64, which include the scale of the terms; ``coefficients`` are (rows, d)
        for a loss that has them.
        """


def marked(terms: Terms, values: Tensor, *, masks: bool = False) -> Terms:
    """Return terms in which the scale of rows without a loss is NaN.

    A row with NaN or infinity in ``values``, its targets or outputs, has no loss, unless it adds nothing. With
    ``masks`` minus infinity is allowed, as for the logits of masked classes. The host does not wait for the device.
    """
    if not values.is_floating_point() or values.is_meta or not values.shape[1:].numel():
        return terms
    values = values.flatten(1)
    if masks:
        fine = values.amax(dim=1) < torch.inf  # False for NaN, which is the largest
    else:
        smallest, largest = values.aminmax(dim=1)
        fine = (smallest > -torch.inf) & (largest < torch.inf)
    bad = ~fine.to(terms.scale.device) & (terms.scale != 0)
    return replace(terms, scale=torch.where(bad, torch.nan, terms.scale))


def uniform(rows: int, scale: float, weight: float, device: torch.device) -> Terms:
    """Return terms with the same scale and weight for all rows, which use no memory."""
    numbers = torch.tensor([scale, weight], dtype=torch.float64, device=device)
    return Terms(numbers[:1].expand(rows), numbers[1:].expand(rows), whole=scale != 0)


def without(shape: Sequence[int], dim: int) -> tuple[int, ...]:
    """Return a shape without one of its dimensions."""
    sizes = list(shape)
    del sizes[dim]
    return tuple(sizes)


def wrong_shape(what: str, values: Tensor, outputs: Tensor) -> InputError:
    """Return the error for values of another shape than the outputs."""
    shape, advice = tuple(outputs.shape), "pass a value for each output"
    if values.numel() == outputs.numel():
        advice = f"pass targets.reshape{(-1, *shape[1:])}"
    elif not values.is_floating_point() and values.ndim < outputs.ndim:
        advice += ", as F.one_hot(targets, classes).double()"
    got = f"{tuple(values.shape)} in a batch of {shape[0]} samples"
    return InputError(f"{what}: the outputs' shape {shape} is wanted, got {got}; {advice}")


def rows_like(what: str, values: Tensor, outputs: Tensor, class_dim: int) -> Tensor:
    """Return ``values``, of the outputs' shape, as (rows, classes)."""
    if values.shape != outputs.shape:
        raise wrong_shape(what, values, outputs)
    values = values.movedim(class_dim, -1)
    return values.reshape(-1, values.shape[-1])


def diagonal(coefficients: Tensor) -> Factors:
    """Return the factors of a diagonal Hessian: one column √coefficients[:, c] e_c for each output c."""
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
    """Return mixtures of orthogonal columns roots[:, :, c], (rows, C, C) float64, with weights σ |s_c|², (rows, C)."""

    def mixed(signs: Tensor) -> list[tuple[Tensor, float]]:
        kept = [((weights * sign > 0) | weights.isnan(), sign) for sign in (1.0, -1.0)]
        by_sign = [(torch.where(chosen, signs.double(), 0.0), sign) for chosen, sign in kept]
        return [((roots @ some.unsqueeze(2)).squeeze(2), sign) for some, sign in by_sign if bool((some != 0).any())]

    return Mixtures(mixed, lambda: weights, lambda index: dense(roots[index], weights[index]), orthogonal=True)
