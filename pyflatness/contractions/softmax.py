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

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from .precision import promoted

DEFAULT_MEMORY = 24 * 2**20  # bytes that working buffers may take
_FUSED_OUTPUTS = 64
_CENTRE_ROWS = 31
_CONDITION = 30.0  # amplification of rounding above which a row of the `rows` route is done by differences


class SoftmaxVariance:
    """``|φ_i|² var_{p_i}(w)`` for rows of features, with what depends on the weight alone prepared once.

    Args:
        weight: (d, m); half precision is computed in float32.
        bias: (d,) or None.
        backend: a module from :func:`.backends.choose`.
        rows: about how many rows of features will come; the cheaper route depends on it.
        memory: bytes for working buffers. Neither the logits of all rows nor a copy of the weight is ever made.
        route: ``"fused"``, ``"pairs"`` or ``"rows"``; None takes the cheapest that fits.
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
        weight = weight.contiguous()  # torch's median of an expanded tensor is uninitialised memory (2.13)
        d, m = weight.shape
        self._backend, self._weight = backend, weight
        self._centre = promoted(weight[:: -(-d // _CENTRE_ROWS)]).median(dim=0).values
        bias = self._centre.new_zeros(d) if bias is None else promoted(bias)
        self._bias = bias - bias.median().nan_to_num(0.0, 0.0, 0.0)  # -inf where most classes are masked
        entries = memory // self._centre.element_size()
        self.route = route or _cheapest_route(rows, d, m, entries)
        if self.route == "rows":
            # scores, and five matrices of m columns: a tile of weights, features, their sum, its mean, a difference
            self._chunk = self._tile = max(16, int((6.25 * m * m + entries) ** 0.5 - 2.5 * m))
            if d < self._tile:
                self._tile, self._chunk = d, max(16, (entries - d * m) // (d + 4 * m))
        else:
            self._centred = self._rows_of_weight(slice(None))
            self._distances = backend.pair_distances(promoted(weight))
            self._chunk = max(1, entries // (2 * d))

    def __call__(self, features: Tensor) -> Tensor:
        """(n, m) features to (n,) float64 values; a row with NaN or infinity in it gives a non-finite value."""
        compute = {"fused": self._fused, "pairs": self._pairs, "rows": self._rows}[self.route]
        chunks = [compute(promoted(chunk)) for chunk in features.split(self._chunk)]
        return chunks[0] if len(chunks) == 1 else torch.cat(chunks)

    def _rows_of_weight(self, which: slice | Tensor) -> Tensor:
        """Some rows of the weight, centred."""
        return promoted(self._weight[which]) - self._centre

    def _fused(self, features: Tensor) -> Tensor:
        values: Tensor = self._backend.softmax_variance(features, self._centred, self._bias, self._distances)
        return values

    def _pairs(self, features: Tensor) -> Tensor:
        backend = self._backend
        scores = torch.addmm(self._bias, features, self._centred.t())
        maximum = scores.new_full((len(scores),), -torch.inf)
        rest, _, _ = backend.exponentiate(scores, None, 1.0, maximum)
        pairs = backend.row_dots(scores, scores @ self._distances) / 2
        values: Tensor = backend.row_dots(features, features) * pairs / (1 + rest).square()
        return values.masked_fill_(maximum.isinf(), torch.nan)

    def _rows(self, features: Tensor) -> Tensor:
        backend, run = self._backend, self._sums(features)
        total = 1 + run.rest
        tiny = torch.finfo(features.dtype).tiny
        mean = run.summed / run.rest.to(features.dtype).clamp_min(tiny).unsqueeze(1)
        away = mean - self._rows_of_weight(run.top.clamp_min(0))
        between = run.rest / total.square() * backend.row_dots(away, away)
        second = run.rest * backend.row_dots(mean, mean)
        variance = ((run.moment - second) / total).clamp_min(0) + between
        ill = ((run.moment + second) / total > _CONDITION * variance).nonzero().squeeze(1)
        if len(ill):
            mean = torch.addcmul(mean, away, (-1 / total).unsqueeze(1).to(mean.dtype))[ill]
            variance[ill] = self._by_differences(features[ill], run.maximum[ill], mean, total[ill])
        values: Tensor = backend.row_dots(features, features) * variance
        return values.masked_fill_(run.maximum.isinf(), torch.nan)

    def _sums(self, features: Tensor) -> "_Running":
        backend, run = self._backend, _Running(features)
        for tile in self._tiles():
            weight = self._rows_of_weight(tile)
            scores = torch.addmm(self._bias[tile], features, weight.t())
            norms = backend.row_dots(weight, weight).to(weight.dtype)
            before = run.maximum.clone()
            rest, moment, place = backend.exponentiate(scores, norms, 0.0, run.maximum)
            run.rescale(before, place >= 0, self._rows_of_weight)
            run.add(tile.start, rest, moment, place)
            run.summed.addmm_(scores, weight)
            del scores, weight  # before the next tile's are made
        return run

    def _by_differences(self, features: Tensor, maximum: Tensor, mean: Tensor, total: Tensor) -> Tensor:
        """Σ_s p_s |w_s - μ|²: an error in μ enters squared, so μ from the product is good enough."""
        squares = torch.zeros_like(total)
        for tile in self._tiles():
            weight = self._rows_of_weight(tile)
            scores = torch.addmm(self._bias[tile], features, weight.t()).sub_(maximum.unsqueeze(1)).exp_()
            distances = torch.cdist(mean, weight, compute_mode="donot_use_mm_for_euclid_dist").square()
            squares += self._backend.row_dots(scores, distances)
        return squares / total

    def _tiles(self) -> list[slice]:
        d = len(self._weight)
        return [slice(start, min(start + self._tile, d)) for start in range(0, d, self._tile)]


class _Running:
    """Sums over the classes seen so far, without the most probable of them, relative to its exp(z)."""

    def __init__(self, features: Tensor) -> None:
        n = len(features)
        self.maximum = features.new_full((n,), -torch.inf)
        self.rest = features.new_zeros(n, dtype=torch.float64)  # Σ e_s
        self.moment = torch.zeros_like(self.rest)  # Σ e_s |w_s|²
        self.summed = torch.zeros_like(features)  # Σ e_s w_s
        self.top = features.new_full((n,), -1, dtype=torch.int64)

    def rescale(self, before: Tensor, raised: Tensor, rows_of_weight: Callable[[Tensor], Tensor]) -> None:
        """Where the maximum was raised: what was relative to the old one, with the old top class among it now."""
        index = (raised & (self.top >= 0)).nonzero().squeeze(1)
        if len(index) == 0:
            return
        factor = (before[index] - self.maximum[index]).double().exp()
        weight = rows_of_weight(self.top[index])
        self.rest[index] = factor * (self.rest[index] + 1)
        self.moment[index] = factor * (self.moment[index] + weight.double().square().sum(dim=1))
        self.summed[index] = (self.summed[index] + weight) * factor.unsqueeze(1).to(weight.dtype)

    def add(self, start: int, rest: Tensor, moment: Tensor, place: Tensor) -> None:
        """The sums of one more tile of classes, which begins at ``start``."""
        self.rest += rest
        self.moment += moment
        self.top = torch.where(place >= 0, place + start, self.top)


def _cheapest_route(n: int, d: int, m: int, entries: int) -> str:
    if d <= _FUSED_OUTPUTS:
        return "fused"
    return "pairs" if d * (n + m) < n * m and d * (d + m) <= entries else "rows"
