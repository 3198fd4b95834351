"""Make a page of many models: their values, profiles over the layers, correlations with a gap, and how all was made."""

import itertools
import json
import math
import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..curvature.landscape import Landscape
from ..curvature.spectra import Spectrum
from ..errors import InputError, printable
from ..measures import MEASURES
from ..report import html
from ..report.page import Cell, Page, Section, Table, charts, interactive, tables
from ..report.page.charts import Axis, Charts
from ..statistics import tables as networks_tables
from ..statistics.coefficients import STATISTICS
from ..statistics.correlation import Correlations, correlations, too_few, unequal_losses
from ..statistics.tables import Networks, aliases, measure_and_layer
from ..training import curves
from ..training.history import History
from . import result_files
from .export import COLUMNS, Record, records, setting_hash, setting_texts
from .result_files import NamedResult
from .store import Store

_GAPS = ("gap", "generalization_gap", "loss")  # what measures are held against, unless that is said: the first there is
_BESIDE = "loss", "accuracy"
_OF_TEST = "test loss", "test accuracy", "test error", "gap"
_FLATNESS = ("relative_flatness", "trace", "scaled_trace", "lambda_max", "sharpness")

HOLLOW = (
    "Hollow points are models that do not count in the correlations: they were excluded by name, are not trained, or "
    "one of their two numbers is missing, and then they are drawn at the left or lower edge. Those that do count set "
    "the scale, and others may lie outside of it."
)
_COUNTS = ("s", "seed", "epoch", "step", "iteration", "checkpoint", "ckpt")  # of names, which are no settings
_INDEPENDENT = (
    "They take networks as independent; settings= of pf.statistics.correlations, or pyflatness report --settings, has "
    "them over whole recipes"
)

OF_TRAININGS = (
    "Models that are checkpoints of one training, by the step or epoch in their names or columns; the numbers are in "
    "the table of values."
)


@dataclass(frozen=True)
class PageOptions:
    """Hold how a page of models is made."""

    against: str | None = None  # what measures are held against; None: the first of :data:`_GAPS` that there is
    test: Any = None  # a table of the same networks on test data; ``gap`` is its loss less that of the models
    exclude: Collection[str] = ()  # names of models that do not count in the correlations
    max_loss: float | None = None  # of models that count; None: see :meth:`.tables.Networks.left_out`
    interval: str = "bootstrap"  # how the intervals of correlations are made, ``"bootstrap"`` or ``"fisher"``
    colour: str | None = None  # the setting that gives points their colours; None: one that is in all names
    histories: Mapping[str, History] = field(default_factory=dict)  # of trainings, by the names to show
    settings: Sequence[str] = ()  # columns that make clusters of networks, see :func:`.correlation.correlations`
    seeds: str | None = None  # the column of seeds, likewise


@dataclass(frozen=True)
class SettingValues:
    """Hold the values of one setting: the same data, loss and options. ``made`` says how they came about."""

    name: str
    records: Sequence[Record]
    made: Sequence[tuple[str, object]] = ()


def page(title: str, settings: Sequence[SettingValues], options: PageOptions, more: Sequence[Section] = ()) -> Page:
    """Return a page."""
    every = [record for setting in settings for record in setting.records]
    if not every and not options.histories:
        raise InputError("page: there are no values to show")
    unknown = [name for name in options.exclude if not _among([name], every)]
    if unknown:
        such = f", such as {every[0]['checkpoint']!r}" if every else ""
        raise InputError(f"exclude: {unknown[0]!r} is none of the models{such}")
    several = len(settings) > 1
    sections = [section for setting in settings for section in _sections(setting, options, several=several)]
    sections += [section(options.histories)] if options.histories else []
    models = len({record["checkpoint"] for record in every})
    measures = [*dict.fromkeys(record["measure"] for record in every)]
    counted = f"{models} model{'s' * (models != 1)}, {len(measures)} measure{'s' * (len(measures) != 1)}"
    text = f"{counted}: {', '.join(measures)}." if every else ""
    return Page(title, (text,) if text else (), (*sections, *more))


