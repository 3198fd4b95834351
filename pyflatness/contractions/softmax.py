"""Weighted variance of the rows of a head's weight under its own softmax: the curvature of cross-entropy at a head.

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

The weight is centred first: a row common to all classes moves no probability, but its size would drown the logits'
last digits. The centre is the median of some rows: a mean would follow an outlier row.
"""

from types import ModuleType

import torch
from torch import Tensor

DEFAULT_MEMORY = 32 * 2**20  # bytes of logits and their like that one chunk of rows may take
_FUSED_OUTPUTS = 64
_CENTRE_ROWS = 31
_CONDITION = 30.0  # amplification of rounding above which a row of the `rows` route is done by differences


class SoftmaxVariance:
    """``|φ_i|² var_{p_i}(w)`` for rows of features, with what depends on the weight alone prepared once.

    Args:
        weight: (d, m), float32 or float64.
        bias: (d,) or None.
        backend: a module from :func:`.backends.choose`.
        rows: about how many rows of features will come; the cheaper route depends on it.
        memory: bytes for the working buffers of one chunk of rows.
        route: ``"fused"``, ``"pairs"`` or ``"rows"``; None takes the cheapest.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        backend: ModuleType,
        *,
        rows: int,
        memory: int = DEFAULT_MEMORY,
        route: str | None = None,
    ) -> None:
        self._backend = backend
        self.route = route or _cheapest_route(rows, *weight.shape)
        weight = weight.contiguous()  # torch's median of an expanded tensor is uninitialised memory (2.13)
        self._weight = weight - weight[:: -(-len(weight) // _CENTRE_ROWS)].median(dim=0).values
        self._bias = weight.new_zeros(len(weight)) if bias is None else bias - bias.median()
        if self.route == "rows":
            self._row_norms = backend.row_dots(self._weight, self._weight).to(weight.dtype)
        else:
            self._distances = backend.pair_distances(weight)
        self._chunk = max(1, memory // (2 * weight.element_size() * len(weight)))

    def __call__(self, features: Tensor) -> Tensor:
        """(n, m) features to (n,) float64 values; a row with NaN or infinity in it gives a non-finite value."""
        compute = {"fused": self._fused, "pairs": self._pairs, "rows": self._rows}[self.route]
        chunks = [compute(chunk) for chunk in features.split(self._chunk)]
        return chunks[0] if len(chunks) == 1 else torch.cat(chunks)

    def _fused(self, features: Tensor) -> Tensor:
        values: Tensor = self._backend.softmax_variance(features, self._weight, self._bias, self._distances)
        return values

    def _pairs(self, features: Tensor) -> Tensor:
        backend = self._backend
        scores = torch.addmm(self._bias, features, self._weight.t())
        rest, _, _ = backend.exponentiate(scores, None, 1.0)
        pairs = backend.row_dots(scores, scores @ self._distances) / 2
        values: Tensor = backend.row_dots(features, features) * pairs / (1 + rest).square()
        return values

    def _rows(self, features: Tensor) -> Tensor:
        backend = self._backend
        scores = torch.addmm(self._bias, features, self._weight.t())
        rest, moment, top = backend.exponentiate(scores, self._row_norms, 0.0)
        total = 1 + rest
        summed = scores @ self._weight  # Σ_{s≠t} e_s w_s
        mean = (summed / rest.clamp_min(torch.finfo(torch.float64).tiny).unsqueeze(1)).to(summed.dtype)
        away = mean - self._weight[top]
        between = rest / total.square() * backend.row_dots(away, away)
        second = rest * backend.row_dots(mean, mean)
        variance = ((moment - second) / total).clamp_min(0) + between
        ill = ((moment + second) / total > _CONDITION * variance).nonzero().squeeze(1)
        if len(ill):
            variance[ill] = self._by_differences(scores[ill], top[ill], summed[ill], total[ill])
        values: Tensor = backend.row_dots(features, features) * variance
        return values

    def _by_differences(self, scores: Tensor, top: Tensor, summed: Tensor, total: Tensor) -> Tensor:
        """Σ_s p_s |w_s - μ|²: an error in μ enters squared, so μ from the product is good enough."""
        scores = scores.scatter(1, top.unsqueeze(1), 1.0)
        mean = ((summed + self._weight[top]) / total.unsqueeze(1)).to(summed.dtype)
        distances = torch.cdist(mean, self._weight, compute_mode="donot_use_mm_for_euclid_dist").square()
        squares: Tensor = self._backend.row_dots(scores, distances)
        return squares / total


def _cheapest_route(n: int, d: int, m: int) -> str:
    if d <= _FUSED_OUTPUTS:
        return "fused"
    return "pairs" if d * (n + m) < n * m else "rows"
