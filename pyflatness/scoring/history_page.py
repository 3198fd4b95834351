"""Make the parts of a page that show measures of networks over their training."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..report import html
from ..report.page import Section, charts, choosing, tables
from ..report.page.charts import Axis, Charts
from ..training import curves
from ..training.history import History

_COUNT = re.compile(
    r"(?<![a-z])(?:(epoch)|global_step|step|iteration|iter|checkpoint|ckpt)([-_=]?)(\d+)", re.IGNORECASE
)


def section(histories: Mapping[str, History]) -> Section:
    """Return charts of everything that was recorded over the steps, and a table of it.

    Args:
        histories: by the names of the trainings.

    Raises:
        MissingExtraError: without Altair.
    """
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
    table = tables.values(values, f"What was recorded: {title}", numbers)
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
        specs.append(choosing.over_training(along, upward, trainings, layers=layers, weights=weights))
    for place, name in enumerate(numbers):
        there = [(point, y) for point in points if (y := charts.finite(point.get(name))) is not None]
        data += [{"training": point["training"], "x": point["x"], f"n{place}": y} for point, y in there]
        if there:
            specs.append(choosing.over_training(along, Axis.of(f"n{place}", name, [y for _, y in there]), trainings))
    return Charts(data, tuple(specs))
