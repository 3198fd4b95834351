"""A grid that can tell: all measures against the gap of networks that differ in one setting, at one training loss.

In most studies of flatness networks stop at different training losses, and correlations follow these. Here networks of
every combination of width, depth, batch size, learning rate, weight decay and optimiser are trained to exactly the same
cross-entropy on all training data (:mod:`.training`). Over all of them, and over those of one width and depth, there is
Kendall's τ; with the settings held fixed Spearman's partial correlation; the granulated Kendall Ψ and the conditional
mutual information of Jiang et al. (2020); the sign error of Dziugaite et al. (2020), mean and worst case. Beside the
measures stands what any of them is to be held against (:func:`baselines`). Targets are the gap, those under shifts
(images turned, with noise, labels that are wrong), and the error on test data.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pyflatness.errors import InputError
from pyflatness.measures import MEASURES
from pyflatness.messages import shown
from pyflatness.statistics.coefficients import coefficients
from pyflatness.statistics.correlation import correlations
from pyflatness.statistics.grid import conditional_mutual_information, granulated_kendall, sign_error
from pyflatness.statistics.tables import Vector

from . import claims, correlating, grid_networks
from .experiment import Bench, Experiment, Finding, Found, Points, note
from .grid_networks import SETTINGS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_HEAD, _SUM = "relative_flatness head", "relative_flatness"
PER_FEATURE = "relative_flatness_per_feature head"
KAPPAS = (_HEAD, _SUM, PER_FEATURE)
SHAPE = ("width", "depth")
ERROR = "test error"
FEWEST = 30  # pairs of an environment of the sign error

Row = dict[str, float]
"""Of a measure and a target: ``tau``, ``inside``, ``partial``, ``psi``, ``information``, ``sign_error``, ``worst``."""


def measured(bench: Bench) -> tuple[dict[str, list[Any]], dict[str, str]]:
    """Train and measure."""
    return grid_networks.made(bench)


def judge(points: Points) -> Found:
    """Compare measures with gaps, and test errors if there are some, of all networks that have relative flatness."""
    grid = compared_networks(points)
    settings = [name for name in SETTINGS if len(set(grid.columns[name])) > 1]
    found: dict[tuple[str, str], Row] = {}
    for target in (*grid.targets, *grid.error):
        columns = grid.columns | baselines(grid.columns, settings, target)
        for measure in (*grid.measures, *BASELINES):
            found[measure, target] = compared(columns, measure, target, settings)
    intervals = kappas(grid, settings)
    by_setting = {
        name: granulated_kendall(
            {key: grid.columns[key] for key in ("name", *settings, name, "test gap")}, name, "test gap", settings
        ).by_setting
        for name in KAPPAS
    }
    losses = grid.columns["train_loss"]
    findings = [
        *intervals.values(),
        *(Finding(f"{name}: ψ of {setting}", psi) for name, of in by_setting.items() for setting, psi in of.items()),
        Finding("networks", len(losses)),
        Finding("training loss, smallest", min(losses)),
        Finding("training loss, largest", max(losses)),
        *(
            Finding(f"{measure}: {what}", found[measure, "test gap"][key])
            for measure in (*grid.measures, *BASELINES)
            for key, what in WORDS.items()
        ),
        *(
            Finding(f"{measure}: {WORDS[key]}, test error", found[measure, ERROR][key])
            for measure in (*grid.measures, *BASELINES)
            for key in OF_ERROR
            if grid.error
        ),
    ]
    return Found(
        points.columns,
        tuple(findings),
        verdict(grid, found, intervals, by_setting),
        lambda figure: draw(figure, grid, found),
        grid.failures,
        size=(11.0, 0.22 * len(grid.measures) + 2.0),
        tables={"measures": ordered(grid, found), "settings": of_settings(by_setting)},
    )


WORDS = {
    "tau": "τ",
    "inside": "τ, one width and depth",
    "partial": "partial Spearman, given all settings",
    "psi": "Ψ",
    "information": "conditional mutual information",
    "sign_error": "mean sign error",
    "worst": "worst sign error",
}
OF_ERROR = ("tau", "inside", "partial")
BASELINES = ("settings alone", "the gap of another seed", "1/width", "random numbers")


def baselines(columns: Mapping[str, Sequence[Any]], settings: Sequence[str], target: str) -> dict[str, list[float]]:
    """Return columns that a measure is to be held against, by the names :data:`BASELINES`.

    The settings alone are the least-squares fit of the target to an indicator of each value of each setting, on the
    networks themselves; another seed is the target of the network with equal settings and the next seed, which is about
    what a measure can reach; random numbers are what nothing looks like. Where the table has no widths 1/width is NaN.
    """
    count = len(columns[target])
    values = [(name, value) for name in settings for value in sorted(set(columns[name]))[1:]]
    design = np.array(
        [[1.0] * count, *([cell == value for cell in columns[name]] for name, value in values)], dtype=float
    ).T
    goal = np.array(columns[target], dtype=float)
    fitted = design @ np.linalg.lstsq(design, goal, rcond=None)[0]
    recipes: dict[tuple[Any, ...], list[int]] = {}
    for place in range(count):
        recipes.setdefault(tuple(columns[name][place] for name in settings), []).append(place)
    twins = {
        place: twin for places in recipes.values() for place, twin in zip(places, [*places[1:], places[0]], strict=True)
    }
    mean = float(goal.mean())  # of a network without a twin
    cells = (
        fitted.tolist(),
        [goal[twins[place]] if twins[place] != place else mean for place in range(count)],
        [1 / width for width in columns.get("width", [math.nan] * count)],
        np.random.default_rng(0).normal(size=count).tolist(),
    )
    return dict(zip(BASELINES, cells, strict=True))


def as_text(columns: Mapping[str, Sequence[Any]], settings: Sequence[str]) -> dict[str, list[str]]:
    """Return settings as text, so that what is held fixed is which value it is, whether or not numbers follow it."""
    return {f"{name} as text": [f"={cell}" for cell in columns[name]] for name in settings}


def kappas(grid: "Grid", settings: Sequence[str]) -> dict[tuple[str, str], Finding]:
    """Return relative flatness' correlations with the gap, with intervals over recipes and seeds, by column and kind.

    The kinds are ``"all"``, over all networks, ``"inside"``, of those of one width and depth, ``"depth"``, of those of
    one depth, ``"partial"``, with all settings held fixed, ``"error"``, of those of one width and depth with the test
    error, and ``"less"``, for the head: what it has inside over the sum over layers.
    """
    chosen = {name: grid.columns[name] for name in ("name", "seed", *settings, *KAPPAS, *grid.error)}
    table = chosen | {"gap": grid.columns["test gap"]} | as_text(grid.columns, settings)
    options: Any = {"settings": settings, "seeds": "seed", "interval": "fisher"}
    inside = [name for name in SHAPE if name in settings]
    kinds: dict[str, tuple[str, str, Any]] = {
        "all": ("Kendall", "Kendall with the gap", {}),
        "inside": ("Kendall", "Kendall with the gap, one width and depth", {"strata": inside}),
        "depth": ("Kendall", "Kendall with the gap, one depth", {"strata": [n for n in inside if n != "width"]}),
        "error": ("Kendall", "Kendall with the test error, one width and depth", {"strata": inside, "y": ERROR}),
        "partial": (
            "Spearman",
            "partial Spearman with the gap, given all settings",
            {"given": [*as_text(table, settings)]},
        ),
    }
    if not grid.error:
        del kinds["error"]
    found = {}
    for kind, (how, what, more) in kinds.items():
        rows = correlations(table, KAPPAS, **options, **more)
        for name in KAPPAS:
            found[name, kind] = Finding(f"{name}, {what}", *correlating.ends(rows, name, how))
    codes = {
        name: np.unique([str([table[key][place] for key in keys]) for place in range(len(table["name"]))],
                        return_inverse=True)[1]
        for name, keys in (("recipe", settings), ("seed", ["seed"]), ("shape", inside))
    }  # fmt: skip
    head, total, gap = (np.array(table[name], dtype=float) for name in (_HEAD, _SUM, "gap"))

    def less(drawn: Vector) -> Vector:
        one, other = (coefficients("Kendall", [values, gap], drawn, codes["shape"]) for values in (head, total))
        return one - other

    what = f"{_HEAD} less {_SUM}, Kendall with the gap, one width and depth"
    found[_HEAD, "less"] = correlating.jackknifed(what, less, codes["recipe"], codes["seed"])
    return found


@dataclass(frozen=True)
class Grid:
    """Hold the networks that are compared.

    Attributes:
        columns: as :func:`.grid_networks.made` gives them, of these networks.
        targets: columns of gaps.
        error: the column of the test error, where there is one.
        measures: columns of measures that every one of the networks has a finite number of, and not one number all.
        failures: networks and measures that are not compared too, and why.
    """

    columns: dict[str, list[Any]]
    targets: tuple[str, ...]
    error: tuple[str, ...]
    measures: tuple[str, ...]
    failures: dict[str, str]


def compared_networks(points: Points) -> Grid:
    """Return the networks that have all gaps and relative flatness, of the head and of all layers.

    Raises:
        InputError: fewer than two do.
    """
    table, failures = points.columns, dict(points.failures)
    targets = tuple(name for name in table if name.endswith(" gap"))
    error = tuple(name for name in table if name == ERROR)
    needed = (_HEAD, _SUM, *targets, *error)
    kept = []
    for place, name in enumerate(table["name"]):
        missing = [column for column in needed if not math.isfinite(table.get(column, {place: math.nan})[place])]
        if missing:
            note(failures, name, f"no finite {', '.join(missing)}: not compared")
        else:
            kept.append(place)
    if len(kept) < 2:
        raise InputError(f"grid: {len(kept)} networks can be compared: {shown(failures)}")
    columns = {column: [cells[place] for place in kept] for column, cells in table.items()}
    if PER_FEATURE not in columns:  # of points that are older than the measure; the head has as many inputs as units
        pairs = zip(columns[_HEAD], columns["width"], strict=True)
        columns[PER_FEATURE] = [value / (2 * width) for value, width in pairs]
    measures = []
    for column in (name for name in columns if name.split()[0] in {row.name for row in MEASURES}):
        missing_of = sum(not math.isfinite(value) for value in columns[column])
        if missing_of:
            note(failures, column, f"no finite number for {missing_of} of {len(kept)} networks: not compared")
        elif len(set(columns[column])) > 1 or column in (_HEAD, _SUM):
            measures.append(column)
    return Grid(columns, targets, error, tuple(measures), failures)


def compared(table: Mapping[str, Sequence[Any]], measure: str, target: str, settings: Sequence[str]) -> Row:
    """Return how a measure orders the networks by a target, over all and where one setting differs alone."""
    columns = {name: [*table[name]] for name in dict.fromkeys(("name", *settings, measure, target))}
    texts = as_text(table, settings)
    errors, merged = (sign_error(columns, measure, target, settings, fewest=fewest) for fewest in (1, FEWEST))
    inside = [name for name in SHAPE if name in settings]
    plain: Any = {"interval": "fisher"}  # of which the values alone count
    fixed = correlations(columns | texts, measure, target, given=[*texts], **plain)[measure, "Spearman"].value
    return {
        "tau": kendall(columns[measure], columns[target]),
        "inside": correlations(columns, measure, target, strata=inside, **plain)[measure, "Kendall"].value,
        "partial": math.nan if measure == BASELINES[0] else fixed,
        "psi": granulated_kendall(columns, measure, target, settings).value,
        "information": conditional_mutual_information(columns, measure, target, settings).value,
        "sign_error": errors.mean,
        "worst": merged.worst,
    }


def kendall(one: Sequence[float], other: Sequence[float]) -> float:
    """Return Kendall's τ_b, which is 0 for a constant."""
    from scipy.stats import kendalltau

    value = float(kendalltau(one, other).statistic)
    return 0.0 if math.isnan(value) else value


