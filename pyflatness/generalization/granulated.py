"""Compute the granulated Kendall coefficient Ψ of a measure over a grid of hyperparameters (Jiang et al. 2020)."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..report import views
from .grid import read_grid

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, repr=False)
class GranulatedKendall:
    """Hold Ψ, and what it is the mean of. ``float()`` gives Ψ, ``str()`` shows all.

    Attributes:
        measure: the one quantity.
        target: the other.
        value: Ψ, the mean of ``by_setting``.
        by_setting: ψ of each setting.
        pairs: the pairs of networks that differ in a setting alone, by setting.
    """

    measure: str
    target: str
    value: float
    by_setting: dict[str, float]
    pairs: dict[str, int]

    def __float__(self) -> float:
        return self.value

    def to_frame(self) -> "pandas.DataFrame":
        """Return a data frame with a row for each setting.

        Raises:
            MissingExtraError: without pandas.
        """
        return views.rows_frame(
            [
                {"measure": self.measure, "target": self.target, "setting": name, "psi": psi, "pairs": self.pairs[name]}
                for name, psi in self.by_setting.items()
            ]
        )

    def __str__(self) -> str:
        each = ", ".join(f"{name} {psi:.2f} ({self.pairs[name]} pairs)" for name, psi in self.by_setting.items())
        return f"{self.measure} with {self.target}: granulated Kendall Ψ {self.value:.2f}; {each}"

    __repr__ = __str__


def granulated_kendall(
    table: Any,
    measure: str,
    target: str,
    settings: str | Sequence[str],
    *,
    exclude: Collection[str] = (),
    test: Any = None,
) -> GranulatedKendall:
    """Return the granulated Kendall coefficient Ψ, which asks how well a measure orders what one setting changes.

    Kendall's τ over all networks can be large because measure and target both follow one hyperparameter. Ψ compares
    only networks that differ in a single one. For a setting i and values v of all others let P(i, v) be the pairs of
    networks j, k with these values that differ in setting i. With the measure μ and the target g

        ψ_i = mean over v of  mean over (j, k) in P(i, v) of  sign(μ_j - μ_k) sign(g_j - g_k),    Ψ = mean over i of ψ_i

    (Jiang, Neyshabur, Mobahi, Krishnan, Bengio 2020, "Fantastic Generalization Measures and Where to Find Them", Eq. 4
    and 5). Several networks with equal settings, such as those of several seeds, make a pair for each combination. Name
    the seed in ``settings`` only where networks of different seeds are not to be compared at all.

    Args:
        table: a pandas data frame or dict of lists with a row for each network, or the path of a CSV file, also of one
            that ``pyflatness score --metadata`` wrote.
        measure: a column.
        target: a column, such as ``"gap"``.
        settings: columns of hyperparameters; their values may be text.
        exclude: names of rows to leave out.
        test: a table of the same networks on test data: ``gap`` is its ``loss`` less that of ``table``.

    Returns:
        Ψ in [-1, 1], and ψ of every setting.

    Raises:
        InputError: no such columns or rows, an empty cell, a number that is not finite, or a setting in which no two
            networks differ alone.

    Example:
        >>> import pyflatness as pf
        >>> table = {"depth": [2, 2, 4, 4], "rate": [0.1, 0.3, 0.1, 0.3], "kappa": [1, 2, 4, 3], "gap": [5, 6, 7, 8]}
        >>> pf.granulated_kendall(table, "kappa", "gap", ["depth", "rate"])
        kappa with gap: granulated Kendall Ψ 0.50; depth 1.00 (2 pairs), rate 0.00 (2 pairs)
    """
    grid = read_grid(table, measure, target, settings, exclude, test)
    agreement = grid.agreement()
    by_setting, pairs = {}, {}
    for name in grid.settings:
        first, second = np.nonzero(grid.differing(name))
        others = grid.groups([other for other in grid.settings if other != name])[first]
        counts = np.bincount(others)
        taus = np.bincount(others, agreement[first, second])[counts > 0] / counts[counts > 0]
        by_setting[name], pairs[name] = float(taus.mean()), len(first) // 2
    return GranulatedKendall(measure, target, float(np.mean([*by_setting.values()])), by_setting, pairs)
