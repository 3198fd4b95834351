"""Relative flatness (Petzka et al. 2021, Definition 3) of a head: no derivative of the model is taken.

    κ(w) = Σ_{s,s'} ⟨w_s, w_s'⟩ Tr(∂²E/∂w_s∂w_s')
         = Σ_i scale_i |φ_i|² ⟨w wᵀ, ∂²ℓ_i/∂z_i²⟩ / Σ_i ω_i                       at a head, z_i = w φ_i + b

Invariant to layer-wise rescalings of ReLU networks; with features divided and columns multiplied by the features'
deviation (Theorem 4) also to neuron-wise ones. Never negative for a convex loss.
"""

import contextlib
import math
from collections.abc import Generator
from typing import Protocol

import torch
from torch import Tensor

from .. import contractions, losses
from ..errors import InputError, NonFiniteError
from ..head import HeadBatch
from ..options import Options
from ..passes import normalize
from ..report import Estimate


class Source(Protocol):
    """A head and its data: rows of features and loss terms, batch by batch."""

    name: str

    def batches(self) -> Generator[HeadBatch, None, None]:
        """Read the data once."""

    def matrix(self) -> tuple[Tensor, Tensor | None]:
        """Weight (d, m) and bias (d,); known once the first batch was read."""

    def expected_rows(self, first: HeadBatch) -> int:
        """About how many rows there will be."""

    def notes(self) -> tuple[str, ...]:
        """What a reader of the value should know."""


def relative_flatness(source: Source, loss: losses.Loss, options: Options) -> Estimate:
    """κ of a head by one pass over its data; two with ``normalize``."""
    scale = _feature_scale(source, options) if options.normalize else None
    total: _Sum | None = None
    with contextlib.closing(source.batches()) as batches:  # hooks go with an error, not at some later time
        for batch in batches:
            with contractions.full_precision(batch.features):
                if total is None:
                    total = _Sum(source, loss, options, scale, source.expected_rows(batch))
                total.add(batch)
    assert total is not None, "data without samples is refused where it is read"
    return total.estimate()


