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

import torch
from torch import Tensor

from ..errors import InputError
from ..losses import Loss
from ..numerics.accumulate import Accumulator, non_finite
from ..numerics.signs import Signs
from ..options import Options
from ..passes import cotangents
from ..passes.runner import Run, Runner

_CHOICE = -2  # the stream that says which samples are in the part


class Subset:
    """Choose samples of the data by the traces of their loss's Hessians.

    Args:
        sizes: t of all samples, (N,) float64 on the CPU.
        places: (n,) int64, of this rank's samples among these.
        over: all samples.
        seed: of the user.

    Attributes:
        over: all samples.
        chosen: (n,) bool, of this rank's samples those in the part.
        count: how many are in the part, of all ranks.
    """

    chosen: Tensor
    count: int

    def __init__(self, sizes: Tensor, places: Tensor, over: Accumulator, seed: int) -> None:
        self._sizes, self._places, self.over = sizes, places, over
        self._uniform = Signs(seed, [0]).uniform(_CHOICE, torch.arange(len(sizes), device="cpu"), 1).flatten()

    @classmethod
    def of(cls, runner: Runner, loss: Loss, options: Options) -> "Subset":
        """Return that of a runner's data, after a forward pass over all of them.

        Raises:
            InputError: as :meth:`.Runner.each`.
            NonFiniteError: NaN or infinity in outputs or targets.
        """
        over, own = Accumulator(options.nan_policy, loss.reduction), list[Tensor]()

        def work(run: Run) -> tuple[Tensor, Tensor, int]:
            sent = cotangents.of_run(run, loss)
            return sent.marked(sent.sizes()), sent.sample_weights, run.number

        def take(found: tuple[Tensor, Tensor, int]) -> None:
            sizes, weights, number = found
            fine = sizes.isfinite()
            over.kept(fine, lambda: non_finite(number, fine, "in their targets, outputs or loss"))
            over.add(len(sizes), float(weights.sum()))
            own.append(sizes.cpu())

        runner.each(work, take)
        shard, mine = runner.batches.shard, torch.cat(own)
        over.together(shard, {})
        sizes = shard.rows("the traces of the loss's Hessians", mine)
        places = shard.numbers(0, len(mine)).clamp(max=len(sizes) - 1)  # those of a lent batch are beyond
        return cls(sizes, places, over, options.seed)

    def choose(self, count: float) -> bool:
        """Choose about so many samples; return False where these are all whose loss is curved.

        Raises:
            InputError: none is drawn.
        """
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
