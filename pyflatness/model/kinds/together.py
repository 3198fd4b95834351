"""Treat a weight that has uses of several kinds as one matrix: an embedding that is the head too, say."""

from torch import Tensor

from .linear import Linear


class Together(Linear):
    """Say how a weight is a matrix whatever its uses are: as a layer of one kind keeps it; see :class:`.Linear`.

    What φ is, and which rows an output has, is said by the kind of each call.

    Args:
        home: the kind whose matrix it is.
    """

    has_input = False
    pointwise = False

    def __init__(self, home: Linear) -> None:
        self._home = home
        self.groups, self.geometry = home.groups, home.geometry

    def as_matrix(self, weight: Tensor) -> Tensor:
        """Return a tensor of the shape of the weight as (d, m)."""
        return self._home.as_matrix(weight)

    def as_weight(self, matrix: Tensor) -> Tensor:
        """Return a (d, m) matrix as a tensor of the shape of the weight; undoes :meth:`as_matrix`."""
        return self._home.as_weight(matrix)
