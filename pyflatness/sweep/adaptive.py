"""Send the columns of a micro-batch in probe groups: hold its probes, and the sums of their values.

A round that at least half of the samples have is sent on the existing graph, for all samples at once. The remaining
probes are packed: samples are repeated as rows of full batches, with a new forward pass.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InputError
from ..numerics.signs import Signs
from ..numerics.variances import with_squares
from ..options import Options
from ..passes import cotangents
from ..passes.cotangents import Cotangents
from ..passes.runner import Repeatable, Run
from . import groups
from .groups import Groups, Probes, Tolerance

_CHOICE = -1  # the stream that chooses the groups with a replicate


@dataclass
class Grouped:
    """Hold the probes of a micro-batch, and the sums of their values."""

    left: Repeatable  # of the micro-batch's run
    sent: Cotangents
    weights: Tensor  # over chances, (n, columns) float64, 0 for samples that are not finite
    finite: Tensor  # (n,), the other samples
    groups: Groups
    probes: Probes
    signs: Tensor  # (2, n, columns) int8: of probes and of their replicates
    sums: Tensor  # (layers, quantities, n) float64
    differences: Tensor  # (layers, quantities, pairs) float64, between a probe and its replicate
    replicated: Tensor  # (pairs,) float64, v_g (1/π - ½) of their groups
    chances: Tensor  # (n,) float64, of each sample to be in the part of the data that is sent
    rounds: int = 0  # of probes, that were sent for all samples at once

    def rows(self, chosen: Tensor) -> Tensor:
        """Return signs of the columns of some probes, (s, columns) int8, 0 for columns of other groups."""
        probes, places = self.probes, self.probes.samples[chosen]
        kept = self.groups.of[places] == probes.groups[chosen].unsqueeze(1)
        return torch.where(kept, self.signs[probes.replicates[chosen], places], 0)

    def of_round(self, number: int) -> tuple[Tensor, Tensor]:
        """Return a round's probes, and its cotangent for all samples; NaN for those that are not finite."""
        chosen = (self.probes.rounds == number).nonzero().flatten()
        rows = torch.zeros_like(self.signs[0]).index_copy_(0, self.probes.samples[chosen], self.rows(chosen))
        return chosen, self.sent.chosen(rows.float().masked_fill_(~self.finite.unsqueeze(1), torch.nan))

    def silent(self, chosen: Tensor) -> Tensor:
        """Return the samples, (n,), without a probe in a round."""
        return torch.ones_like(self.finite).index_fill_(0, self.probes.samples[chosen], False) & self.finite

    def packed(self, chosen: Tensor) -> Tensor:
        """Return the cotangents of some probes, one in each row of a batch."""
        return self.sent.take(self.probes.samples[chosen]).chosen(self.rows(chosen).float())

    def add_round(self, chosen: Tensor, values: Tensor) -> None:
        """Add values (layers, quantities, n) of a round; those of samples without a probe in it are 0, or NaN."""
        places = self.probes.samples[chosen]
        fractions = values.new_zeros(values.shape[2]).index_copy_(0, places, self.probes.fractions[chosen])
        self.sums += values * fractions
        self._compare(chosen, values[..., places])

    def add(self, chosen: Tensor, values: Tensor) -> None:
        """Add values (layers, quantities, s) of some probes."""
        self.sums.index_add_(2, self.probes.samples[chosen], values * self.probes.fractions[chosen])
        self._compare(chosen, values)

    def _compare(self, chosen: Tensor, values: Tensor) -> None:
        kept = self.probes.pairs[chosen] >= 0
        again = self.probes.replicates[chosen] == 1
        signed = torch.where(again, -values, values)[..., kept]
        self.differences.index_add_(2, self.probes.pairs[chosen][kept], signed)

    def variances(self) -> Tensor | None:
        """Return unbiased variances of each sample's sum, the sum of its groups' squared ones, and its replicates.

        They are (3, layers + 1, quantities, n); the last layer is the network. None if the sums are exact.
        """
        if not bool((self.groups.variances > 0).any()):
            return None
        both = torch.cat([self.differences, self.differences.sum(dim=0, keepdim=True)])
        found = with_squares(both.square() / 2 * (1 / self.probes.chances - 0.5))
        found = torch.cat([found, torch.ones_like(found[:1])])
        again = self.probes.samples[self.probes.replicates == 1]
        return both.new_zeros(*found.shape[:-1], self.sums.shape[2]).index_add_(3, again, found)


def begin(
    run: Run,
    sent: Cotangents,
    shape: tuple[int, int],
    tolerance: Tolerance,
    options: Options,
    share: float,
    chances: Tensor,
) -> Grouped:
    """Plan a run's probes; ``shape`` counts layers and quantities, ``share`` is a fraction of the allowed variance.

    A sample that is in a part of the data with probability π, of ``chances`` (n,), stands for 1/π samples. Its variance
    is weighted by 1/π, and so its weights by 1/√π in groups; in sums they are weighted by 1/π.
    """
    weights = sent.weights()
    finite = weights.isfinite().all(dim=1)
    whole = torch.where(finite.unsqueeze(1), weights, 0.0) / chances.unsqueeze(1)
    found = groups.group(whole * chances.sqrt().unsqueeze(1), tolerance.allowed(whole, share))
    replicating = groups.chances(found.variances, tolerance.replicates)
    uniform = Signs(options.seed, [0]).uniform(_CHOICE, run.numbers, replicating.shape[1])[0]
    probes = groups.probes(found, replicating, uniform)
    if len(probes.samples) > options.max_passes * run.samples:
        raise InputError(
            f"probes='adaptive' takes {len(probes.samples) / run.samples:.0f} cotangents a sample for this rtol, more "
            f"than max_passes={options.max_passes}; pass a larger rtol= or max_passes=, or probes=k, a number of probes"
        )
    signs = Signs(options.seed, [0, 1])(cotangents.STREAM, run.numbers, sent.places)
    sums = weights.new_zeros(*shape, run.samples)
    differences = weights.new_zeros(*shape, len(probes.chances))
    replicated = found.variances[uniform < replicating] * (1 / probes.chances - 0.5)
    left = Repeatable.of(run)
    return Grouped(left, sent, whole, finite, found, probes, signs, sums, differences, replicated, chances)
