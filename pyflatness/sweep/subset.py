"""Send a part of the data backward, which stands for all: a Poisson sample in proportion to the loss's curvature.

With t_i the trace of the loss Hessian in the outputs of sample i, which a forward pass gives, T = Σ_i t_i over all N
samples and each sample in the part with probability π_i = min(1, c t_i) by itself, a sum over all data Σ_i κ_i is
estimated by the ratio (Hájek 1971; Särndal, Swensson and Wretman 1992, "Model Assisted Survey Sampling", 5.6 and 7.3)

    T Σ_s v_i/π_i / Σ_s t_i/π_i

v_i an unbiased value of κ_i. Its bias is O(1/s) for s samples in the part. With e_i = v_i - γ t_i, γ = Σ_s v_i/π_i /
Σ_s t_i/π_i, and u_i an unbiased estimate of the variance of v_i (0 of exact values, e_i² of one probe: an upper bound),

    Σ_s [(1 - π_i) e_i² / π_i² + u_i / π_i]        estimates   Σ_i Var v_i / π_i + Σ_i (1/π_i - 1) (κ_i - γ t_i)²,

its variance to first order. Whether a sample is in the part follows from the seed, its place in all data and c alone,
and a larger part has all samples of a smaller one.
"""

from functools import partial

import torch
from torch import Tensor

from .. import losses
from ..errors import InputError
from ..model import data
from ..numerics.accumulate import Accumulator, non_finite
from ..numerics.signs import Signs
from ..passes import cotangents
from ..passes.task import Task

_CHOICE = -2  # the stream that says which samples are in the part


class Subset:
    """Choose samples of the data by the traces t of their loss's Hessians, ``sizes`` (N,) float64 on the CPU.

    ``places`` (n,) int64 are those of this rank's samples, of which ``chosen`` are in the part; ``count`` is of all
    ranks.
    """

    chosen: Tensor
    count: int

    def __init__(self, sizes: Tensor, places: Tensor, over: Accumulator, seed: int) -> None:
        self._sizes, self._places, self.over = sizes, places, over
        self._uniform = Signs(seed, [0]).uniform(_CHOICE, torch.arange(len(sizes), device="cpu"), 1).flatten()

    @classmethod
    @torch.no_grad()
    def of(cls, task: Task) -> "Subset":
        """Return that of a task's data, after a forward pass over all of them."""
        over, own = Accumulator(task.options.nan_policy, task.loss.reduction), list[Tensor]()
        for number, part in task.parts().numbered(task.batches):
            outputs, targets = task.run(part)
            with losses.of_batch(number):
                found = losses.tensor_targets(targets, number)
                sent = cotangents.prepare(outputs, found, task.loss, data.size(part))
            sizes = sent.marked(sent.sizes())
            fine = sizes.isfinite()
            over.kept(fine, partial(non_finite, number, fine, "in their targets, outputs or loss"))
            over.add(len(sizes), sent.sample_weights.sum())
            own.append(sizes.cpu())
        shard, mine = task.batches.shard, torch.cat(own)
        over.together(shard, {})
        sizes = shard.rows("the traces of the loss's Hessians", mine)
        places = shard.numbers(0, len(mine)).clamp(max=len(sizes) - 1)  # those of a lent batch are beyond
        return cls(sizes, places, over, task.options.seed)

    def choose(self, count: float) -> bool:
        """Choose about so many samples; return False where these are all whose loss is curved."""
        if count >= int((self._sizes > 0).sum()):
            return False
        sizes = self._sizes.sort(descending=True).values
        rest = sizes.flip(0).cumsum(0).flip(0)
        factors = (count - torch.arange(len(sizes), device="cpu")) / rest  # if so many are certain
        self._factor = float(factors[(factors * sizes <= 1).int().argmax()])
        chosen = self._uniform < self.chances(self._sizes)
        self.chosen, self.count = chosen[self._places], int(chosen.sum())
        if self.count == 0:
            raise InputError(
                f"fraction=: none of {len(chosen)} samples was drawn, {count:.2g} expected; pass a larger one"
            )
        return True

    def spread(self) -> float:
        """Return Σ t_i²/π_i / T², about what the relative variance by one probe each is a multiple of."""
        sizes = self._sizes[self._sizes > 0]
        return float((sizes**2 / self.chances(sizes)).sum() / sizes.sum() ** 2)

    def part(self, variance: float, allowed: float) -> tuple[float, float]:
        """Return how many samples to choose, and the fraction of the allowed variance that is left to their probes.

        With the ``variance`` ρ of a sample's one probe over t², their choice takes ρ Σ t_i² (1/π_i - 1) / T². Of those
        that are certain to be in the part, which have Σ t_i = C, ρ C² / T² over what is left are the probes. Of a few
        fractions the cheapest is taken, where a sample's forward pass counts as much as a probe.
        """
        sizes = self._sizes[self._sizes > 0].sort(descending=True).values
        whole, first = float(sizes.sum()), torch.arange(len(sizes), device="cpu")
        rest, squares = ((sizes**power).flip(0).cumsum(0).flip(0) for power in (1, 2))  # of those that are not certain
        found = []
        for left in (0.75, 0.5, 0.25, 0.1):
            most = (1 - left) * allowed / variance * whole**2
            certain = int((sizes * rest - squares <= most).int().argmax())
            count = float(first[certain] + rest[certain] ** 2 / (most + squares[certain]))
            probes = variance * (1 - float(rest[certain]) / whole) ** 2 / (left * allowed)
            found.append((2 * count + max(0.0, probes - certain), count, left))
        _, count, left = min(found)
        return count, left

    def chances(self, sizes: Tensor) -> Tensor:
        """Return π of samples of these sizes, (n,)."""
        return (self._factor * sizes).clamp(max=1)

    def scale(self, size: Tensor) -> float:
        """Return T / Σ_s t_i/π_i, by which sums over the part are multiplied."""
        return float(self._sizes.sum() / size)

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what a reader of a value should know."""
        return (f"{self.count} of {len(self._sizes)} samples were sent backward",)
