"""Hold a diagonal's entries by parameter, summed over a micro-batch, and their variance over probes."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ..report.intervals import AGREEING
from .layer_sweep import Summands
from .totals import Sums

Draw = int | slice  # the number of a probe; all of them for exact entries

_MEAN, _VARIANCE = "mean", "variance"


class EntrySums:
    """Sum entries of parameters over samples, for each probe; with ``rows`` over all dimensions but the first too."""

    def __init__(self, theta: Mapping[str, Tensor], draws: int, *, rows: bool) -> None:
        self._rows = rows
        self._sums = {
            name: torch.zeros(draws, *(w.shape[:1] if rows else w.shape), dtype=torch.float64, device=w.device)
            for name, w in theta.items()
        }

    def add(self, draw: Draw, name: str, entries: Tensor) -> None:
        """Add entries of a parameter's shape, summed over samples, to those of a probe, or of all."""
        self._sums[name][draw] += entries.flatten(1).sum(dim=1) if self._rows and entries.ndim > 1 else entries

    def summands(self, *, lost: bool) -> Summands:
        """Return the mean over probes, and for several probes its variance, by parameter.

        They are NaN if a sample is ``lost``, since the sum then has no value.
        """
        found = {}
        for name, sums in self._sums.items():
            draws, found[name, _MEAN] = len(sums), sums.mean(dim=0)
            if draws > 1:
                found[name, _VARIANCE] = (sums - found[name, _MEAN]).square().sum(dim=0) / (draws * (draws - 1))
        return {key: torch.full_like(part, math.nan) for key, part in found.items()} if lost else found

    @staticmethod
    def mean(sums: Sums, name: str) -> Tensor:
        """Return a parameter's entries of all data."""
        return sums.further[name, _MEAN]

    @staticmethod
    def error(sums: Sums, name: str) -> Tensor:
        """Return the entries' standard errors; variances add up, as the signs of micro-batches are independent.

        It is NaN if it is not known, for one probe or if probes agree.
        """
        if (name, _VARIANCE) not in sums.further:
            return torch.full_like(EntrySums.mean(sums, name), math.nan)
        errors = (sums.further[name, _VARIANCE] / sums.normaliser).sqrt()
        return errors.masked_fill(errors <= AGREEING * EntrySums.mean(sums, name).abs(), math.nan)
