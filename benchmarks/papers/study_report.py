"""Say in docs/study.md and studies.md what the networks of :mod:`.study` tell, of its longest whole prefix.

Inside of a *stratum*, one data set, architecture and training loss, measures are held against targets. Statistics that
are no correlations have the jackknife over recipes too.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas
import scipy.stats
from numpy.typing import NDArray

from pyflatness.errors import InputError
from pyflatness.statistics import intervals as resampling
from pyflatness.statistics.coefficients import coefficients, whole
from pyflatness.statistics.correlation import Correlations, correlations
from pyflatness.statistics.tables import Vector

from . import claims, correlating, reproducing, study
from .claims import Claim
from .experiment import Finding, Found
from .grid import FEWEST
from .restate import filled, placed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FOLDER = Path(__file__).parents[2] / "docs" / "study"
PAGE, ANSWER = FOLDER.with_name("studies.md"), FOLDER.with_name("study.md")
HEAD, SUM, PER_FEATURE = "relative_flatness head", "relative_flatness", "relative_flatness_per_feature"
CEILINGS = ("the twin's target", "settings fitted")
BASELINES = ("random numbers", "learning rate", "steps")
DRAWN = {
    HEAD: "relative flatness κ of the head",
    SUM: "κ, sum over layers",
    "trace": "trace of the Hessian",
    "lambda_max": "largest eigenvalue",
    "adaptive_sharpness": "adaptive sharpness",
    "adaptive_sharpness_mc, normalised logits": "adaptive sharpness, normalised logits",
    "fisher_rao": "Fisher–Rao norm",
    "pac_bayes": "PAC-Bayes",
    "weight_norm": "norm of the weights",
    "mls": "sensitivity to the image (MLS)",
    "margin": "margin",
    "steps": "steps of training",
    "random numbers": "random numbers",
    "the twin's target": "error of another seed",
    "settings fitted": "settings, fitted to the errors",
}
"""Rows of the figure, in words."""
CUT = (SUM, HEAD, "scaled_trace", "trace", "adaptive_sharpness", "mls", "nmls", "weight_norm", "steps")
"""Rows of the table of cuts."""
CHANCE = 20
"""Columns of random numbers in it."""
DIFFERENCES = ((SUM, "trace"), (SUM, "adaptive_sharpness"), ("scaled_trace", SUM))
TARGET = study.TARGETS[0]
_OPTIONS: Any = {"interval": "fisher", "settings": "recipe"}


def table(path: Path = FOLDER / "networks.csv") -> pandas.DataFrame:
    """Return the networks that reached their losses, of the longest prefix of whole blocks.

    Beside the columns of the file there are ``recipe``, ``stratum`` and ``learning rate``, the factor.
    """
    frame = prefix(path)
    frame = frame[frame[TARGET].notna()].reset_index(drop=True)
    told = frame.astype(str)
    shape = told["data"] + " " + told["architecture"]
    recipe = told[[*study.SETTINGS]].agg(" ".join, axis=1)
    return frame.assign(
        **{"recipe": shape + " " + recipe, "stratum": shape + " " + told["loss"], "learning rate": frame["rate"]}
    )


def prefix(path: Path) -> pandas.DataFrame:
    """Return all rows of the longest prefix of whole blocks."""
    frame = pandas.read_csv(path)
    whole = frame["training"].nunique() // study.BLOCK * study.BLOCK
    return frame[frame["training"].isin([planned.name for planned in study.plan()[:whole]])]


def references(frame: pandas.DataFrame, target: str) -> pandas.DataFrame:
    """Return the table with what a measure is to be held against: ceilings, which know the target, and random numbers.

    The twin is the network of the same recipe and loss with the next seed; one that is alone has its stratum's mean.
    """
    twins = frame.groupby(["recipe", "loss"], sort=False)[target].transform(
        lambda cells: np.roll(cells, -1) if len(cells) > 1 else np.nan
    )
    means = frame.groupby("stratum")[target].transform("mean")
    codes = _indicators(frame)
    fitted = codes @ np.linalg.lstsq(codes, frame[target].to_numpy(), rcond=None)[0]
    drawn = np.random.default_rng(0).normal(size=len(frame))
    return frame.assign(**dict(zip((*CEILINGS, BASELINES[0]), (twins.fillna(means), fitted, drawn), strict=True)))


def compared(frame: pandas.DataFrame) -> list[str]:
    """Return the measures that have a finite value for every network, κ first."""
    first = [HEAD, SUM, PER_FEATURE]
    every = [*first, *(name for name in study.MEASURED if name not in (*first, f"{PER_FEATURE} head"))]
    return [name for name in every if np.isfinite(frame[name]).all()]


def inside(frame: pandas.DataFrame, columns: Sequence[str], target: str = TARGET) -> Correlations:
    """Return correlations inside of the strata."""
    return correlations(frame, columns, target, strata="stratum", **_OPTIONS)


def compare(values: Mapping[str, float], target: str = TARGET) -> Correlations:
    """Hold a measure of your own against the study's networks: how it orders them inside of the strata.

    Args:
        values: of the measure, by the networks' names; those without one are left out for all columns.
        target: one of :data:`.study.TARGETS`.

    Returns:
        Correlations of the column ``yours``, and of κ, ceilings and baselines over the same networks.

    Raises:
        InputError: no value is of a network of the study.
    """
    frame = table()
    frame = frame[frame["name"].isin(list(values))].reset_index(drop=True)
    if frame.empty:
        raise InputError("values: none is of a network of the study; study_report.table()['name'] has the names")
    frame = references(frame.assign(yours=[values[name] for name in frame["name"]]), target)
    return inside(frame, ["yours", HEAD, SUM, *CEILINGS, *BASELINES], target)


def taus(frame: pandas.DataFrame, columns: Sequence[str], target: str) -> dict[str, Finding]:
    """Return Kendall's τ inside of the strata, by column."""
    found = inside(frame, columns, target)
    what = f"τ with the {target}"
    return {name: Finding(f"{name}, {what}", *correlating.ends(found, name, "Kendall")) for name in columns}


