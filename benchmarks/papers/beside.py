"""Hold measures of a table of networks against what settings, another seed and chance say of the same target."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from pyflatness.statistics.correlation import correlations
from pyflatness.statistics.grid import granulated_kendall, sign_error

from . import claims, correlating
from .experiment import Finding
from .grid import BASELINES, FEWEST, as_text, baselines

PEARSON, INSIDE, OF_SEED = "Pearson", "Pearson, one recipe", "Pearson, one seed"
PARTIAL = "partial Spearman, given the settings"
HEADS = (PEARSON, INSIDE, OF_SEED, PARTIAL, "Ψ", "sign error", "worst")
"""Of the table. The worst sign error is that of environments of at least :data:`.grid.FEWEST` pairs of networks."""


def table(
    networks: Mapping[str, Sequence[Any]], called: Mapping[str, str], y: str, settings: Sequence[str]
) -> tuple[list[Finding], str]:
    """Return how measures and baselines go with a target, with intervals over recipes and seeds, and as Markdown.

    Args:
        networks: columns with ``name`` and ``seed``; rows whose measure is not finite do not count for that measure.
        called: what the table calls each measure, by its column.
        y: column of the target, which is finite.
        settings: columns that make a recipe.
    """
    first = baselines(networks, settings, y)
    names = {name: name.replace("the gap", f"the {y}") for name in BASELINES}
    rows = {label: first[name] for name, label in names.items() if all(map(math.isfinite, first[name]))}
    known: dict[str, tuple[str, ...]] = {names[BASELINES[0]]: (INSIDE, PARTIAL), names[BASELINES[1]]: (INSIDE, PARTIAL)}
    label = f"the {y} of the seed in other recipes"
    rows[label], known[label] = of_seed(networks, y, settings), (OF_SEED,)
    rows |= {label: [float(cell) for cell in networks[name]] for name, label in called.items()}
    found, lines = [], [f"| with the {y} | {' | '.join(HEADS)} |", f"|---|{'---|' * len(HEADS)}"]
    for label, cells in rows.items():
        kept = [place for place, cell in enumerate(cells) if math.isfinite(cell)]
        columns = {name: [networks[name][place] for place in kept] for name in ("name", "seed", *settings, y)}
        values = _of(columns | {"value": [cells[place] for place in kept]}, y, settings)
        for head in known.get(label, ()):  # follows from how the column was made
            del values[head]
        found += [Finding(f"{label} with the {y}: {head}", *_ends(item)) for head, item in values.items()]
        told = {head: claims.shown(item) for head, item in values.items() if item.value is not None}
        shown = (told.get(head, "–") for head in HEADS)
        lines.append(f"| {label} | {' | '.join(shown)} |")
    return found, "\n".join(lines)


def of_seed(networks: Mapping[str, Sequence[Any]], y: str, settings: Sequence[str]) -> list[float]:
    """Return by network the mean of a target over the networks of its seed that another recipe made; NaN if none."""
    recipes = [*zip(*(networks[name] for name in settings), strict=True)]
    rows = [*zip(networks["seed"], recipes, networks[y], strict=True)]
    others = (
        [value for seed, recipe, value in rows if seed == own and recipe != not_this] for own, not_this, _ in rows
    )
    return [statistics.fmean(values) if values else math.nan for values in others]


def _of(columns: Mapping[str, Sequence[Any]], y: str, settings: Sequence[str]) -> dict[str, Finding]:
    """Return what a row of the table says of the column ``value``, by its heads."""
    options: Any = {"settings": settings, "seeds": "seed", "interval": "fisher"}
    texts = as_text(columns, settings)
    ways: dict[str, tuple[str, Any]] = {
        PEARSON: (PEARSON, {}),
        INSIDE: (PEARSON, {"strata": settings}),
        OF_SEED: (PEARSON, {"strata": ["seed"]}),
        PARTIAL: ("Spearman", {"given": [*texts]}),
    }
    found = {
        head: Finding(
            "", *correlating.ends(correlations({**columns, **texts}, "value", y, **options, **more), "value", how)
        )
        for head, (how, more) in ways.items()
    }
    errors, merged = (sign_error(columns, "value", y, settings, fewest=fewest) for fewest in (1, FEWEST))
    alone = (granulated_kendall(columns, "value", y, settings).value, errors.mean, merged.worst)
    return found | {head: Finding("", value) for head, value in zip(HEADS[4:], alone, strict=True)}


def _ends(item: Finding) -> tuple[float | None, float | None, float | None]:
    return item.value, item.low, item.high