def verdict(
    grid: Grid,
    found: Mapping[tuple[str, str], Row],
    intervals: Mapping[tuple[str, str], Finding],
    by_setting: Mapping[str, Mapping[str, float]],
) -> str:
    """Say how κ goes with the gap, over all networks and where something is held fixed, and beside what."""
    losses, said = grid.columns["train_loss"], claims.shown
    gap = {name: found[name, "test gap"] for name in (*grid.measures, *BASELINES)}

    def each(values: Mapping[str, Any], form: str = "{0} for {1}") -> str:
        """Return numbers, or texts, by column, for a sentence."""
        rows = (
            (value if isinstance(value, str) else f"{value:.2f}", NAMES.get(name, name))
            for name, value in values.items()
        )
        return ", ".join(form.format(*row) for row in rows)

    kinds = {kind for _, kind in intervals if kind != "less"}
    of = {kind: each({name: said(intervals[name, kind]) for name in KAPPAS}) for kind in kinds}
    by_psi = sorted(grid.measures, key=lambda name: gap[name]["psi"], reverse=True)
    right = [name for name in by_psi if gap[name]["worst"] < 0.5]
    above = sum(gap[name]["tau"] > gap["1/width"]["tau"] for name in grid.measures)
    with_error = (
        f"With the test error in the gap's place, over networks of one width and depth, it is {of['error']}. "
        if grid.error
        else ""
    )
    shifts = []
    for target in grid.targets[1:]:
        top = max(grid.measures, key=lambda name, target=target: found[name, target]["psi"])  # type: ignore[misc]
        shifts.append(f"{target} {each({name: found[name, target]['psi'] for name in (top, *KAPPAS)})}")
    return (
        f"{len(losses)} networks with training losses between {min(losses):.5f} and {max(losses):.5f}; 95 % intervals "
        f"over recipes and seeds. Kendall's τ with the gap over all networks is {of['all']}. Over networks of one "
        f"width and depth it is {of['inside']}; the head less the sum {said(intervals[_HEAD, 'less'])}. Over networks "
        f"of one depth it is {of['depth']}. {with_error}With all "
        f"settings held fixed Spearman's partial correlation is {of['partial']}. ψ by setting: "
        f"{'; '.join(f'{NAMES[name]} {each(psi, FORM)}' for name, psi in by_setting.items())}. Beside them, τ over all "
        f"networks: {each({name: gap[name]['tau'] for name in BASELINES})}; {above} of the {len(grid.measures)} "
        f"measures are above 1/width. Highest Ψ: {each({name: gap[name]['psi'] for name in by_psi[:5]})}. In "
        f"environments of at least {FEWEST} pairs {len(right) or 'no'} measures are better than chance everywhere; the "
        f"worst sign error is {each({name: gap[name]['worst'] for name in (*KAPPAS, *BASELINES, *right[:3])})}. Under "
        f"shifts, Ψ: {'; '.join(shifts)}."
    )