def cuts(frame: pandas.DataFrame) -> dict[str, tuple[pandas.DataFrame, tuple[str, ...]]]:
    """Return networks, and the columns in which those that are compared are equal, by what is held fixed."""
    return {
        "as pooled": (frame, ("stratum",)),
        "noise and augmentation fixed": (frame, ("stratum", "label_noise", "augmentation")),
        "clean labels": (frame[frame["label_noise"] == 0].reset_index(drop=True), ("stratum",)),
        "within a recipe": (frame, ("recipe", "loss")),
    }


def by_cut(frame: pandas.DataFrame) -> dict[str, list[Finding]]:
    """Return τ with the test error in every cut, of the rows of :data:`CUT`, and the range of random columns."""
    drawn = np.random.default_rng(0).normal(size=(CHANCE, len(frame)))
    chance = f"{CHANCE} random columns, from and to"
    rows: dict[str, list[Finding]] = {name: [] for name in (*CUT, chance)}
    frame = frame.assign(place=np.arange(len(frame)))
    for what, (networks, equal) in cuts(frame).items():
        strata = np.unique(networks[[*equal]].astype(str).agg(" ".join, axis=1), return_inverse=True)[1]
        recipes, target = _codes(networks, "recipe"), networks[TARGET].to_numpy(dtype=float)
        find = resampling.finder("fisher", len(networks), 0, recipes, 0, strata=strata)

        def tau(column: Vector, target: Vector = target, strata: NDArray[np.intp] = strata) -> float:
            return float(coefficients("Kendall", [column, target], whole(len(target)), strata)[0])

        for name in CUT:
            column = networks[name].to_numpy(dtype=float)
            value = tau(column)
            rows[name].append(Finding(f"{name}: τ, {what}", value, *find(value, "Kendall", [column, target])))
        values = [tau(column[networks["place"]]) for column in drawn]
        rows[chance].append(Finding(f"random columns: τ, {what}", float(np.mean(values)), min(values), max(values)))
    return rows


