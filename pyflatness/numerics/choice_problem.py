"""Choose one option of each of several groups, to minimise a quadratic form under a budget.

    E(z) = ⟨c, z⟩ + ½ ⟨z, Q z⟩,     z the indicator of the chosen options, Q positive semidefinite,
    Σ_a z_a = 1 in every group,     ⟨sizes, z⟩ ≤ budget

Frank-Wolfe steps start from the choice that is best by single costs, c + ½ diag Q. Each solves an integer linear
program for the choice s that is best by the gradient at z. Since E is convex, E(z) + ⟨∇E(z), s - z⟩ is a lower bound of
E for every choice, which bounds how much better any could be. The best of these s are improved by exchanges of one
option, or of two at a time, until none is better.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import MissingExtraError

Numbers = NDArray[np.float64]
Indices = NDArray[np.int64]

_STEPS, _STARTS = 16, 4  # Frank-Wolfe steps; choices from which exchanges start
_PROGRAM = {"mip_rel_gap": 1e-5, "node_limit": 5000}  # nodes are limited, not time, so that a plan is reproducible
ROUNDING = 1e-12  # relative; a smaller gain does not count, and a smaller excess is within the budget


def smallest(group: Indices, sizes: Numbers) -> Indices:
    """Return the smallest option of each group."""
    order = np.lexsort((sizes, group))
    found: Indices = order[np.unique(group[order], return_index=True)[1]]
    return found


@dataclass(frozen=True)
class ChoiceProblem:
    """Represent a choice of one option of each group."""

    group: Indices  # (options,), the number of each option's group
    costs: Numbers  # (options,), c
    products: Numbers  # (options, options), Q
    sizes: Numbers  # (options,), none negative

    def value(self, z: Numbers) -> float:
        """Return E(z)."""
        return float(self.costs @ z + 0.5 * z @ self.products @ z)

    def some(self, kept: Indices) -> "ChoiceProblem":
        """Return the problem with some of the options, at least one of each group."""
        return ChoiceProblem(self.group[kept], self.costs[kept], self.products[np.ix_(kept, kept)], self.sizes[kept])

    def cheapest(self) -> Indices:
        """Return the smallest option of each group."""
        return smallest(self.group, self.sizes)

    def largest(self) -> float:
        """Return the sum over groups of the size of the largest option."""
        return float(sum(self.sizes[self.group == number].max() for number in np.unique(self.group)))

    def by_single_costs(self, budget: float) -> Indices:
        """Return the choice that would be best if Q had no entries between groups."""
        return self._program(self.costs + 0.5 * np.diagonal(self.products), budget)[0]

    def good(self, budget: float, told: Callable[[], None] = lambda: None) -> Indices:
        """Return a choice that no exchange improves, found from a single program; ``told`` as for :meth:`best`."""
        return self._exchanged(self.by_single_costs(budget), budget, told)

    def best(self, budget: float, told: Callable[[], None] = lambda: None) -> tuple[Indices, float]:
        """Return the best choice found, an option of each group, and a bound on how much better another could be.

        ``told`` is called at every program and exchange, to show that the search goes on.
        """
        chosen = self.by_single_costs(budget)
        found, bound = {tuple(self.cheapest()), tuple(chosen)}, -math.inf
        z = self._indicator(chosen)
        for _ in range(_STEPS):
            told()
            gradient = self.costs + self.products @ z
            chosen, least = self._program(gradient, budget)
            found.add(tuple(chosen))
            bound = max(bound, self.value(z) + least - float(gradient @ z))
            step = self._indicator(chosen) - z
            down, curved = -gradient @ step, step @ self.products @ step
            if down <= ROUNDING * abs(self.value(z)):
                break
            z = z + min(1.0, down / curved if curved > 0 else 1.0) * step
        ranked = sorted(found, key=self._value_of)[:_STARTS]
        best = min((self._exchanged(np.array(start), budget, told) for start in ranked), key=self._value_of)
        return best, max(0.0, self._value_of(best) - float(bound))

    def _value_of(self, chosen: Any) -> float:
        return self.value(self._indicator(np.asarray(chosen)))

    def _indicator(self, chosen: Indices) -> Numbers:
        z = np.zeros(len(self.group))
        z[chosen] = 1.0
        return z

    def _program(self, costs: Numbers, budget: float) -> tuple[Indices, float]:
        """Return the choice with the least sum of costs, and a lower bound of every choice's sum."""
        try:
            from scipy import optimize, sparse
        except ImportError:
            raise MissingExtraError("pf.allocate needs SciPy: pip install 'pyflatness[allocate]'") from None
        count, scale = len(costs), float(np.abs(costs).max()) or 1.0
        one_each = sparse.csr_matrix((np.ones(count), (self.group, np.arange(count))))
        found = optimize.milp(
            costs / scale,
            constraints=[
                optimize.LinearConstraint(one_each, 1, 1),
                optimize.LinearConstraint(self.sizes[None] / budget, 0, 1 + ROUNDING),
            ],
            integrality=np.ones(count),
            bounds=optimize.Bounds(0, 1),
            options=_PROGRAM,
        )
        least = -np.inf if found.mip_dual_bound is None else scale * float(found.mip_dual_bound)
        chosen = self.cheapest() if found.x is None else np.flatnonzero(found.x > 0.5)  # None at the limit of nodes
        fits = self.sizes[chosen].sum() <= budget * (1 + ROUNDING)  # SciPy's own tolerance is larger
        return chosen if fits else self.cheapest(), least

    def _exchanged(self, chosen: Indices, budget: float, told: Callable[[], None]) -> Indices:
        """Return a choice within the budget that no exchange of one or two options improves."""
        q, most, chosen = self.products, budget * (1 + ROUNDING), chosen.copy()
        other = self.group[:, None] != self.group[None]
        while True:
            told()
            z, now = self._indicator(chosen), chosen[self.group]  # the option chosen in each option's group
            gradient, larger = self.costs + q @ z, self.sizes - self.sizes[now]
            own = 0.5 * (np.diagonal(q) + np.diagonal(q)[now]) - q[now, np.arange(len(now))]
            single = gradient - gradient[now] + own
            crossed = q[now]
            pairs = single[:, None] + single[None] + q - crossed - crossed.T + crossed[:, now]
            fits = other & (larger[:, None] + larger[None] <= most - self.sizes @ z)
            a, b = np.unravel_index(np.where(fits, pairs, np.inf).argmin(), pairs.shape)
            if not fits[a, b] or pairs[a, b] >= -ROUNDING * (abs(self.value(z)) + np.abs(self.costs).max()):
                return chosen
            chosen[self.group[a]], chosen[self.group[b]] = a, b
