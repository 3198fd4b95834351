"""Sum variances of sampled values over the samples of a data set, with their degrees of freedom.

Probes are independent over samples, so that a sum's variance V is the sum of its samples' variances v_i. The sum of
their squares gives its degrees of freedom (:mod:`.intervals`).
"""

import math

import torch
from torch import Tensor

from .accumulate import masked
from .shard import Shard

# The fewest replicates of groups for intervals by Student's t: 95 % intervals hold in 85 % of cases with one replicate,
# and in 92 to 95 % with eight.
_FEWEST = 8


class Variances:
    """Hold running sums of the variances of samples, from their probes or from groups of cotangents."""

    def __init__(self) -> None:
        self._sums = torch.zeros((), dtype=torch.float64, device="cpu")
        self._residuals = RatioResiduals()

    def add_probes(
        self,
        probes: Tensor,
        kept: Tensor | None,
        sizes: Tensor | None = None,
        chances: Tensor | None = None,
        *,
        exact: bool = False,
    ) -> None:
        """Add the values (k, …, n) of k probes of n samples, of which those ``kept`` count.

        With one probe, or a part of the data, values are assumed roughly proportional to ``sizes`` (n,). ``chances``
        (n,) are the probabilities with which these samples were drawn, see :mod:`.subset`; values and sizes are already
        divided by them. None stands for all data. If ``exact``, only the choice of samples is random.
        """
        alone = len(probes) == 1 and not exact
        if len(probes) > 1:
            found = masked(probes.var(dim=0) / len(probes), kept)
            found = with_squares(found if chances is None else chances * found)
            found[1] /= len(probes) - 1
            self.add(found)
        if alone or chances is not None:
            assert sizes is not None
            self._add_residuals(probes.mean(dim=0), kept, sizes, 0 * sizes if alone or chances is None else chances)

    def add_groups(self, found: Tensor, means: Tensor, kept: Tensor | None, sizes: Tensor, chances: Tensor) -> None:
        """Add variances of a part of the data, as in :meth:`add`; means and sizes are already divided by chances."""
        self.add(masked(of_part(found, chances), kept))
        self._add_residuals(means, kept, sizes, chances)

    def _add_residuals(self, means: Tensor, kept: Tensor | None, sizes: Tensor, chances: Tensor) -> None:
        self._residuals.add(masked(means, kept), masked(sizes, kept), masked(1 - chances, kept))

    def add(self, found: Tensor) -> None:
        """Add variances of n samples, squares over degrees of freedom, and replicates of groups, (2 or 3, …, n)."""
        self._sums = self._sums.to(found.device) + found.sum(dim=-1)

    def together(self, shard: Shard) -> None:
        """Add the sums of the other ranks, at the end of a read of the data."""
        if shard.ranks.alone:
            return
        parts = {"sums": self._sums, "residuals": self._residuals.sums}
        found = shard.sum("the variances of samples", {name: part for name, part in parts.items() if part.ndim})
        self._sums, self._residuals.sums = (found.get(name, part) for name, part in parts.items())

    def result(self) -> tuple[Tensor, Tensor] | None:
        """Return the variance of the sum over samples of the mean over probes, and its degrees of freedom, (…) each.

        It is None if nothing was added, so that the values are exact. The degrees of freedom are NaN if they are
        unknown, and always if there are few replicates: many degrees of freedom from few replicates only show that the
        largest groups agree by chance.
        """
        found = [self._sums[:2]] if self._sums.ndim else []
        found += [torch.stack(self._residuals.squares())] if self._residuals.sums.ndim else []
        if not found:
            return None
        variance, squares = torch.stack(found).sum(dim=0)
        dof = variance**2 / squares  # NaN if all variances are 0
        few = self._sums.ndim and len(self._sums) > 2 and self._sums[2] < _FEWEST
        return variance, dof.masked_fill(few, torch.nan) if isinstance(few, Tensor) else dof


class RatioResiduals:
    """Hold running moments of values v_i and sizes t_i, for the residuals e_i = v_i - γ t_i, γ = Σ v_i / Σ t_i.

    One probe does not show a sample's variance, but E e_i² = Var v_i + (E v_i - γ t_i)² is an upper bound of it. γ
    follows the deviation of v_i in part, which makes e_i smaller: for deviations proportional to t, with
    h_i = t_i / Σ t,

        E Σ e_i² = D Σ Var v_i + …,    D = 1 + Σ h_i² - 2 Σ h_i³ / Σ h_i²

    which is 1 - 1/n for equal ones. So Σ e_i² / D is an upper bound in expectation; each e_i² has one degree of
    freedom. If the e_i² are weighted, so are all sums of terms with e_i.
    """

    def __init__(self) -> None:
        self.sums = torch.zeros((), dtype=torch.float64, device="cpu")

    def add(self, values: Tensor, sizes: Tensor, weights: Tensor) -> None:
        """Add values (…, n), sizes and weights (n,) of n samples; 0 for those that do not count."""
        sizes, weights = sizes.expand_as(values), weights.expand_as(values)
        terms = [(weights > 0).to(values), sizes**2, weights * sizes**3, values, sizes]
        terms += [weights ** (d // 2) * values ** (d - j) * sizes**j for d in (2, 4) for j in range(d + 1)]
        self.sums = self.sums.to(values.device) + torch.stack(terms).sum(dim=-1)

    def squares(self) -> tuple[Tensor, Tensor]:
        """Return Σ e_i² / D and Σ e_i⁴ / D², (…) each; NaN where one sample has all of Σ t."""
        count, whole, cubes, total, size, *moments = self.sums
        ratio = torch.where(size > 0, total / size, 0.0)
        second, fourth = (
            sum(((-ratio) ** j * math.comb(d, j) * part for j, part in enumerate(of)), start=torch.zeros_like(total))
            for d, of in ((2, moments[:3]), (4, moments[3:]))
        )
        squares = moments[2]
        kept = torch.where(size > 0, 1 + whole / size**2 - 2 * cubes / (size * squares), 1 - 1 / count)
        second, fourth = second.clamp_min(0) / kept, fourth / kept**2
        return second, torch.maximum(fourth, second**2 / count)  # by Cauchy-Schwarz, which rounding may break


def standard_error(draws: Tensor, factor: float = 1.0) -> Tensor:
    """Return the standard error of ``factor`` times the mean of independent draws (k, …), as (…)."""
    error: Tensor = draws.std(dim=0) * factor / len(draws) ** 0.5
    return error


def of_part(found: Tensor, chances: Tensor) -> Tensor:
    """Return variances, squares and replicates (3, …, n) of a part of the data, as they count for all of it."""
    return torch.cat([found[:1] / chances, found[1:2] / chances**2, found[2:]])


def with_squares(variances: Tensor) -> Tensor:
    """Return variances (…) and their squares, stacked as (2, …)."""
    return torch.stack([variances, variances**2])