def _sections(part: SettingValues, options: PageOptions, *, several: bool) -> Iterator[Section]:
    suffix = f" · {part.name}" if several and part.name else ""
    settings = [name for name in part.records[0] if name not in {*COLUMNS, *_BESIDE}]
    against = _Against.of(part.records, options)
    yield against.section(suffix)
    yield Section(
        f"Values{suffix}",
        (tables.LEGEND,),
        tables=(tables.values(against.with_test(), "Values by model and layer", (*_BESIDE, *_OF_TEST), settings),),
    )
    counting = [record for record in part.records if record["checkpoint"] not in against.left_out]
    of_layers = charts.profiles(counting, against.setting, against.values)
    if of_layers.specs:
        text = (f"Without {', '.join(against.left_out)}.",) if against.left_out else ()
        yield Section(f"Over the layers{suffix}", tuple(map(printable, text)), of_layers)
    of_trainings = of_checkpoints(part.records)
    if of_trainings.specs:
        yield Section(f"Over the training{suffix}", (OF_TRAININGS,), of_trainings)
    yield from _left_out(against, suffix)
    formulas = {measure.name: measure.formula for measure in MEASURES}
    made = (
        tables.summary(part.records, formulas),
        *([tables.facts("What was measured", part.made)] if part.made else []),
    )
    yield Section(f"How it was made{suffix}", tables=made)