def partials(frame: pandas.DataFrame, columns: Sequence[str]) -> dict[str, Finding]:
    """Return Spearman's correlations with the test error, stratum and all settings held fixed.

    It is the correlation of what least squares on indicators leave of ranks, which is defined too where a setting is
    the same throughout a stratum.
    """
    values, codes = frame[[*columns, TARGET]].to_numpy(dtype=float), _indicators(frame)

    def numbers(kept: NDArray[np.bool_]) -> Vector:
        ranks = scipy.stats.rankdata(values[kept], axis=0)
        left = ranks - codes[kept] @ np.linalg.lstsq(codes[kept], ranks)[0]
        length = np.linalg.norm(left, axis=0)
        length[length < 1e-6 * np.linalg.norm(ranks, axis=0)] = np.nan  # of what is held fixed
        r = left[:, :-1].T @ left[:, -1] / (length[:-1] * length[-1])
        z: Vector = np.arctanh(np.clip(r, -1 + 1e-12, 1 - 1e-12))
        return z

    found = _jackknifed(frame, columns, numbers)
    return {name: replace(_each(row, math.tanh), what=f"{name}, partial") for name, row in found.items()}


def less(frame: pandas.DataFrame, one: str, other: str) -> Finding:
    """Return by how much τ with the test error is larger for one column than for another."""
    first, second, target = (frame[name].to_numpy(dtype=float) for name in (one, other, TARGET))
    strata = _codes(frame, "stratum")

    def of(drawn: Vector) -> Vector:
        return coefficients("Kendall", [first, target], drawn, strata) - coefficients(
            "Kendall", [second, target], drawn, strata
        )

    return correlating.jackknifed(f"{one} less {other}, τ", of, _codes(frame, "recipe"))


def pairwise(frame: pandas.DataFrame, columns: Sequence[str]) -> dict[str, dict[str, Finding]]:
    """Return by column ψ of each setting, Ψ, mutual information given the stratum, mean and worst sign errors.

    They are what the library's functions of a grid give, made of one list of pairs for all columns and samples.
    """
    settings = settings_with_pairs(frame)
    kept = frame.assign(stratum=_together(frame, [name for name in study.SETTINGS if name not in settings]))
    pairs = Pairs.of(kept, [*settings])
    names = [*settings, "Ψ", "CMI", "sign error", "worst"]
    counts = dict.fromkeys(names, sum(settings.values())) | settings
    found: dict[str, dict[str, Finding]] = {}
    for column in columns:
        rows = _jackknifed(
            frame, names, functools.partial(pairs.statistics, *(kept[name] for name in (column, TARGET)))
        )
        rows = {name: _each(row, lambda end: min(max(end, -1.0), 1.0)) for name, row in rows.items()}
        found[column] = {
            name: replace(row, low=None, high=None) if counts[name] < resampling.FEWEST or row.low == row.high else row
            for name, row in rows.items()
        }
    return found


