"""Compute the conditional mutual information of a measure and a target over a grid (Jiang et al. 2020)."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from ..report import views
from .grid import Codes, Grid, read_grid
from .tables import Vector

if TYPE_CHECKING:
    import pandas

_MOST = 2  # settings that are conditioned on at once


@dataclass(frozen=True, repr=False)
class ConditionalMutualInformation:
    """Hold the normalised conditional mutual information. ``float()`` gives it, ``str()`` shows where it is smallest.

    Attributes:
        measure: the one quantity.
        target: the other.
        value: the smallest of ``by_condition``; NaN if none is defined.
        by_condition: Î given each set of at most two settings; NaN where no two networks are equal in them, or where
            all that are have equal targets.
    """

    measure: str
    target: str
    value: float
    by_condition: dict[tuple[str, ...], float]

    def __float__(self) -> float:
        return self.value

    def to_frame(self) -> "pandas.DataFrame":
        """Return a data frame with a row for each set of settings that is conditioned on.

        Raises:
            MissingExtraError: without pandas.
        """
        beside = {"measure": self.measure, "target": self.target}
        return views.rows_frame(
            [{**beside, "given": ", ".join(given), "value": value} for given, value in self.by_condition.items()]
        )

    def __str__(self) -> str:
        where = [", ".join(given) or "nothing" for given, value in self.by_condition.items() if value == self.value]
        alone = self.by_condition[()]
        text = f"conditional mutual information {self.value:.3f} given {' or '.join(where[:1]) or 'any settings'}"
        return f"{self.measure} with {self.target}: {text}, {alone:.3f} given nothing"

    __repr__ = __str__


def conditional_mutual_information(
    table: Any,
    measure: str,
    target: str,
    settings: str | Sequence[str],
    *,
    exclude: Collection[str] = (),
    test: Any = None,
) -> ConditionalMutualInformation:
    """Return how much a measure says of the order of the target that no one or two hyperparameters say as well.

    For pairs (j, k) of networks let V_μ = sign(μ_j - μ_k) and V_g = sign(g_j - g_k) for the measure μ and the target g.
    Given a set S of settings, only pairs that are equal in S are compared, and U_S are the values that they have in S.
    Of the ordered pairs, all alike, come the probabilities in

        Î(S) = I(V_μ; V_g | U_S) / H(V_g | U_S),         value = min over S of at most two settings of Î(S)

    (Jiang et al. 2020, "Fantastic Generalization Measures and Where to Find Them", Eq. 8 to 10). 0 says that within
    equal settings S the orders by μ and by g have nothing to do with each other, 1 that one follows from the other,
    whether rising or falling: mutual information has no sign. Equal values are a third sign, 0.

    Few networks in a group of equal settings make Î too large: two networks alone always have Î = 1.

    Args:
        table: as for :func:`pyflatness.granulated_kendall`, like all that follow.
        measure: a column.
        target: a column, such as ``"gap"``.
        settings: columns of hyperparameters.
        exclude: names of rows to leave out.
        test: a table of the same networks on test data, for the gap.

    Returns:
        The smallest Î, in [0, 1], and that of every S.

    Raises:
        InputError: no such columns or rows, an empty cell, or a number that is not finite.

    Example:
        >>> import pyflatness as pf
        >>> table = {"depth": [2, 2, 2, 4, 4, 4], "kappa": [1, 2, 3, 6, 5, 4], "gap": [1, 3, 2, 5, 6, 4]}
        >>> pf.conditional_mutual_information(table, "kappa", "gap", ["depth"])
        kappa with gap: conditional mutual information 0.082 given depth, 0.433 given nothing
    """
    grid = read_grid(table, measure, target, settings, exclude, test)
    sets = [given for size in range(_MOST + 1) for given in combinations(grid.settings, size)]
    found = {given: _information(grid, grid.groups(given)) for given in sets}
    defined = [value for value in found.values() if not math.isnan(value)]
    return ConditionalMutualInformation(measure, target, min(defined, default=math.nan), found)


def _information(grid: Grid, groups: Codes) -> float:
    """Return Î over the pairs inside of groups."""
    first, second = np.triu_indices(len(groups), 1)
    inside = groups[first] == groups[second]
    first, second = first[inside], second[inside]
    of_measure, of_target = (np.sign(v[first] - v[second]).astype(np.intp) + 1 for v in (grid.measure, grid.target))
    counts = np.bincount(9 * groups[first] + 3 * of_measure + of_target, minlength=9 * (groups.max() + 1))
    signs = counts.reshape(-1, 3, 3)  # of pairs by group, sign of the measure's difference and that of the target's
    table = (signs + signs[:, ::-1, ::-1]) / max(2 * len(first), 1)  # of ordered pairs
    alone = _entropy(table.sum(axis=(1, 2)))
    with_target, with_measure = _entropy(table.sum(axis=1)), _entropy(table.sum(axis=2))
    uncertainty = with_target - alone  # H(V_g | U) = H(V_g, U) - H(U)
    if uncertainty <= 1e-12:
        return math.nan
    return (with_measure + with_target - _entropy(table) - alone) / uncertainty


def _entropy(probabilities: Vector) -> float:
    positive = probabilities[probabilities > 0]
    return float(-(positive * np.log(positive)).sum())