class _Sum:
    """The running sums behind κ."""

    def __init__(self, source: Source, loss: losses.Loss, options: Options, scale: Tensor | None, rows: int) -> None:
        self._source, self._options, self._scale, self._reduction = source, options, scale, loss.reduction
        weight, bias = source.matrix()
        if scale is not None:
            weight = normalize.apply(scale, weight)
        self._backend = contractions.choose(options.backend, weight.device, contractions.promoted_dtype(weight.dtype))
        memory = options.memory or contractions.default_memory(weight.device)
        self._curvature = loss.curvature(weight, bias, self._backend, rows, memory, options.tolerance)
        self._value = self._normaliser = self._bound = 0.0
        self._shares: list[Tensor] = []
        self._samples = self._omitted = 0

    def add(self, batch: HeadBatch) -> None:
        features = batch.features if self._scale is None else normalize.apply(self._scale, batch.features, inverse=True)
        curvature = self._curvature(features, batch.terms.scale, *batch.terms.extra)
        rows = curvature.values.mul_(batch.terms.scale)
        if self._scale is not None:
            rows = self._as_in_the_first_read(batch, rows)
        total, weights, kept = float(rows.sum()), batch.terms.weights, None
        if not math.isfinite(total):
            rows = torch.where(batch.terms.scale != 0, rows, 0.0)
            rows, weights, kept = self._without_bad_rows(batch, rows)
            total = float(rows.sum())
        self._samples += batch.samples if kept is None else int(kept.sum())
        self._value, self._normaliser = self._value + total, self._normaliser + float(weights.sum())
        if curvature.bounds is not None:
            bounds = curvature.bounds * batch.terms.scale.abs()
            counted = bounds.isfinite() & (rows != 0)  # not in rows that were left out
            self._bound += float(torch.where(counted, bounds, 0.0).sum())
        if self._options.per_sample:
            shares = _by_sample(batch, rows).sum(dim=1)
            self._shares.append(shares if kept is None else shares.masked_fill(~kept, torch.nan))

    def _as_in_the_first_read(self, batch: HeadBatch, rows: Tensor) -> Tensor:
        """NaN in the rows that the deviations are without; under ``"omit"`` these have to be all that are bad."""
        left_out = _bad_rows(batch)
        late = ~left_out & ~rows.isfinite() & (batch.terms.scale != 0)
        if self._options.nan_policy == "omit" and bool(late.any()):
            _check_finite_weights(self._source)
            raise normalize.late(batch.number, int(late.sum()), "rows")
        return rows.masked_fill(left_out, math.nan)

    def _without_bad_rows(self, batch: HeadBatch, rows: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return rows and weights by the policy for NaN, and which samples are left (None: all)."""
        bad = ~rows.isfinite()
        if not bad.any() or self._options.nan_policy == "propagate":
            return rows.masked_fill(bad, math.nan), batch.terms.weights, None
        _check_finite_weights(self._source)
        if self._options.nan_policy == "raise":
            raise _non_finite(batch, bad, self._source.name)
        kept = ~_by_sample(batch, bad).any(dim=1)
        gone = ~kept.repeat_interleave(batch.per_sample)
        self._omitted += int((~kept).sum())
        return rows.masked_fill(gone, 0.0), batch.terms.weights.masked_fill(gone, 0.0), kept

    def estimate(self) -> Estimate:
        if self._samples == 0:
            raise NonFiniteError(f"nan_policy='omit': all {self._omitted} samples have NaN or infinity")
        if self._normaliser == 0:
            raise InputError("targets: every one is ignored (or has class weight 0), so the loss has no terms")
        divisor = self._normaliser if self._reduction == "mean" else 1.0
        return Estimate(
            value=self._value / divisor,
            stderr=None,
            samples=self._samples,
            method="head",
            exact=self._bound == 0,
            backend=contractions.describe(self._backend),
            per_sample=torch.cat(self._shares) * (self._samples / divisor) if self._options.per_sample else None,
            layer=self._source.name,
            omitted=self._omitted,
            notes=(*self._source.notes(), *self._scale_note()),
            bound=self._bound / divisor if self._bound else None,
        )

    def _scale_note(self) -> tuple[str, ...]:
        dropped = 0 if self._scale is None else int((self._scale == 0).sum())
        return (f"{dropped} features that are zero throughout dropped",) if dropped else ()


def _feature_scale(source: Source, options: Options) -> Tensor:
    deviations = normalize.FeatureScale()
    with contextlib.closing(source.batches()) as batches:
        for batch in batches:
            bad = _bad_rows(batch)
            if bad.any() and options.nan_policy == "raise":
                raise _non_finite(batch, bad, source.name)
            if bad.any() and options.nan_policy == "omit":
                bad = _by_sample(batch, bad).any(dim=1).repeat_interleave(batch.per_sample)
            kept = _used(batch) & ~bad
            deviations.add((batch.features if bool(kept.all()) else batch.features[kept]).flatten(0, -2))
    return deviations.scale()


def _used(batch: HeadBatch) -> Tensor:
    """(rows,), those that the loss does not ignore."""
    return torch.ones_like(batch.terms.scale, dtype=torch.bool) if batch.terms.used is None else batch.terms.used


def _bad_rows(batch: HeadBatch) -> Tensor:
    """(rows,), those without a loss, or with NaN or infinity in features that count."""
    bad = batch.terms.scale.isnan()
    if not bool(batch.features.sum().isfinite()):
        bad = bad | (_used(batch) & ~batch.features.isfinite().flatten(1).all(dim=1))
    return bad


def _by_sample(batch: HeadBatch, rows: Tensor) -> Tensor:
    if len(rows) == 0:
        return rows.view(batch.samples, 0)
    if batch.per_sample == 0:
        raise InputError(
            f"batch {batch.number}: its {len(rows)} loss terms cannot be told apart by sample ({batch.samples} "
            "samples); have the model (or forward=) return outputs with the samples in dimension 0"
        )
    return rows.view(batch.samples, batch.per_sample)


def _check_finite_weights(source: Source) -> None:
    for what, values in zip(("weight", "bias"), source.matrix(), strict=True):
        if values is not None and not bool(values.isfinite().all()):
            where = f"layer {source.name!r}" if source.name else "the head"
            raise NonFiniteError(
                f"{where}: its {what} has {int((~values.isfinite()).sum())} entries of NaN or infinity"
            )


def _non_finite(batch: HeadBatch, bad: Tensor, name: str) -> NonFiniteError:
    first = int(bad.nonzero()[0])
    what = "features"
    if bool(batch.features[first].isfinite().all()):
        what = "logits, or in squares beyond the dtype's range,"
        what = "targets, or in the loss," if bool(batch.terms.scale[first].isnan()) else what
    where = f" of layer {name!r}" if name else ""
    return NonFiniteError(
        f"batch {batch.number}: {int(bad.sum())} of {len(bad)} rows have NaN or infinity in the {what}{where} (the "
        f"first is row {first}); pass nan_policy='omit' or 'propagate' to go on"
    )