FORM = "{1} {0}"
NAMES = {_HEAD: "κ of the head", _SUM: "κ summed over the layers", PER_FEATURE: "κ/(2m) of the head"}


def ordered(grid: Grid, found: Mapping[tuple[str, str], Row]) -> str:
    """Return all measures by Ψ as a Markdown table, and what they are to be held against."""
    shifts = [target.removesuffix(" gap") for target in grid.targets[1:]]
    heads = ("τ", "τ, one shape", "partial", "Ψ", "CMI", "sign error", "worst", *(f"Ψ, {shift}" for shift in shifts),
             *(("τ, error", "τ, error, one shape", "partial, error") if grid.error else ()))  # fmt: skip
    lines = [f"| measure | {' | '.join(heads)} |", f"|---|{'---|' * len(heads)}"]
    by_psi = sorted(grid.measures, key=lambda name: found[name, "test gap"]["psi"], reverse=True)
    for name in (*BASELINES, *by_psi):
        row = found[name, "test gap"]
        cells = [*(row[key] for key in WORDS), *(found[name, target]["psi"] for target in grid.targets[1:])]
        cells += [found[name, error][key] for error in grid.error for key in OF_ERROR]
        called = name if name in BASELINES else f"`{name}`"
        lines.append(f"| {called} | {' | '.join('–' if math.isnan(cell) else f'{cell:.2f}' for cell in cells)} |")
    return "\n".join(lines)


