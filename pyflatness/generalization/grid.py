"""Compare networks in pairs, by the settings that they were trained with.

Axes: [network, network]. The agreement of a pair is sign(μ_i - μ_j) sign(g_i - g_j) of measure and target: 1 where the
network with the larger measure has the larger target, -1 where it has the smaller, 0 where one of them is tied.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from .tables import Vector, listed, one_name, read

Codes = NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class Grid:
    """Hold the networks of a study with their settings.

    Attributes:
        measure: (n,).
        target: (n,).
        settings: by name, which of its values a network has, (n,).
        labels: of the combinations of settings that there are, and which of them a network has, ``combination`` (n,).
    """

    measure: Vector
    target: Vector
    settings: dict[str, Codes]
    labels: tuple[str, ...]
    combination: Codes

    def agreement(self) -> Vector:
        """Return the agreement of every pair, (n, n)."""
        return np.sign(self.measure[:, None] - self.measure) * np.sign(self.target[:, None] - self.target)

    def differing(self, setting: str) -> NDArray[np.bool_]:
        """Return which pairs differ in one setting alone, (n, n).

        Raises:
            InputError: there are none.
        """
        differ = {name: codes[:, None] != codes for name, codes in self.settings.items()}
        alone: NDArray[np.bool_] = differ.pop(setting)
        for other in differ.values():
            alone &= ~other
        if not alone.any():
            raise InputError(f"settings: no two networks differ in {setting!r} alone")
        return alone

    def groups(self, settings: Sequence[str]) -> Codes:
        """Return which networks are equal in some settings, as a number for each, (n,)."""
        chosen = [self.settings[name] for name in settings]
        if not chosen:
            return np.zeros(len(self.measure), dtype=np.intp)
        places: Codes = np.unique(np.stack(chosen), axis=1, return_inverse=True)[1].reshape(-1)
        return places


def read_grid(
    table: Any, measure: str, target: str, settings: str | Sequence[str], exclude: Collection[str], test: Any
) -> Grid:
    """Return the networks of a table with their settings.

    Raises:
        InputError: no such columns or rows, or a cell that is empty or, in measure or target, not finite.
    """
    measure, target = one_name("measure", measure), one_name("target", target)
    names = listed("settings", settings)
    if not names or len({*names, measure, target}) < len(names) + 2:
        raise InputError(f"settings={settings!r}: columns other than {measure!r} and {target!r} are wanted, each once")
    networks = read(table, test)
    kept = networks.kept(exclude)
    codes = {name: networks.groups([name], kept)[0] for name in names}
    combination, labels = networks.groups(names, kept)
    return Grid(networks.finite(measure, kept), networks.finite(target, kept), codes, labels, combination)