@dataclass(frozen=True)
class Pairs:
    """Hold the pairs of networks of one stratum, every pair once.

    Attributes:
        ends: the two networks, (2, pairs).
        strata: of each pair, (pairs,).
        alone: which pairs differ in one setting alone, (pairs,).
        groups: of those, which are of one stratum and differ in one setting alone, the others being equal: a number.
        settings: in which the pairs of each group differ, a number.
        count: of settings.
    """

    ends: NDArray[np.intp]
    strata: NDArray[np.intp]
    alone: NDArray[np.bool_]
    groups: NDArray[np.intp]
    settings: NDArray[np.intp]
    count: int

    @classmethod
    def of(cls, frame: pandas.DataFrame, settings: Sequence[str]) -> "Pairs":
        """Return the pairs of a table with the column ``stratum``."""
        strata, codes = _codes(frame, "stratum"), np.stack([_codes(frame, name) for name in settings])
        ends = np.stack(np.triu_indices(len(frame), 1))
        ends = ends[:, strata[ends[0]] == strata[ends[1]]]
        differ = codes[:, ends[0]] != codes[:, ends[1]]
        alone = differ.sum(axis=0) == 1
        which = differ[:, alone].argmax(axis=0)
        others = codes[:, ends[0, alone]]
        others[which, np.arange(len(which))] = -1
        rows, groups = np.unique(np.vstack([which, strata[ends[0, alone]], others]), axis=1, return_inverse=True)
        return cls(ends, strata[ends[0]], alone, groups.reshape(-1), rows[0], len(settings))

    def statistics(
        self, measure: "pandas.Series[float]", target: "pandas.Series[float]", kept: NDArray[np.bool_]
    ) -> list[float]:
        """Return ψ of each setting, Ψ, Î given the stratum, mean and worst sign error, of the networks that are kept.

        All are NaN where a setting has no pair of networks.
        """
        there = kept[self.ends[0]] & kept[self.ends[1]]
        one, two = (
            np.sign(values[self.ends[0]] - values[self.ends[1]]) for values in (measure.to_numpy(), target.to_numpy())
        )
        agreement, groups = (one * two)[self.alone & there], self.groups[there[self.alone]]
        counts = np.bincount(groups, minlength=len(self.settings))
        sums = np.bincount(groups, agreement, minlength=len(self.settings))
        pairs, total = (np.bincount(self.settings, cells, minlength=self.count) for cells in (counts, sums))
        if not pairs.all():
            return [np.nan] * (self.count + 4)
        taus, of = sums[counts > 0] / counts[counts > 0], self.settings[counts > 0]
        psi = np.bincount(of, taus, minlength=self.count) / np.bincount(of, minlength=self.count)
        worst = max(((1 - total / pairs) / 2)[pairs >= FEWEST], default=np.nan)
        return [
            *psi,
            psi.mean(),
            _information(self.strata[there], one[there], two[there]),
            (1 - taus).mean() / 2,
            worst,
        ]


def _information(groups: NDArray[np.intp], measure: Vector, target: Vector) -> float:
    """Return the normalised mutual information of two signs of pairs given their group, each pair in both orders."""
    places = 9 * groups + 3 * (measure + 1).astype(np.intp) + (target + 1).astype(np.intp)
    signs = np.bincount(places, minlength=9 * (int(groups.max()) + 1)).reshape(-1, 3, 3)
    table = signs + signs[:, ::-1, ::-1]
    alone, by_target, by_measure, both = (
        float(scipy.stats.entropy(part, axis=None)) for part in (table.sum((1, 2)), table.sum(1), table.sum(2), table)
    )
    return (by_measure + by_target - both - alone) / (by_target - alone) if by_target - alone > 1e-12 else math.nan


def _jackknifed(
    frame: pandas.DataFrame, names: Sequence[str], numbers: Callable[[NDArray[np.bool_]], Sequence[float] | Vector]
) -> dict[str, Finding]:
    """Return several statistics that are made together, with intervals by the jackknife over recipes.

    Args:
        frame: of n networks.
        names: of the statistics.
        numbers: makes them, of the networks that are kept, (n,).
    """
    held: dict[int, Vector] = {}

    def every(drawn: Vector) -> Vector:
        count = len(drawn)  # of the one sample with all networks, or of those without one recipe each
        if count not in held:
            held[count] = np.array([numbers(counts > 0) for counts in drawn])
        return held[count]

    recipes = _codes(frame, "recipe")
    return {
        name: correlating.jackknifed(name, lambda drawn, place=place: every(drawn)[:, place], recipes)  # type: ignore[misc]
        for place, name in enumerate(names)
    }


