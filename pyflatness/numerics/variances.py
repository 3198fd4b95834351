"""Sum variances of sampled values over the samples of a data set, and how well they are known.

Draws are independent over samples, so that a sum's variance V is the sum of its samples' variances v_i. From the sum of
their squares come its degrees of freedom (:mod:`.intervals`).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .shard import Shard

_FEWEST = (
    8  # replicates of groups from which the t law holds: of 95 % intervals 85 % do with one, 92 to 95 % with eight
)


class Variances:
    """Hold running sums of variances over samples, in some probes of each or in groups of cotangents."""

    def __init__(self) -> None:
        self._sums = torch.zeros((), dtype=torch.float64, device="cpu")
        self._origin: Tensor | None = None
        self._probes = self._samples = 0

    def add_probes(self, probes: Tensor, kept: Tensor) -> None:
        """Take in k probes' values (k, …, n) of n samples, of which those count that are ``kept``, (n,)."""
        self._probes, self._samples = len(probes), self._samples + int(kept.sum())
        if len(probes) > 1:
            self.add(with_squares(probes.var(dim=0)))
            return
        if self._origin is None:  # near the mean, so that the squares do not cancel
            self._origin = probes[0].sum(dim=-1, keepdim=True) / kept.sum().clamp_min(1)
        shifted = torch.where(kept, probes[0] - self._origin, 0.0)
        self.add(torch.stack([shifted, shifted**2]))

    def add(self, found: Tensor) -> None:
        """Take in variances of n samples and the squares of the independent ones in them, (2, …, n).

        Of groups their replicates are counted beside these, (3, …, n).
        """
        self._sums = self._sums.to(found.device) + found.sum(dim=-1)

    def together(self, shard: Shard) -> None:
        """Take in what the other ranks took in, where a read of the data ends."""
        if shard.ranks.alone or self._sums.ndim == 0:
            return
        if self._probes != 1:
            self._sums = shard.sum("the variances of samples", {"sums": self._sums})["sums"]
            return
        assert self._origin is not None
        own = {
            "sums": self._sums,
            "origin": self._origin.squeeze(-1),
            "samples": torch.tensor(self._samples, dtype=torch.int64, device="cpu"),
        }
        found = shard.each("the variances of samples", own)
        self._origin, self._samples = found[0]["origin"].unsqueeze(-1), sum(int(each["samples"]) for each in found)
        self._sums = sum((_moved(each, found[0]["origin"]) for each in found), start=torch.zeros_like(found[0]["sums"]))

    def result(self) -> tuple[Tensor, Tensor] | None:
        """Return the variance of the sum over samples of the mean over probes, and its degrees of freedom, (…) each.

        It is None if there was nothing to take in: the values are exact. One probe does not tell a sample's variance.
        The variance between samples takes its place, which is larger by that of the true values, and of one sample is
        infinite. It says nothing of the probes themselves, so that there are no degrees of freedom. These are NaN where
        they are not known, and with few replicates: by how many there are and not by what they say, since intervals of
        many degrees of freedom among those of few replicates are those where the largest groups agree by chance.
        """
        if self._sums.ndim == 0:
            return None
        if self._probes == 1:
            return self._between()
        variance, squares, *replicates = self._sums
        dof = variance**2 / squares  # of variances of one degree of freedom; NaN where all are 0
        if replicates:
            return variance, dof.masked_fill(replicates[0] < _FEWEST, torch.nan)
        return variance / self._probes, dof * (self._probes - 1)

    def _between(self) -> tuple[Tensor, Tensor]:
        first, second = self._sums
        n, unknown = self._samples, torch.full_like(first, torch.nan)
        if n < 2:
            return torch.full_like(first, torch.inf), unknown
        return (second - first**2 / n).clamp_min(0) * (n / (n - 1)), unknown


def _moved(found: Mapping[Any, Tensor], origin: Tensor) -> Tensor:
    """Return sums of n values and of their squares, (2, …), less another origin than they were taken from."""
    (first, second), shift, n = found["sums"], found["origin"] - origin, found["samples"]
    return torch.stack([first + n * shift, second + 2 * shift * first + n * shift**2])


def standard_error(draws: Tensor, factor: float = 1.0) -> Tensor:
    """Return the standard error of ``factor`` times the mean of independent draws (k, …), as (…)."""
    error: Tensor = draws.std(dim=0) * factor / len(draws) ** 0.5
    return error


def with_squares(variances: Tensor) -> Tensor:
    """Return variances and their squares, stacked."""
    return torch.stack([variances, variances**2])
