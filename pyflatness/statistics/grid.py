"""Compare pairs of networks by their training settings, to see what a measure says when the other settings are equal.

Axes: [network, network]. The agreement of a pair is sign(μ_i - μ_j) sign(g_i - g_j) of measure and target: 1 where the
network with the larger measure has the larger target, -1 where it has the smaller, 0 where one of them is tied. Of it
are made the granulated Kendall coefficient Ψ and the conditional mutual information (Jiang et al. 2020), and the sign
error of every environment (Dziugaite et al. 2020).
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from ..options import check_count
from ..report import Result
from .tables import Vector, listed, one_name, read

Codes = NDArray[np.intp]

_MOST = 2  # settings that are conditioned on together


@dataclass(frozen=True, eq=False)
class Grid:
    """Hold the networks of a study with their settings."""

    measure: Vector  # (n,)
    target: Vector  # (n,)
    settings: dict[str, tuple[Codes, tuple[str, ...]]]  # by name, which value each network has, (n,), and the values
    combination: Codes  # which combination of settings each network has, (n,)
    labels: tuple[str, ...]  # of the combinations that there are

    def agreement(self) -> Vector:
        """Return the agreement of every pair, (n, n)."""
        return np.sign(self.measure[:, None] - self.measure) * np.sign(self.target[:, None] - self.target)

    def differing(self, setting: str) -> NDArray[np.bool_]:
        """Return which pairs differ in one setting alone, (n, n)."""
        differ = {name: codes[:, None] != codes for name, (codes, _) in self.settings.items()}
        alone: NDArray[np.bool_] = differ.pop(setting)
        for other in differ.values():
            alone &= ~other
        if not alone.any():
            raise InputError(f"settings: no two networks differ in {setting!r} alone")
        return alone

    def groups(self, settings: Sequence[str]) -> Codes:
        """Return which networks are equal in some settings, as a number for each, (n,)."""
        chosen = [self.settings[name][0] for name in settings]
        if not chosen:
            return np.zeros(len(self.measure), dtype=np.intp)
        places: Codes = np.unique(np.stack(chosen), axis=1, return_inverse=True)[1].reshape(-1)
        return places


def read_grid(
    table: Any, measure: str, target: str, settings: str | Sequence[str], exclude: Collection[str], test: Any
) -> Grid:
    """Return the networks of a table with their settings."""
    measure, target = one_name("measure", measure), one_name("target", target)
    names = listed("settings", settings)
    if not names or len({*names, measure, target}) < len(names) + 2:
        raise InputError(f"settings={settings!r}: columns other than {measure!r} and {target!r} are wanted, each once")
    networks = read(table, test)
    kept = networks.kept(exclude)
    by_name = {name: networks.groups([name], kept) for name in names}
    combinations = networks.groups(names, kept)
    return Grid(networks.finite(measure, kept), networks.finite(target, kept), by_name, *combinations)


@dataclass(frozen=True, repr=False)
class GranulatedKendall(Result):
    """Hold Ψ, and what it is the mean of. ``float()`` gives Ψ, ``str()`` shows all, a data frame has the settings.

    Attributes:
        measure: the name of the measure.
        target: the column that it is compared with.
        value: Ψ, the mean of ``by_setting``.
        by_setting: ψ of each setting.
        pairs: the number of pairs of networks that differ in a setting alone, by setting.
    """

    measure: str
    target: str
    value: float
    by_setting: dict[str, float]
    pairs: dict[str, int]

    def __float__(self) -> float:
        return self.value

    def _rows(self) -> list[dict[str, Any]]:
        return [
            {"measure": self.measure, "target": self.target, "setting": name, "psi": psi, "pairs": self.pairs[name]}
            for name, psi in self.by_setting.items()
        ]

    def __str__(self) -> str:
        each = ", ".join(f"{name} {psi:.2f} ({self.pairs[name]} pairs)" for name, psi in self.by_setting.items())
        return f"{self.measure} with {self.target}: granulated Kendall Ψ {self.value:.2f}; {each}"


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
        >>> pf.statistics.granulated_kendall(table, "kappa", "gap", ["depth", "rate"])
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


@dataclass(frozen=True)
class Environment:
    """Hold how often a measure orders two settings wrongly.

    Attributes:
        setting: the one in which the two sides differ.
        first: the values of all settings on one side.
        second: the values on the other side.
        error: the sign error, in [0, 1].
        pairs: the number of pairs of networks that it is the mean over.
    """

    setting: str
    first: str
    second: str
    error: float
    pairs: int


@dataclass(frozen=True, repr=False)
class SignError(Result):
    """Hold the sign errors of all environments. ``str()`` shows mean and worst case, also by setting.

    A data frame has a row for each environment.

    Attributes:
        measure: the name of the measure.
        target: the column whose order it should have.
        mean: the mean over the environments.
        worst: the largest of them.
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

    def _rows(self) -> list[dict[str, Any]]:
        beside = {"measure": self.measure, "target": self.target}
        return [{**beside, **asdict(environment)} for environment in self.environments]

    def __str__(self) -> str:
        each = "; ".join(f"{name} {mean:.2f}, worst {worst:.2f}" for name, (mean, worst) in self.by_setting().items())
        count = len(self.environments)
        head = f"{self.measure} with {self.target}: sign error {self.mean:.2f}, worst {self.worst:.2f}"
        return f"{head} of {count} environments; {each}"