def _each(row: Finding, change: Callable[[float], float]) -> Finding:
    """Return a finding with its value and the ends of its interval changed."""
    value, low, high = (end if end is None else change(end) for end in (row.value, row.low, row.high))
    return replace(row, value=value, low=low, high=high)


def settings_with_pairs(frame: pandas.DataFrame) -> dict[str, int]:
    """Return by setting how many pairs of recipes differ in it alone, if at least two do."""
    recipes = frame.drop_duplicates("recipe")
    codes = np.stack([_codes(recipes, name) for name in ("data", "architecture", *study.SETTINGS)])
    differ = codes[:, :, None] != codes[:, None]
    alone = np.triu(differ.sum(axis=0) == 1)
    counts = {name: int((differ[place] & alone).sum()) for place, name in enumerate(study.SETTINGS, 2)}
    return {name: count for name, count in counts.items() if count > 1}


def _together(frame: pandas.DataFrame, names: Sequence[str]) -> "pandas.Series[str]":
    return frame[["stratum", *names]].astype(str).agg(" ".join, axis=1)


def _indicators(frame: pandas.DataFrame) -> Vector:
    made: Vector = pandas.get_dummies(frame[["stratum", *study.SETTINGS]].astype(str), dtype=float).to_numpy()
    return made


def _codes(frame: pandas.DataFrame, name: str) -> NDArray[np.intp]:
    found: NDArray[np.intp] = np.unique(frame[name].astype(str), return_inverse=True)[1]
    return found


def hypotheses(frame: pandas.DataFrame, tau: Mapping[str, Finding], partial: Mapping[str, Finding]) -> list[Claim]:
    """Return the protocol's hypotheses, each that a number is above 0."""
    others = [name for name in ("adaptive_sharpness", "steps") if name in tau]
    return [Claim(row) for row in (tau[HEAD], tau[SUM], partial[HEAD], *(less(frame, HEAD, name) for name in others))]


def markdown(heads: Sequence[str], rows: Mapping[str, Sequence[Finding | None]]) -> str:
    """Return a table in Markdown."""
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for name, cells in rows.items():
        called = f"`{name}`" if name in study.MEASURED else name
        lines.append(f"| {called} | {' | '.join('–' if cell is None else claims.shown(cell) for cell in cells)} |")
    return "\n".join(lines)


def found(path: Path = FOLDER / "networks.csv") -> Found:
    """Return findings, verdict, figure and tables."""
    frame = references(table(path), TARGET)
    measures = compared(frame)
    columns = [*CEILINGS, *BASELINES, *measures]
    tau, partial = taus(frame, columns, TARGET), partials(frame, columns)
    pairs = pairwise(frame, columns)
    losses = {loss: taus(part.reset_index(drop=True), columns, TARGET) for loss, part in frame.groupby("loss")}
    targets = {name: taus(references(frame, name), columns, name) for name in study.TARGETS[1:]}
    asked = hypotheses(frame, tau, partial)
    cut = by_cut(frame)
    first = sorted(measures, key=lambda name: -claims.number(tau[name]))
    order = [*CEILINGS, *BASELINES, *first]
    ways = ("Ψ", "CMI", "sign error", "worst")
    heads = ("", "τ within shape", *(f"τ, loss {loss:g}" for loss in losses), "partial", *ways)
    one = {
        name: [tau[name], *(of[name] for of in losses.values()), partial.get(name), *(pairs[name][way] for way in ways)]
        for name in order
    }
    settings = settings_with_pairs(frame)
    two = {name: [pairs[name][setting] for setting in settings] for name in order}
    three = {name: [targets[target][name] for target in targets] for name in order}
    tables = {"measures": markdown(heads, one), "cuts": markdown(("", *cuts(frame)), cut)}
    differences = [less(frame, *pair) for pair in DIFFERENCES]
    tables["differences"] = "; ".join(f"{row.what} {claims.shown(row)}" for row in differences) + "."
    parts = ((heads[1:], one), ([*settings], two), ([f"τ, {target}" for target in targets], three))
    cells = [
        replace(cell, what=f"{name}: {head}")
        for names, part in parts
        for name, row in part.items()
        for head, cell in zip(names, row, strict=True)
        if cell is not None
    ]
    missing = sorted({*study.MEASURED} - {*measures, f"{PER_FEATURE} head"})
    text = f"{counted(path, frame)} {claims.grouped(asked)}"
    text += f" Not compared, for want of a finite value for every network: {', '.join(missing)}." if missing else ""
    rows = (*(claim.finding for claim in asked), *cells, *itertools.chain(*cut.values()), *differences)
    return Found(
        {}, rows, text, lambda figure: draw(figure, tau),
        size=(7.0, 4.6), tables=tables,
    )  # fmt: skip