@dataclass(frozen=True)
class _Against:
    """Hold the measures of networks against one column."""

    records: Sequence[Record]
    networks: Networks
    y: str
    kept: NDArray[np.bool_]
    left_out: Mapping[str, str]  # networks that do not count, each with the reason
    how: Mapping[str, Any]  # options of intervals
    setting: str  # that gives points their colours; "": each has its own
    values: Mapping[str, Any]  # of the setting, by network

    @classmethod
    def of(cls, records: Sequence[Record], options: PageOptions) -> "_Against":
        columns = [name for name in records[0] if name != "setting"]
        networks = networks_tables.read({name: [record[name] for record in records] for name in columns}, options.test)
        y = options.against or next((name for name in _GAPS if name in networks.columns), "loss")
        networks.column(y)  # raises if there is none
        reasons = networks.left_out(_among(options.exclude, records), options.max_loss)
        kept = np.array([not why for why in reasons])
        how = {"interval": options.interval, "settings": options.settings or None, "seeds": options.seeds}
        networks.groups(_columns(how), kept)  # raises for one that is not there, or has empty cells
        left_out = {name: why for name, why in zip(networks.names, reasons, strict=True) if why}
        colours = _setting(records, networks.names, options.colour)
        return cls(records, networks, y, kept, left_out, how, *colours)

    def with_test(self) -> list[Record]:
        """Return the values with the gap of their networks, and what these do on test data, where that is known."""
        columns = {name: name.replace(" ", "_") for name in _OF_TEST}
        own = {name: self.networks.columns[key] for name, key in columns.items() if key in self.networks.columns}
        cells = {
            network: {name: tables.finite(float(column[place])) for name, column in own.items()}
            for place, network in enumerate(self.networks.names)
        }
        return [cells[record["checkpoint"]] | record for record in self.records]

    @property
    def measures(self) -> list[str]:
        """Return the columns that are measures: those of whole networks first, then those of layers."""
        return sorted(
            (name for name in self.networks.measures if name != self.y),
            key=lambda x: measure_and_layer(x)[1] != tables.NETWORK,
        )

    def counting(self, x: str) -> NDArray[np.bool_]:
        """Return which networks count: those that are not excluded, and have both numbers."""
        return self.kept & np.isfinite(self.networks.column(x)) & np.isfinite(self.networks.column(self.y))

    def correlations(self, x: str) -> Correlations | None:
        """Return the correlations of a measure over the networks that count; None where there are none."""
        counts = self.counting(x)
        if not counts.any():
            return None
        every = {name: column.tolist() for name, column in self.networks.columns.items()} | self.networks.text_columns
        named = {x, self.y, "loss", *_columns(self.how)} & {*every}  # the loss for the warning alone
        columns = {name: [*itertools.compress(every[name], counts)] for name in named}
        return correlations(columns, x, self.y, max_loss=math.inf, **self.how)  # those that count

    def section(self, suffix: str) -> Section:
        found = {x: self.correlations(x) for x in self.measures}
        title = "generalisation gap" if self.y == "gap" else self.y
        header = ("measure", "layer", *STATISTICS, "networks", "left out", "smallest", "largest")
        table = Table(f"Correlations with {title}", header, tuple(self._row(x, found[x]) for x in found), layer=1)
        how = next((f"{one.method}." for one in found.values() if one is not None), "")
        how += f" {_INDEPENDENT}." if how and not self.how["settings"] else ""
        hollow = any(not self.counting(x).all() for x in found)
        x = next(iter(found))
        out = "; ".join(f"{name} ({why})" for name, why in self.left_out.items())
        left_out = printable(f"Left out of what is said here and of the correlations: {out}.") if out else ""
        answers = (*self._flattest(x), _answer(x, title, found[x]))
        texts = (*answers, left_out, self._fair(), how, HOLLOW if hollow else "")
        return Section(f"Flatness and {title}{suffix}", (*filter(None, texts),), self._charts(found, title), (table,))

    def _flattest(self, x: str) -> Iterator[str]:
        """Yield which network has the smallest value of a measure, and how sure that is."""
        ends = self._ends(x)
        if not ends:
            return
        (least, low), (most, high) = ends
        measure, layer = measure_and_layer(x)
        flatter = " A smaller value is a flatter network." if measure in _FLATNESS else ""
        of = "" if layer == tables.NETWORK else f" of {layer}"
        yield printable(f"Smallest {measure}{of}: {least}, {low:.4g}. Largest: {most}, {high:.4g}.{flatter}")
        counting = [one for one in self.records if one["checkpoint"] not in self.left_out]
        own = [one for one in counting if (one["measure"], one["layer"] or tables.NETWORK) == (measure, layer)]
        highs = [one["high"] for one in own if one["checkpoint"] == least and one["high"] is not None]
        lows = [one["low"] for one in own if one["checkpoint"] != least and one["low"] is not None]
        others = sum(low <= high for low in lows for high in highs)
        if others:
            more = f"{others} other network{'s' * (others != 1)}"
            yield f"By their 95 % intervals {more} may have as small a value."

    def _ends(self, x: str) -> list[tuple[str, float]]:
        """Return the networks of the smallest and the largest value of a measure, with these; none without values."""
        values = np.where(self.kept, self.networks.column(x), math.nan)
        if not np.isfinite(values).any():
            return []
        places = [int(np.nanargmin(values)), int(np.nanargmax(values))]
        return [(self.networks.names[place], float(values[place])) for place in places]

    def _fair(self) -> str:
        """Return whether the training losses are near enough to each other for a comparison."""
        losses = self.networks.columns.get("loss", np.empty(0))
        losses = losses[self.kept & np.isfinite(losses)] if len(losses) else losses
        if len(losses) < 2 or not (losses > 0).all():
            return ""
        unequal = unequal_losses(losses)
        if unequal:
            fixed = "pyflatness correlate --given loss holds them fixed"
            return f"⚠ The comparison may not be fair: {unequal}; {fixed}."
        return f"The comparison is at nearly equal losses: at most a factor of {losses.max() / losses.min():.3g} apart."

    def _row(self, x: str, found: Correlations | None) -> tuple[Cell, ...]:
        counts = int(self.counting(x).sum())
        rows = [Cell("–")] * len(STATISTICS) if found is None else [_correlation(found, x, how) for how in STATISTICS]
        short = charts.short(self.networks.names)
        ends = [Cell(printable(short[name]), note=f"{value:.6g}") for name, value in self._ends(x)] or [Cell("")] * 2
        return (
            *map(Cell, map(printable, measure_and_layer(x))),
            *rows,
            tables.text(counts),
            tables.text(len(self.kept) - counts),
            *ends,
        )

    def _charts(self, found: Mapping[str, Correlations | None], title: str) -> Charts:
        upward = Axis.over("y", title, self.networks.column(self.y)[self.kept].tolist())
        specs, columns = [], {"y": self.networks.column(self.y)}
        short = charts.short(self.networks.names)
        values = [(self.values if self.setting else short)[name] for name in self.networks.names]
        for place, (x, own) in enumerate(found.items()):
            columns[f"x{place}"] = self.networks.column(x)
            lines = [f"{row.statistic} {_correlation(own, x, row.statistic).text}" for row in own.rows] if own else []
            lines += [_too_few(own)] if own and too_few(own) else []
            across = Axis.over(f"x{place}", x, columns[f"x{place}"][self.kept].tolist())
            specs.append(charts.scatter(across, upward, lines, values, self.setting))
        data = [
            {"model": name, "name": short[name], "out": not kept, "setting": self.values.get(name)}
            | {key: float(column[place]) for key, column in columns.items() if math.isfinite(column[place])}
            for place, (name, kept) in enumerate(zip(self.networks.names, self.kept, strict=True))
        ]
        return Charts(data, tuple(specs))


