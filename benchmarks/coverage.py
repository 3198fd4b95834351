"""How often the intervals of correlations contain the truth, and how often p-values reject what is true.

    python benchmarks/coverage.py intervals             # all of docs/statistics.md: 700 simulated studies for each row
    python benchmarks/coverage.py p-values
    python benchmarks/coverage.py intervals --runs 50 --networks 57      # a look

A study has n networks, in G recipes of nearly equal size, and two normal quantities of correlation ρ over all networks.
A fraction of the variance of each is that of the recipes. So Pearson's truth is ρ, Spearman's 6/π asin(ρ/2), Kendall's
2/π asin(ρ). Skewed quantities are the exponentials, with the same ranks and Pearson's (e^ρ - 1)/(e - 1).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from time import process_time

import click
import numpy as np
from numpy.typing import NDArray

from pyflatness.statistics import intervals, permutation
from pyflatness.statistics.coefficients import STATISTICS, coefficients, whole

SEEDS = 4
RECIPES = {10: 5, 24: 6, 57: 12, 110: 22}  # by the number of networks
TESTS = {"of networks": (False, False), "of recipes": (True, False), "within recipes": (True, True)}


@dataclass(frozen=True)
class Design:
    """Hold what studies are drawn from.

    Attributes:
        networks: in a study.
        shared: the fraction of the variance that networks of a recipe share.
        skewed: whether the quantities are exponentials of normal ones.
        correlation: ρ.
        seeds: the fraction that networks of a seed share, of four seeds that every recipe has; 0: none do.
        crossed: whether the second quantity has the two fractions exchanged, with eleven seeds.
    """

    networks: int
    shared: float
    skewed: bool
    correlation: float
    seeds: float = 0.0
    crossed: bool = False

    @property
    def count(self) -> int:
        """How many seeds there are."""
        return 11 if self.crossed else SEEDS

    @property
    def recipes(self) -> NDArray[np.intp]:
        """The recipe of each network, (networks,)."""
        if self.seeds:
            return np.arange(self.networks) // self.count
        return np.arange(self.networks) * RECIPES[self.networks] // self.networks

    @property
    def numbers(self) -> NDArray[np.intp]:
        """The seed of each network, (networks,)."""
        return np.arange(self.networks) % self.count

    @property
    def fractions(self) -> NDArray[np.float64]:
        """The fractions of recipes, seeds and networks in the variance of the two quantities, (2, 3)."""
        both = np.array([self.shared, self.seeds]), np.array([self.seeds, self.shared])[:: 1 if self.crossed else -1]
        return np.array([[*row, 1 - row.sum()] for row in both])

    def truth(self, statistic: str) -> float:
        """Return the correlation of all networks that there could be."""
        r = self.correlation * float(np.sqrt(self.fractions).prod(axis=0).sum())
        if statistic == "Spearman":
            return 6 / math.pi * math.asin(r / 2)
        if statistic == "Kendall":
            return 2 / math.pi * math.asin(r)
        return (math.exp(r) - 1) / (math.e - 1) if self.skewed else r

    def studies(self, runs: int, seed: int = 0) -> Iterator[NDArray[np.float64]]:
        """Yield the two quantities of studies, (2, networks)."""
        generator = np.random.default_rng(seed)
        mix = np.linalg.cholesky([[1, self.correlation], [self.correlation, 1]])
        for _ in range(runs):
            of_recipes, of_networks = (mix @ generator.normal(size=(2, self.networks)) for _ in range(2))
            recipes, seeds, networks = np.sqrt(self.fractions).T[..., None]
            values = recipes * of_recipes[:, self.recipes] + networks * of_networks
            if self.seeds:
                values += seeds * (mix @ generator.normal(size=(2, self.count)))[:, self.numbers]
            yield np.exp(values) if self.skewed else values


def coverage(design: Design, interval: str, clustered: bool, runs: int, *, seeds: bool = False) -> dict[str, float]:
    """Return the fraction of intervals that contain the truth, by statistic; one that is not defined does not."""
    clusters = design.recipes if clustered else None
    hits = dict.fromkeys(STATISTICS, 0)
    for run, columns in enumerate(design.studies(runs)):
        find = intervals.finder(interval, design.networks, 0, clusters, run, seeds=design.numbers if seeds else None)
        for statistic in STATISTICS:
            value = float(coefficients(statistic, [*columns], whole(design.networks))[0])
            low, high = find(value, statistic, [*columns])
            hits[statistic] += low <= design.truth(statistic) <= high
    return {statistic: hits[statistic] / runs for statistic in STATISTICS}


def rejections(design: Design, clustered: bool, within: bool, runs: int, permutations: int = 199) -> dict[str, float]:
    """Return the fraction of studies with p ≤ 0.05, by statistic."""
    clusters = design.recipes if clustered else None
    count = dict.fromkeys(STATISTICS, 0)
    for run, (x, y) in enumerate(design.studies(runs)):
        orders = permutation.orders(design.networks, clusters, within, permutations, run)
        for statistic in STATISTICS:
            count[statistic] += permutation.p_values(statistic, [x], y, [], orders)[0] <= 0.05
    return {statistic: count[statistic] / runs for statistic in STATISTICS}


@click.group()
def main() -> None:
    """See the module's text."""