def counted(path: Path, frame: pandas.DataFrame) -> str:
    """Say how many networks there are, how many did not reach their loss, by setting, and what they took."""
    every = prefix(path)
    trainings, lost = every["training"].nunique(), every[every[TARGET].isna()]
    of = "; ".join(
        f"{name} {', '.join(f'{value} {count}' for value, count in lost[name].value_counts().sort_index().items())}"
        for name in ("loss", "data", "architecture", *study.SETTINGS)
    )
    seconds = [every[name].median() for name in ("training_seconds", "measuring_seconds")]
    return (
        f"{len(frame)} networks of {trainings} trainings and {frame['recipe'].nunique()} recipes in "
        f"{frame['stratum'].nunique()} strata, {trainings // study.BLOCK} of {len(study.plan()) // study.BLOCK} "
        f"blocks; {len(lost)} of {len(every)} did not reach their loss ({of}). Training losses are within a relative "
        f"{(frame['train_loss'] / frame['loss'] - 1).abs().max():.1g} of their targets. The median network took "
        f"{seconds[0]:.1f} s of a core to train and {seconds[1]:.1f} s to measure."
    )


def draw(figure: "Figure", tau: Mapping[str, Finding]) -> None:
    """Draw τ of the measures in :data:`DRAWN` with its interval: κ red, ceilings and baselines grey."""
    axes = figure.subplots()
    names = sorted(tau.keys() & DRAWN.keys(), key=lambda name: claims.number(tau[name]))
    for place, name in enumerate(names):
        row = tau[name]
        color = "C7" if name in (*CEILINGS, *BASELINES) else "C3" if name.startswith("relative_flatness") else "C0"
        axes.barh(place, claims.number(row), color=color, alpha=0.6)
        if row.low is not None and row.high is not None:
            axes.plot([row.low, row.high], [place, place], color="0.2", linewidth=1.2)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(names)), [DRAWN[name] for name in names], fontsize=9)
    axes.set_xlabel("Kendall's τ with the test error, with its 95 % interval")
    axes.set_title("Which networks of equal training loss err more on new images?\n"
                   "0: says nothing, 1: puts all in order. Grey: no measure.", fontsize=9)  # fmt: skip


def restate() -> str:
    """Write figure, findings and the page's sentences and tables anew from the table beside it; return the verdict."""
    said = found()
    (FOLDER / "taus.png").write_bytes(reproducing.image(said))
    rows = [*map(vars, said.findings)]
    pandas.DataFrame(rows).drop(columns="paper").to_csv(FOLDER / "findings.csv", index=False, float_format="%.6g")
    texts = placed(said)
    for page, names in ((PAGE, ("verdict", "measures")), (ANSWER, ("cuts", "differences"))):
        own = {name: texts[name] for name in names}
        page.write_text(filled(page.read_text(encoding="utf-8"), "study", own), encoding="utf-8")
    return said.verdict
