"""Make the part of a page that shows the measures of a network over its training."""

from typing import Any

from ..report import html
from ..report.page import Section, charts, tables
from ..report.page.charts import Axis, Charts
from ..training import curves
from ..training.history import History


def section(name: str, history: History) -> Section:
    """Return charts of everything that was recorded over the steps, and a table of it.

    Raises:
        MissingExtraError: without Altair.
    """
    records = [*history]
    along, places = curves.places(records, None)
    values: list[dict[str, Any]] = [
        {**html.record(estimate, measure), **record.numbers}
        | {"layer": layer, "weights": weights, "x": place, "checkpoint": f"{along} {place:g}, {weights}"}
        for record, place in zip(records, places, strict=True)
        for weights, report in record.reports.items()
        for measure, held in report.by_measure().items()
        for layer, estimate in held.items()
    ]
    numbers = [*dict.fromkeys(name for record in records for name in record.numbers)]
    points = {name: [(x, r.numbers.get(name)) for x, r in zip(places, records, strict=True)] for name in numbers}
    curves_of = [_of_measures(along, values), _of_numbers(along, points)]
    drawn = Charts(
        [row for one in curves_of for row in one.data], tuple(spec for one in curves_of for spec in one.specs)
    )
    table = tables.values(values, f"What was recorded: {name}", numbers)
    return Section(f"Training · {name}", charts=drawn, tables=(table,), closed=True)


def _of_measures(along: str, values: list[dict[str, Any]]) -> Charts:
    layers = [*dict.fromkeys(value["layer"] or tables.NETWORK for value in values)]
    weights = [*dict.fromkeys(value["weights"] for value in values)]
    data, specs = [], []
    for place, measure in enumerate(dict.fromkeys(value["measure"] for value in values)):
        own = [value for value in values if value["measure"] == measure]
        data += [
            {"x": value["x"], "layer": value["layer"] or tables.NETWORK, "weights": value["weights"]}
            | charts.numbers(f"m{place}", value)
            for value in own
        ]
        upward = Axis.of(f"m{place}", measure, [value["value"] for value in own])
        specs.append(charts.curve(along, upward, layers=layers, weights=weights))
    return Charts(data, tuple(specs))


def _of_numbers(along: str, points: dict[str, list[tuple[float, float | None]]]) -> Charts:
    data, specs = [], []
    for place, (name, own) in enumerate(points.items()):
        data += [{"x": x, f"n{place}": y} for x, given in own if (y := charts.finite(given)) is not None]
        specs.append(charts.curve(along, Axis.of(f"n{place}", name, [y for _, y in own])))
    return Charts(data, tuple(specs))
