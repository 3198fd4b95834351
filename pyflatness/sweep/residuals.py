"""Sample the residual, a layer's Hessian without its GGN, with more probes for samples in which it can be large.

    ∂²ℓ_i/∂w² = Jᵀ (∂²ℓ_i/∂f²) J + Σ_c r_ic ∂²f_c/∂w²,    r_i = ∂ℓ_i/∂f_i

The first term, the GGN, has a low rank, so that random probes of it vary a lot; cotangents give it. The second one, the
residual, is the Hessian of ⟨r_i, f⟩ with r_i held fixed, and small if a sample is fitted.

For m_i probes of sample i with variances v_i the sum over samples has the variance Σ v_i / m_i. For a given number of
probes it is least with m_i ~ √v_i, which is about proportional to |r_i|. Every sample gets a few probes, the pilot, and

    m_i = max(pilot, ⌈s |r_i|⌉),    the smallest s with c Σ_i |r_i|² / max(pilot, s |r_i|) ≤ the allowed variance

in all. The factor c, of v_i ≈ c |r_i|², and the value to which the error is relative come from the probes of all other
samples so far: if a sample's own probes set their number, their mean would be biased. A sample for which an exact value
needs fewer Hessian products is computed exactly.
"""

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from ..hessian.block_traces import Value
from ..losses import Loss
from ..numerics.variances import with_squares
from ..passes.runner import Run
from .groups import Tolerance

GGN_SHARE = 0.25  # of the allowed variance, if the GGN is sampled as well
_PILOT = 2  # probes of every sample, so that their variance can be estimated
_AT_LEAST = 64  # probes of the pilot over all data
_MOST = 2**31  # so that numbers of probes are finite integers

Rounds = Mapping[int, range | None]  # by a layer's number the probes to send; None for exact values


def of_run(run: Run, loss: Loss) -> tuple[Value, Tensor]:
    """Return the function (outputs, targets) -> Σ_i ⟨r_i, f_i⟩, and |r_i|, (n,) float64; 0 if it is not finite."""
    outputs = run.outputs.detach().requires_grad_()
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(loss.value(outputs, run.targets), outputs)
    sizes = torch.linalg.vector_norm(gradient.reshape(run.samples, -1), dim=1, dtype=torch.float64)
    return partial(_along, gradient), sizes.nan_to_num(0.0, 0.0, 0.0)


def _along(gradient: Tensor, outputs: Tensor, targets: Any) -> Tensor:
    return (gradient * outputs).sum(dtype=torch.float64)


