"""Say in docs/studies.md what the whole seeds of the study within recipes tell, by the protocol that stands there.

    python -m benchmarks.papers within --report [--out reproduced]

takes the whole seeds of the run in the folder, where there is one, into docs/study/within.csv. All that is said
follows from that file.
"""

import math
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas
import scipy.stats

from pyflatness.errors import InputError
from pyflatness.report.intervals import student_t
from pyflatness.statistics import permutation
from pyflatness.statistics.tables import Vector

from . import claims, within, within_pairs
from .experiment import Finding
from .restate import DOCS, filled

POINTS, PAGE = within.POINTS, DOCS / "studies.md"
PAIRS = POINTS.with_name("within_pairs.csv")
KAPPA, HEAD = "relative_flatness", "relative_flatness head"
OTHERS = (
    *("relative_flatness_columns", HEAD, "scaled_trace", "trace", "relative_flatness_std", "adaptive_sharpness"),
    *("mls", "weight_norm", "steps"),
)
"""The secondary columns."""
RECIPE = ["data", "architecture", *within.SETTINGS]
TARGET = within.TARGETS[0]
CHANCE, LARGEST, SMALL, FEWEST_REACHED, INTERIM = 20, 0.6, 0.1, 0.8, 0.995


@dataclass(frozen=True)
class Study:
    """Hold the networks that count.

    Attributes:
        frame: a row for each, with the columns ``recipe``, a text, and ``relative_flatness head``.
        seeds: whole seeds that were trained.
        trained: networks of these seeds.
        unreached: those that did not reach the loss.
        excluded: recipes that are left out whole, and why.
    """

    frame: pandas.DataFrame
    seeds: int
    trained: int
    unreached: int
    excluded: Mapping[str, str]

    @property
    def recipes(self) -> list[pandas.DataFrame]:
        """Return the networks of each recipe."""
        return [part for _, part in self.frame.groupby("recipe", sort=False)]


