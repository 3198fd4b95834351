"""Compute standard deviations of a layer's features over rows, by which normalised measures rescale.

A feature that is always zero is dropped; for a constant c ≠ 0 the scale is |c| (Petzka et al. 2021, Theorem 4).
"""

import torch
from torch import Tensor

from ...contractions import Columns
from ...numerics.shard import Shard

_ENTRIES = 2**17  # entries of rows that are processed at a time
ULPS = 16  # a deviation below 16 units in the last place of the largest entry counts as 0


class FeatureScale:
    """Update the mean, deviation and largest magnitude of each feature, in float64 (Chan's update)."""

    def __init__(self) -> None:
        self.rows = self._features = 0
        self._mean = self._squares = self._largest = torch.zeros((), dtype=torch.float64, device="cpu")
        self._eps, self._device = 0.0, torch.device("cpu")

    def add(self, features: Tensor) -> None:
        """Add rows of a layer's input, in the form of :meth:`.Linear.input_rows`."""
        self._features, self._device = features.shape[1], features.device
        if len(features) == 0:
            return
        self._eps = torch.finfo(features.dtype).eps
        for rows in features.split(max(1, _ENTRIES // self._features)):  # without a second matrix of their size
            rows = rows.double()
            mean = rows.mean(dim=0)
            self._merge(len(rows), mean, (rows - mean).square_().sum(dim=0), rows.abs().amax(dim=0))

    def _merge(self, rows: int, mean: Tensor, squares: Tensor, largest: Tensor) -> None:
        if self.rows == 0:
            self.rows, self._mean, self._squares, self._largest = rows, mean, squares, largest
            return
        total = self.rows + rows
        shift = mean - self._mean
        self._squares = self._squares + squares + shift.square() * (self.rows * rows / total)
        self._mean = self._mean + shift * (rows / total)
        self._largest = torch.maximum(self._largest, largest)
        self.rows = total

    def together(self, shard: Shard, name: str) -> None:
        """Add the rows of other ranks, at the end of a read of the data; ``name`` is the layer's."""
        if shard.ranks.alone:
            return
        own = {
            "rows": torch.tensor(self.rows, dtype=torch.int64, device="cpu"),
            "eps": torch.tensor(self._eps, dtype=torch.float64, device="cpu"),
        }
        own |= {"mean": self._mean, "squares": self._squares, "largest": self._largest} if self.rows else {}
        found, device = shard.each(f"the deviations of layer {name!r}", own), self._device
        self.rows = 0
        for each in found:
            rows = int(each["rows"])
            if rows:
                self._eps = float(each["eps"])
                self._merge(rows, *(each[key].to(device) for key in ("mean", "squares", "largest")))

    def scale(self) -> Tensor:
        """Return σ_j, (m,) float64: |c| for a constant feature, 0 if it is dropped, and 1 without rows."""
        if self.rows == 0:
            return torch.ones(self._features, dtype=torch.float64, device=self._device)
        deviation = (self._squares / self.rows).sqrt()
        constant = deviation <= ULPS * self._eps * self._largest
        return torch.where(constant, self._largest, deviation)


class TokenScale:
    """Count how often each of m tokens occurs, which gives the deviations of one-hot features."""

    def __init__(self, count: int) -> None:
        self.rows, self._count = 0, count
        self._sums = self._squares = torch.zeros(count, dtype=torch.float64, device="cpu")

    def add(self, features: Tensor) -> None:
        """Add rows (rows, 2 k) of k token numbers, followed by their k coefficients."""
        self.rows += len(features)
        tokens, coefficients = features.chunk(2, dim=1)
        columns = Columns(tokens.long())
        counts = columns.of(coefficients.unsqueeze(2)).squeeze(2)
        self._sums, self._squares = (
            total.to(counts.device).index_add(0, columns.tokens.flatten(), values.flatten())
            for total, values in ((self._sums, counts), (self._squares, counts.square()))
        )

    def together(self, shard: Shard, name: str) -> None:
        rows = torch.tensor(self.rows, dtype=torch.int64, device="cpu")
        own = {"rows": rows, "sums": self._sums, "squares": self._squares}
        found = shard.sum(f"the deviations of layer {name!r}", own)
        self.rows, self._sums, self._squares = int(found["rows"]), found["sums"], found["squares"]

    def scale(self) -> Tensor:
        if self.rows == 0:
            return torch.ones_like(self._sums)
        mean = self._sums / self.rows
        variance = self._squares / self.rows - mean.square()
        eps = torch.finfo(torch.float64).eps
        return torch.where(variance <= ULPS * eps * mean.square(), mean.abs(), variance.clamp_min(0).sqrt())


Deviations = FeatureScale | TokenScale
