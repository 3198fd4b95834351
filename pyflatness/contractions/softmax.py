"""Compute the curvature of cross-entropy at a head: the variance of the weight's rows under the head's softmax.

For a row of features φ with p = softmax(W φ + b), the Hessian of the loss in the logits is diag(p) - p pᵀ, and

    |φ|² ⟨W Wᵀ, diag(p) - p pᵀ⟩ = |φ|² (E_s |w_s|² - |E_s w_s|²) = |φ|² var_p(w).

The difference cancels if one probability is close to 1, as at every trained minimum. Three routes avoid that:

- ``fused`` and ``pairs``: var_p(w) = Σ_{s<t} p_s p_t |w_s - w_t|². Every term is >= 0 and the distances come from the
  differences of rows, so the relative error is that of the probabilities, for any p. One kernel computes it for up to
  64 outputs; for more, it takes two matrix products (n d m + n d² multiply-adds).
- ``rows`` (2 n d m multiply-adds, for d large against m): the sum is split at the most probable row t. With q = 1 -
  p_t, summed directly, and r the probabilities of the others, var_p(w) = q var_r(w) + q p_t |E_r w - w_t|². Both parts
  are >= 0. The first is E - |E|² again. It cancels too if the others are close together and far from the centre; such
  rows have a large condition number, and get Σ_s p_s |w_s - μ|² from the differences.

The weight is centred first (:func:`.centre`).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..interrupts import cached_property
from .precision import product, promoted, promoted_dtype
from .reference import DEFAULT_MEMORY, FUSED_OUTPUTS, Backend, RowSum, centre, shifted
from .wide import Bounded, WideHead


class Labels(NamedTuple):
    """Hold the class indices of rows, unchecked; all rows have weight 1 except ignored ones."""

    classes: Tensor | None  # (rows,) int64; None if all rows count
    ignored: int  # the index of rows that count 0


class SoftmaxVariance:
    """Compute ``|φ_i|² var_{p_i}(w)`` for rows of features; the weight (d, m) is prepared once.

    The cheapest ``route`` depends on about how many ``rows`` will come. In the route ``rows``, neither the logits of
    all rows nor a copy of the weight is ever made. For ``rtol`` see :class:`.wide.WideHead`; with 0 all terms count.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        backend: Backend,
        *,
        rows: int,
        memory: int = DEFAULT_MEMORY,
        route: str | None = None,
        rtol: float = 0.0,
    ) -> None:
        d, m = weight.shape
        self._weight, self._bias, self._backend = weight, bias, backend
        entries = memory // promoted_dtype(weight.dtype).itemsize
        self.route = route or _cheapest_route(rows, d, m, entries)
        self._chunk = max(1, entries // (2 * d))
        self._prepared: Tensor | None = None  # made by the first call of `total`
        if self.route == "rows":
            self._wide = WideHead(weight.contiguous(), centre(weight), bias, backend, memory, rtol)

    def __call__(self, features: Tensor) -> Tensor:
        """Return values (n,) float64 for features (n, m); the value of a row with NaN or infinity is not finite."""
        return self.bounded(features).values

    def bounded(self, features: Tensor, scale: Tensor | None = None) -> Bounded:
        """Return the values of features (n, m), with bounds on their errors if ``rtol`` allows errors.

        ``scale``, (n,), weights the rows in the sum that ``rtol`` is about; NaN counts as 0.
        """
        if self.route == "rows":
            return self._wide(features, None if scale is None else scale.nan_to_num(0.0))
        values = self._backend.softmax_variance if self.route == "fused" else self._pairs
        constants, chunks = self._constants, []
        for chunk in features.split(self._chunk):
            chunks.append(values(promoted(chunk), *constants))
        return Bounded(chunks[0] if len(chunks) == 1 else torch.cat(chunks), None)

    def total(self, features: Tensor, labels: Labels, values: Tensor | None) -> RowSum | None:
        """Return the sum of the values by one call of :meth:`.Backend.softmax_variance_sum`.

        It is None if there is no kernel for it, or if a row that counts has a label that is no class.
        """
        weight, bias = self._weight, self._bias
        if self.route != "fused" or not features.dtype == weight.dtype in self._backend.sums:
            return None
        if bias is not None and bias.dtype != weight.dtype:  # such as half precision with a float32 weight
            return None
        found = self._backend.softmax_variance_sum(features, weight, bias, self._prepared, *labels, values)
        self._prepared = self._prepared if found is None else found.prepared
        return found

    @cached_property
    def _constants(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the centred weight (d, m), the shifted bias (d,) and the distances (d, d)."""
        weight = promoted(self._weight.contiguous())
        return weight - centre(weight), shifted(self._bias, weight), self._backend.pair_distances(weight)

    def _pairs(self, features: Tensor, weight: Tensor, bias: Tensor, distances: Tensor) -> Tensor:
        backend = self._backend
        scores = product(features, weight.t(), bias)
        maximum = scores.new_full((len(scores),), -torch.inf)
        rest, _, _ = backend.exponentiate(scores, None, 1.0, maximum)
        pairs = backend.row_dots(scores, product(scores, distances)) / 2
        values = backend.row_dots(features, features) * pairs / (1 + rest).square()
        return values.masked_fill_(maximum.isinf(), torch.nan)


def _cheapest_route(n: int, d: int, m: int, entries: int) -> str:
    if d <= FUSED_OUTPUTS:
        return "fused"
    return "pairs" if d * (n + m) < n * m and d * (d + m) <= entries else "rows"
