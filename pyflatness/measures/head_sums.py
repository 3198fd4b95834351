"""Compute relative flatness of a head (Petzka et al. 2021, Definition 3); no derivative of the model is taken.

    κ(w) = Σ_{s,s'} ⟨w_s, w_s'⟩ Tr(∂²E/∂w_s∂w_s')
         = Σ_i scale_i |φ_i|² ⟨w wᵀ, ∂²ℓ_i/∂z_i²⟩ / Σ_i ω_i                       at a head, z_i = w φ_i + b

It is invariant to layer-wise rescalings of ReLU networks; with features divided and columns multiplied by the features'
deviation (Theorem 4) also to neuron-wise ones. Never negative for a convex loss.

The rows of a head for cross-entropy may be spread over the ranks of a process group. With p the softmax over all
classes, P_r the probability of the classes on rank r, p^r = p / P_r the softmax over that rank's classes alone, and
w̄_r = E_{p^r} w the mean of its rows,

    var_p(w) = Σ_r P_r var_{p^r}(w) + Σ_r P_r |w̄_r - Σ_r P_r w̄_r|²        (the law of total variance)

No term is negative, so that nothing cancels between the ranks. Of each row of features a rank sends its logarithm of
Σ exp z, its own variance and its mean: m + 2 numbers. The logits of all classes are nowhere.
"""

import contextlib
import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from .. import contractions, losses
from ..contractions import product, promoted
from ..contractions.wide import Bounded
from ..errors import InputError, NonFiniteError
from ..head import Head, HeadBatch
from ..losses import Curvature
from ..model import layers
from ..model.kinds.deviations import FeatureScale
from ..numerics.accumulate import Accumulator, masked, non_finite, underflow
from ..numerics.shard import Shard
from ..options import Options
from ..passes import normalize
from ..report import Estimate
from .tensor_head import TensorHead

_SENT = 2**22  # numbers of all ranks in one exchange