def pilot(expected: int) -> int:
    """Return the number of probes that each of about ``expected`` samples of the data gets first."""
    return max(_PILOT, -(-_AT_LEAST // expected))


class Residuals:
    """Hold the residuals of a micro-batch: the sums of their probes so far, and the wanted numbers of probes.

    ``products`` has, by number of a layer with probes, the Hessian products that its exact value takes.
    """

    def __init__(self, shape: tuple[int, int], sizes: Tensor, pilot: int, most: int) -> None:
        self.sizes, self.pilot, self._most = sizes, pilot, most
        self.products: dict[int, int] = {}
        self._counts = torch.zeros(shape[0], len(sizes), dtype=torch.int64, device=sizes.device)
        self._wanted, self._exact = torch.zeros_like(self._counts), torch.ones_like(self._counts, dtype=torch.bool)
        self._origins = sizes.new_zeros(*shape, len(sizes))  # first values; sums of differences from them do not cancel
        self._sums, self._squares = torch.zeros_like(self._origins), torch.zeros_like(self._origins)
        self._values = torch.zeros_like(self._origins)  # exact ones

    def begin(self, layer: int, products: int) -> range | None:
        """Return the probes of a layer's pilot; None for exact values, if their ``products`` are no more."""
        if products <= self.pilot:
            return None
        self.products[layer] = products
        self._exact[layer], self._wanted[layer] = False, self.pilot
        return range(self.pilot)

    def add(self, layer: int, places: Tensor, values: Tensor, numbers: range | None) -> None:
        """Add values (k, quantities, s) of probes of these numbers; for None, k = 1 and the values are exact."""
        if numbers is None:
            self._values[layer][:, places] = values[0]
            return
        begins = self._counts[layer, places] == 0
        self._origins[layer][:, places[begins]] = values[0][:, begins]
        counted = (
            torch.arange(numbers.start, numbers.stop, device=places.device).unsqueeze(1) < self._wanted[layer, places]
        )
        shifted = torch.where(counted.unsqueeze(1), values - self._origins[layer][:, places], 0.0)
        self._sums[layer].index_add_(1, places, shifted.sum(dim=0))
        self._squares[layer].index_add_(1, places, shifted.square().sum(dim=0))
        self._counts[layer].index_add_(0, places, counted.sum(dim=0))

    @property
    def means(self) -> Tensor:
        """Return each sample's residual, (layers, quantities, n)."""
        means = self._origins + self._sums / self._counts.clamp_min(1).unsqueeze(1)
        return torch.where(self._exact.unsqueeze(1), self._values, means)

    @property
    def deviations(self) -> Tensor:
        """Return the variance of one probe of each sample's residual, (layers, quantities, n); 0 without probes."""
        counts = self._counts.unsqueeze(1)
        return ((self._squares - self._sums.square() / counts.clamp_min(1)) / (counts - 1).clamp_min(1)).clamp_min(0)

    def variances(self) -> Tensor | None:
        """Return variances of the means, their squares over their degrees of freedom, and these; None if all are exact.

        They are (3, layers + 1, quantities, n). The last layer is the network: variances add up, as layers have
        independent probes.
        """
        if bool(self._exact.all()):
            return None
        counts = self._counts.clamp_min(2).unsqueeze(1)
        found = with_squares((self.deviations / counts).masked_fill(self._exact.unsqueeze(1), 0.0))
        found[1] /= counts - 1
        replicates = (counts - 1).masked_fill(self._exact.unsqueeze(1), 0).expand_as(found[0])
        found = torch.cat([found, replicates.unsqueeze(0)])
        return torch.cat([found, found.sum(dim=1, keepdim=True)], dim=1)

    def want(self, wanted: Tensor) -> None:
        """Set the number of probes to send in all, (layers, n); -1 where nothing is known.

        A sample's value is exact instead if that takes fewer products, or if nothing is known.
        """
        for layer, products in self.products.items():
            if products <= self._most:
                self._exact[layer] = (wanted[layer] < 0) | (wanted[layer] - self.pilot > products)
        self._wanted = wanted.clamp_min(self.pilot).masked_fill(self._exact, 0)
        most = float(self._wanted.mean(dim=1, dtype=torch.float64).max())
        if most > self._most:
            raise InputError(
                f"probes='adaptive' takes {most:.0f} Hessian products a sample for this rtol, more than "
                f"max_passes={self._most}; pass a larger rtol= or max_passes=, or probes=k, a number of probes: a "
                "value near zero has no small relative error"
            )

    def steps(self, *, whole: bool) -> Iterator[tuple[Tensor, Rounds]]:
        """Yield places of samples (s,) and the probes to send for them, by layer; with ``whole`` always all samples.

        The caller has to :meth:`add` the values before the next step. A step sends as many probes as at least half of
        its samples lack, so that later steps have fewer samples.
        """
        every = torch.arange(len(self.sizes), device=self.sizes.device)
        for layer in self.products:
            if bool(self._exact[layer].any()):
                yield every if whole else self._exact[layer].nonzero().flatten(), {layer: None}
        sent = dict.fromkeys(self.products, self.pilot)
        while True:
            left = self._wanted - self._counts
            places = (left > 0).any(dim=0).nonzero().flatten()
            if len(places) == 0:
                return
            rounds: dict[int, range | None] = {}
            for layer, first in sent.items():
                ordered = left[layer, places].sort(descending=True).values
                if ordered[0] > 0:
                    sent[layer] += max(1, int(ordered[0 if whole else (len(ordered) - 1) // 2]))
                    rounds[layer] = range(first, sent[layer])
            yield every if whole else places, rounds


class Predictor:
    """Predict how many probes residuals need, from the samples so far."""

    def __init__(self, rtol: float, tolerance: Tolerance) -> None:
        self._rtol, self._tolerance = rtol, tolerance
        self._size, self._samples = 0.0, 0
        self._sums = torch.zeros(3, 1, 1, dtype=torch.float64, device="cpu")  # of the result of _summands

    def wanted(self, residuals: Residuals, ggn: Tensor, *, ggn_is_exact: bool) -> Tensor:
        """Return m_i by layer, (layers, n) int64, after the pilot; -1 if there are no other samples."""
        sizes, summands = _summands(residuals, ggn)
        of_ggn, means, ratios = (self._sums.to(ggn.device) + summands.sum(dim=3)).unsqueeze(3)
        size, samples = self._size + sizes.sum(), self._samples + len(sizes)
        others = size - sizes
        divisor = others.clamp_min(torch.finfo(sizes.dtype).tiny)
        means, ratios = (means - summands[1]) / divisor, ((ratios - summands[2]) / divisor).clamp_min(0)
        error = self._rtol * torch.maximum(of_ggn.abs(), (of_ggn + size * means).abs()) / samples
        share = 1.0 if ggn_is_exact else 1 - GGN_SHARE
        allowed = share * error.square() * self._tolerance.expected(len(sizes)) * len(sizes)
        bound = (allowed / ratios).nan_to_num(math.inf, math.inf)  # 0 / 0 if all known deviations are zero
        found = fewest(sizes, bound, residuals.pilot).amax(dim=1)
        return torch.where((others > 0) | (sizes == 0), found, -1)

    def add(self, residuals: Residuals, ggn: Tensor) -> None:
        """Add a micro-batch of which all probes were sent."""
        sizes, summands = _summands(residuals, ggn)
        self._size, self._samples = self._size + float(sizes.sum()), self._samples + len(sizes)
        self._sums = self._sums.to(ggn.device) + summands.sum(dim=3)


def _summands(residuals: Residuals, ggn: Tensor) -> tuple[Tensor, Tensor]:
    """Return |r_i|, (n,), and (3, layers, quantities, n): GGN, residual, v_i / |r_i|; 0 for samples not finite."""
    summands = torch.stack([ggn, residuals.means, residuals.deviations])
    fine = summands.isfinite().flatten(0, 2).all(dim=0)
    summands, sizes = summands.where(fine, 0.0), residuals.sizes.where(fine, 0.0)
    summands[2] = torch.where(sizes > 0, summands[2] / sizes, 0.0)
    return sizes, summands


def fewest(sizes: Tensor, bound: Tensor, least: int) -> Tensor:
    """Return m_i = max(least, ⌈s a_i⌉) for the smallest s with Σ_j a_j² / max(least, s a_j) ≤ a bound, (…, n) int64.

    ``sizes`` are a, (n,), and ``bound``, (…, n), has a bound for each m_i.
    """
    ordered = sizes.sort(descending=True).values
    squares = ordered.square() / least
    heads, tails = ordered.cumsum(0), squares.flip(0).cumsum(0).flip(0) - squares
    reached = heads * ordered / least + tails  # the sum for s = least / a_h, beyond which h samples get more
    above = torch.searchsorted(-reached, -bound.contiguous())
    heads, tails = (torch.nn.functional.pad(part, (1, 0)) for part in (heads, tails))
    scale = heads[above] / (bound - tails[above]).clamp_min(0)
    more = (scale * sizes).nan_to_num(0.0).ceil().clamp(max=_MOST)
    return torch.where(above > 0, more, 0.0).long().clamp_min(least)
