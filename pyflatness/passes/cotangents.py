"""Compute the cotangents to send backward: a column of one loss term of every sample, or random signs of all.

    scale_i ∂²ℓ_i/∂f_i² = Σ_c σ_ic s_ic s_icᵀ,       M_i^(c) from the cotangent s_ic alone

The s_ic are the columns of the square-root factor of the loss Hessian. Terms of one sample go apart: their cotangents
would add up in M, and the cross terms are not in the curvature. Samples go together, since each has its own rows
everywhere. To sample, all columns of all terms go together with independent random signs, so that the cross terms have
mean zero.
"""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .. import losses
from ..contractions import promoted_dtype
from ..errors import InputError
from ..losses import Factors, Loss, Mixtures, Terms
from ..model import data
from ..numerics.signs import Signs
from .batch_layout import check_outputs
from .limit import Tell, check_passes
from .runner import Run

STREAM = 0  # of random numbers, for the signs
_ROUNDING = 1e-9  # negative weights within this fraction of the largest count as 0


@dataclass(frozen=True)
class Cotangents:
    """Hold the square-root factor of a batch's loss Hessian, whose columns are the cotangents to send.

    A cotangent has the outputs' shape and dtype; its signs are (n,) float64, or None for all +1.
    """

    passes: int  # how many cotangents there are
    sample_weights: Tensor  # (n,) float64, each sample's weight in a mean, the sum of its terms'
    bad: Tensor  # (n,), samples without a loss: NaN or infinity in their targets or outputs
    used: Tensor  # (n, L), whether the loss does not ignore each of a sample's L terms
    outputs: Tensor
    terms: Terms  # the loss terms, those of a sample one after another
    _rows: Tensor
    _dim: int
    _loss: Loss
    _order: Tensor
    _factors: Callable[[], Factors]
    _mixtures: Callable[[], Mixtures]

    def exact(
        self, most: int, send: Callable[[Tensor], Any], tell: Tell | None = None
    ) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield cotangents and their signs; ``send`` shows how long one takes, see :func:`.check_passes`."""
        samples, terms = self._order.shape
        columns = self._loss.columns(self._rows.shape[1])
        what = (
            f"an exact value takes {self.passes} backward passes a batch ({terms} loss terms of a sample x {columns} "
            "columns of the loss's factor)"
        )
        check_passes(self.passes, most, what, lambda: send(torch.zeros_like(self.outputs)), samples, tell=tell)
        first = torch.arange(samples, device=self._rows.device) * self.used.shape[1]
        for t in range(terms):
            index = first + self._order[:, t]
            part = self.terms.take(index)
            factors = self._loss.factors(self._rows[index], part)
            among_others = len(index) < len(self._rows)
            for c in range(factors.count):
                column, signs = factors.column(c)
                values = part.counted(column).to(self._rows.dtype)
                if among_others:
                    values = torch.zeros_like(self._rows).index_copy_(0, index, values)
                yield self._shaped(values), signs

    def sent(
        self,
        signs: Signs | None,
        numbers: Tensor,
        most: int,
        send: Callable[[Tensor], Any],
        tell: Tell | None = None,
    ) -> Iterator[tuple[int, Tensor, Tensor | float | None]]:
        """Yield probe, cotangent and sign: of :meth:`exact` as probe 0 without ``signs``, else of :meth:`sampled`."""
        if signs is None:
            for cotangent, sign in self.exact(most, send, tell):
                yield 0, cotangent, sign
        else:
            yield from self.sampled(signs, numbers)

    def sampled(self, signs: Signs, numbers: Tensor) -> Iterator[tuple[int, Tensor, float]]:
        """Yield probe, cotangent and its sign, for samples by their numbers; values of one probe are added up."""
        if not self.passes:
            return
        for draw, number in enumerate(signs.draws):
            drawn = Signs(signs.seed, [number])(STREAM, numbers, self.places)
            for mixed, sign in self._mixtures().mixed(drawn.view_as(self._rows)):
                yield draw, self._counted(mixed), sign

    @property
    def same_lengths(self) -> bool:
        """Return whether all sampled cotangents of a sample have one norm: its only term has orthogonal columns."""
        return self.used.shape[1] == 1 and self._mixtures().orthogonal

    @property
    def has_forms(self) -> bool:
        """Return whether the loss has :meth:`form`."""
        return self._factors().form is not None

    def form(self, change: Tensor) -> Tensor:
        """Return ⟨v, H v⟩ of each sample for a change v of the outputs, H its loss Hessian in them; (n,) float64."""
        form = self._factors().form
        assert form is not None
        values = form(self._changed(change))
        return torch.where(self.terms.scale != 0, values, 0.0).view(len(self._order), -1).sum(dim=1)

    def times(self, change: Tensor) -> Tensor | None:
        """Return H v for a change v of the outputs, in their shape; None if second derivatives have to compute it.

        Factors of custom losses are eigenvectors, which cost more than a second derivative.
        """
        times = self._factors().times if self._loss.known else None
        return None if times is None else self._counted(times(self._changed(change)))

    def _changed(self, change: Tensor) -> Tensor:
        """Return a change of the outputs as rows, in the dtype of the computation."""
        moved = change.movedim(self._dim, -1) if self._loss.positions and change.ndim > 1 else change
        return moved.reshape(self._rows.shape).to(promoted_dtype(self._rows.dtype))

    def sizes(self) -> Tensor:
        """Return t_i of each sample, (n,) float64: the trace of its loss Hessian in the outputs, over all terms."""
        counted = self.terms.scale != 0
        return torch.where(counted, self._factors().sizes(), 0.0).view(len(self._order), -1).sum(dim=1)

    def traces(self) -> Tensor:
        """Return the trace of each loss term's Hessian in the outputs, (n L,) float64."""
        factors = self._factors()
        if self._loss.convex:
            found = factors.sizes()
        else:
            columns = map(factors.column, range(factors.count))
            found = sum(
                (column.double().square().sum(dim=1) * (1.0 if signs is None else signs) for column, signs in columns),
                start=torch.zeros_like(self.terms.scale),
            )
        return torch.where(self.terms.scale != 0, found, 0.0)

    def marked(self, values: Tensor) -> Tensor:
        """Return values (…, n) of the samples, NaN for those without a loss."""
        return values.masked_fill(self.bad, math.nan)

    def rows(self) -> Tensor | None:
        """Return the outputs with the dimension that a loss term reads last; None if a term reads several."""
        if not self._loss.positions and self.outputs.ndim != 2:
            return None
        return self.outputs.unsqueeze(-1) if self.outputs.ndim == 1 else self.outputs.movedim(self._dim, -1)

    @property
    def weight(self) -> float:
        """Return the sum of the samples' weights; NaN if one of them has no loss, as then the mean has none."""
        return math.nan if bool(self.bad.any()) else float(self.sample_weights.sum())

    @property
    def places(self) -> int:
        """Return how many columns all terms of a sample have."""
        return self._rows.numel() // len(self._order)

    def weights(self) -> Tensor:
        """Return the weights of each sample's columns of all terms, (n, places) float64, none negative."""
        weights = torch.where((self.terms.scale != 0).unsqueeze(1), self._mixtures().weights(), 0.0)
        negative = weights < -_ROUNDING * weights.nan_to_num(0.0).abs().amax()
        if bool(negative.any()):
            raise InputError(
                f"probes='adaptive' is for losses that are convex in the outputs; this one curves down at "
                f"{int(negative.reshape(len(self._order), -1).any(dim=1).sum())} of {len(self._order)} samples: pass "
                "probes=k, a number of probes"
            )
        return weights.clamp_min(0.0).reshape(len(self._order), -1)  # not contiguous where the terms are reordered

    def chosen(self, signs: Tensor) -> Tensor:
        """Return the cotangent Σ_c r_c s_c of signs r (n, places), 0 for columns that are left out."""
        for mixed, sign in self._mixtures().mixed(signs.view_as(self._rows)):
            if sign > 0:
                return self._counted(mixed)
        return torch.zeros_like(self.outputs)

    def take(self, index: Tensor) -> "Cotangents":
        """Return the cotangents of some samples, by their places; one may come more than once."""
        samples, terms = self.used.shape
        rows = (index.unsqueeze(1) * terms + torch.arange(terms, device=index.device)).flatten()
        return replace(
            self,
            sample_weights=self.sample_weights[index],
            bad=self.bad[index],
            used=self.used[index],
            outputs=data.rows_of(self.outputs, samples, index),
            _rows=self._rows[rows],
            terms=self.terms.take(rows),
            _order=self._order[index],
            _mixtures=lambda: self._mixtures().take(rows),
        )

    def _counted(self, values: Tensor) -> Tensor:
        """Return values as a cotangent, 0 for terms that do not count."""
        return self._shaped(self.terms.counted(values).to(self._rows.dtype))

    def _shaped(self, rows: Tensor) -> Tensor:
        if not self._loss.positions or self._dim % self.outputs.ndim == self.outputs.ndim - 1:
            return rows.view_as(self.outputs)
        moved = self.outputs.movedim(self._dim, -1)
        return rows.view(moved.shape).movedim(-1, self._dim)