def _by_row(
    shard: Shard,
    own: Curvature | None,
    weight: Tensor,
    bias: Tensor | None,
    memory: int,
    features: Tensor,
    scale: Tensor,
) -> Bounded:
    count = max(1, _SENT // (shard.ranks.size * (features.shape[1] + 2)))
    chunks = []
    for rows, counts in zip(features.split(count), scale.split(count), strict=True):
        variances = rows.new_zeros(len(rows), dtype=torch.float64) if own is None else own.by_row(rows, counts).values
        sizes, means = _moments(rows, weight, bias, memory)
        sent = torch.cat([sizes.unsqueeze(1), variances.unsqueeze(1), means], dim=1)
        found = torch.stack([each["rows"] for each in shard.each("the moments of rows", {"rows": sent})])
        sizes, variances, means = found.to(rows.device).split([1, 1, means.shape[1]], dim=2)
        probabilities = torch.softmax(sizes, dim=0)
        centre = (probabilities * means).sum(dim=0)
        between = (probabilities * (means - centre).square()).sum(dim=(0, 2))
        within = torch.where(probabilities > 0, probabilities * variances, 0.0).sum(dim=(0, 2))
        chunks.append(within + rows.double().square().sum(dim=1) * between)
    return Bounded(torch.cat(chunks), None)


def _moments(features: Tensor, weight: Tensor, bias: Tensor | None, memory: int) -> tuple[Tensor, Tensor]:
    """Return log Σ exp z (n,) over this rank's classes, and the mean of their rows (n, m), in float64."""
    if not len(weight):
        return features.new_full((len(features),), -torch.inf, dtype=torch.float64), torch.zeros_like(features).double()
    matrix, shift = promoted(weight), None if bias is None else promoted(bias).double()
    sizes, means = [], []
    for rows in features.split(max(1, memory // (16 * len(weight)))):
        scores = product(promoted(rows), matrix.t()).double()
        scores = scores if shift is None else scores.add_(shift)
        sizes.append(scores.logsumexp(dim=1))
        likely = scores.sub_(sizes[-1].unsqueeze(1)).exp_().to(matrix.dtype)
        means.append(product(likely, matrix).double())
    return torch.cat(sizes), torch.cat(means)


HeadSource = Head | TensorHead
Error = Callable[[HeadBatch, Tensor], NonFiniteError]  # (batch, bad rows (rows,) bool) -> the error


class Total:
    """Take the sums behind κ of a head, by one read of its data; by two with ``normalize``.

    ``value`` is Σ_i scale_i |φ_i|² ⟨w wᵀ, ∂²ℓ_i/∂z_i²⟩ over this rank's rows.
    """

    def __init__(self, source: HeadSource, loss: losses.Loss, options: Options) -> None:
        self._source, self._options, self._backend = source, options, ""
        self._scale = _feature_scale(source, options) if options.normalize else None
        self._over, self.value, self._bound = Accumulator(options.nan_policy, loss.reduction), 0.0, 0.0
        self._contributions: list[Tensor] = []
        curvature: Curvature | None = None
        with contextlib.closing(source.batches()) as batches:  # an error removes the hooks now, not at some later time
            for batch in batches:
                with contractions.full_precision(batch.features):
                    curvature = curvature or self._curvature(loss, source.expected_rows(batch))
                    self._add(batch, curvature)
                del batch  # to free its memory before the next one is made

    @property
    def weight(self) -> float:
        """Return Σ_i ω_i over the rows that count."""
        return self._over.weight

    def _curvature(self, loss: losses.Loss, rows: int) -> Curvature:
        """Return the curvature for the weight to measure, which is there once the first batch has been read."""
        weight, bias = self._source.matrix()
        if self._scale is not None:
            weight = normalize.apply(self._scale, weight)
        backend = contractions.choose_for_head(self._options.backend, weight)
        self._backend = backend.name
        memory = self._options.memory or contractions.default_memory(weight.device)
        make = partial(loss.curvature, weight, bias, backend, rows, memory)
        if self._source.classes.alone:
            return make(self._options.tolerance)
        own = make(0.0) if len(weight) else None
        return Curvature(partial(_by_row, Shard(self._source.classes), own, weight, bias, memory))

    def _add(self, batch: HeadBatch, curvature: Curvature) -> None:
        found, rows = None, None
        if batch.labels is not None and curvature.total is not None and self._scale is None:
            rows = (
                batch.features.new_empty(len(batch.features), dtype=torch.float64) if self._options.per_sample else None
            )
            found = curvature.total(batch.features, batch.labels, rows)
        lost = None if found is None else self._lost(batch, found.total)
        if found is None or lost is not None or not math.isfinite(found.total):
            self._add_rows(batch, curvature)  # to find the rows that are wrong, and leave them out or say so
            return
        self._over.add(batch.samples, found.counted)
        self.value += found.total
        if rows is not None:
            self._contributions.append(_by_sample(batch, rows).sum(dim=1))

    def _add_rows(self, batch: HeadBatch, curvature: Curvature) -> None:
        features = batch.features if self._scale is None else normalize.apply(self._scale, batch.features, inverse=True)
        rows, bounds = curvature.by_row(features, batch.terms.scale, *batch.terms.extra)
        rows = rows.mul_(batch.terms.scale)
        if self._scale is not None:
            rows = self._as_in_the_first_read(batch, rows)
        total, weights, kept = float(rows.sum()), batch.terms.weights, None
        lost = self._lost(batch, total)
        if lost is not None:
            rows, total = rows.masked_fill(lost, math.nan), math.nan
        if not math.isfinite(total):
            rows = torch.where(batch.terms.scale != 0, rows, 0.0)
            kept = _kept(self._over, batch, ~rows.isfinite(), self._error)
            rows, weights = masked(rows.where(rows.isfinite(), torch.nan), kept), masked(weights, kept)
            total = float(rows.sum())
        self._over.add(batch.samples, weights.sum())
        self.value += total
        if bounds is not None:
            bounds = bounds * batch.terms.scale.abs()
            counted = bounds.isfinite() & (rows != 0)  # not in rows that were left out
            self._bound += float(torch.where(counted, bounds, 0.0).sum())
        if self._options.per_sample:
            self._contributions.append(_by_sample(batch, masked(rows, kept, torch.nan)).sum(dim=1))

    def _lost(self, batch: HeadBatch, total: float) -> Tensor | None:
        """Return which rows are lost to underflow, (rows,); None if none is."""
        policy, name = self._options.nan_policy, self._source.name
        return underflow(policy, batch.number, abs(total), [batch.features], name, "rows")

    def _as_in_the_first_read(self, batch: HeadBatch, rows: Tensor) -> Tensor:
        """Return rows with NaN in those that the deviations were computed without; other rows have to be finite."""
        left_out = _bad_rows(batch)
        late = ~left_out & ~rows.isfinite() & (batch.terms.scale != 0)
        check_weights = partial(_check_finite_weights, self._source)
        normalize.check_in_time(self._options.nan_policy, late, batch.number, "rows", check_weights)
        return rows.masked_fill(left_out, math.nan)

    def _error(self, batch: HeadBatch, bad: Tensor) -> NonFiniteError:
        _check_finite_weights(self._source)
        return _non_finite(self._source.name, batch, bad)

    def estimate(self) -> Estimate:
        """Return κ, over the rows of all ranks."""
        shard = self._source.shard
        if not shard.ranks.alone:
            own = torch.tensor([self.value, self._bound], dtype=torch.float64, device="cpu")
            self.value, self._bound = self._over.together(shard, {"values": own})["values"].tolist()
        normaliser = self._over.normaliser
        zero = 0 if self._scale is None else int((self._scale == 0).sum())
        dropped = [f"{zero} features that are zero throughout dropped"] if zero else []
        return Estimate(
            value=self.value / normaliser,
            stderr=None,
            samples=self._over.samples,
            method="head",
            exact=self._bound == 0,
            backend=self._backend,
            per_sample=self._over.per_sample(self._contributions, shard) if self._options.per_sample else None,
            layer=self._source.name,
            omitted=self._over.omitted,
            notes=(*self._source.notes(), *dropped),
            max_error=self._bound / normaliser if self._bound else None,
        )


def _feature_scale(source: HeadSource, options: Options) -> Tensor:
    deviations, over = FeatureScale(), Accumulator(options.nan_policy)
    with contextlib.closing(source.batches()) as batches:
        for batch in batches:
            bad = _bad_rows(batch)
            counted = _kept(over, batch, bad, partial(_non_finite, source.name))
            kept = _used(batch) & (~bad if counted is None else counted)
            deviations.add((batch.features if bool(kept.all()) else batch.features[kept]).flatten(0, -2))
    deviations.together(source.shard, source.name)
    return deviations.scale()


def _used(batch: HeadBatch) -> Tensor:
    """Return which rows the loss does not ignore, (rows,)."""
    return torch.ones_like(batch.terms.scale, dtype=torch.bool) if batch.terms.used is None else batch.terms.used


def _bad_rows(batch: HeadBatch) -> Tensor:
    """Return which rows have no loss, or NaN or infinity in features that count, (rows,)."""
    bad = batch.terms.scale.isnan()
    if not bool(batch.features.sum().isfinite()):
        bad = bad | (_used(batch) & ~batch.features.isfinite().flatten(1).all(dim=1))
    return bad


def _kept(over: Accumulator, batch: HeadBatch, bad: Tensor, error: Error) -> Tensor | None:
    """Return which rows count, (rows,), and count the samples left out with all their rows; None if all rows count."""
    kept = over.kept(~bad, lambda: error(batch, bad), lambda fine: _by_sample(batch, fine).all(dim=1))
    return None if kept is None else kept.repeat_interleave(batch.per_sample)


def _by_sample(batch: HeadBatch, rows: Tensor) -> Tensor:
    if len(rows) == 0:
        return rows.view(batch.samples, 0)
    if batch.per_sample == 0:
        raise InputError(
            f"batch {batch.number}: its {len(rows)} loss terms cannot be told apart by sample ({batch.samples} "
            "samples); have the model (or forward=) return outputs with the samples in dimension 0"
        )
    return rows.view(batch.samples, batch.per_sample)


def _check_finite_weights(source: HeadSource) -> None:
    layers.check_finite_entries(f"layer {source.name!r}" if source.name else "the head", *source.matrix())


def _non_finite(name: str, batch: HeadBatch, bad: Tensor) -> NonFiniteError:
    first = int(bad.nonzero()[0])
    what = "features"
    if bool(batch.features[first].isfinite().all()):
        what = "logits, or in squares beyond the dtype's range,"
        what = "targets, or in the loss," if bool(batch.terms.scale[first].isnan()) else what
    where = f" of layer {name!r}" if name else ""
    return non_finite(batch.number, ~bad, f"in the {what}{where} (the first is row {first})", "rows")