def _setting(records: Sequence[Record], names: Sequence[str], wanted: str | None) -> tuple[str, dict[str, str]]:
    """Return the setting that gives points their colours, with its values by network: a column, or a part of names."""
    columns = [name for name in records[0] if name not in {*COLUMNS, *_BESIDE, "setting"}]
    found: dict[str, list[Any]] = dict(charts.settings(names))
    for name in columns:
        held = {record["checkpoint"]: record[name] for record in records}
        found[name] = [held.get(network) for network in names]
    if wanted is not None and wanted not in found:
        raise InputError(f"colour: {wanted!r} is no column, nor a number in all names; there are {', '.join(found)}")
    several = [name for name, held in found.items() if 1 < len({*held}) <= charts.NAMED and name not in _COUNTS]
    setting = wanted or next(iter(several), "")
    return setting, {n: str(value) for n, value in zip(names, found.get(setting, ()), strict=False)}


def _columns(how: Mapping[str, Any]) -> list[str]:
    """Return the columns that options of intervals name."""
    return [*(how["settings"] or ()), *filter(None, [how["seeds"]])]


def _answer(x: str, title: str, found: Correlations | None) -> str:
    """Return whether a measure correlates with a column, and how sure that is."""
    row = None if found is None else found[x, "Kendall"]
    if found is None or row is None or math.isnan(row.value):
        return ""
    name = printable(x.removesuffix(f" {tables.NETWORK}"))
    over = f"{found.points} networks" + ("" if found.clusters is None else f" in {found.clusters} clusters")
    said = f"Kendall's correlation of {name} with the {title} is {row.value:.2f} over {over}"
    if not row.has_interval():
        few = too_few(found)
        why = f"so few {few}" if few else "networks in perfect order"
        return f"{said}, without an interval: {why} say next to nothing of others."
    ends = f"{said}, with the 95 % interval [{row.low:.2f}, {row.high:.2f}]"
    if row.low <= 0 <= row.high:
        return f"{ends}. It contains 0: these networks do not show whether the two correlate."
    return f"{ends}: networks with a smaller value have a {'smaller' if row.low > 0 else 'larger'} {title}."


def _among(names: Collection[str], records: Sequence[Record]) -> list[str]:
    """Return the names that are those of models, or of their files."""
    known = {alias for record in records for alias in aliases(record["checkpoint"])}
    return [name for name in names if name in known]


def _correlation(found: Correlations, x: str, statistic: str) -> Cell:
    row = found[x, statistic]
    if math.isnan(row.value):
        return Cell("not defined")
    text = str(row).removeprefix(f"{statistic} ").removesuffix(" [–]")
    return Cell(text, row.value, note=_too_few(found))


def _too_few(found: Correlations) -> str:
    few = too_few(found)
    return f"too few {few} for an interval" if few else ""


def _left_out(against: _Against, suffix: str) -> Iterator[Section]:
    """Yield the values that failed, and the models that do not count in correlations, each with the reason."""
    rows = [
        (record["checkpoint"], record["layer"] or tables.NETWORK, record["measure"], record["error"])
        for record in against.records
        if record["error"]
    ]
    rows += [(name, "", "", why) for name, why in against.left_out.items()]
    missing = ~np.isfinite(against.networks.column(against.y))
    rows += [(name, "", against.y, "no number") for name in against.networks.named(missing)]
    if rows:
        cells = tuple(
            (*(Cell(printable(text)) for text in row), Cell(printable(why), kind="long")) for *row, why in rows
        )
        caption = "Values that failed, and models that do not count"
        held = Table(caption, ("model", "layer", "measure", "why"), cells)
        yield Section(f"Failed and excluded{suffix}", tables=(held,))


_COUNT = re.compile(
    r"(?<![a-z])(?:(epoch)|global_step|step|iteration|iter|checkpoint|ckpt)([-_=]?)(\d+)", re.IGNORECASE
)