def _options(command: click.Command) -> click.Command:
    chosen = click.Choice([*map(str, RECIPES)])
    command = click.option("--networks", type=chosen, multiple=True, default=[*map(str, RECIPES)])(command)
    return click.option("--runs", default=700, show_default=True, help="Studies for each row.")(command)


@main.command("intervals")
@_options
@click.option("--correlation", default=0.5, show_default=True)
def print_intervals(runs: int, networks: tuple[str, ...], correlation: float) -> None:
    """Print the coverage of 95 % intervals as a table, in per cent: Pearson / Spearman / Kendall."""
    rows = {
        f"{what} | {interval}{' over recipes' if clustered else ''}": (shared, skewed, interval, clustered)
        for what, shared, skewed, over in (
            ("independent", 0.0, False, (False,)),
            ("independent, skewed", 0.0, True, (False,)),
            ("half shared in a recipe", 0.5, False, (False, True)),
            ("nine tenths shared", 0.9, False, (False, True)),
        )
        for clustered in over
        for interval in ("bootstrap", "fisher")
    }
    started = process_time()
    print(f"| networks | 95 % interval | {' | '.join(networks)} |\n|---|---|{'---|' * len(networks)}")
    for name, (shared, skewed, interval, clustered) in rows.items():
        found = [coverage(Design(int(n), shared, skewed, correlation), interval, clustered, runs) for n in networks]
        _print_row(name, found)
    for shared, of_seeds in ((0.4, 0.2), (0.2, 0.4)):
        for name, seeds in (("fisher over recipes", False), ("fisher over recipes and seeds", True)):
            designs = [Design(count, shared, False, correlation, of_seeds) for count in (36, 100)]
            found = [coverage(design, "fisher", True, runs, seeds=seeds) for design in designs]
            _print_row(f"{shared:.0%} shared in a recipe, {of_seeds:.0%} in a seed; 36, 100 networks | {name}", found)
    for shared, of_seeds in ((0.8, 0.1), (0.9, 0.05)):
        crossed = Design(99, shared, False, correlation, of_seeds, crossed=True)
        name = f"{shared:.0%} and {of_seeds:.0%}, the other way round in the gap; 9 recipes of 11 seeds"
        _print_row(f"{name} | fisher over recipes and seeds", [coverage(crossed, "fisher", True, runs, seeds=True)])
    print(f"{runs} studies each, {process_time() - started:.0f} s of the processor")


@main.command("p-values")
@_options
def print_p_values(runs: int, networks: tuple[str, ...]) -> None:
    """Print how often p ≤ 0.05 where measure and gap are independent, in per cent: Pearson / Spearman / Kendall."""
    print(f"| networks | permutations | {' | '.join(networks)} |\n|---|---|{'---|' * len(networks)}")
    for shared, what in ((0.0, "independent"), (0.9, "nine tenths shared")):
        for name, (clustered, within) in TESTS.items():
            found = [rejections(Design(int(n), shared, False, 0.0), clustered, within, runs) for n in networks]
            _print_row(f"{what} | {name}", found)


def _print_row(name: str, found: list[dict[str, float]]) -> None:
    cells = (" / ".join(f"{100 * fraction:.0f}" for fraction in by.values()) for by in found)
    print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
