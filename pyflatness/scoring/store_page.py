"""Make a page of a store: the values of each of its settings, and how they were made as far as the store has it."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..curvature.slices import Landscape
from ..curvature.spectra import Spectrum
from ..errors import InputError
from ..messages import printable
from ..report.page import Cell, Page, Section, Table, charts, choosing, tables
from ..report.page.charts import Axis, Charts
from ..training.history import History
from . import attached
from .attached import Attached
from .export import records, setting_hash, setting_texts
from .page import Choices, SettingValues, page
from .store import Store

_UNITS = """
SELECT min(finished) AS first, max(finished) AS last, sum(seconds) AS seconds, count(*) AS units FROM units
WHERE setting = ?
"""
_VERSIONS = "SELECT versions, count(*) AS units FROM units WHERE setting = ? GROUP BY versions ORDER BY min(finished)"


def of_store(store: Store, title: str, choices: Choices, more: Mapping[str, Mapping[str, Any]] | None = None) -> Page:
    """Return a page of all that a store has.

    Args:
        store: to be read.
        title: the page's heading.
        choices: what measures are held against, and how.
        more: columns of checkpoints, by their names, beside those that the store has.

    Raises:
        InputError: a store without values, and as :func:`.page.page`.
        MissingExtraError: without Altair.
    """
    found = [*records(store, more)]
    settings = [*dict.fromkeys(record["setting"] for record in found)]
    own = {key: [record for record in found if record["setting"] == key] for key in settings}
    every = store.settings()
    numbers = {setting_hash(facts): number for number, facts in every.items()}
    texts = setting_texts(every)
    parts = [
        SettingValues(texts[numbers[key]], own[key], _facts(store, numbers[key], every[numbers[key]]))
        for key in settings
    ]
    held = attached.found(store)
    stored = {one.name: one.result for one in held if isinstance(one.result, History)}
    choices = replace(choices, histories={**stored, **choices.histories})
    return page(title, parts, choices, [*sections(held), *_runs(store), _checkpoints(store)])


def table(store: Store) -> dict[str, list[Any]]:
    """Return the values of a store as columns by name.

    Raises:
        InputError: it has no values, or a checkpoint has values of several settings.
    """
    found = [*records(store)]
    settings: dict[str, set[str]] = {}
    for record in found:
        settings.setdefault(record["checkpoint"], set()).add(record["setting"])
    several = [name for name, own in settings.items() if len(own) > 1]
    if several:
        raise InputError(f"test: {several[0]!r} has values of several settings (data, loss, …) in {store.path}")
    if not found:
        raise InputError(f"test: there are no values in {store.path}")
    return {name: [record[name] for record in found] for name in found[0]}


def _facts(store: Store, setting: int, facts: Mapping[str, Any]) -> list[tuple[str, object]]:
    key, shown = facts["key"], facts.get("shown", {})
    data, units = key["data"], store.select(_UNITS, (setting,))[0]
    found: list[tuple[str, object]] = [
        ("model", shown.get("model") or "that of each checkpoint"),
        ("data", shown.get("data") or ""),
        ("samples", data["samples"]),
        (
            "fingerprint of the data (SHA-256)",
            data["content"] + (", first and last batch alone" if "ends" in data else ""),
        ),
        ("loss", key["loss"].get("name", "")),
        *((f"option {name}", value) for name, value in key["options"].items() if value not in (None, False)),
        ("measuring took", f"{units['seconds'] or 0:.3g} s in {units['units']} units"),
    ]
    if units["first"] is not None:
        found.append(("measured", f"{_date(units['first'])} to {_date(units['last'])} UTC"))
    for row in store.select(_VERSIONS, (setting,)):
        found.append(("versions", f"{_versions(row['versions'])} ({row['units']} units)"))
    return found


def _runs(store: Store) -> Iterator[Section]:
    """Yield what added to the store: of releases that did not keep it nothing is known."""
    rows = store.select("SELECT command, began, versions FROM runs ORDER BY began")
    if rows:
        cells = tuple(
            (Cell(f"{_date(row['began'])} UTC"), Cell(printable(row["command"])), Cell(_versions(row["versions"])))
            for row in rows
        )
        held = tables.Table("What added to the store", ("began", "command", "versions"), cells)
        yield Section("Commands", tables=(held,), closed=True)


def _versions(text: str) -> str:
    return ", ".join(f"{name} {number}" for name, number in json.loads(text).items())


def _checkpoints(store: Store) -> Section:
    rows = store.select("SELECT name, path, content FROM checkpoints ORDER BY id")
    cells = tuple(tuple(map(tables.text, (row["name"], row["path"] or "in memory", row["content"]))) for row in rows)
    held = tables.Table("Checkpoints by content", ("model", "file", "SHA-256 of its content"), cells)
    return Section("Checkpoints", tables=(held,), closed=True)


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(seconds))


_POINTS = 200  # of a density, whose Gaussian is a hundredth of the range wide
_BEYOND = 0.2  # of the losses' range: so far beyond them a quadratic model is drawn


def sections(held: Sequence[Attached]) -> Iterator[Section]:
    """Yield a section of the spectra and one of the landscapes, where there are any.

    Raises:
        MissingExtraError: without Altair.
    """
    spectra = {_name(one): one.result for one in held if isinstance(one.result, Spectrum)}
    landscapes = {_name(one): one.result for one in held if isinstance(one.result, Landscape)}
    failed = [f"{_name(one)} has no spectrum: {one.error}" for one in held if one.error]
    if failed and not spectra:
        yield Section("Spectra", tuple(map(printable, failed)))
    if spectra:
        text = (
            "Where the pointer rests on an eigenvalue its residual is shown: the matrix has an eigenvalue no "
            "farther from it than that. ± of the trace is the standard error over the random probes."
        )
        yield Section("Spectra", (text, *map(printable, failed)), _of_spectra(spectra), (_table_of_spectra(spectra),))
    if landscapes:
        yield Section("Landscapes", (), _of_landscapes(landscapes), (_table_of_landscapes(landscapes),))


def _name(one: Attached) -> str:
    return f"{one.name}, {one.label}" if one.label else one.name


def _of_spectra(spectra: Mapping[str, Spectrum]) -> Charts:
    data = [
        {"name": name, "number": [*range(1, len(one.eigenvalues) + 1)], "value": _list(one.eigenvalues)}
        | {"residual": _list(one.residuals), **_density(one)}
        for name, one in spectra.items()
    ]
    specs = []
    peaks = [one.density.peak(one.width()) for one in spectra.values() if one.density is not None]
    if peaks:
        named = [name for name, one in spectra.items() if one.density is not None]
        specs.append(choosing.density(named, min(peaks)))
    if any(len(one.eigenvalues) for one in spectra.values()):
        every = [value for one in spectra.values() for value in one.eigenvalues.tolist()]
        specs.append(choosing.eigenvalues(Axis.of("value", "eigenvalue", every), len(spectra)))
    return Charts(data, tuple(specs))


def _density(one: Spectrum) -> dict[str, Any]:
    if one.density is None:
        return {}
    points = one.points(width := one.width(), _POINTS)
    mean, error = one.density.at(points, width)
    error = error.nan_to_num(nan=0.0)  # of a single probe
    lists = {"x": points, "p": mean, "low": (mean - error).clamp_min(0), "high": mean + error}
    return {name: [None if x is None else float(f"{x:.5g}") for x in _list(held)] for name, held in lists.items()}


def _table_of_spectra(spectra: Mapping[str, Spectrum]) -> Table:
    most = max(len(one.eigenvalues) for one in spectra.values())
    header = ("spectrum", "weights", *(f"λ{k}" for k in range(1, most + 1)), "trace by the density")
    rows = []
    for name, one in spectra.items():
        pairs = zip(one.eigenvalues.tolist(), one.residuals.tolist(), strict=True)
        cells = [tables.number(value)._replace(note=f"± {residual:.1e}") for value, residual in pairs]
        cells += [Cell("")] * (most - len(cells))
        ended = "yes" if one.converged else "no"
        facts = (one.method, ended, one.samples, one.products, "; ".join(one.notes))
        rows.append((tables.text(name), tables.text(one.size), *cells, _trace(one), *map(tables.text, facts)))
    return Table("Eigenvalues", (*header, "matrix", "converged", "samples", "products", "notes"), tuple(rows))


def _trace(one: Spectrum) -> Cell:
    if one.density is None:
        return Cell("")
    trace, error = one.density.moment(1)
    return Cell(one.density.trace(), charts.finite(trace), note=f"{trace:.10g}, standard error {error:.6g}")


def _of_landscapes(landscapes: Mapping[str, Landscape]) -> Charts:
    curves = {name: one for name, one in landscapes.items() if len(one.coefficients) == 1}
    surfaces = {name: one for name, one in landscapes.items() if len(one.coefficients) == 2}
    data = [_curve(name, one) for name, one in curves.items()]
    data += [row for name, one in surfaces.items() for row in _lines(name, one)]
    specs = []
    if curves:
        specs.append(choosing.curve([*curves], _loss(curves)))
    if surfaces:
        specs.append(choosing.surface([*surfaces], log=_loss(surfaces).log))
    return Charts(data, tuple(specs))


def _loss(landscapes: Mapping[str, Landscape]) -> Axis:
    return Axis.of("loss", "loss", [loss for one in landscapes.values() for loss in one.losses.flatten().tolist()])


def _curve(name: str, one: Landscape) -> dict[str, Any]:
    (along,) = one.coefficients
    model: list[float | None] = [None] * len(along)
    finite = one.losses[one.losses.isfinite()]
    if one.quadratic is not None and len(finite):
        room = _BEYOND * float(finite.max() - finite.min())
        low, high = float(finite.min()) - room, float(finite.max()) + room
        model = [x if x is not None and low <= x <= high else None for x in _list(one.quadratic.at(along))]
    return {"name": name, "a": _list(along), "loss": _list(one.losses), "model": model}


def _lines(name: str, one: Landscape) -> list[dict[str, Any]]:
    first, second = one.coefficients
    apart = {"da": _apart(first), "db": _apart(second)}
    lines = zip(first.tolist(), one.losses, strict=True)
    return [{"name": name, "a": a, "b": _list(second), "loss": _list(losses), **apart} for a, losses in lines]


def _apart(coefficients: Tensor) -> float:
    return float(coefficients[1] - coefficients[0]) if len(coefficients) > 1 else 1.0


def _table_of_landscapes(landscapes: Mapping[str, Landscape]) -> Table:
    header = ("landscape", "directions", "points", "evaluated", "loss at the weights", "smallest loss", "largest loss")
    rows = []
    for name, one in landscapes.items():
        finite = one.losses[one.losses.isfinite()]
        ends = [tables.number(float(x)) for x in finite.aminmax()] if len(finite) else [Cell("not finite")] * 2
        points = " × ".join(str(len(each)) for each in one.coefficients)
        facts = (Cell(printable("; ".join(one.labels))), Cell(points), tables.text(one.done), tables.number(one.loss))
        rows.append((tables.text(name), *facts, *ends, *_quadratic(one), tables.text(one.samples)))
    return Table("Losses along directions", (*header, "gradient", "curvature", "samples"), tuple(rows))


def _quadratic(one: Landscape) -> tuple[Cell, Cell]:
    """Return the slope and the second derivative along each direction."""
    if one.quadratic is None:
        return Cell(""), Cell("")
    numbers = one.quadratic.gradient.tolist(), one.quadratic.hessian.diagonal().tolist()
    slopes, curvatures = (
        Cell("; ".join(f"{x:.4g}" for x in held), held[0] if len(held) == 1 else None) for held in numbers
    )
    return slopes, curvatures


def _list(held: Tensor) -> list[float | None]:
    return [*map(charts.finite, held.tolist())]