def section(histories: Mapping[str, History]) -> Section:
    """Return charts of everything that was recorded over the steps, and a table of it."""
    values: list[dict[str, Any]] = []
    points: list[dict[str, Any]] = []
    steps: dict[str, None] = {}
    for training, history in histories.items():
        along, places = curves.places([*history], None)
        steps[along] = None
        for record, place in zip(history, places, strict=True):
            points.append({**record.numbers, "training": training, "x": place})
            of = f"{along} {place:g}"
            values += [
                {**html.record(estimate, measure), **record.numbers}
                | {"layer": layer, "weights": weights, "x": place, "training": training}
                | {"checkpoint": ", ".join([*([training] if len(histories) > 1 else []), of, weights])}
                for weights, report in record.reports.items()
                for measure, held in report.by_measure().items()
                for layer, estimate in held.items()
            ]
    numbers = [*dict.fromkeys(name for history in histories.values() for record in history for name in record.numbers)]
    title = next(iter(histories)) if len(histories) == 1 else f"{len(histories)} histories"
    table = tables.values(values, f"What was recorded: {title}", settings=numbers)
    drawn = _charts(" or ".join(steps), [*histories], values, points, numbers)
    return Section(f"Training · {title}", charts=drawn, tables=(table,), closed=True)


def of_checkpoints(records: Sequence[tables.Record]) -> Charts:
    """Return charts of measures, loss and accuracy over the steps of trainings that several of the models are from.

    Which these are, their names or their columns ``run`` with ``step`` or ``epoch`` say; see :func:`_place`.
    """
    places = {record["checkpoint"]: _place(record) for record in records}
    steps: dict[str, set[float]] = {}
    for place in places.values():
        if place is not None:
            steps.setdefault(place[0], set()).add(place[2])
    trainings = [name for name, own in steps.items() if len(own) > 1]
    values: list[dict[str, Any]] = []
    along: dict[str, None] = {}
    for record in records:
        place = places[record["checkpoint"]]
        if place is not None and place[0] in trainings:
            along[place[1]] = None
            values.append({**record, "training": place[0], "x": place[2], "weights": "live"})
    values.sort(key=lambda value: value["x"])
    points = {value["checkpoint"]: value for value in values if value["value"] is not None}
    return _charts(" or ".join(along), trainings, values, [*points.values()], ["loss", "accuracy"])


def _place(record: tables.Record) -> tuple[str, str, float] | None:
    """Return the training that a model is from, whether it is at a step or an epoch of it, and which; None: unknown.

    The columns ``run`` with ``step`` or ``epoch`` say so, or else the numbers behind these words in the model's name:
    then the name without them is the training's.
    """
    for along in ("step", "epoch"):
        number = record.get(along)
        if record.get("run") is not None and isinstance(number, (int, float)):
            return str(record["run"]), along, float(number)
    found = sorted(_COUNT.finditer(record["checkpoint"]), key=lambda match: bool(match[1]))  # steps are finer
    if not found:
        return None
    training = _COUNT.sub(lambda match: match[0].removesuffix(match[3]) + "*", record["checkpoint"])
    return training, "epoch" if found[0][1] else "step", float(found[0][3])


def _charts(
    along: str,
    trainings: Sequence[str],
    values: Sequence[Mapping[str, Any]],
    points: Sequence[Mapping[str, Any]],
    numbers: Sequence[str],
) -> Charts:
    """Return a chart of each measure, and of each of the numbers beside them."""
    data, specs = [], []
    weights = [*dict.fromkeys(value["weights"] for value in values)]
    for place, measure in enumerate(dict.fromkeys(value["measure"] for value in values)):
        own = [value for value in values if value["measure"] == measure and value["value"] is not None]
        layers = [*dict.fromkeys(value["layer"] or tables.NETWORK for value in own)]
        data += [
            {"training": value["training"], "x": value["x"], "weights": value["weights"]}
            | {"layer": value["layer"] or tables.NETWORK, **charts.numbers(f"m{place}", value)}
            for value in own
        ]
        upward = Axis.of(f"m{place}", measure, [value["value"] for value in own])
        specs.append(interactive.over_training(along, upward, trainings, layers=layers, weights=weights))
    for place, name in enumerate(numbers):
        there = [(point, y) for point in points if (y := tables.finite(point.get(name))) is not None]
        data += [{"training": point["training"], "x": point["x"], f"n{place}": y} for point, y in there]
        if there:
            specs.append(interactive.over_training(along, Axis.of(f"n{place}", name, [y for _, y in there]), trainings))
    return Charts(data, tuple(specs))


