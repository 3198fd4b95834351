"""Send a part of the data backward that represents all: a Poisson sample in proportion to the loss's curvature.

Let t_i be the trace of the loss Hessian in the outputs of sample i, from a forward pass, and T = Σ_i t_i over all N
samples. Each sample is in the part independently, with probability π_i = min(1, c t_i). A sum over all data Σ_i κ_i is
estimated by the ratio (Hájek 1971; Särndal, Swensson and Wretman 1992, "Model Assisted Survey Sampling", 5.6 and 7.3)

    T Σ_s v_i/π_i / Σ_s t_i/π_i

v_i an unbiased value of κ_i. Its bias is O(1/s) for s samples in the part. With e_i = v_i - γ t_i, γ = Σ_s v_i/π_i /
Σ_s t_i/π_i, and u_i an unbiased estimate of the variance of v_i (0 of exact values, e_i² of one probe: an upper bound),

    Σ_s [(1 - π_i) e_i² / π_i² + u_i / π_i]        estimates   Σ_i Var v_i / π_i + Σ_i (1/π_i - 1) (κ_i - γ t_i)²,

its variance to first order. The seed, a sample's place in all data and c alone set whether it is in the part, and a
larger part has all samples of a smaller one.
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

_CHOICE = -2  # the stream of random numbers that chooses the samples in the part


class Subset:
    """Choose samples of the data by the traces t of their loss's Hessians, ``sizes`` (N,) float64 on the CPU.

    ``places`` (n,) int64 are the places of this rank's samples in all data; ``chosen``, (n,) bool, is True for those in
    the part, and ``count`` is the number of samples in the part, of all ranks.
    """

    chosen: Tensor
    count: int

    def __init__(self, sizes: Tensor, places: Tensor, over: Accumulator, seed: int) -> None:
        self._sizes, self._places, self.over = sizes, places, over
        self._uniform = Signs(seed, [0]).uniform(_CHOICE, torch.arange(len(sizes), device="cpu"), 1).flatten()

    @classmethod
    @torch.no_grad()
    def of(cls, task: Task) -> "Subset":
        """Return the subset of a task's data, after a forward pass over all of them."""
        over, own = Accumulator(task.options.nan_policy, task.loss.reduction), list[Tensor]()
        for number, part in task.cut_batches().numbered(task.batches):
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
        places = shard.numbers(0, len(mine)).clamp(max=len(sizes) - 1)  # a lent batch has places beyond the data
        return cls(sizes, places, over, task.options.seed)

    def choose(self, count: float) -> bool:
        """Choose about ``count`` samples; return False if these are all with a loss that has curvature."""
        if count >= int((self._sizes > 0).sum()):
            return False
        sizes = self._sizes.sort(descending=True).values
        rest = sizes.flip(0).cumsum(0).flip(0)
        factors = (count - torch.arange(len(sizes), device="cpu")) / rest  # c, if the k largest have probability 1
        self._factor = float(factors[(factors * sizes <= 1).int().argmax()])
        chosen = self._uniform < self.chances(self._sizes)
        self.chosen, self.count = chosen[self._places], int(chosen.sum())
        if self.count == 0:
            raise InputError(
                f"fraction=: none of {len(chosen)} samples was drawn, {count:.2g} expected; pass a larger one"
            )
        return True

    def spread(self) -> float:
        """Return Σ t_i²/π_i / T², to which the relative variance of one probe a sample is about proportional."""
        sizes = self._sizes[self._sizes > 0]
        return float((sizes**2 / self.chances(sizes)).sum() / sizes.sum() ** 2)

    def part(self, variance: float, allowed: float) -> tuple[float, float]:
        """Return how many samples to choose, and the fraction of the allowed variance that is left to their probes.

        With ρ = ``variance``, that of one probe of a sample over t², the choice of samples has the relative variance
        ρ Σ t_i² (1/π_i - 1) / T². If the samples with π_i = 1 have Σ t_i = C, they need ρ C² / T² probes over the
        variance left to probes. The cheapest of a few fractions is returned; a sample's forward pass counts as a probe.
        """
        sizes = self._sizes[self._sizes > 0].sort(descending=True).values
        whole, first = float(sizes.sum()), torch.arange(len(sizes), device="cpu")
        rest, squares = ((sizes**power).flip(0).cumsum(0).flip(0) for power in (1, 2))  # of samples with π < 1
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
        """Return π of samples with traces ``sizes``, (n,)."""
        return (self._factor * sizes).clamp(max=1)

    def scale(self, size: Tensor) -> float:
        """Return T / Σ_s t_i/π_i, by which sums over the part are multiplied."""
        return float(self._sizes.sum() / size)

    @property
    def notes(self) -> tuple[str, ...]:
        """Return notes for the reader of a value."""
        return (f"{self.count} of {len(self._sizes)} samples were sent backward",)
