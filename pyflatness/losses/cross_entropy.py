"""Define cross-entropy on logits: class weights, label smoothing, probability targets and ignored targets."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ..contractions import FUSED_OUTPUTS, Backend, Labels, SoftmaxVariance, promoted
from ..errors import InputError
from ..interrupts import cached_property
from . import penalty
from .base import Curvature, Factors, Known, Mixtures, Reduction, Terms, dense, marked, rows_like, uniform, without

_EIGENBASIS = 16  # the most classes for which eigenvectors take no more time and memory than a small network
_MATRICES = 2**13  # matrices in one call of eigh; torch's CUDA kernel fails at a few times as many
_ROUNDING = 1e-15  # of the largest eigenvalue; a smaller eigenvalue is 0
_COLUMNS = 16  # columns that are computed at once, for few outputs
_AT_ONCE = 2**18  # probabilities in float64 at once, so that they stay in a processor's caches


@dataclass
class CrossEntropy(Known):
    """Represent cross-entropy: ∂²ℓ/∂z² = a (diag(p) - p pᵀ) with a = Σ_c t_c ω_c for (smoothed) targets t."""

    weight: Tensor | None
    ignore_index: int
    label_smoothing: float
    reduction: Reduction
    by_rows: ClassVar[bool] = True

    def class_dim(self, outputs: Tensor) -> int:
        return 1

    def terms(self, outputs: Tensor, targets: Tensor | None, class_dim: int) -> Terms:
        classes = outputs.shape[class_dim]
        if targets is None:
            if self.weight is not None:
                raise InputError("targets: cross-entropy with class weights cannot do without them")
            return uniform(outputs.numel() // classes, 1.0, 1.0, outputs.device)
        expected = without(outputs.shape, class_dim)
        if targets.is_floating_point() and tuple(targets.shape) == expected and targets.shape != outputs.shape:
            raise InputError(f"targets: class indices must be int64, got {targets.dtype}; convert with .long()")
        if targets.is_floating_point():
            return self._probability_terms(outputs, targets, class_dim)
        if targets.dtype in (torch.bool, torch.complex64, torch.complex128):
            raise InputError(f"targets: class indices (int64) or probabilities (float) are wanted, got {targets.dtype}")
        if tuple(targets.shape) != expected:
            raise InputError(
                f"targets: class indices of shape {expected} are wanted for outputs {tuple(outputs.shape)} with "
                f"classes in dimension {class_dim % outputs.ndim}, got {tuple(targets.shape)}; "
                f"{_advice(outputs, targets, class_dim)}"
            )
        labels = targets.reshape(-1).long()
        if len(labels) == 0:
            return uniform(0, 1.0, 1.0, labels.device)
        low, high = torch.stack(labels.aminmax()).tolist()  # the host waits for the device once
        if self.weight is None and 0 <= low <= high < classes and not low <= self.ignore_index <= high:
            return uniform(len(labels), 1.0, 1.0, labels.device)
        kept = labels != self.ignore_index
        wrong = labels[kept & ((labels < 0) | (labels >= classes))]
        if len(wrong):
            raise InputError(
                f"targets: class {int(wrong[0])} does not exist among {classes} classes, which are numbered from 0 to "
                f"{classes - 1} (ignore_index is {self.ignore_index})"
            )
        if self.weight is None:  # smoothing too has a weight of 1 in all
            weights = kept.double()
            return Terms(weights, weights, used=kept)
        weight = self._class_weights(classes, labels.device)
        weights = torch.where(kept, weight[labels.clamp(0, classes - 1)], 0.0)
        smooth = torch.where(kept, self.label_smoothing * weight.mean(), 0.0)
        return Terms((1 - self.label_smoothing) * weights + smooth, weights, used=kept)

    def labels(self, shape: Sequence[int], targets: Tensor | None, class_dim: int) -> Labels | None:
        """Return the class indices for outputs of a shape if all rows that count have weight 1; otherwise None.

        They are not checked here but by :meth:`terms`. The result is also None for more classes than kernels take.
        """
        if self.weight is not None or shape[class_dim] > FUSED_OUTPUTS:
            return None
        if targets is None:
            return Labels(None, self.ignore_index)
        if targets.dtype != torch.int64 or targets.shape != without(shape, class_dim):
            return None
        return Labels(targets if targets.ndim == 1 else targets.reshape(-1), self.ignore_index)

    def _probability_terms(self, outputs: Tensor, targets: Tensor, class_dim: int) -> Terms:
        rows = rows_like("target probabilities", targets, outputs, class_dim).double()
        smoothed = (1 - self.label_smoothing) * rows + self.label_smoothing / rows.shape[1]
        scale = smoothed @ self._class_weights(rows.shape[1], rows.device)
        return marked(Terms(scale, rows.new_ones(len(rows))), rows)

    def _class_weights(self, classes: int, device: torch.device) -> Tensor:
        if self.weight is None:
            return torch.ones(classes, dtype=torch.float64, device=device)
        if tuple(self.weight.shape) != (classes,):
            raise InputError(f"loss: {len(self.weight)} class weights for {classes} classes")
        return self.weight.to(device, torch.float64)

    def curvature(
        self, weight: Tensor, bias: Tensor | None, backend: Backend, rows: int, memory: int, rtol: float
    ) -> Curvature:
        variance = SoftmaxVariance(weight, bias, backend, rows=rows, memory=memory, rtol=rtol)
        return Curvature(variance.bounded, variance.total)

    def each(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.reduced(outputs, targets, "none").flatten()

    def reduced(self, outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
        """Return the loss in float64, for many logits with contiguous classes some rows at a time.

        A copy of all logits in float64 would take as long as the matrix product that gave them.
        """
        rows = outputs.movedim(1, -1) if outputs.ndim > 1 else outputs
        of_classes = targets.is_floating_point()
        few = max(1, _AT_ONCE // max(1, rows.shape[-1]))
        fits = targets.shape == (outputs.shape if of_classes else rows.shape[:-1])
        if outputs.ndim < 2 or not fits or rows.stride(-1) != 1 or rows.shape[:-1].numel() <= few:
            return self._of_logits(outputs, targets, reduction)
        given = targets.movedim(1, -1).flatten(0, -2) if of_classes else targets.flatten()
        each = zip(rows.flatten(0, -2).split(few), given.split(few), strict=True)
        values = [self._of_logits(*some, reduction) for some in each]
        return torch.stack(values).sum() if reduction == "sum" else torch.cat(values)

    def _of_logits(self, outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
        return F.cross_entropy(
            outputs.double(),
            targets.double() if targets.is_floating_point() else targets.long(),
            None if self.weight is None else self.weight.to(outputs.device, torch.float64),
            ignore_index=self.ignore_index,
            reduction=reduction,
            label_smoothing=self.label_smoothing,
        )

    def columns(self, outputs: int) -> int:
        return outputs - 1

    def factors(self, rows: Tensor, terms: Terms, *, alone: bool = False) -> Factors:
        """Return C - 1 columns √p_j (e_j - q), j ≠ k, with k the most probable class.

        S = diag(√p) (I - √p √pᵀ) has S Sᵀ = diag(p) - p pᵀ and S √p = 0. So S times a Householder reflection that maps
        √p to e_k has zeros in column k. The other columns have q = √p_k at k and p / (1 + √p_k) elsewhere: nothing in
        them cancels, however peaked p is.

        For the only term of a sample, random signs mix columns that are nearly orthogonal (docs/estimators.md): the
        eigenbasis for few classes, and for more the contrasts of each class with all less probable ones.
        """
        columns = _Columns(torch.softmax(promoted(rows), dim=1), terms.scale)
        mixtures: Callable[[], Mixtures] = columns.mixtures
        if alone and rows.shape[1] <= _EIGENBASIS:
            mixtures = columns.eigenbasis
        elif alone:
            mixtures = columns.contrasts
        return Factors(rows.shape[1] - 1, columns.column, mixtures, columns.sizes, columns.form, columns.times)

    def sampled(self, rows: Tensor, terms: Terms, signs: Tensor) -> Tensor:
        log_p = F.log_softmax(promoted(rows), dim=1)
        roots = (0.5 * log_p).exp()  # has a finite derivative if p underflows, unlike √p
        top = log_p.detach().argmax(dim=1, keepdim=True)
        root = roots.gather(1, top)
        q = (roots.square() / (1 + root)).scatter(1, top, root)
        signed = (roots * signs * terms.scale.sqrt().to(roots.dtype).unsqueeze(1)).scatter(1, top, 0.0)
        return signed - q * signed.sum(dim=1, keepdim=True)

    def used(self, targets: Tensor | None) -> Tensor | None:
        return None if targets is None or targets.is_floating_point() else targets.flatten() != self.ignore_index

    def penalty(
        self, features: Tensor, weight: Tensor, bias: Tensor | None, counts: Tensor, coefficients: Tensor
    ) -> Tensor:
        value = penalty.fused if penalty.fuses(weight) else penalty.weighted_sum
        return value(features, weight, bias, counts)


class _Columns:
    """Compute the columns √(scale p_j) (e_j - q), j ≠ k, from the softmax p (rows, C).

    Only p is kept. Other tensors of its size are computed for some rows at a time, so that they stay in a processor's
    caches.
    """

    def __init__(self, p: Tensor, scale: Tensor) -> None:
        self._p, self._scale = p, scale
        self._largest, self._top = p.max(dim=1, keepdim=True)
        self._several = max(1, min(_COLUMNS, _AT_ONCE // max(1, p.numel())))  # columns that are computed at once
        self._first, self._made = -1, p  # the number of the first of these, and the columns (k, rows, C)

    def _with_roots(self, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, the roots √(scale p) and the most probable class of some rows."""
        p, largest, top = self._p[rows], self._largest[rows].sqrt(), self._top[rows]
        q = (p / (1 + largest)).scatter_(1, top, largest)
        return q, p.sqrt().mul_(self._scale[rows].sqrt().to(q.dtype).unsqueeze(1)), top

    def _blocks(self) -> Iterator[slice]:
        few = max(1, _AT_ONCE // max(1, self._p.shape[1]))
        return (slice(start, start + few) for start in range(0, max(1, len(self._p)), few))

    @cached_property
    def _whole(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return -q, the classes other than k, and their roots, for all columns."""
        q, roots, top = self._with_roots(slice(None))
        numbers = torch.arange(roots.shape[1] - 1, device=top.device)
        classes = numbers + (top <= numbers)
        return -q, classes, roots.gather(1, classes)

    def column(self, c: int) -> tuple[Tensor, None]:
        """See :class:`.base.Factors`; with few outputs several columns are computed at once."""
        start = c - c % self._several
        if start != self._first:
            minus, classes, factors = self._whole
            j, root = (each[:, start : start + self._several].t().unsqueeze(2) for each in (classes, factors))
            self._first, self._made = start, (minus * root).scatter_add_(2, j, root)
        return self._made[c - start], None

    def form(self, changes: Tensor) -> Tensor:
        """See :class:`.base.Factors`."""
        found = []
        for rows in self._blocks():
            away = self._away(changes, rows)
            found.append(away.square().mul_(self._p[rows]).sum(dim=1, dtype=torch.float64))
        return torch.cat(found).mul_(self._scale)

    def times(self, changes: Tensor) -> Tensor:
        """See :class:`.base.Factors`; without square roots, for negative class weights too."""
        found, scale = torch.empty_like(self._p), self._scale.unsqueeze(1).to(self._p.dtype)
        for rows in self._blocks():
            torch.mul(self._p[rows], self._away(changes, rows).mul_(scale[rows]), out=found[rows])
        return found

    def _away(self, changes: Tensor, rows: slice) -> Tensor:
        """Return v - ⟨p, v⟩ of changes v, (rows, C); v is taken from v_k, so that nothing cancels if p is peaked."""
        away = changes[rows] - changes[rows].gather(1, self._top[rows])
        return away.sub_(torch.linalg.vecdot(self._p[rows], away).unsqueeze(1))

    def sizes(self) -> Tensor:
        """Return Σ_j scale p_j (1 - p_j), (rows,), with 1 - p_k as the sum of the others, so that nothing cancels."""
        found = []
        for rows in self._blocks():
            others = self._p[rows].scatter(1, self._top[rows], 0.0)
            squares = torch.linalg.vector_norm(others, dim=1, dtype=torch.float64).square()
            found.append((1 + self._largest[rows, 0]) * others.sum(dim=1, dtype=torch.float64) - squares)
        return torch.cat(found).mul_(self._scale)

    def mixtures(self) -> Mixtures:
        """Return mixtures of these columns."""

        def mixed(signs: Tensor) -> list[tuple[Tensor, float]]:
            found = self._p.new_empty(self._p.shape, dtype=torch.result_type(self._p, signs))
            for rows in self._blocks():
                q, roots, top = self._with_roots(rows)
                signed = torch.mul(roots, signs[rows].to(found.dtype), out=found[rows]).scatter_(1, top, 0.0)
                signed.sub_(q * signed.sum(dim=1, keepdim=True))
            return [(found, 1.0)]

        def weights() -> Tensor:
            return (self._p * self._scale.unsqueeze(1)).scatter_(1, self._top, 0.0)

        return Mixtures(mixed, weights, lambda index: _Columns(self._p[index], self._scale[index]).mixtures())

    def eigenbasis(self) -> Mixtures:
        """Return mixtures of the columns V Λ^½ of the loss Hessian V Λ Vᵀ."""
        q, roots, top = self._with_roots(slice(None))
        blocks = (each.double().split(_MATRICES) for each in (q, roots.scatter_(1, top, 0.0)))
        columns = torch.cat([_orthogonal(*block) for block in zip(*blocks, strict=True)])
        return dense(columns, columns.square().sum(dim=1))

    def contrasts(self) -> Mixtures:
        """Return mixtures of the contrasts of each class with the less probable ones.

        With the classes in about ascending order and P_k = Σ_{i<k} p_i,

            diag(p) - p pᵀ = Σ_k p_k P_k / P_{k+1} (e_k - Σ_{i<k} p_i e_i / P_k) (…)ᵀ

        by the law of total variance, class by class. Nothing in it cancels. Probabilities are compared in steps of √2,
        so that rounding hardly changes the order.
        """
        p = self._p.double()
        order = (2 * p.log2()).round_().sort(dim=1, stable=True).indices
        return _ordered_contrasts(p.gather(1, order), order, self._scale.unsqueeze(1))


def _orthogonal(q: Tensor, roots: Tensor) -> Tensor:
    """Return orthogonal columns, by eigenvectors of the Gram matrix of the columns of :class:`_Columns`.

    Nothing in it cancels. Libraries choose the sign of an eigenvector freely; here the inner product of its column with
    √1, √2, … is not negative.
    """
    columns = torch.diag_embed(roots) - q.unsqueeze(2) * roots.unsqueeze(1)
    bad = ~columns.isfinite().all(dim=(1, 2))[:, None, None]  # eigh would fail for all samples
    columns = columns.masked_fill(bad, 0.0)
    values, vectors = torch.linalg.eigh(columns.mT @ columns)
    kept = values > _ROUNDING * values[:, -1:]  # the others, at least one, are 0
    columns = columns @ (vectors * kept.unsqueeze(1))
    along = torch.arange(1, q.shape[1] + 1, dtype=q.dtype, device=q.device).sqrt() @ columns
    return torch.where(along.unsqueeze(1) < 0, -columns, columns).masked_fill_(bad, torch.nan)


def _ordered_contrasts(p: Tensor, order: Tensor, scale: Tensor) -> Mixtures:
    """Return the mixtures of :meth:`_Columns.contrasts` for p in ascending order and a scale (rows, 1), float64."""
    before, tiny = _before(p), torch.finfo(p.dtype).tiny
    roots = (scale * p * before / (before + p).clamp_min(tiny)).sqrt()
    over = before.clamp_min(tiny)

    def mixed(signs: Tensor) -> list[tuple[Tensor, float]]:
        signed = roots * signs
        later = _before((signed / over).flip(1)).flip(1)
        return [(torch.empty_like(signed).scatter_(1, order, signed - p * later), 1.0)]

    def weights() -> Tensor:
        return roots.square() * (1 + _before(p.square()) / over / over)

    return Mixtures(mixed, weights, lambda index: _ordered_contrasts(p[index], order[index], scale[index]))


def _before(values: Tensor) -> Tensor:
    """Return for each value the sum of the earlier values in its row."""
    return F.pad(values[:, :-1].cumsum(dim=1), (1, 0))


def _advice(outputs: Tensor, targets: Tensor, class_dim: int) -> str:
    """Return advice for class indices whose shape differs from that of the outputs without classes."""
    expected = without(outputs.shape, class_dim)
    if outputs.shape[class_dim] == 1:
        return "one output is no choice among classes: have the model return (n, classes), or take another loss"
    if targets.shape == outputs.shape:
        return f"where they are one-hot, pass targets.argmax({class_dim % outputs.ndim})"
    if targets.numel() == math.prod(expected):
        return f"pass targets.reshape{expected}"
    if outputs.ndim > 2:
        return "for token outputs (n, T, C), have `forward` return outputs.transpose(1, 2)"
    return "pass one class for each sample"