_UNITS = """
SELECT min(finished) AS first, max(finished) AS last, sum(seconds) AS seconds, count(*) AS units FROM units
WHERE setting = ?
"""
_VERSIONS = "SELECT versions, count(*) AS units FROM units WHERE setting = ? GROUP BY versions ORDER BY min(finished)"


def of_store(
    store: Store, title: str, options: PageOptions, more: Mapping[str, Mapping[str, Any]] | None = None
) -> Page:
    """Return a page of all that a store has."""
    by_setting: dict[str, list[Record]] = {}
    for record in records(store, more):
        by_setting.setdefault(record["setting"], []).append(record)
    settings = store.settings()
    values = [
        SettingValues(text, by_setting[key], _facts(store, number, settings[number]))
        for number, text in setting_texts(settings).items()
        if (key := setting_hash(settings[number])) in by_setting
    ]
    held = result_files.found(store)
    stored = {one.name: one.result for one in held if isinstance(one.result, History)}
    options = replace(options, histories={**stored, **options.histories})
    return page(title, values, options, [*sections(held), *_of_store(store)])


def table(path: Path) -> Any:
    """Return the values of a store as columns by name; of another file its path, for it to be read as CSV."""
    if not networks_tables.is_store(path):
        return path
    with Store(path) as store:
        found = [*records(store)]
    settings: dict[str, set[str]] = {}
    for record in found:
        settings.setdefault(record["checkpoint"], set()).add(record["setting"])
    several = [name for name, own in settings.items() if len(own) > 1]
    if several:
        raise InputError(f"{path}: {several[0]!r} has values of several settings (data, loss, …)")
    if not found:
        raise InputError(f"{path}: there are no values in this store")
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


def _of_store(store: Store) -> Iterator[Section]:
    """Yield what added to the store, of which releases that did not keep it left nothing, and its checkpoints."""
    runs = [
        (Cell(f"{_date(row['began'])} UTC"), Cell(printable(row["command"])), Cell(_versions(row["versions"])))
        for row in store.select("SELECT command, began, versions FROM runs ORDER BY began")
    ]
    if runs:
        held = Table("What added to the store", ("began", "command", "versions"), tuple(runs))
        yield Section("Commands", tables=(held,), closed=True)
    rows = store.select("SELECT name, path, content FROM checkpoints ORDER BY id")
    cells = tuple(tuple(map(tables.text, (row["name"], row["path"] or "in memory", row["content"]))) for row in rows)
    held = Table("Checkpoints by content", ("model", "file", "SHA-256 of its content"), cells)
    yield Section("Checkpoints", tables=(held,), closed=True)


def _versions(text: str) -> str:
    return ", ".join(f"{name} {number}" for name, number in json.loads(text).items())


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(seconds))


_POINTS = 200  # of a density, whose Gaussian is a hundredth of the range wide
_BEYOND = 0.2  # of the losses' range: so far beyond them a quadratic model is drawn


def sections(held: Sequence[NamedResult]) -> Iterator[Section]:
    """Yield a section of the spectra and one of the landscapes, where there are any."""
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


def _name(one: NamedResult) -> str:
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
        specs.append(interactive.density(named, min(peaks)))
    if any(len(one.eigenvalues) for one in spectra.values()):
        every = [value for one in spectra.values() for value in one.eigenvalues.tolist()]
        specs.append(interactive.eigenvalues(Axis.of("value", "eigenvalue", every), len(spectra)))
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
    return Cell(one.density.trace(), tables.finite(trace), note=f"{trace:.10g}, standard error {error:.6g}")


def _of_landscapes(landscapes: Mapping[str, Landscape]) -> Charts:
    curves = {name: one for name, one in landscapes.items() if len(one.coefficients) == 1}
    surfaces = {name: one for name, one in landscapes.items() if len(one.coefficients) == 2}
    data = [_curve(name, one) for name, one in curves.items()]
    data += [row for name, one in surfaces.items() for row in _lines(name, one)]
    specs = []
    if curves:
        specs.append(interactive.curve([*curves], _loss(curves)))
    if surfaces:
        specs.append(interactive.surface([*surfaces], log=_loss(surfaces).log))
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
    return [*map(tables.finite, held.tolist())]