def of_settings(by_setting: Mapping[str, Mapping[str, float]]) -> str:
    """Return ψ of each setting as a Markdown table."""
    settings = [*next(iter(by_setting.values()))]
    lines = [f"| ψ | {' | '.join(settings)} |", f"|---|{'---|' * len(settings)}"]
    lines += [f"| `{name}` | {' | '.join(f'{psi:.2f}' for psi in of.values())} |" for name, of in by_setting.items()]
    return "\n".join(lines)


def draw(figure: "Figure", grid: Grid, found: Mapping[tuple[str, str], Row]) -> None:
    """Draw Ψ of every measure by target, and beside it mean and worst sign error with the gap."""
    by_psi = sorted(grid.measures, key=lambda name: found[name, "test gap"]["psi"])
    places = range(len(by_psi))
    left, right = figure.subplots(1, 2, sharey=True)
    for target, marker in zip(grid.targets, "osD^", strict=False):
        left.plot([found[name, target]["psi"] for name in by_psi], places, marker, markersize=4, label=target)
    left.plot([found[name, "test gap"]["tau"] for name in by_psi], places, "k|", label="τ, test gap")
    left.axvline(0, color="grey", linewidth=0.8)
    left.set_yticks([*places], by_psi, fontsize=7)
    left.set_xlabel("granulated Kendall Ψ")
    left.legend(fontsize=7)
    for key, label in (("sign_error", "mean"), ("worst", "worst")):
        right.plot([found[name, "test gap"][key] for name in by_psi], places, "o", markersize=4, label=label)
    right.axvline(0.5, color="grey", linewidth=0.8)
    right.set_xlabel("sign error with the test gap")
    right.legend(fontsize=7)


EXPERIMENT = Experiment(
    name="grid",
    figure="A grid that can tell",
    title="all measures against the gap of networks with one training loss, by Ψ, mutual information and sign errors",
    claim="Flat minima generalise better: measures of flatness order networks by their gap, whichever setting made the "
    "networks differ.",
    measure=measured,
    judge=judge,
    seconds=115,
    long="hours",
    small={
        **{"widths": [8, 32], "depths": [1, 2], "batch_sizes": [16, 64], "learning_rates": [0.5, 2.0]},
        **{"weight_decays": [0.0], "optimizers": ["sgd", "adam"], "seeds": 2},
        **{"samples": 600, "loss": 0.05, "steps": 20_000, "measures": "all"},
    },
    paper={
        **{"widths": [16, 32, 64], "depths": [1, 2, 3], "batch_sizes": [32, 128], "learning_rates": [0.5, 1.0, 2.0]},
        **{"weight_decays": [0.0, 1.0], "optimizers": ["sgd", "momentum", "adam"], "seeds": 2},
        **{"samples": 2000, "loss": 0.05, "steps": 20_000, "measures": "all"},
    },
    data="MNIST",
)
