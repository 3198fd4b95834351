"""Standard deviations of features, by which the normalised measures rescale (Petzka et al. 2021, Theorem 4).

    κ_n = Σ with φ_j / σ_j for φ_j and w_j σ_j for w_j

σ_j is the biased, unweighted standard deviation over the rows that the loss does not ignore. A feature that is zero
throughout drops out; a constant c ≠ 0 takes |c|. Only so does no rescaling of a neuron change the value.
"""

import torch
from torch import Tensor

from .contractions import promoted

_ULPS = 16  # a deviation below so many units in the last place of the largest entry is none


class FeatureScale:
    """Running mean, deviation and largest magnitude of each feature, in float64 (Chan's update).

    ``rows`` says how many rows were taken in; without any there is no scale.
    """

    def __init__(self) -> None:
        self.rows = 0
        self._mean = self._squares = self._largest = torch.zeros(())
        self._eps = 0.0

    def add(self, features: Tensor) -> None:
        """Take in rows (rows, m)."""
        if len(features) == 0:
            return
        self._eps = torch.finfo(features.dtype).eps
        rows = features.double()
        mean = rows.mean(dim=0)
        squares = (rows - mean).square().sum(dim=0)
        largest = rows.abs().amax(dim=0)
        if self.rows == 0:
            self.rows, self._mean, self._squares, self._largest = len(rows), mean, squares, largest
            return
        total = self.rows + len(rows)
        shift = mean - self._mean
        self._squares = self._squares + squares + shift.square() * (self.rows * len(rows) / total)
        self._mean = self._mean + shift * (len(rows) / total)
        self._largest = torch.maximum(self._largest, largest)
        self.rows = total

    def scale(self) -> Tensor:
        """(m,) float64: σ_j, |c| for a constant feature, 0 for one that is zero throughout (and drops out)."""
        deviation = (self._squares / self.rows).sqrt()
        constant = deviation <= _ULPS * self._eps * self._largest
        return torch.where(constant, self._largest, deviation)


def apply(scale: Tensor, matrix: Tensor, *, inverse: bool = False) -> Tensor:
    """Columns of ``matrix`` times ``scale``, or divided by it; those of scale 0 dropped."""
    matrix, kept = promoted(matrix), scale > 0
    factors = scale[kept]
    columns = matrix if bool(kept.all()) else matrix[:, kept]
    return columns * (1 / factors if inverse else factors).to(matrix.dtype)
