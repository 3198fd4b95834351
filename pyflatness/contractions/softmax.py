"""Compute the curvature of cross-entropy at a head: the variance of the weight's rows under the head's softmax.

For a row of features φ with p = softmax(W φ + b), the Hessian of the loss in the logits is diag(p) - p pᵀ, and

    |φ|² ⟨W Wᵀ, diag(p) - p pᵀ⟩ = |φ|² (E_s |w_s|² - |E_s w_s|²) = |φ|² var_p(w).

The difference cancels where one probability is close to 1, as it is at every trained minimum. Three routes avoid it:

- ``fused`` and ``pairs``: var_p(w) = Σ_{s<t} p_s p_t |w_s - w_t|². Every term is >= 0 and the distances come from the
  differences of rows, so the relative error is that of the probabilities, for any p. One kernel does it for up to 64
  outputs; for more, two matrix products (n d m + n d² multiply-adds).
- ``rows`` (2 n d m multiply-adds, for d large against m): the split by the most probable row t. With q = 1 - p_t,
  summed directly, and r the probabilities of the others, var_p(w) = q var_r(w) + q p_t |E_r w - w_t|². Both parts are
  >= 0. The first is E - |E|² again, so rows in which that cancels too (the others pile up far from the centre) are
  found by their condition number and take Σ_s p_s |w_s - μ|² from the differences.

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
    """Hold the class indices of rows that all count the same, but for ignored ones; nothing of them is checked."""

    classes: Tensor | None  # (rows,) int64; None: there are none, and all rows count
    ignored: int  # the index of rows that add nothing


class SoftmaxVariance:
    """Compute ``|φ_i|² var_{p_i}(w)`` for rows of features; what depends on the weight (d, m) alone is prepared once.

    The cheapest ``route`` of those above depends on how many ``rows`` will come, about. Neither the logits of all rows
    nor a copy of the weight is ever made. For ``rtol`` see :class:`.wide.WideHead`; 0: nothing is left out.
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
        self._prepared: Tensor | None = None  # by the first call of `total`
        if self.route == "rows":
            self._wide = WideHead(weight.contiguous(), centre(weight), bias, backend, memory, rtol)

    def __call__(self, features: Tensor) -> Tensor:
        """Return values (n,) float64 of features (n, m); a row with NaN or infinity in it gives a non-finite value."""
        return self.bounded(features).values

    def bounded(self, features: Tensor, scale: Tensor | None = None) -> Bounded:
        """Return the values of features (n, m), with bounds where ``rtol`` lets there be errors.

        NaN of ``scale``: no row.
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

        None where there is no kernel.
        """
        weight, bias = self._weight, self._bias
        if self.route != "fused" or not features.dtype == weight.dtype in self._backend.sums:
            return None
        if bias is not None and bias.dtype != weight.dtype:  # half precision may stand beside float32
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