def of_run(run: Run, loss: Loss) -> Cotangents:
    """Return the cotangents of a run's outputs; errors name its batch."""
    targets = losses.tensor_targets(run.targets, run.number)
    with losses.of_batch(run.number):
        return prepare(run.outputs, targets, loss, run.samples)


def prepare(outputs: Tensor, targets: Tensor, loss: Loss, samples: int) -> Cotangents:
    """Return the cotangents of a batch's outputs, with the samples, or several rows of each, in dimension 0."""
    outputs = outputs.detach()
    check_outputs(outputs, samples)
    found = losses.rows(outputs, targets, loss)
    rows = found.of(outputs)
    terms = losses.marked(found.terms, rows, masks=not loss.elementwise)
    counted = (terms.scale != 0).view(samples, -1)
    most = counted.shape[1]
    order = torch.arange(most, device=counted.device).expand(samples, -1)
    terms = replace(terms, whole=terms.whole or bool(counted.all()))
    if not terms.whole:
        most = int(counted.sum(dim=1).max())
        order = counted.int().argsort(dim=1, descending=True, stable=True)[:, :most]
    passes = most * loss.columns(rows.shape[1])
    weights = terms.weights.reshape(samples, -1).sum(dim=1)
    used = torch.ones_like(counted) if terms.used is None else terms.used.view(samples, -1)
    factors = functools.cache(lambda: loss.factors(rows, terms, alone=counted.shape[1] == 1))
    mixtures = functools.cache(lambda: factors().mixtures())
    bad = terms.scale.isnan().view(samples, -1).any(dim=1)
    return Cotangents(passes, weights, bad, used, outputs, terms, rows, found.dim, loss, order, factors, mixtures)