def whole(path: Path) -> pandas.DataFrame:
    """Return all rows of the whole seeds of a run, in the order of its list."""
    frame = pandas.read_csv(path).set_index("name")
    names = [planned.name for planned in within.plan()]
    there = next((place for place, name in enumerate(names) if name not in frame.index), len(names))
    return frame.loc[names[: there // within.BLOCK * within.BLOCK]].reset_index()


def study(frame: pandas.DataFrame, *, exclude: bool = True) -> Study:
    """Return the networks that count of rows of whole seeds.

    Args:
        frame: of :func:`whole`.
        exclude: leave recipes of CIFAR-10 out whose error is too large.
    """
    if frame.empty:
        raise InputError("no seed of the study within recipes is whole")
    recipe = frame[RECIPE].astype(str).agg(" ".join, axis=1)
    layers = [f"{KAPPA} {place + 1}" for place in range(within.LAYERS)]
    frame = frame.assign(**{"recipe": recipe, HEAD: frame[layers].ffill(axis=1).iloc[:, -1]})
    reached = frame[TARGET].notna()
    excluded = {}
    for name, part in frame.groupby("recipe", sort=False):
        if part[TARGET].notna().mean() < FEWEST_REACHED:
            excluded[str(name)] = f"{part[TARGET].isna().sum()} of {len(part)} networks did not reach the loss"
        elif exclude and part["data"].iloc[0] == "cifar10" and part[TARGET].mean() >= LARGEST:
            excluded[str(name)] = f"mean test error {part[TARGET].mean():.3f}"
    kept = frame[reached & ~recipe.isin(list(excluded))].reset_index(drop=True)
    return Study(kept, len(frame) // within.BLOCK, len(frame), int((~reached).sum()), excluded)


def correlations(recipes: Sequence[pandas.DataFrame], column: str, target: str = TARGET) -> Vector:
    """Return Spearman's ρ in each recipe, NaN where it has fewer than two networks or one value alone."""
    found = []
    for part in recipes:
        values = part[[column, target]].to_numpy(dtype=float)
        values = values[np.isfinite(values).all(axis=1)]
        varied = len(values) > 1 and bool(np.ptp(values, axis=0).all())
        found.append(float(scipy.stats.spearmanr(values).statistic) if varied else math.nan)
    return np.array(found)


def mean(what: str, values: Vector, level: float = 0.95) -> Finding:
    """Return a mean with Student's interval."""
    values = values[np.isfinite(values)]
    if len(values) < 2:
        return Finding(what, float(values.mean()) if len(values) else None)
    half = student_t(level, len(values) - 1) * float(values.std(ddof=1)) / math.sqrt(len(values))
    value = float(values.mean())
    return Finding(what, value, value - half, value + half)


def p_value(values: Vector) -> float:
    """Return the two-sided p of Student's test that the mean is 0."""
    return float(scipy.stats.ttest_1samp(values[np.isfinite(values)], 0).pvalue)


def verdict(low: float, high: float) -> str:
    """Return what the protocol says for an interval of the primary number."""
    if high < 0:
        return "refuted, the order is reversed"
    if low > 0:
        return "seen, and smaller than 0.1" if high < SMALL else "seen"
    return "refuted" if high < SMALL else "not decided"


def by_shape(found: Study, values: Vector) -> Finding:
    """Return the mean over the pairs of data and architecture, each the mean of its recipes, with their interval."""
    shapes = [" ".join(part[["data", "architecture"]].iloc[0]) for part in found.recipes]
    return mean("ρ over shapes", pandas.Series(values).groupby(shapes).mean().to_numpy())


def reliability(found: Study) -> float:
    """Return the mean correlation within recipes of the errors on two halves of the test images, for both together."""
    halves = [f"{TARGET}, {half} images" for half in ("even", "odd")]
    values = [
        float(np.corrcoef(part[halves].to_numpy(dtype=float).T)[0, 1]) if len(part) > 2 else math.nan
        for part in found.recipes
    ]
    r = float(np.nanmean(values)) if np.isfinite(values).any() else math.nan
    return 2 * r / (1 + r)


def table(found: Study) -> str:
    """Return the table of all columns, in Markdown."""
    recipes = found.recipes
    if found.seeds < 2:
        return ""
    first = correlations(recipes, KAPPA)
    rows, p = [], []
    for name in (KAPPA, *OTHERS):
        values = correlations(recipes, name)
        less = first - values
        p += [] if name == KAPPA else [p_value(values), p_value(less)]
        cells = [
            claims.shown(mean(name, values)),
            claims.shown(mean(name, correlations(recipes, name, within.TARGETS[1]))),
            "" if name == KAPPA else claims.shown(mean(name, less)),
        ]
        rows.append((f"`{name}`" if name != "steps" else name, cells))
    adjusted = permutation.holm(np.array(p)).reshape(-1, 2)
    lines = ["|  | test error | p | test loss | κ summed less it | p |", "|---|---|---|---|---|---|"]
    for place, (name, cells) in enumerate(rows):
        own = ("primary", "") if place == 0 else tuple(f"{value:.2g}" for value in adjusted[place - 1])
        lines.append(f"| {name} | {cells[0]} | {own[0]} | {cells[1]} | {cells[2]} | {own[1]} |")
    drawn = np.random.default_rng(0).normal(size=(CHANCE, len(found.frame)))
    chance = [
        float(np.nanmean(correlations([part.assign(drawn=row[part.index]) for part in recipes], "drawn")))
        for row in drawn
    ]
    lines.append(f"| {CHANCE} random columns, from and to | {min(chance):.2f}, {max(chance):.2f} |  |  |  |  |")
    return "\n".join(lines)


def left_out(found: Study) -> dict[str, Counter[str]]:
    """Return how many recipes of each pair of data and architecture are left out whole, by the reason."""
    counts: dict[str, Counter[str]] = {}
    for name, why in found.excluded.items():
        reason = (
            "for a mean test error of 0.6 or more" if "error" in why else "for networks that did not reach the loss"
        )
        counts.setdefault(reason, Counter())[" ".join(name.split()[:2])] += 1
    return counts


def paragraph(frame: pandas.DataFrame) -> str:
    """Return what the protocol says of the networks of whole seeds."""
    found, every = study(frame), study(frame, exclude=False)
    recipes, last = found.recipes, found.seeds == within.SEEDS
    values = correlations(recipes, KAPPA)
    shown = mean("ρ", values)
    decides = shown if last else mean("ρ", values, INTERIM)
    if decides.low is None or decides.high is None:
        return f"{found.seeds} of {within.SEEDS} seeds of the {within.BLOCK} recipes: nothing can be said yet."
    kind = "The study is whole" if last else "This is an interim evaluation, and the runner goes on where it stopped"
    ends = "" if last else f" (99.5 % interval [{decides.low:.2f}, {decides.high:.2f}])"
    sets = [
        f"{name} {claims.shown(mean(name, values[[part['data'].iloc[0] == name for part in recipes]]))}"
        for name in within.DATA
        if any(part["data"].iloc[0] == name for part in recipes)
    ]
    ceiling = reliability(found)
    left = "; ".join(
        f"{why} ({', '.join(f'{pair} {count}' for pair, count in pairs.items())})"
        for why, pairs in left_out(found).items()
    )
    same = "Without that exclusion for errors it is " + claims.shown(mean("ρ", correlations(every.recipes, KAPPA)))
    split = (
        f"Errors on two halves of the test images give the target a reliability of {ceiling:.2f}."
        if math.isfinite(ceiling)
        else "The target's reliability cannot be said of two seeds."
    )
    return (
        f"{kind}: {found.seeds} of {within.SEEDS} seeds of all {within.BLOCK} recipes, {found.trained} networks, of "
        f"which {found.unreached} did not reach the loss; {len(found.frame)} networks of {len(recipes)} recipes count. "
        f"Spearman's ρ of κ summed with the test error within a recipe is {claims.shown(shown)} in the mean{ends}: "
        f"**{verdict(decides.low, decides.high)}**. Over the {len(within.DATA) * len(within.ARCHITECTURES)} pairs of "
        f"data and architecture as far as they count it is {claims.shown(by_shape(found, values))}; by data "
        f"{', '.join(sets)}. {split} Of eight recipes of each pair are left out whole: {left or 'none'}. {same}. A "
        f"network took {found.frame['training_seconds'].median():.1f} s of a core to train and "
        f"{found.frame['measuring_seconds'].median():.1f} s to measure (medians)."
    )


def intervention(found: Study, pairs: pandas.DataFrame) -> str:
    """Return what the protocol says of networks that were taken on at one loss in three ways, a row for each way."""
    kappa, norm, random = within_pairs.WAYS
    recipe = found.frame.set_index("name")["recipe"]
    counted = pairs[pairs["name"].isin(recipe.index)]
    errors, losses, heads = (
        counted.pivot(index="name", columns="way", values=column) for column in (*within.TARGETS, HEAD)
    )
    if len(errors) < 2:
        return "The intervention has not been run."
    moved = 100 * pandas.DataFrame({norm: errors[kappa] - errors[norm], random: errors[kappa] - errors[random]})
    means = moved.groupby(recipe[moved.index].to_numpy()).mean()
    main, beside = (mean(way, means[way].to_numpy()) for way in (norm, random))
    assert main.low is not None
    assert main.high is not None
    what = "a difference is shown" if main.low > 0 or main.high < 0 else "no difference is shown"
    began = found.frame.set_index("name").loc[errors.index]
    by = (100 * errors.sub(began[TARGET], axis=0)).groupby(recipe[errors.index].to_numpy()).mean()
    since = ", ".join(claims.shown(mean(way, by[way].to_numpy())) for way in within_pairs.WAYS)
    rise = losses.sub(began[within.TARGETS[1]], axis=0).mean()
    kept = heads[kappa] / heads[norm]
    return (
        f"The intervention was run on {pairs['name'].nunique()} networks of the first {within_pairs.NETWORKS}, of "
        f"which {len(errors)} of {len(means)} recipes count. The test error after 200 steps against the gradient of κ "
        f"of the head, less that after as many against the norm's, is {claims.shown(main)} percentage points: "
        f"**{what}**. Less that after random steps it is {claims.shown(beside)}. κ of the head is then "
        f"{kept.median():.2f} times (median) what it is after steps against the norm's gradient. Since the steps "
        f"began, the test error has changed by {since} points (κ, norm, random), and the test loss by "
        f"{', '.join(f'{rise[way]:.2g}' for way in within_pairs.WAYS)}."
    )


def restate(folder: Path) -> str:
    """Take over the whole seeds of a run in the folder, write the page's texts anew, and return the paragraphs."""
    run, pairs = folder / "networks.csv", folder / "pairs.csv"
    if run.exists():
        whole(run).to_csv(POINTS, index=False, float_format="%.6g")
    if pairs.exists():
        order = {planned.name: place for place, planned in enumerate(within.plan())}
        taken = pandas.read_csv(pairs).sort_values("name", key=lambda names: names.map(order), kind="stable")
        taken.to_csv(PAIRS, index=False, float_format="%.7g")
    frame = whole(POINTS)
    said = paragraph(frame)
    if PAIRS.exists():
        said += "\n\n" + intervention(study(frame), pandas.read_csv(PAIRS))
    texts = {
        "verdict": "\n\n".join(
            textwrap.fill(part, 120, break_long_words=False, break_on_hyphens=False) for part in said.split("\n\n")
        ),
        "table": table(study(frame)),
    }
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), "within", texts), encoding="utf-8")
    return said