def sign_error(
    table: Any,
    measure: str,
    target: str,
    settings: str | Sequence[str],
    *,
    exclude: Collection[str] = (),
    test: Any = None,
    fewest: int = 1,
) -> SignError:
    """Return how often a measure orders networks wrongly, in the worst environment as well as in the mean.

    An environment is a pair of settings (a, b) that differ in one hyperparameter. Its sign error is

        mean over networks j trained with a and k trained with b of  ½ (1 - sign(μ_j - μ_k) sign(g_j - g_k)),

    0 where the measure μ always orders them as the target g does, 1 where it never does, ½ for ties (Dziugaite et al.
    2020, "In Search of Robust Measures of Generalization"). A measure that explains generalisation should do so
    everywhere, so that the largest error counts; the mean can hide where a measure fails. Where an environment is a
    single pair of networks, with one seed for each setting, its error is 0, ½ or 1, and the worst case says little.
    The paper leaves out environments of fewer than 12 pairs, and weights pairs by how sure the sign of their difference
    in g is; here all pairs count alike, and ``fewest=`` takes environments together in place of leaving them out.

    Args:
        table: a pandas data frame or dict of lists with a row for each network, or the path of a CSV file of
            ``pyflatness score`` or ``store export``.
        measure: a column.
        target: a column, such as ``"gap"``.
        settings: columns of hyperparameters, without the seed.
        exclude: names of rows to leave out.
        test: a table of the same networks on test data, for the gap.
        fewest: the least number of pairs of an environment. Environments with fewer pairs are merged into one if they
            differ in the same two values of the same setting, whatever their other settings are.

    Returns:
        Mean and worst case, and the error of every environment.

    Raises:
        InputError: as :func:`pyflatness.statistics.granulated_kendall`.

    Example:
        >>> import pyflatness as pf
        >>> table = {"depth": [2, 2, 4, 4], "rate": [0.1, 0.3, 0.1, 0.3], "kappa": [1, 2, 4, 3], "gap": [5, 6, 7, 8]}
        >>> pf.statistics.sign_error(table, "kappa", "gap", ["depth", "rate"])
        kappa with gap: sign error 0.25, worst 1.00 of 4 environments; depth 0.00, worst 0.00; rate 0.50, worst 1.00
    """
    grid = read_grid(table, measure, target, settings, exclude, test)
    fewest = check_count("fewest", fewest, 1)
    found = [environment for name in grid.settings for environment in _environments(grid, name, fewest)]
    errors = [environment.error for environment in found]
    return SignError(measure, target, float(np.mean(errors)), max(errors), tuple(found))


def _environments(grid: Grid, setting: str, fewest: int) -> list[Environment]:
    first, second = np.nonzero(grid.differing(setting))
    ordered = grid.combination[first] < grid.combination[second]  # every pair once
    first, second = first[ordered], second[ordered]
    errors = (1 - grid.agreement()[first, second]) / 2
    sides = np.stack([grid.combination[first], grid.combination[second]])
    place = np.unique(sides, axis=1, return_inverse=True)[1]
    few = np.bincount(place.reshape(-1))[place.reshape(-1)] < fewest
    of_setting = grid.settings[setting]
    found: dict[tuple[str, str], list[float]] = {}
    for i, j, merged, error in zip(first, second, few, errors, strict=True):
        codes, labels = of_setting if merged else (grid.combination, grid.labels)
        one, other = sorted((codes[i], codes[j]))  # combinations are in this order already
        found.setdefault((labels[one], labels[other]), []).append(float(error))
    return [Environment(setting, *labels, float(np.mean(pairs)), len(pairs)) for labels, pairs in found.items()]


@dataclass(frozen=True, repr=False)
class ConditionalMutualInformation(Result):
    """Hold the normalised conditional mutual information. ``float()`` gives it, ``str()`` shows where it is smallest.

    A data frame has a row for each set of settings that is conditioned on.

    Attributes:
        measure: the name of the measure.
        target: the column that it is compared with.
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

    def _rows(self) -> list[dict[str, Any]]:
        beside = {"measure": self.measure, "target": self.target}
        return [{**beside, "given": ", ".join(given), "value": value} for given, value in self.by_condition.items()]

    def __str__(self) -> str:
        where = [", ".join(given) or "nothing" for given, value in self.by_condition.items() if value == self.value]
        alone = self.by_condition[()]
        text = f"conditional mutual information {self.value:.3f} given {' or '.join(where[:1]) or 'any settings'}"
        return f"{self.measure} with {self.target}: {text}, {alone:.3f} given nothing"


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
        table: a pandas data frame or dict of lists with a row for each network, or the path of a CSV file of
            ``pyflatness score`` or ``store export``.
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
        >>> pf.statistics.conditional_mutual_information(table, "kappa", "gap", ["depth"])
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
