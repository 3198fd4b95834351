"""Compute the sign error of a measure in every environment, worst case as well as mean (Dziugaite et al. 2020)."""

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..report import views
from .grid import Grid, read_grid

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Environment:
    """Hold how often a measure orders two settings wrongly.

    Attributes:
        setting: in which the two differ.
        first: values of all settings of the one side.
        second: those of the other.
        error: the sign error, in [0, 1].
        pairs: the pairs of networks that it is the mean over.
    """

    setting: str
    first: str
    second: str
    error: float
    pairs: int


@dataclass(frozen=True, repr=False)
class SignError:
    """Hold the sign errors of all environments. ``str()`` shows mean and worst case, also by setting.

    Attributes:
        measure: what is to order the networks.
        target: by what they are to be ordered.
        mean: over the environments.
        worst: their largest.
        environments: pairs of settings.
    """

    measure: str
    target: str
    mean: float
    worst: float
    environments: tuple[Environment, ...]

    def by_setting(self) -> dict[str, tuple[float, float]]:
        """Return mean and worst case over the environments in which a setting differs."""
        errors: dict[str, list[float]] = {}
        for environment in self.environments:
            errors.setdefault(environment.setting, []).append(environment.error)
        return {name: (float(np.mean(found)), max(found)) for name, found in errors.items()}

    def to_frame(self) -> "pandas.DataFrame":
        """Return a data frame with a row for each environment.

        Raises:
            MissingExtraError: without pandas.
        """
        beside = {"measure": self.measure, "target": self.target}
        return views.rows_frame([{**beside, **asdict(environment)} for environment in self.environments])

    def __str__(self) -> str:
        each = "; ".join(f"{name} {mean:.2f}, worst {worst:.2f}" for name, (mean, worst) in self.by_setting().items())
        count = len(self.environments)
        head = f"{self.measure} with {self.target}: sign error {self.mean:.2f}, worst {self.worst:.2f}"
        return f"{head} of {count} environments; {each}"

    __repr__ = __str__


def sign_error(
    table: Any,
    measure: str,
    target: str,
    settings: str | Sequence[str],
    *,
    exclude: Collection[str] = (),
    test: Any = None,
) -> SignError:
    """Return how often a measure orders networks wrongly, in the worst environment as well as in the mean.

    An environment is a pair of settings (a, b) that differ in one hyperparameter. Its sign error is

        mean over networks j trained with a and k trained with b of  ½ (1 - sign(μ_j - μ_k) sign(g_j - g_k)),

    0 where the measure μ always orders them as the target g does, 1 where it never does, ½ for ties (Dziugaite et al.
    2020, "In Search of Robust Measures of Generalization"). A measure that explains generalisation should do so
    everywhere, so that the largest error counts; the mean can hide where a measure fails. Where an environment is a
    single pair of networks, with one seed for each setting, its error is 0, ½ or 1, and the worst case says little.
    The paper leaves out environments of fewer than 12 pairs, and weights pairs by how sure the sign of their difference
    in g is; here all pairs count alike.

    Args:
        table: as for :func:`pyflatness.granulated_kendall`, like all that follow.
        measure: a column.
        target: a column, such as ``"gap"``.
        settings: columns of hyperparameters, without the seed.
        exclude: names of rows to leave out.
        test: a table of the same networks on test data, for the gap.

    Returns:
        Mean and worst case, and the error of every environment.

    Raises:
        InputError: as :func:`pyflatness.granulated_kendall`.

    Example:
        >>> import pyflatness as pf
        >>> table = {"depth": [2, 2, 4, 4], "rate": [0.1, 0.3, 0.1, 0.3], "kappa": [1, 2, 4, 3], "gap": [5, 6, 7, 8]}
        >>> pf.sign_error(table, "kappa", "gap", ["depth", "rate"])
        kappa with gap: sign error 0.25, worst 1.00 of 4 environments; depth 0.00, worst 0.00; rate 0.50, worst 1.00
    """
    grid = read_grid(table, measure, target, settings, exclude, test)
    found = [environment for name in grid.settings for environment in _environments(grid, name)]
    errors = [environment.error for environment in found]
    return SignError(measure, target, float(np.mean(errors)), max(errors), tuple(found))


def _environments(grid: Grid, setting: str) -> list[Environment]:
    first, second = np.nonzero(grid.differing(setting))
    ordered = grid.combination[first] < grid.combination[second]  # every pair once
    first, second = first[ordered], second[ordered]
    errors = (1 - grid.agreement()[first, second]) / 2
    sides = np.stack([grid.combination[first], grid.combination[second]])
    environments, place = np.unique(sides, axis=1, return_inverse=True)
    counts = np.bincount(place.reshape(-1))
    means = np.bincount(place.reshape(-1), errors) / counts
    return [
        Environment(setting, grid.labels[a], grid.labels[b], float(error), int(count))
        for a, b, error, count in zip(*environments, means, counts, strict=True)
    ]
